"""What the analysis says, in words: one source for the terminal, summary.md and report.html."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.fitting import Estimate, FitResult
from analysis.study import EXTRAPOLATE, Analysis, QuantityFit, Series, SlopeComparison
from analysis.tables import interval, point_means, probability, results_table, text_table

FEW = 2  # series that are told one by one; of more, the best and the worst


def headline(analysis: Analysis) -> str:
    """The answer: a sentence a series, or of many series who gains most and least."""
    answered = [(s, s.fits["tau"].gain) for s in analysis.series if "tau" in s.fits]
    gains = [(s, g) for s, g in answered if g is not None]
    if not gains:
        return "There is no answer yet: no series has tau at two data scales or more."
    gains.sort(key=lambda pair: -pair[1].value)
    if len(gains) <= FEW:
        return " ".join(_series_answer(s) for s, _ in gains)
    most, least = (f"{s.label} ({_gain(g)})" for s, g in (gains[0], gains[-1]))
    adds = "doubling the training data adds most tokens a target forward"
    return f"Of {len(gains)} series, {adds} to {most}, least to {least}."


def _gain(e: Estimate) -> str:
    if e.lo is None or e.hi is None:
        return f"{e.value:+.3f}, without an interval"
    return f"{e.value:+.3f}, 95 % interval {interval(e.lo, e.hi, 3)}"


def _series_answer(s: Series) -> str:
    fitted = s.fits.get("tau")
    if fitted is None or fitted.gain is None:
        return ""
    means = point_means(fitted)["value"]
    span = f"tau was {means.iloc[0]:.2f} at {s.scales[0]:g}x and {means.iloc[-1]:.2f} at {s.scales[-1]:g}x"
    gain = fitted.gain
    if gain.lo is None or gain.hi is None:
        return f"Doubling the training data of {s.label} changes tau by {gain.value:+.3f}, without an interval; {span}."
    within = f"95 % interval {interval(gain.lo, gain.hi, 3)}"
    if gain.lo > 0:
        adds = f"adds {gain.value:.3f} tokens to every target forward"
        return f"Doubling the training data of {s.label} {adds} ({within}); {span}."
    if gain.hi < 0:
        loses = f"takes {-gain.value:.3f} tokens from every target forward"
        return f"Doubling the training data of {s.label} {loses} (change: {within}); {span}."
    return (
        f"More training data did not measurably change {s.label}: {gain.value:+.3f} tokens a target forward "
        f"for a doubling ({within}); {span}."
    )


def certainty(analysis: Analysis) -> list[str]:
    """How sure, a paragraph for each series: which form and why, what it says beyond the data; then slopes compared."""
    shown = [s for s in analysis.series if "tau" in s.fits]
    if len(shown) > FEW:
        return [f"{_series_answer(s)} {_series_certainty(s, s.fits['tau'])}".strip() for s in shown]
    return [*[_series_certainty(s, s.fits["tau"]) for s in shown], *map(comparison_sentence, analysis.comparisons)]


def _series_certainty(s: Series, fitted: QuantityFit) -> str:
    best, selection = fitted.best, fitted.selection
    if best is None or selection is None:
        count = len(s.scales)
        few = f"{count} data scale{'s are' if count > 1 else ' is'} too few to hold one out"
        return f"{s.label}: {few}, so no form was chosen and nothing is predicted."
    title = best.form.title
    if len(selection.tied) > 1:
        how = (
            f"{s.label}: {len(selection.tied)} forms predict the held-out largest scale equally well, within one "
            f"standard error. Of these the {title} is drawn, {_rank(best)}."
        )
    else:
        how = f"{s.label}: the {title} predicts the held-out largest scale best ({best.status})."
    beyond = [_beyond(s, fitted, best, m) for m in EXTRAPOLATE if m > s.scales[-1]]
    if not beyond:
        return how
    return f"{how} It predicts {', and '.join(beyond)}."


def _rank(best: FitResult) -> str:
    return "the identified one with the lowest AICc" if best.ok else "though it, as all of them, is under-identified"


def _beyond(s: Series, fitted: QuantityFit, best: FitResult, multiple: float) -> str:
    p = best.predict([s.base * multiple])
    text = f"tau {p.value[0]:.2f}"
    if p.lo is not None and p.hi is not None:
        text += f" ({interval(p.lo[0], p.hi[0])})"
    text += f" at {multiple:g}x"
    tied = fitted.selection.tied if fitted.selection else []
    others = [float(fitted.results[n].predict([s.base * multiple]).value[0]) for n in tied]
    if len(others) > 1:
        text += f", where the {len(others)} forms range from {min(others):.2f} to {max(others):.2f}"
    return text


def comparison_sentence(c: SlopeComparison) -> str:
    d = c.difference
    return (
        f"A doubling of the data gives {c.first} {d.value:+.3f} tau over what it gives {c.second} "
        f"(95 % interval {interval(d.lo, d.hi, 3)}); the probability that its slope is the larger is "
        f"{probability(c)}."
    )


def summary_text(analysis: Analysis) -> str:
    """Plain English and a table, for the terminal."""
    parts = [headline(analysis), *certainty(analysis), ""]
    parts += [text_table(results_table(analysis)), "", f"Intervals: 95 %, {analysis.method}."]
    parts += [f"Note: {w}." for w in analysis.warnings]
    return "\n".join(parts)


def summary_markdown(analysis: Analysis) -> str:
    """The answer and a table ready for a paper."""
    parts = [f"**{headline(analysis)}**", "", *_paragraphs(certainty(analysis))]
    parts += [text_table(results_table(analysis), markdown=True), ""]
    parts += [f"Intervals are 95 % intervals by {analysis.method}.", ""]
    parts += [f"- {w}." for w in analysis.warnings]
    return "\n".join(parts) + "\n"


def _paragraphs(sentences: Sequence[str]) -> list[str]:
    return [line for s in sentences for line in (s, "")]


def limits(analysis: Analysis) -> list[str]:
    """What the numbers do not say."""
    out = [
        "Intervals cover the choice of prompts and the training seed. They do not cover the choice of the training "
        "subset (scales are nested prefixes of one shuffled store), of the tasks, or of the hyper-parameters.",
        "Beyond the data a prediction holds only if its form does; how far the forms differ there is shown above.",
    ]
    out += [
        f"{s.label}: {len(s.scales)} data scales from {s.scales[0]:g}x to {s.scales[-1]:g}x, {len(s.runs)} runs."
        for s in analysis.series
    ]
    if not analysis.table.records.empty:
        out.append(
            "tau is by replay on the target's own greedy transcripts, which equals greedy decoding; sampling at other "
            "temperatures accepts differently."
        )
    out.append(
        f"An interval is a 95 % interval by {analysis.method}, except where it is called a profile interval: that one "
        "is conditional on these prompts."
    )
    return out

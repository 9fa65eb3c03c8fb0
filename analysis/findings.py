"""What the analysis says, in words: one source for the terminal, summary.md and report.html."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.selection import TIE
from analysis.study import Analysis, QuantityFit, Series, SlopeComparison
from analysis.tables import interval, needed_table, point_means, probability, results_table, text_table

FEW = 2  # series that are told one by one; of more, the best and the worst


def headline(analysis: Analysis) -> str:
    """The answer: a sentence a series, or of many series who gains most and least."""
    gains = [(s, s.fits["tau"].gain.value) for s in analysis.series if "tau" in s.fits and s.fits["tau"].gain]
    if not gains:
        return "There is no answer yet: no series has tau at two data scales or more."
    gains.sort(key=lambda pair: -pair[1])
    if len(gains) <= FEW:
        return " ".join(_series_answer(s) for s, _ in gains)
    most, least = (f"{s.label} ({value:+.3f}, {gain_interval(s.fits['tau'])})" for s, value in (gains[0], gains[-1]))
    adds = "doubling the training data adds most tokens a target forward"
    return f"Of {len(gains)} series, {adds} to {most}, least to {least}."


def gain_interval(fitted: QuantityFit) -> str:
    """The interval of a gain in words, and of what."""
    gain = fitted.gain
    if gain is None or gain.lo is None or gain.hi is None:
        return "without an interval"
    return _within(gain.lo, gain.hi, fitted.seeds.known)


def _within(lo: float | None, hi: float | None, seeds_known: bool) -> str:
    ends = interval(lo, hi, 3)
    return f"95 % interval {ends}" if seeds_known else f"{ends} by the choice of prompts alone"


def _series_answer(s: Series) -> str:
    fitted = s.fits.get("tau")
    if fitted is None or fitted.gain is None:
        return ""
    means = point_means(fitted)["value"]
    span = f"tau was {means.iloc[0]:.2f} at {s.scales[0]:g}x and {means.iloc[-1]:.2f} at {s.scales[-1]:g}x"
    gain, within = fitted.gain, gain_interval(fitted)
    if gain.lo is None or gain.hi is None:
        return f"Doubling the training data of {s.label} changes tau by {gain.value:+.3f}, {within}; {span}."
    if not fitted.seeds.known:
        return (
            f"Doubling the training data of {s.label} changed tau by {gain.value:+.3f} in these runs ({within}); "
            f"{span}. How much seeds vary is not known, so whether data did it is open: train a second seed."
        )
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
    title, tied = best.form.title, len(selection.tied)
    if tied > 1:
        how = (
            f"{s.label}: {tied} forms predict the held-out largest scale equally well, within {TIE:g} standard errors. "
            f"Of these the {title} is drawn, {selection.reason}."
        )
    else:
        how = f"{s.label}: the {title} predicts the held-out largest scale best ({best.status})."
    said = ", and ".join(f"tau {_predicted(s, fitted, m)} at {m:g}x" for m in s.beyond)
    by = f" (intervals: of all {tied} forms together, since nothing here tells them apart)" if tied > 1 else ""
    return f"{how} It predicts {said}{by}."


def _predicted(s: Series, fitted: QuantityFit, multiple: float) -> str:
    p = fitted.predict([s.base * multiple])
    return f"{p.value[0]:.2f}" + ("" if p.lo is None or p.hi is None else f" ({interval(p.lo[0], p.hi[0])})")


def comparison_sentence(c: SlopeComparison) -> str:
    d = c.difference
    within = _within(d.lo, d.hi, c.seeds_known)
    return (
        f"A doubling of the data gives {c.first} {d.value:+.3f} tau over what it gives {c.second} "
        f"({within}); the probability that its slope is the larger is {probability(c)}."
    )


def summary_text(analysis: Analysis) -> str:
    """Plain English and a table, for the terminal."""
    parts = [headline(analysis), *certainty(analysis), ""]
    parts += [text_table(results_table(analysis)), "", f"Intervals: 95 %, {analysis.method}."]
    parts += [line for s in analysis.series for line in _needed(analysis, s)]
    parts += [f"Note: {w}." for w in analysis.warnings]
    return "\n".join(parts)


def _needed(analysis: Analysis, s: Series) -> list[str]:
    """The data that the wanted values of tau need, where some were asked for."""
    if not analysis.wanted or "tau" not in s.fits:
        return []
    table = needed_table(s, analysis.wanted)
    return ["", f"{s.label}: data that a wanted tau needs", text_table(table), ""] if len(table) else []


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
        "Beyond the data a prediction holds only if one of its forms does; how far they differ there is shown above.",
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

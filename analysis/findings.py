"""What the analysis says, in words and tables: one source for the terminal, summary.md and report.html."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.fitting import LEVEL, Estimate, FitResult
from analysis.forms import Array
from analysis.study import EXTRAPOLATE, Analysis, QuantityFit, Series, data_for_tau

DASH = "–"


def number(value: float | None, digits: int = 2) -> str:
    """A number for people; a dash where there is none."""
    return DASH if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"


def interval(lo: float | None, hi: float | None, digits: int = 2) -> str:
    """`0.07 to 0.10`; an open end is named."""
    if lo is None and hi is None:
        return "no interval"
    left = "no lower limit" if lo is None else number(lo, digits)
    right = "no upper limit" if hi is None else number(hi, digits)
    return f"{left} to {right}"


def with_interval(e: Estimate, digits: int = 2) -> str:
    return f"{number(e.value, digits)} ({interval(e.lo, e.hi, digits)})"


def significant(value: float, digits: int = 3) -> str:
    """`46_213` -> `46,200`; `3.1e12` -> `3.1e+12`."""
    if not np.isfinite(value):
        return DASH
    if abs(value) >= 1e7 or (0 < abs(value) < 1e-3):
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - int(np.floor(np.log10(abs(value) or 1))))
    return f"{round(value, digits - 1 - int(np.floor(np.log10(abs(value) or 1)))):,.{places}f}"


def point_means(fitted: QuantityFit) -> pd.DataFrame:
    """Mean over seeds at every data value with its bootstrap interval: columns x, value, lo, hi, runs."""
    data = fitted.data
    values = data.quantity.from_loss(data.loss)
    rows = []
    for cell in np.unique(data.scale):
        own = data.scale == cell
        lo = hi = np.nan
        if data.replicates is not None:
            draws = data.quantity.from_loss(np.exp(data.replicates[:, own])).mean(1)
            lo, hi = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        x = float(data.inputs[own, 0][0] * data.reference[0])
        rows.append({"x": x, "value": values[own].mean(), "lo": lo, "hi": hi, "runs": int(own.sum())})
    return pd.DataFrame(rows).sort_values("x", ignore_index=True)


def headline(analysis: Analysis) -> str:
    """The answer in a sentence for each series with a slope of tau."""
    sentences = [s for s in (_series_answer(x) for x in analysis.series) if s]
    if not sentences:
        return "There is no answer yet: no series has tau at two data scales or more."
    return " ".join(sentences)


def _series_answer(s: Series) -> str:
    fitted = s.fits.get("tau")
    if fitted is None or fitted.gain is None:
        return ""
    means = point_means(fitted)
    span = f"tau was {means['value'].iloc[0]:.2f} at {s.scales[0]:g}x and {means['value'].iloc[-1]:.2f} at {s.scales[-1]:g}x"
    gain = fitted.gain
    if gain.lo is None or gain.hi is None:
        return f"Doubling the training data of {s.label} changes tau by {gain.value:+.3f}, without an interval; {span}."
    within = f"95 % interval {gain.lo:+.3f} to {gain.hi:+.3f}"
    if gain.lo > 0:
        return f"Doubling the training data of {s.label} adds {gain.value:.3f} tokens to every target forward ({within.replace('+', '')}); {span}."
    if gain.hi < 0:
        return f"Doubling the training data of {s.label} loses {-gain.value:.3f} tokens a target forward ({within}); {span}."
    return f"More training data did not measurably change {s.label}: {gain.value:+.3f} tokens a target forward for a doubling ({within}); {span}."


def certainty(analysis: Analysis) -> list[str]:
    """How sure: selection, what the scales identify, and what 16x would give."""
    out = []
    for s in analysis.series:
        fitted = s.fits.get("tau")
        if fitted is None:
            continue
        best, selection = fitted.best, fitted.selection
        if best is None or selection is None:
            out.append(f"{s.label}: {len(s.scales)} scales are too few to hold one out, so no form was chosen.")
            continue
        out.append(f"{s.label}: the curve is the {best.form.title} ({best.status}; {selection.reason}).")
        for multiple in EXTRAPOLATE:
            if multiple > s.scales[-1]:
                out.append(_extrapolation_sentence(s, fitted, best, multiple))
    return out


def _extrapolation_sentence(s: Series, fitted: QuantityFit, best: FitResult, multiple: float) -> str:
    p = best.predict([s.base * multiple])
    text = f"At {multiple:g}x it predicts tau {p.value[0]:.2f}"
    if p.lo is not None and p.hi is not None:
        text += f" ({p.lo[0]:.2f} to {p.hi[0]:.2f})"
    others = [
        fitted.results[n].predict([s.base * multiple]).value[0]
        for n in (fitted.selection.tied if fitted.selection else [])
    ]
    if len(others) > 1:
        text += f"; the {len(others)} forms that fit equally well range from {min(others):.2f} to {max(others):.2f}"
    return text + "."


def results_table(analysis: Analysis) -> pd.DataFrame:
    """A row a series and scale: data, validation loss, alphas, tau with interval, decode tau, speed-up."""
    rows = []
    for s in analysis.series:
        runs = analysis.table.runs.loc[s.runs]
        means = {name: point_means(f) for name, f in s.fits.items()}
        for scale in s.scales:
            own = runs[runs["data_scale"] == scale]
            x = float(own[analysis.axis].iloc[0])
            row = {"draft head": s.label, "data": f"{scale:g}x", "seeds": str(own["seed"].nunique())}
            for column, title in (("unique_tokens", "unique tokens"), ("supervised_tokens", "supervised tokens")):
                if column in own:
                    row[title] = number(own[column].mean(), 0)
            for name, table in means.items():
                at = table[np.isclose(table["x"], x)]
                if at.empty:
                    continue
                value, lo, hi = at[["value", "lo", "hi"]].iloc[0]
                row[name] = (
                    f"{value:.3f}" if name != "tau" or not np.isfinite(lo) else f"{value:.3f} ({lo:.3f} to {hi:.3f})"
                )
            row |= _decoded(own, analysis.table.tasks)
            rows.append(row)
    return pd.DataFrame(rows).fillna(DASH)


def _decoded(runs: pd.DataFrame, tasks: Sequence[str]) -> dict[str, str]:
    out = {}
    for task in tasks:
        for column, title in ((f"decode_tau.{task}", f"tau decode, {task}"), (f"speedup.{task}", f"speed-up, {task}")):
            if column in runs and runs[column].notna().any():
                out[title] = number(runs[column].mean(), 2) + ("x" if "speed" in title else "")
    return out


def forms_table(fitted: QuantityFit) -> pd.DataFrame:
    """A row a form, the chosen one first: parameters, checks, status."""
    selection = fitted.selection
    order = sorted(
        fitted.results,
        key=lambda n: (selection is None or n != selection.best, n not in (selection.tied if selection else [])),
    )
    rows = []
    for name in order:
        r = fitted.results[name]
        chosen = selection is not None and name == selection.best
        rows.append(
            {
                "form": r.form.title + (" (chosen)" if chosen else ""),
                "equation": r.form.equation.replace("L", fitted.quantity.loss_symbol, 1),
                "parameters": "; ".join(_parameter(n, e) for n, e in r.parameters.items()),
                "held-out error": DASH if r.held_out is None else f"{r.held_out:+.3f}",
                "leave-one-out": number(r.leave_one_out, 3),
                "AICc": number(r.aicc, 1),
                "best in replicates": DASH
                if selection is None or name not in selection.wins
                else f"{100 * selection.wins[name]:.0f} %",
                "status": r.status + (": " + "; ".join(r.messages) if r.messages else ""),
            }
        )
    rows += [{"form": name, "status": reason} for name, reason in fitted.skipped.items()]
    return pd.DataFrame(rows).fillna(DASH)


def _parameter(name: str, e: Estimate) -> str:
    if not e.identified:
        return f"{name}: not identified"
    if e.lo is None:
        return f"{name} = {significant(e.value)}"
    return f"{name} = {significant(e.value)} ({significant(e.lo)} to {significant(e.hi or np.nan)})"


def extrapolation_table(s: Series, multiples: Sequence[float] = EXTRAPOLATE) -> pd.DataFrame:
    """tau at multiples of the 1x data under every form of tau and every per-position model."""
    fitted = s.fits["tau"]
    tied = fitted.selection.tied if fitted.selection else []
    data: Array = np.array([s.base * m for m in multiples])
    rows = []
    for name, r in fitted.results.items():
        p = r.predict(data)
        row = {"model": r.form.title, "held-out error": DASH if r.held_out is None else f"{r.held_out:+.3f}"}
        for i, m in enumerate(multiples):
            row[f"{m:g}x"] = number(p.value[i])
            if p.lo is not None and p.hi is not None and p.run_lo is not None and p.run_hi is not None:
                row[f"{m:g}x"] += f" ({p.lo[i]:.2f} to {p.hi[i]:.2f}; a new run {p.run_lo[i]:.2f} to {p.run_hi[i]:.2f})"
        row["status"] = r.status + (", within one standard error of the best" if name in tied else "")
        rows.append(row)
    for model in s.positions:
        p = model.predict(data)
        row = {
            "model": f"per position, {model.form.title}",
            "held-out error": DASH if model.held_out is None else f"{model.held_out:+.3f}",
        }
        for i, m in enumerate(multiples):
            row[f"{m:g}x"] = number(p.value[i]) + (
                "" if p.lo is None or p.hi is None else f" ({p.lo[i]:.2f} to {p.hi[i]:.2f})"
            )
        row["status"] = ", ".join(sorted({q.status for q in model.positions}))
        rows.append(row)
    return pd.DataFrame(rows)


def wanted_taus(s: Series) -> list[float]:
    """Round values above the largest measured tau, below the ceiling."""
    top = float(point_means(s.fits["tau"])["value"].max())
    first = np.ceil(top * 10 + 1e-9) / 10
    return [round(float(w), 2) for w in first + np.array([0.0, 0.1, 0.2, 0.4]) if w < s.draft_steps + 1]


def needed_table(s: Series, wanted: Sequence[float] | None = None) -> pd.DataFrame:
    """Data that the chosen form says a tau needs, as a multiple of 1x."""
    best = s.fits["tau"].best
    if best is None:
        return pd.DataFrame()
    rows = []
    for tau in wanted or wanted_taus(s):
        need = data_for_tau(best, tau, s.base)
        row = {"wanted tau": number(tau)}
        if need is None:
            row |= {"data": "not reached by this curve", "95 % interval": DASH}
        else:
            ends = [None if v is None else v / s.base for v in (need.lo, need.hi)]
            row |= {"data": f"{significant(need.value / s.base)}x", "95 % interval": interval(ends[0], ends[1], 1)}
        rows.append(row | {"by": f"{best.form.title} ({best.status})"})
    return pd.DataFrame(rows)


def text_table(table: pd.DataFrame, markdown: bool = False) -> str:
    """A table of strings for a terminal, or in Markdown."""
    cells = [list(map(str, table.columns)), *[list(map(str, row)) for row in table.itertuples(index=False)]]
    if markdown:
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
        return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def summary_text(analysis: Analysis) -> str:
    """Plain English and a table, for the terminal."""
    parts = [headline(analysis), *certainty(analysis), "", text_table(results_table(analysis))]
    if analysis.comparisons:
        parts += [
            "",
            *[comparison_sentence(c.first, c.second, c.difference, c.probability) for c in analysis.comparisons],
        ]
    parts += ["", f"Intervals: 95 %, {analysis.method}."]
    parts += [f"Note: {w}." for w in analysis.warnings]
    return "\n".join(parts)


def comparison_sentence(first: str, second: str, difference: Estimate, probability: float) -> str:
    return (
        f"A doubling gives {first} {difference.value:+.3f} more tau than {second} "
        f"({interval(difference.lo, difference.hi, 3)}); probability that its slope is the larger: {probability:.3f}."
    )

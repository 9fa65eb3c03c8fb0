"""The analysis as tables of text: for the terminal, for a paper (Markdown), and for the report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.fitting import LEVEL, FitResult
from analysis.forms import Array
from analysis.inverse import data_for_tau
from analysis.study import Analysis, PositionModel, QuantityFit, Series, SlopeComparison
from analysis.table import FAILED

DASH = "\u2013"  # for a value that is not there


INTERVAL = ["value", "lo", "hi"]  # columns of point_means, in the order in which bracketed() takes them


def number(value: float | None, digits: int = 2) -> str:
    """A number for people; a dash where there is none."""
    return DASH if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """`46_213` -> `46,200`; `3.1e12` -> `3.10e+12`."""
    if value is None or not np.isfinite(value):
        return DASH
    if abs(value) >= 1e7 or 0 < abs(value) < 1e-3:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - (int(np.floor(np.log10(abs(value)))) if value else 0)
    return f"{round(value, places):,.{max(0, places)}f}"


def interval(lo: float | None, hi: float | None, digits: int = 2) -> str:
    """`0.07 to 0.10`; an open end is named."""
    if lo is None and hi is None:
        return "no interval"
    left = "no lower limit" if lo is None else number(lo, digits)
    right = "no upper limit" if hi is None else number(hi, digits)
    return f"{left} to {right}"


def bracketed(value: float, lo: float | None, hi: float | None, digits: int = 3) -> str:
    """`1.170 [1.137, 1.203]`, the value alone where there is no interval."""
    if lo is None or hi is None or not np.isfinite([lo, hi]).all():
        return number(value, digits)
    return f"{number(value, digits)} [{number(lo, digits)}, {number(hi, digits)}]"


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


def results_table(analysis: Analysis) -> pd.DataFrame:
    """A row a series and scale: data, losses, alphas, tau with interval, decoded tau, speed-up."""
    rows = []
    for s in analysis.series:
        runs = analysis.table.runs.loc[s.runs]
        means = {name: point_means(f) for name, f in s.fits.items()}
        for scale in s.scales:
            own = runs[runs["data_scale"] == scale]
            row = {} if len(analysis.series) == 1 else {"draft head": s.label}
            row |= {"data": f"{scale:g}x", "seeds": str(own["seed"].nunique())}
            for column, title in (("unique_tokens", "tokens"), ("supervised_tokens", "supervised")):
                if column in own:
                    row[title] = number(own[column].mean(), 0)
            for name, table in means.items():
                at = table[np.isclose(table["x"], own[analysis.axis].iloc[0])]
                if not at.empty:
                    value, lo, hi = at[["value", "lo", "hi"]].iloc[0]
                    row[name] = bracketed(value, lo, hi) if name == "tau" else number(value, 3)
            for prefix, title in (("decode_tau.", "tau decode"), ("speedup.", "speed-up")):
                names = [c for task in analysis.table.tasks if (c := f"{prefix}{task}") in own]
                measured = own[names].to_numpy(float)
                if np.isfinite(measured).any():  # the mean of the runs and tasks that were decoded
                    row[title] = number(float(np.nanmean(measured)), 3)
            rows.append(row)
    return pd.DataFrame(rows).fillna(DASH)


def decoded_table(analysis: Analysis) -> pd.DataFrame:
    """A row a decoded run and task: tau by decoding, by replay of the same prompts and of the whole task, speed-up."""
    rows = []
    for s in analysis.series:
        own = analysis.table.runs.loc[s.runs].sort_values(["data_scale", "seed"])
        for index, (_, run) in zip(own.index.tolist(), own.iterrows(), strict=True):
            for task in analysis.table.tasks:
                if pd.isna(run.get(f"decode_tau.{task}")):
                    continue
                row = {} if len(analysis.series) == 1 else {"draft head": s.label}
                row |= {"data": f"{run['data_scale']:g}x", "seed": str(run["seed"]), "task": task}
                if f"decode_tau_prompts.{task}" in run:
                    row["prompts"] = number(run[f"decode_tau_prompts.{task}"], 0)
                row["tau decode"] = number(run[f"decode_tau.{task}"], 3)
                row["tau replay"] = number(analysis.table.tau_of_decoded(index, task), 3)
                row["tau replay, whole task"] = number(run[f"tau.{task}"], 3)
                if f"speedup.{task}" in run:
                    lo, hi = run.get(f"speedup_lo.{task}"), run.get(f"speedup_hi.{task}")
                    row["speed-up"] = bracketed(run[f"speedup.{task}"], lo, hi, 2)
                rows.append(row)
    return pd.DataFrame(rows).fillna(DASH)


def forms_table(fitted: QuantityFit) -> pd.DataFrame:
    """A row a form, the chosen one first, then those tied with it: how well it predicts, and what it is worth."""
    selection = fitted.selection
    tied = selection.tied if selection else []

    def rank(name: str) -> tuple[bool, bool]:
        return (selection is None or name != selection.best, name not in tied)

    rows = []
    for name in sorted(fitted.results, key=rank):
        r = fitted.results[name]
        wins = selection.wins.get(name) if selection else None
        rows.append(
            {
                "form": r.form.title + (" (chosen)" if selection and name == selection.best else ""),
                "held-out error": DASH if r.held_out is None else f"{r.held_out:+.3f}",
                "leave-one-out": number(r.leave_one_out, 3),
                "AICc": number(r.aicc, 1),
                "best in": DASH if wins is None else f"{100 * wins:.0f} %",
                "status": r.status,
            }
        )
    rows += [{"form": form.title, "status": reason} for form, reason in fitted.skipped]
    return pd.DataFrame(rows).fillna(DASH)


def parameters_table(fitted: QuantityFit) -> pd.DataFrame:
    """A row a parameter of every form, with both intervals; no value alone where it is not identified."""
    rows = []
    for r in fitted.results.values():
        for i, (name, e) in enumerate(r.parameters.items()):
            rows.append(
                {
                    "form": r.form.title if i == 0 else "",
                    "equation": r.form.equation.replace("L", fitted.quantity.loss_symbol, 1) if i == 0 else "",
                    "parameter": name,
                    "estimate": significant(e.value) + ("" if e.identified else " (not identified)"),
                    "bootstrap 95 %": _ends(e.lo, e.hi),
                    "profile 95 %": DASH if e.profile is None else _ends(*e.profile),
                    "note": "; ".join(r.messages) if i == 0 else "",
                }
            )
    return pd.DataFrame(rows)


def _ends(lo: float | None, hi: float | None) -> str:
    if lo is None and hi is None:
        return DASH
    return f"{'open' if lo is None else significant(lo)} to {'open' if hi is None else significant(hi)}"


def extrapolation_table(s: Series) -> pd.DataFrame:
    """tau beyond the data (`Series.beyond`) by every form of it and every per-position model: curve and one new run."""
    fitted = s.fits["tau"]
    tied = fitted.selection.tied if fitted.selection else []
    multiples = s.beyond
    data: Array = np.array([s.base * m for m in multiples])
    models: list[tuple[str, FitResult | PositionModel, str]] = [
        (r.form.title, r, r.status + (", tied for best" if name in tied else "")) for name, r in fitted.results.items()
    ]
    models += [
        (f"per position: {m.form.title}", m, "; ".join(sorted({q.status for q in m.positions}))) for m in s.positions
    ]
    rows = []
    for title, model, status in models:
        p = model.predict(data)
        row = {"model": title}
        for i, m in enumerate(multiples):
            lo, hi = (None, None) if p.lo is None or p.hi is None else (p.lo[i], p.hi[i])
            row[f"tau at {m:g}x"] = bracketed(p.value[i], lo, hi, 2)
            if p.run_lo is not None and p.run_hi is not None:
                row[f"one new run at {m:g}x"] = interval(p.run_lo[i], p.run_hi[i])
        row["held-out error"] = DASH if model.held_out is None else f"{model.held_out:+.3f}"
        rows.append(row | {"status": status})
    return pd.DataFrame(rows).fillna(DASH)


def wanted_taus(s: Series) -> list[float]:
    """Round values above the largest measured tau, below the ceiling."""
    top = float(point_means(s.fits["tau"])["value"].max())
    first = np.ceil(top * 10 + 1e-9) / 10
    return [round(float(w), 2) for w in first + np.array([0.0, 0.1, 0.2, 0.4]) if w < s.draft_steps + 1]


def needed_table(s: Series, wanted: Sequence[float] = ()) -> pd.DataFrame:
    """Data that a tau needs (`wanted`, or some round values), as a multiple of 1x: by the chosen form, within the ends
    of all forms tied with it. Empty where no form was chosen."""
    fitted = s.fits["tau"]
    rows = []
    for tau in (wanted or wanted_taus(s)) if fitted.best is not None else ():
        need = data_for_tau(fitted, tau, s.base)
        ends = [None if v is None else v / s.base for v in (need.lo, need.hi)]
        low, high = ("no limit" if v is None else f"{significant(v)}x" for v in ends)
        known = any(v is not None for v in ends)
        rows.append(
            {
                "wanted tau": number(tau),
                "data": "not by this curve" if need.value == np.inf else f"{significant(need.value / s.base)}x",
                "95 % interval": f"{low} to {high}" if known else DASH,
                "by": _by(fitted),
            }
        )
    return pd.DataFrame(rows)


def _by(fitted: QuantityFit) -> str:
    """The chosen form, and how many stand beside it."""
    assert fitted.best is not None
    others = len(fitted.tied) - 1
    beside = f"; interval: with the {others} tied" if others else ""
    return f"{fitted.best.form.title} ({fitted.best.status}){beside}"


def joint_table(result: FitResult) -> pd.DataFrame:
    """Parameters of a form with a second input, in relative units and with their status."""
    rows = [
        {
            "parameter": name,
            "estimate": significant(e.value) + ("" if e.identified else " (not identified)"),
            "bootstrap 95 %": _ends(e.lo, e.hi),
            "profile 95 %": DASH if e.profile is None else _ends(*e.profile),
        }
        for name, e in result.parameters.items()
    ]
    note = "; ".join([result.status, *result.messages])
    return pd.DataFrame([{"parameter": result.form.equation, "estimate": note}, *rows]).fillna("")


def probability(c: SlopeComparison) -> str:
    """A share of replicates; never 0 or 1, which no finite bootstrap can show."""
    smallest = 1 / c.replicates
    if c.probability < smallest:
        return f"below {smallest:g}"
    if 1 - c.probability < smallest:
        return f"above {1 - smallest:g}"
    return f"{c.probability:.3f}"


def comparisons_table(analysis: Analysis) -> pd.DataFrame:
    """A row a pair of series: difference of their gains per doubling, probability that the first is larger."""
    return pd.DataFrame(
        [
            {
                "first": c.first,
                "second": c.second,
                "difference of gains": bracketed(c.difference.value, c.difference.lo, c.difference.hi),
                "probability that the first is larger": probability(c),
            }
            for c in analysis.comparisons
        ]
    )


def budget_table(analysis: Analysis) -> pd.DataFrame:
    """A row a point: status, time by part, FLOPs, rate, memory; failed points too."""
    columns = (
        ("wall_seconds.train", "train, s", 0),
        ("wall_seconds.replay", "replay, s", 0),
        ("wall_seconds.decode", "decode, s", 0),
        ("train_tokens_per_s", "train tokens/s", 0),
        ("peak_rss_mb", "peak memory, MB", 0),
    )
    rows = []
    for _, run in analysis.table.runs.iterrows():
        row = {"point": str(run["point"])}
        row |= {title: number(run[column], digits) for column, title, digits in columns if column in run}
        if "train_flops" in run:
            row["train FLOPs"] = significant(float(run["train_flops"]))
        row["status"] = f"{run['status']}: {run['reason']}" if run["status"] == FAILED else str(run["status"])
        rows.append(row)
    total = {"point": "all points", "status": ""}
    for column, title, digits in columns[:3]:
        if analysis.table.has(column):
            total[title] = number(analysis.table.runs[column].sum(), digits)
    if analysis.table.has("train_flops"):
        total["train FLOPs"] = significant(float(analysis.table.runs["train_flops"].sum()))
    return pd.DataFrame([*rows, total]).fillna(DASH)


def provenance_table(analysis: Analysis) -> pd.DataFrame:
    """What was measured with what; several values where the runs differ."""
    titles = {
        "target": "target model",
        "store_fingerprint": "store fingerprint",
        "code_version": "code version",
        "draft_steps": "draft steps K",
        "draft_vocab_size": "draft vocabulary",
        "vocab_coverage": "its coverage of supervised tokens",
        "parameters.trainable": "trainable parameters",
        "epochs": "epochs",
    }
    rows = [
        {"what": title, "value": ", ".join(sorted({_plain(v) for v in analysis.table.runs[column].dropna()}))}
        for column, title in titles.items()
        if analysis.table.has(column)
    ]
    return pd.DataFrame(rows)


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(float(value)) >= 1e6 else f"{value:,g}"  # type: ignore[arg-type,str-format]


def text_table(table: pd.DataFrame, markdown: bool = False) -> str:
    """A table of strings for a terminal, or in Markdown."""
    cells = [list(map(str, table.columns)), *[list(map(str, row)) for row in table.itertuples(index=False)]]
    if markdown:
        lines = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
        return "\n".join([lines[0], "|" + "---|" * len(cells[0]), *lines[1:]])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])

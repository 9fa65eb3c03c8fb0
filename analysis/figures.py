"""The report's figures. Each is drawn twice, wide and narrow (a phone), and carries its text alternative and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis.findings import point_means
from analysis.fitting import FitResult
from analysis.forms import Array
from analysis.speedup import SpeedupModel, speedup_model
from analysis.study import EXTRAPOLATE, Analysis, QuantityFit, Series
from analysis.style import DASHES, GRID, INK, MARKERS, MUTED, NARROW, SERIES, WIDE, WIDTHS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_POINTS = 120


@dataclass(frozen=True)
class Picture:
    """One figure: `draw(WIDE | NARROW)`, what it shows (`caption`), what a reader by ear gets (`alt`), and its numbers."""

    name: str
    title: str
    caption: str
    alt: str
    data: pd.DataFrame
    draw: Callable[[str], Figure]


def pictures(analysis: Analysis) -> list[Picture]:
    """All figures that the data allow, in the report's order."""
    out = []
    for quantity in ("tau", "val_loss", "val_kl"):
        if any(quantity in s.fits for s in analysis.series):
            out.append(_curves(analysis, quantity))
    candidates = [_alphas(analysis), _fan(analysis), _tasks(analysis), _speedup(analysis), _training(analysis)]
    return out + [p for p in candidates if p is not None]


def _figure(size: str, height: float, rows: int = 1, columns: int = 1, **kw: object) -> tuple[Figure, np.ndarray]:
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(rows, columns, figsize=(WIDTHS[size], height), squeeze=False, **kw)  # type: ignore[arg-type]
    return fig, axes


def _data_axis(ax: Axes, s: Series, analysis: Analysis, largest: float, size: str, label: bool = True) -> None:
    """log2 axis with ticks at multiples of 1x, the amount of data under each."""
    low, high = min(s.scales), max(largest, max(s.scales))
    ticks = [low * 2.0**k for k in range(int(np.ceil(np.log2(high / low) + 1e-9)) + 1)]
    every = 1 if len(ticks) <= (8 if size == WIDE else 5) else 2
    ax.set_xscale("log", base=2)
    ax.set_xticks([s.base * t for t in ticks], minor=False)
    ax.set_xticks([], minor=True)
    ax.set_xticklabels(
        [f"{t:g}x\n{_short(s.base * t)}" if i % every == 0 else "" for i, t in enumerate(ticks)], color=MUTED
    )
    ax.set_xlim(s.base * low / 1.25, s.base * high * 1.25)
    if label:
        ax.set_xlabel(f"training data: multiple of 1x, and {analysis.axis_title}")


def _short(value: float) -> str:
    """`60800` -> `61k`."""
    for unit, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def _curves(analysis: Analysis, name: str) -> Picture:
    """A quantity against data: every run, the chosen curve with its band, beyond the data dashed; residuals below."""
    shown = [s for s in analysis.series if name in s.fits]
    reference = max(shown, key=lambda s: max(s.scales))
    first = shown[0].fits[name].quantity
    beyond = max(EXTRAPOLATE) if name == "tau" else max(reference.scales) * 2

    def draw(size: str) -> Figure:
        fig, axes = _figure(size, 5.0 if size == WIDE else 4.6, 2, 1, height_ratios=[4, 1.15], sharex=True)
        ax, below = axes[:, 0]
        for k, s in enumerate(shown):
            _draw_series(ax, below, s, s.fits[name], k, s.base * beyond)
        ax.set_ylabel(first.title)
        below.axhline(0, color=MUTED, lw=0.8)
        below.set_ylabel("residual, s.e.")
        worst = max([3.0, *[float(np.abs(b.residuals).max()) for s in shown if (b := s.fits[name].best)]])
        below.set_ylim(-1.15 * worst, 1.15 * worst)
        _data_axis(below, reference, analysis, beyond, size)
        ax.legend(loc="upper left" if first.rises else "upper right")
        return fig

    sentences = [_curve_alt(s, s.fits[name]) for s in shown]
    return Picture(
        name=name,
        title={"tau": "Acceptance against training data", "val_loss": "Validation loss against training data"}.get(
            name, f"{first.title[0].upper()}{first.title[1:]} against training data"
        ),
        caption=(
            f"{first.title[0].upper()}{first.title[1:]}. Every mark is a run (a seed); the line is the chosen form, the shaded band its 95 % interval "
            f"({analysis.method}). Dashed: beyond the data. Below: standardised residuals of the runs; ringed: an outlier, kept in the fit."
        ),
        alt=" ".join(sentences),
        data=pd.concat([_curve_data(analysis, s, s.fits[name]) for s in shown], ignore_index=True),
        draw=draw,
    )


def _draw_series(ax: Axes, below: Axes, s: Series, fitted: QuantityFit, k: int, largest: float) -> None:
    colour, marker = SERIES[k % len(SERIES)], MARKERS[k % len(MARKERS)]
    x = fitted.data.inputs[:, 0] * fitted.data.reference[0]
    y = fitted.data.quantity.from_loss(fitted.data.loss)
    ax.plot(x, y, marker, color=colour, mfc="none", mew=1.4, label=s.label)
    best = fitted.best
    if best is None:
        return
    _draw_fit(ax, best, x.min(), x.max(), largest, colour, k)
    below.plot(x, best.residuals, marker, color=colour, mfc="none", mew=1.4)
    out = best.outliers
    if out.any():
        ax.plot(x[out], y[out], "o", ms=13, mfc="none", mec=INK, mew=1.0)
        below.plot(x[out], best.residuals[out], "o", ms=13, mfc="none", mec=INK, mew=1.0)


def _draw_fit(ax: Axes, fit: FitResult, low: float, high: float, largest: float, colour: str, k: int) -> None:
    inside = np.geomspace(low, high, CURVE_POINTS)
    p = fit.predict(inside)
    ax.plot(inside, p.value, color=colour, ls=DASHES[k % len(DASHES)])
    if p.lo is not None and p.hi is not None:
        ax.fill_between(inside, p.lo, p.hi, color=colour, alpha=0.18, lw=0)
    if largest > high * 1.01:
        outside = np.geomspace(high, largest, CURVE_POINTS)
        p = fit.predict(outside)
        ax.plot(outside, p.value, color=colour, ls=(0, (3, 2)), lw=1.2)
        if p.lo is not None and p.hi is not None:
            ax.fill_between(outside, p.lo, p.hi, color=colour, alpha=0.09, lw=0)


def _curve_alt(s: Series, fitted: QuantityFit) -> str:
    means = point_means(fitted)
    points = ", ".join(f"{v:.2f} at {x:g}x" for x, v in zip(s.scales, means["value"], strict=False))
    form = f"; the fitted curve is the {fitted.best.form.title}" if fitted.best else ""
    return f"{s.label}, {fitted.quantity.title}: {points}{form}."


def _curve_data(analysis: Analysis, s: Series, fitted: QuantityFit) -> pd.DataFrame:
    data = fitted.data
    x = data.inputs[:, 0] * data.reference[0]
    table = pd.DataFrame(
        {
            "draft head": s.label,
            analysis.axis_title: [f"{v:,.0f}" for v in x],
            "measured": [f"{v:.4f}" for v in data.quantity.from_loss(data.loss)],
        }
    )
    if fitted.best is not None:
        table["fitted"] = [f"{v:.4f}" for v in fitted.best.curve(data.inputs)]
        table["residual, s.e."] = [f"{v:+.2f}" for v in fitted.best.residuals]
        table["outlier"] = ["yes" if o else "no" for o in fitted.best.outliers]
    return table


def _alphas(analysis: Analysis) -> Picture | None:
    """alpha_i against data, a colour a draft position, a panel a series."""
    shown = [s for s in analysis.series if "alpha_0" in s.fits]
    if not shown:
        return None

    def draw(size: str) -> Figure:
        across = min(len(shown), 2) if size == WIDE else 1
        rows = -(-len(shown) // across)
        fig, axes = _figure(size, 3.3 * rows, rows, across, sharey=True)
        for ax, s in zip(axes.flat, shown, strict=False):
            for i in range(s.draft_steps):
                fitted = s.fits.get(f"alpha_{i}")
                if fitted is None:
                    continue
                colour = SERIES[i % len(SERIES)]
                x = fitted.data.inputs[:, 0] * fitted.data.reference[0]
                y = 1 - fitted.data.loss
                ax.plot(x, y, MARKERS[i % len(MARKERS)], color=colour, mfc="none", mew=1.4, label=f"position {i}")
                if fitted.best is not None:
                    _draw_fit(ax, fitted.best, x.min(), x.max(), x.max(), colour, i)
            ax.set_title(s.label)
            _data_axis(ax, s, analysis, max(s.scales), size)
            ax.set_ylim(bottom=0)
        for ax in axes.flat[len(shown) :]:
            ax.remove()
        axes[0, 0].set_ylabel("acceptance alpha_i")
        axes[0, 0].legend(loc="upper left")
        return fig

    rows = [
        {
            "draft head": s.label,
            "position": str(i),
            "data": f"{scale:g}x",
            "alpha": f"{row.value:.3f}",
            "95 % interval": f"{row.lo:.3f} to {row.hi:.3f}" if np.isfinite(row.lo) else "–",
        }
        for s in shown
        for i in range(s.draft_steps)
        if f"alpha_{i}" in s.fits
        for scale, row in zip(s.scales, point_means(s.fits[f"alpha_{i}"]).itertuples(), strict=False)
    ]
    return Picture(
        name="alpha",
        title="Acceptance by draft position",
        caption="alpha_i: share of drafts accepted at position i, given that all earlier ones were. Lines: the form chosen for each position; bands: 95 % bootstrap intervals.",
        alt="Acceptance by draft position. " + " ".join(_alpha_alt(s) for s in shown),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _alpha_alt(s: Series) -> str:
    parts = []
    for i in range(s.draft_steps):
        if f"alpha_{i}" in s.fits:
            values = point_means(s.fits[f"alpha_{i}"])["value"]
            parts.append(f"position {i} from {values.iloc[0]:.2f} to {values.iloc[-1]:.2f}")
    return f"{s.label}: {', '.join(parts)} between {s.scales[0]:g}x and {s.scales[-1]:g}x."


def _fan(analysis: Analysis) -> Picture | None:
    """What each form says beyond the data: a row a form, a panel a multiple."""
    shown = [s for s in analysis.series if "tau" in s.fits and s.fits["tau"].results]
    if not shown:
        return None
    s = shown[0]
    fitted = s.fits["tau"]
    tied = fitted.selection.tied if fitted.selection else []
    names = [n for n in fitted.results if n != "constant"]
    multiples = [m for m in EXTRAPOLATE if m > max(s.scales)]
    if not multiples or not names:
        return None
    data: Array = np.array([s.base * m for m in multiples])
    predictions = {n: fitted.results[n].predict(data) for n in names}

    def draw(size: str) -> Figure:
        fig, axes = _figure(size, (0.42 if size == WIDE else 0.5) * len(names) + 1.1, 1, len(multiples), sharey=True)
        for j, (ax, m) in enumerate(zip(axes[0], multiples, strict=True)):
            for row, n in enumerate(reversed(names)):
                p = predictions[n]
                strong = n in tied
                colour = SERIES[0] if strong else MUTED
                if p.lo is not None and p.hi is not None and p.run_lo is not None and p.run_hi is not None:
                    ax.plot([p.run_lo[j], p.run_hi[j]], [row, row], color=colour, lw=1)
                    ax.plot([p.lo[j], p.hi[j]], [row, row], color=colour, lw=3.2, solid_capstyle="butt")
                ax.plot(p.value[j], row, "o" if strong else "s", color=colour, mfc=colour if strong else "none")
            ax.set_title(f"{m:g}x")
            ax.set_yticks(range(len(names)), [fitted.results[n].form.title for n in reversed(names)])
            ax.grid(axis="y", visible=False)
            ax.set_xlabel("tau")
        return fig

    rows = [
        {
            "form": fitted.results[n].form.title,
            "data": f"{m:g}x",
            "tau": f"{p.value[j]:.3f}",
            "95 % interval": "–" if p.lo is None or p.hi is None else f"{p.lo[j]:.3f} to {p.hi[j]:.3f}",
            "status": fitted.results[n].status,
        }
        for n, p in predictions.items()
        for j, m in enumerate(multiples)
    ]
    return Picture(
        name="extrapolation",
        title="Beyond the data: how far the forms agree",
        caption=f"{s.label}. Filled: forms that predict the held-out largest scale equally well; hollow: the others. Thick bars: 95 % interval of the curve; thin: of one new run.",
        alt="; ".join(f"{r['form']} at {r['data']}: {r['tau']} ({r['95 % interval']})" for r in rows) + ".",
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _tasks(analysis: Analysis) -> Picture | None:
    """tau of every task against data: run means a series."""
    tasks = analysis.table.tasks
    runs = analysis.table.finished
    if not tasks:
        return None
    means = runs.groupby("data_scale")[[f"tau.{t}" for t in tasks]]
    rows = []
    for s in analysis.series:
        own = analysis.table.runs.loc[s.runs]
        for task in tasks:
            for scale, value in own.groupby("data_scale")[f"tau.{task}"].mean().items():
                rows.append({"draft head": s.label, "task": task, "data": f"{scale:g}x", "tau": f"{value:.3f}"})
    del means

    def draw(size: str) -> Figure:
        fig, axes = _figure(size, 3.2 if size == WIDE else 3.0)
        ax = axes[0, 0]
        for k, s in enumerate(analysis.series):
            own = analysis.table.runs.loc[s.runs]
            for i, task in enumerate(tasks):
                by_scale = own.groupby("data_scale")[f"tau.{task}"].mean()
                label = task if len(analysis.series) == 1 else f"{s.label}, {task}"
                x = by_scale.index.to_numpy() * s.base
                colour = SERIES[i % len(SERIES)]
                ax.plot(
                    own["data_scale"] * s.base,
                    own[f"tau.{task}"],
                    MARKERS[k % len(MARKERS)],
                    color=colour,
                    mfc="none",
                    mew=1.2,
                )
                ax.plot(x, by_scale.to_numpy(), color=colour, ls=DASHES[k % len(DASHES)], label=label)
        widest = max(analysis.series, key=lambda s: max(s.scales))
        _data_axis(ax, widest, analysis, max(widest.scales), size)
        ax.set_ylabel("tau")
        ax.legend(loc="upper left")
        return fig

    return Picture(
        name="tasks",
        title="tau by task",
        caption="tau of every task, all target forwards of its prompts together. Marks: runs; lines: means over seeds.",
        alt="tau by task. " + "; ".join(f"{r['draft head']}, {r['task']}, {r['data']}: {r['tau']}" for r in rows) + ".",
        data=pd.DataFrame(rows),
        draw=draw,
    )


def _speedup(analysis: Analysis) -> Picture | None:
    models = [(s, m) for s in analysis.series if (m := speedup_model(analysis, s)) is not None]
    if not models:
        return None

    def draw(size: str) -> Figure:
        fig, axes = _figure(size, 3.3 if size == WIDE else 3.1)
        ax = axes[0, 0]
        for k, (s, m) in enumerate(models):
            colour = SERIES[k % len(SERIES)]
            ax.plot(
                m.modelled["x"],
                m.modelled["speedup"],
                color=colour,
                ls=DASHES[k % len(DASHES)],
                label=f"{s.label}, modelled",
            )
            y = m.measured["speedup"].to_numpy()
            bars = np.abs(np.stack([y - m.measured["lo"], m.measured["hi"] - y]))
            ax.errorbar(
                m.measured["x"],
                y,
                yerr=bars,
                fmt=MARKERS[k % len(MARKERS)],
                color=colour,
                capsize=3,
                label=f"{s.label}, measured",
            )
        ax.axhline(1, color=MUTED, lw=1, ls=(0, (2, 2)))
        widest = max((s for s, _ in models), key=lambda s: max(s.scales))
        _data_axis(ax, widest, analysis, max(widest.scales), size)
        ax.set_ylabel("speed-up over plain decoding")
        ax.legend(loc="upper left")
        return fig

    return Picture(
        name="speedup",
        title="Speed-up",
        caption=_speedup_caption(models),
        alt="Speed-up. "
        + " ".join(
            f"{s.label}: "
            + ", ".join(f"{r.speedup:.2f}x at {r.scale:g}x data" for r in m.measured.itertuples())
            + " measured."
            for s, m in models
        ),
        data=pd.concat([m.table(s.label) for s, m in models], ignore_index=True),
        draw=draw,
    )


def _speedup_caption(models: list[tuple[Series, SpeedupModel]]) -> str:
    costs = "; ".join(f"{s.label}: {m.cost:.3f}" for s, m in models)
    return (
        "Points: wall time of decoding against plain decoding in the same process, with 95 % intervals. Lines: modelled, tau / (1 + K c), "
        f"c the cost of one draft step in target forwards, taken from the measured points ({costs})."
    )


def _training(analysis: Analysis) -> Picture | None:
    """Training loss against the share of the run's own schedule, shaded from the smallest scale to the largest."""
    curves = [
        (s, run, scale)
        for s in analysis.series
        for run, scale in zip(s.runs, s.scale, strict=True)
        if run in analysis.table.metrics and {"step", "loss"} <= set(analysis.table.metrics[run])
    ]
    if not curves:
        return None
    scales = sorted({scale for _, _, scale in curves})

    def draw(size: str) -> Figure:
        fig, axes = _figure(size, 3.3 if size == WIDE else 3.1)
        ax = axes[0, 0]
        for s, run, scale in curves:
            rows = analysis.table.metrics[run].dropna(subset=["step", "loss"])
            k = analysis.series.index(s)
            strength = 0.25 + 0.75 * (scales.index(scale) + 1) / len(scales)
            ax.plot(
                rows["step"],
                rows["loss"],
                color=SERIES[k % len(SERIES)],
                alpha=strength,
                lw=1.2,
                ls=DASHES[k % len(DASHES)],
            )
            ax.annotate(
                f"{scale:g}x",
                (rows["step"].iloc[-1], rows["loss"].iloc[-1]),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=MUTED,
            )
        ax.set_xscale("log")
        ax.set_xlabel("training step")
        ax.set_ylabel("training loss")
        return fig

    rows = []
    for s, run, scale in curves:
        m = analysis.table.metrics[run]
        rows.append(
            {
                "draft head": s.label,
                "data": f"{scale:g}x",
                "seed": str(analysis.table.runs.loc[run, "seed"]),
                "steps": f"{m['step'].max():,.0f}",
                "first loss": f"{m['loss'].iloc[0]:.3f}",
                "last loss": f"{m['loss'].iloc[-1]:.3f}",
            }
        )
    return Picture(
        name="training",
        title="Training curves",
        caption="Training loss of every run against its steps; darker: more data. Every scale has its own fully decayed schedule.",
        alt="Training loss falls in every run. "
        + "; ".join(
            f"{r['draft head']} {r['data']} seed {r['seed']}: {r['first loss']} to {r['last loss']}" for r in rows
        )
        + ".",
        data=pd.DataFrame(rows),
        draw=draw,
    )


__all__ = ["GRID", "NARROW", "WIDE", "Picture", "pictures"]

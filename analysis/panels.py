"""Figures beside the fits: tau by task and against FLOPs, speed-up, training curves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis.figures import Look, Picture, data_axis, largest_series, new_figure
from analysis.speedup import ASSUMED_COSTS, SpeedupModel, speedup_at, speedup_model
from analysis.study import Analysis, Series
from analysis.style import MUTED, WIDE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tasks(analysis: Analysis) -> Picture | None:
    """tau of every task against data: a colour a task, a marker and dash a series."""
    names = analysis.table.tasks
    shown = [
        s for s in analysis.series if any(analysis.table.runs.loc[s.runs, f"tau.{t}"].notna().any() for t in names)
    ]
    if not shown:
        return None

    def draw(size: str) -> Figure:
        fig, axes = new_figure(size, 3.3 if size == WIDE else 3.0)
        ax = axes[0, 0]
        for k, s in enumerate(shown):
            own = analysis.table.runs.loc[s.runs]
            for i, task in enumerate(names):
                look = Look(
                    Look.of(i).colour,
                    Look.of(k if len(shown) > 1 else i).marker,
                    Look.of(k if len(shown) > 1 else i).dash,
                )
                means = own.groupby(analysis.axis)[f"tau.{task}"].mean()
                label = task if len(shown) == 1 else f"{s.label}, {task}"
                ax.plot(own[analysis.axis], own[f"tau.{task}"], look.marker, color=look.colour, mfc="none", mew=1.3)
                ax.plot(means.index, means, color=look.colour, ls=look.dash, marker=look.marker, ms=0, label=label)
        reference = largest_series(analysis, shown)
        data_axis(ax, reference, analysis, max(reference.scales), size)
        ax.set_ylabel("tau, tokens per target forward")
        ax.legend(loc="upper left")
        return fig

    rows = []
    for s in shown:
        for scale, own in analysis.table.runs.loc[s.runs].groupby("data_scale"):
            for t in names:
                row = {"draft head": s.label, "data": f"{scale:g}x", "task": t, "tau": f"{own[f'tau.{t}'].mean():.3f}"}
                if f"tau_prompts.{t}" in own:
                    row["prompts"] = f"{own[f'tau_prompts.{t}'].mean():,.0f}"
                rows.append(row)
    return Picture(
        name="tasks",
        title="tau by task",
        caption="All target forwards of a task's prompts together. Marks: runs; lines: means over seeds.",
        alt="; ".join(f"{r['draft head']}, {r['task']} at {r['data']}: {r['tau']}" for r in rows) + ".",
        data=pd.DataFrame(rows),
        draw=draw,
    )


def compute(analysis: Analysis) -> Picture | None:
    """tau against training FLOPs, where there are several series: at equal data heads differ in what they cost."""
    runs = analysis.table.runs
    if analysis.axis == "train_flops" or not {"tau", "train_flops"} <= set(runs):
        return None
    means = []
    for s in analysis.series:
        own = runs.loc[s.runs].dropna(subset=["tau", "train_flops"])
        own = own[own["train_flops"] > 0]  # a head that trains nothing has no place on a logarithmic axis
        if len(own):
            means.append((s, own, own.groupby("data_scale")[["train_flops", "tau"]].mean()))
    if len(means) < 2:
        return None

    def draw(size: str) -> Figure:
        fig, axes = new_figure(size, 3.3 if size == WIDE else 3.0)
        ax = axes[0, 0]
        for k, (s, own, mean) in enumerate(means):
            look = Look.of(k)
            ax.plot(own["train_flops"], own["tau"], look.marker, color=look.colour, mfc="none", mew=1.3)
            ax.plot(
                mean["train_flops"], mean["tau"], color=look.colour, ls=look.dash, marker=look.marker, ms=0,
                label=s.label,
            )  # fmt: skip
        ax.set_xscale("log")
        ax.set_xlabel("training FLOPs")
        ax.set_ylabel("tau, tokens per target forward")
        ax.legend(loc="upper left")
        return fig

    rows = [
        {
            "draft head": s.label,
            "data": f"{scale:g}x",
            "training FLOPs": f"{row.train_flops:.3g}",
            "tau": f"{row.tau:.3f}",
        }
        for s, _, mean in means
        for scale, row in mean.iterrows()
    ]
    return Picture(
        name="flops",
        title="tau against training FLOPs",
        caption=(
            "FLOPs of training, counted by each head for the rows that it computes; capture is not among them, since "
            "all share it. Marks: runs; lines: means over seeds."
        ),
        alt="; ".join(f"{r['draft head']} at {r['training FLOPs']} FLOPs: {r['tau']}" for r in rows) + ".",
        data=pd.DataFrame(rows),
        draw=draw,
    )


def speedup(analysis: Analysis) -> Picture | None:
    """Measured and modelled speed-up; assumed draft costs where nothing was decoded."""
    models = [(s, m) for s in analysis.series if (m := speedup_model(analysis, s)) is not None]
    return _measured_speedup(analysis, models) if models else _assumed_speedup(analysis)


def _measured_speedup(analysis: Analysis, models: list[tuple[Series, SpeedupModel]]) -> Picture:
    def draw(size: str) -> Figure:
        fig, axes = new_figure(size, 3.3 if size == WIDE else 3.0)
        ax = axes[0, 0]
        for k, (s, m) in enumerate(models):
            look = Look.of(k)
            ax.plot(
                m.modelled["x"], m.modelled["speedup"], color=look.colour, ls=look.dash, label=f"{s.label}, modelled"
            )
            y = m.measured["speedup"].to_numpy()
            bars = np.abs(np.stack([y - m.measured["lo"], m.measured["hi"] - y]))
            label = f"{s.label}, measured on {m.task}"
            ax.errorbar(m.measured["x"], y, yerr=bars, fmt=look.marker, color=look.colour, capsize=3, label=label)
        ax.axhline(1, color=MUTED, lw=1, ls=(0, (2, 2)))
        reference = largest_series(analysis, [s for s, _ in models])
        data_axis(ax, reference, analysis, max(reference.scales), size)
        ax.set_ylabel("speed-up over plain decoding")
        ax.legend(loc="upper left")
        return fig

    costs = "; ".join(f"{s.label} {m.cost:.3f}" for s, m in models)
    return Picture(
        name="speedup",
        title="Speed-up",
        caption=(
            "Marks: wall time of decoding against plain decoding in the same process, with the 95 % intervals that the "
            "evaluation reports. Lines: modelled, tau / (1 + K c), where c, the cost of a draft step in target "
            f"forwards, comes from the measured points ({costs}). Dotted: no gain."
        ),
        alt=" ".join(
            f"{s.label}, measured: "
            + ", ".join(f"{r.speedup:.2f}x at {r.scale:g}x data" for r in m.measured.itertuples())
            + "."
            for s, m in models
        ),
        data=pd.concat([m.table(s.label) for s, m in models], ignore_index=True),
        draw=draw,
    )


def _assumed_speedup(analysis: Analysis) -> Picture | None:
    shown = [s for s in analysis.series if "tau" in s.fits]
    if not shown:
        return None
    s = shown[0]
    tau = analysis.table.runs.loc[s.runs].groupby(analysis.axis)["tau"].mean()

    def draw(size: str) -> Figure:
        fig, axes = new_figure(size, 3.3 if size == WIDE else 3.0)
        ax = axes[0, 0]
        for k, cost in enumerate(ASSUMED_COSTS):
            look = Look.of(k)
            y = speedup_at(tau.to_numpy(), s.draft_steps, cost)
            ax.plot(
                tau.index, y, color=look.colour, ls=look.dash, marker=look.marker, mfc="none", label=f"c = {cost:g}"
            )
        ax.axhline(1, color=MUTED, lw=1, ls=(0, (2, 2)))
        data_axis(ax, s, analysis, max(s.scales), size)
        ax.set_ylabel("modelled speed-up")
        ax.legend(loc="upper left")
        return fig

    rows = [
        {"data": f"{x / s.base:g}x", "tau": f"{t:.3f}"}
        | {f"c = {c:g}": f"{speedup_at(t, s.draft_steps, c):.3f}x" for c in ASSUMED_COSTS}
        for x, t in zip(s.scales, tau, strict=True)
    ]
    return Picture(
        name="speedup",
        title="Speed-up, modelled",
        caption=(
            f"{s.label}. No point was decoded, so nothing here is measured: tau / (1 + K c) for assumed costs c of a "
            "draft step in target forwards."
        ),
        alt="Modelled speed-up, nothing measured. " + "; ".join(str(r) for r in rows),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def training(analysis: Analysis) -> Picture | None:
    """Training loss of every run against its steps; stronger lines have more data."""
    metrics = analysis.table.metrics
    curves = [
        (k, s, run, float(scale))
        for k, s in enumerate(analysis.series)
        for run, scale in zip(s.runs, s.scale, strict=True)
        if run in metrics and {"step", "loss"} <= set(metrics[run]) and metrics[run]["loss"].notna().any()
    ]
    if not curves:
        return None
    scales = sorted({scale for *_, scale in curves})

    def draw(size: str) -> Figure:
        fig, axes = new_figure(size, 3.4 if size == WIDE else 3.1)
        ax = axes[0, 0]
        labelled = set()
        for k, s, run, scale in curves:
            rows = metrics[run].dropna(subset=["step", "loss"])
            strength = 0.3 + 0.7 * (scales.index(scale) + 1) / len(scales)
            look = Look.of(k)
            name = None if s.label in labelled or len(analysis.series) == 1 else s.label
            ax.plot(rows["step"], rows["loss"], color=look.colour, alpha=strength, lw=1.2, ls=look.dash, label=name)
            if (s.label, scale) not in labelled:
                end = (rows["step"].iloc[-1], rows["loss"].iloc[-1])
                ax.annotate(
                    f"{scale:g}x",
                    end,
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8.5,
                    color=MUTED,
                )
            labelled |= {s.label, (s.label, scale)}
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.margins(x=0.07)
        ax.set_xlabel("training step")
        ax.set_ylabel("training loss")
        if len(analysis.series) > 1:
            ax.legend(loc="upper right")
        return fig

    rows = []
    for _, s, run, scale in curves:
        m = metrics[run].dropna(subset=["loss"])
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
        caption="Training loss of every run; stronger lines have more data. Every scale has its own full schedule.",
        alt="; ".join(
            f"{r['draft head']} {r['data']} seed {r['seed']}: {r['first loss']} to {r['last loss']}" for r in rows
        )
        + ".",
        data=pd.DataFrame(rows),
        draw=draw,
    )

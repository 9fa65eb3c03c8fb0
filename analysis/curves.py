"""Quantities against data, with the chosen curves, their bands, and what the forms say beyond the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.figures import Look, Picture, data_axis, largest_series, new_figure
from analysis.fitting import FitResult
from analysis.forms import BROKEN_POWER, CONSTANT, Array
from analysis.study import Analysis, PositionModel, QuantityFit, Series
from analysis.style import INK, MUTED, NARROW, SERIES, WIDE
from analysis.table import FAILED
from analysis.tables import INTERVAL, bracketed, extrapolation_table, point_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVE_POINTS = 120
BEYOND = (0, (3, 2))  # dashes of a curve beyond the data


def acceptance(analysis: Analysis) -> Picture | None:
    """tau against data: runs, chosen curve and band, predictions dashed; standardised residuals below."""
    shown = [s for s in analysis.series if "tau" in s.fits]
    if not shown:
        return None
    reference = largest_series(analysis, shown)
    beyond = max(s.beyond[-1] for s in shown)

    def draw(size: str) -> Figure:
        fig, axes = new_figure(size, 4.7 if size == WIDE else 4.4, 2, 1, height_ratios=[4, 1.1], sharex=True)
        ax, below = axes[:, 0]
        for k, s in enumerate(shown):
            _draw_quantity(ax, s, s.fits["tau"], Look.of(k), s.base * beyond)
            _draw_residuals(below, s.fits["tau"], Look.of(k))
        _mark_failed(ax, analysis, reference)
        ax.set_ylabel("tau, tokens per target forward")
        below.axhline(0, color=MUTED, lw=0.8)
        below.set_ylabel("residual\n(s.e.)")
        data_axis(below, reference, analysis, beyond, size)
        ax.legend(loc="upper left")
        return fig

    many = "Every mark is a run (one seed). " + ("The line is" if len(shown) == 1 else "Lines are")
    return Picture(
        name="tau",
        title="Acceptance against training data",
        caption=(
            f"{many} the chosen form, the band the 95 % band of all forms tied with it ({analysis.method}); dashed "
            "and lighter beyond the data. Below, residuals of the runs in their standard errors; a ring marks an "
            "outlier, which stays in."
        ),
        alt=" ".join(_alt(s, s.fits["tau"]) for s in shown),
        data=pd.concat([_numbers(analysis, s, s.fits["tau"]) for s in shown], ignore_index=True),
        draw=draw,
    )


def losses(analysis: Analysis) -> Picture | None:
    """Validation loss and KL against data, a panel each."""
    names = [n for n in ("val_loss", "val_kl") if any(n in s.fits for s in analysis.series)]
    if not names:
        return None
    shown = {n: [s for s in analysis.series if n in s.fits] for n in names}

    def draw(size: str) -> Figure:
        rows, columns = (1, len(names)) if size == WIDE else (len(names), 1)
        fig, axes = new_figure(size, 3.1 if size == WIDE else 2.7 * rows, rows, columns)
        for ax, name in zip(axes.flat, names, strict=True):
            reference = largest_series(analysis, shown[name])
            for k, s in enumerate(shown[name]):
                _draw_quantity(ax, s, s.fits[name], Look.of(k), s.base * 2 * max(reference.scales))
            ax.set_title(shown[name][0].fits[name].quantity.title)
            data_axis(ax, reference, analysis, 2 * max(reference.scales), NARROW)
            ax.legend(loc="upper right")
        return fig

    return Picture(
        name="losses",
        title="Validation losses against training data",
        caption="Held-out conversations, teacher-forced. Marks and lines as above; bands hold seed variation alone.",
        alt=" ".join(_alt(s, s.fits[n]) for n in names for s in shown[n]),
        data=pd.concat([_numbers(analysis, s, s.fits[n]) for n in names for s in shown[n]], ignore_index=True),
        draw=draw,
    )


def alphas(analysis: Analysis) -> Picture | None:
    """alpha_i against data: a colour a draft position, a panel a series."""
    shown = [s for s in analysis.series if "alpha_0" in s.fits]
    if not shown:
        return None

    def draw(size: str) -> Figure:
        across = min(len(shown), 2) if size == WIDE else 1
        rows = -(-len(shown) // across)
        fig, axes = new_figure(size, 3.3 * rows, rows, across, sharey=True)
        for ax, s in zip(axes.flat, shown, strict=False):
            for i in range(s.draft_steps):
                if (fitted := s.fits.get(f"alpha_{i}")) is not None:
                    _draw_quantity(ax, s, fitted, Look.of(i), 0.0, label=f"position {i}")
            if len(shown) > 1:
                ax.set_title(s.label)
            data_axis(ax, s, analysis, max(s.scales), size if across == 1 else NARROW)
            ax.set_ylim(bottom=0)
        for ax in axes.flat[len(shown) :]:
            ax.remove()
        for ax in axes[:, 0]:
            ax.set_ylabel("acceptance alpha_i")
        axes[0, 0].legend(loc="upper left")
        return fig

    rows = [
        {
            "draft head": s.label,
            "position": str(i),
            "data": f"{scale:g}x",
            "alpha [95 %]": bracketed(*row),
        }
        for s in shown
        for i in range(s.draft_steps)
        if f"alpha_{i}" in s.fits
        for scale, row in zip(s.scales, point_means(s.fits[f"alpha_{i}"])[INTERVAL].to_numpy(), strict=False)
    ]
    return Picture(
        name="alpha",
        title="Acceptance by draft position",
        caption=(
            "alpha_i: share of drafts accepted at position i among the cycles whose earlier drafts were all accepted. "
            "Lines: the form chosen for each position, with its 95 % bootstrap band."
        ),
        alt=" ".join(
            _alt(s, s.fits[f"alpha_{i}"]) for s in shown for i in range(s.draft_steps) if f"alpha_{i}" in s.fits
        ),
        data=pd.DataFrame(rows),
        draw=draw,
    )


def extrapolation(analysis: Analysis) -> Picture | None:
    """What each form of tau says beyond the data: a row a form, a panel a multiple, for the series that gains most."""
    able = [s for s in analysis.series if "tau" in s.fits and s.fits["tau"].selection is not None]
    s = max(able, key=_gain, default=None)
    if s is None:
        return None
    fitted, multiples = s.fits["tau"], s.beyond
    tied = fitted.selection.tied if fitted.selection else []
    unfit = (CONSTANT.name, BROKEN_POWER.name)
    models: list[tuple[str, FitResult | PositionModel, bool]] = [
        (r.form.title, r, n in tied) for n, r in fitted.results.items() if n not in unfit
    ]
    models += [(f"by position: {m.form.title}", m, False) for m in s.positions if m.form.name not in unfit]
    data: Array = np.array([s.base * m for m in multiples])

    def draw(size: str) -> Figure:
        rows, columns = (1, len(multiples)) if size == WIDE else (len(multiples), 1)
        height = 0.29 * len(models) * rows + 0.9 * rows
        fig, axes = new_figure(size, height, rows, columns, sharey=True)
        for j, (ax, m) in enumerate(zip(axes.flat, multiples, strict=True)):
            for row, (_, model, strong) in enumerate(reversed(models)):
                p = model.predict(data)
                colour = SERIES[0] if strong else MUTED
                if p.run_lo is not None and p.run_hi is not None:
                    ax.plot([p.run_lo[j], p.run_hi[j]], [row, row], color=colour, lw=1)
                if p.lo is not None and p.hi is not None:
                    ax.plot([p.lo[j], p.hi[j]], [row, row], color=colour, lw=3, solid_capstyle="butt", alpha=0.75)
                ax.plot(p.value[j], row, "o" if strong else "s", color=colour, mfc=colour if strong else "none")
            ax.set_title(f"at {m:g}x")
            ax.set_yticks(range(len(models)), [title for title, _, _ in reversed(models)])
            ax.set_ylim(-0.6, len(models) - 0.4)
            ax.grid(axis="y", visible=False)
            ax.set_xlabel("tau")
        return fig

    table = extrapolation_table(s)
    return Picture(
        name="extrapolation",
        title="Beyond the data: how far the forms agree",
        caption=(
            f"{s.label}. Filled: forms that predict the held-out largest scale equally well; hollow: the others, and "
            "models that fit each draft position and compose tau. Thick: 95 % interval of the curve; thin: a new run's."
        ),
        alt="; ".join(
            ": ".join(
                [str(r[0]), *[f"{c} {v}" for c, v in zip(table.columns[1:], r[1:], strict=True) if c.startswith("tau")]]
            )
            for r in table.itertuples(index=False)
        )
        + ".",
        data=table,
        draw=draw,
    )


def _gain(s: Series) -> float:
    """Gain of tau per doubling."""
    gain = s.fits["tau"].gain
    return 0.0 if gain is None else gain.value


def _draw_quantity(
    ax: Axes, s: Series, fitted: QuantityFit, look: Look, beyond: float, label: str | None = None
) -> None:
    """Runs and the chosen curve of one quantity, up to `beyond` on the data axis."""
    x = fitted.data.inputs[:, 0] * fitted.data.reference[0]
    y = fitted.data.quantity.from_loss(fitted.data.loss)
    best = fitted.best
    form = f", {best.form.title}" if best and label is None else ""
    ax.plot(x, y, look.marker, color=look.colour, mfc="none", mew=1.4)
    handle: dict[str, Any] = {
        "color": look.colour,
        "marker": look.marker,
        "mfc": "none",
        "mew": 1.4,
        "label": (label or s.label) + form,
    }
    if best is None:
        ax.plot([], [], ls="", **handle)
        return
    ax.plot([], [], ls=look.dash, **handle)
    inside = np.geomspace(x.min(), x.max(), CURVE_POINTS)
    _draw_curve(ax, fitted, inside, look, look.dash, 1.8, 0.2)
    if beyond > x.max() * 1.01:
        _draw_curve(ax, fitted, np.geomspace(x.max(), beyond, CURVE_POINTS), look, BEYOND, 1.1, 0.1)
    ax.plot(x[best.outliers], y[best.outliers], "o", ms=13, mfc="none", mec=INK, mew=1.0)


def _draw_curve(ax: Axes, fit: QuantityFit, x: Array, look: Look, dash: object, width: float, alpha: float) -> None:
    p = fit.predict(x)
    ax.plot(x, p.value, color=look.colour, ls=dash, lw=width)  # type: ignore[arg-type]
    if p.lo is not None and p.hi is not None:
        ax.fill_between(x, p.lo, p.hi, color=look.colour, alpha=alpha, lw=0)


def _draw_residuals(ax: Axes, fitted: QuantityFit, look: Look) -> None:
    best = fitted.best
    if best is None:
        return
    x = fitted.data.inputs[:, 0] * fitted.data.reference[0]
    ax.plot(x, best.residuals, look.marker, color=look.colour, mfc="none", mew=1.4)
    ax.plot(x[best.outliers], best.residuals[best.outliers], "o", ms=13, mfc="none", mec=INK, mew=1.0)
    reach = max(2.5, *np.abs(ax.get_ylim()), 1.2 * float(np.abs(best.residuals).max()))
    ax.set_ylim(-reach, reach)


def _mark_failed(ax: Axes, analysis: Analysis, reference: Series) -> None:
    """A cross on the axis for every point without a result, at the data that it was to have."""
    failed = analysis.table.runs[analysis.table.runs["status"] == FAILED]
    x = pd.to_numeric(failed["data_scale"]).dropna().to_numpy(dtype=float) * reference.base
    if len(x):
        ax.plot(
            x, np.full(len(x), 0.03), "x", color=INK, mew=1.6, transform=ax.get_xaxis_transform(), label="failed point"
        )


def _alt(s: Series, fitted: QuantityFit) -> str:
    means = point_means(fitted)
    points = ", ".join(f"{v:.2f} at {x:g}x" for x, v in zip(s.scales, means["value"], strict=False))
    form = f"; the curve is the {fitted.best.form.title}" if fitted.best else ""
    return f"{s.label}, {fitted.quantity.title}: {points}{form}."


def _numbers(analysis: Analysis, s: Series, fitted: QuantityFit) -> pd.DataFrame:
    """Measured, fitted and standardised residual of every run."""
    data, best = fitted.data, fitted.best
    table = pd.DataFrame(
        {
            "draft head": s.label,
            "quantity": data.quantity.symbol,
            analysis.axis_title: [f"{v:,.0f}" for v in data.inputs[:, 0] * data.reference[0]],
            "measured": [f"{v:.4f}" for v in data.quantity.from_loss(data.loss)],
        }
    )
    if best is not None:
        table["fitted"] = [f"{v:.4f}" for v in best.curve(data.inputs)]
        table["residual, s.e."] = [f"{v:+.2f}" for v in best.residuals]
        table["outlier"] = ["yes" if o else "no" for o in best.outliers]
    return table

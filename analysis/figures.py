"""The report's figures: what a picture is, which there are, and what they share.

Each is drawn twice, wide and narrow (a phone), and carries its text alternative and its numbers. The drawings are in
`curves.py` (quantities against data, with fits) and `panels.py` (tasks, speed-up, training).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.study import Analysis, Series
from analysis.style import DASHES, MARKERS, MUTED, SERIES, WIDE, WIDTHS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """One figure: `draw(WIDE | NARROW)`, what it shows (`caption`), its text alternative (`alt`), and its numbers."""

    name: str
    title: str
    caption: str
    alt: str
    data: pd.DataFrame
    draw: Callable[[str], Figure]


@dataclass(frozen=True)
class Look:
    """Colour, marker and dash of the k-th thing in a figure: each alone tells it apart."""

    colour: str
    marker: str
    dash: Any

    @classmethod
    def of(cls, k: int) -> Look:
        return cls(SERIES[k % len(SERIES)], MARKERS[k % len(MARKERS)], DASHES[k % len(DASHES)])


def pictures(analysis: Analysis) -> list[Picture]:
    """All figures that the data allow, in the report's order."""
    from analysis.curves import acceptance, alphas, extrapolation, losses
    from analysis.panels import compute, speedup, tasks, training

    made = [f(analysis) for f in (acceptance, losses, compute, extrapolation, alphas, tasks, speedup, training)]
    return [p for p in made if p is not None]


def new_figure(
    size: str, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """A figure of the width for `size` and `height` inches, and its axes [rows, columns]."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(WIDTHS[size], height), squeeze=False, **options)
    return figure, axes


def data_axis(ax: Axes, s: Series, analysis: Analysis, largest: float, size: str) -> None:
    """log2 axis up to `largest` (a multiple of 1x): ticks at doublings, the amount of data under each."""
    low, high = min(s.scales), max(largest, max(s.scales))
    ticks = low * 2.0 ** np.arange(int(np.ceil(np.log2(high / low) + 1e-9)) + 1)
    every = int(np.ceil(len(ticks) / (8 if size == WIDE else 5)))
    ax.set_xscale("log", base=2)
    ax.set_xticks(s.base * ticks, minor=False)
    ax.set_xticks([], minor=True)
    labels = [f"{t:g}x\n{short(s.base * t)}" if i % every == 0 else "" for i, t in enumerate(ticks)]
    ax.set_xticklabels(labels, color=MUTED)
    ax.set_xlim(s.base * low / 1.2, s.base * high * 1.2)
    ax.set_xlabel(f"training data ({analysis.axis_title})")


def short(value: float) -> str:
    """`60800` -> `60.8k`."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= value < 1e3 * unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def largest_series(analysis: Analysis, shown: list[Series]) -> Series:
    """The series whose scales name the ticks."""
    return max(shown or analysis.series, key=lambda s: max(s.scales))

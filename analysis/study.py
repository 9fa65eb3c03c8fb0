"""What an analysis is made of: series, their fitted quantities, models by position, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from analysis.bootstrap import METHOD, SeedVariance
from analysis.fitting import Data, Estimate, FitResult, Prediction
from analysis.forms import Array, Form
from analysis.quantities import AXES, Quantity
from analysis.selection import Selection
from analysis.table import Table

REPLICATES = 1000
EXTRAPOLATE = (2.0, 8.0)  # multiples of the largest data


@dataclass(frozen=True)
class QuantityFit:
    """All forms of one quantity of one series. `gain`: change per doubling of the data by the straight line."""

    quantity: Quantity
    data: Data
    seeds: SeedVariance
    results: dict[str, FitResult]
    skipped: list[tuple[Form, str]]  # forms that were not fitted, and why
    selection: Selection | None
    gain: Estimate | None

    @property
    def best(self) -> FitResult | None:
        return self.results[self.selection.best] if self.selection else None

    @property
    def tied(self) -> list[FitResult]:
        """The forms that the data do not tell from the chosen one, itself among them."""
        return [self.results[name] for name in self.selection.tied] if self.selection else []

    def predict(self, data: Sequence[float] | Array) -> Prediction:
        """The chosen form's curve at `data` [m], in units of the axis; its bands are the union of those of all tied
        forms: one form's own band would take the choice for certain. ValueError where no form was chosen."""
        if self.best is None:
            raise ValueError(f"{self.quantity.title}: no form was chosen, so nothing is predicted")
        chosen, all_tied = self.best.predict(data), [form.predict(data) for form in self.tied]

        def end(name: str, outermost: np.ufunc) -> Array | None:
            ends = [values for p in all_tied if (values := getattr(p, name)) is not None]
            return outermost.reduce(ends, axis=0) if len(ends) == len(all_tied) else None

        return replace(
            chosen,
            lo=end("lo", np.minimum),
            hi=end("hi", np.maximum),
            run_lo=end("run_lo", np.minimum),
            run_hi=end("run_hi", np.maximum),
        )


@dataclass(frozen=True)
class PositionModel:
    """tau = 1 + sum_i prod_{j<=i} alpha_j(D), every alpha_j fitted by the same form: never above K + 1.

    `held_out`: error in tau at the largest scale, every position fitted without it.
    """

    form: Form
    positions: list[FitResult]
    held_out: float | None

    def predict(self, data: Sequence[float] | Array) -> Prediction:
        raw = np.asarray(data, dtype=float)
        inputs = raw[:, None] / self.positions[0].data.reference
        value = compose_tau(np.stack([p.curve(inputs) for p in self.positions]))
        if any(p.draws is None for p in self.positions):
            return Prediction(raw, value)
        alphas = [
            p.data.quantity.from_loss(p.form.loss(p.draws, inputs)) for p in self.positions if p.draws is not None
        ]
        lo, hi = np.quantile(compose_tau(np.stack(alphas)), [0.025, 0.975], axis=0)
        return Prediction(raw, value, lo, hi)


def compose_tau(alpha: Array) -> Array:
    """tau of alpha [K, ...]: 1 + sum_i P(first i + 1 accepted)."""
    return 1 + np.cumprod(alpha, 0).sum(0)


@dataclass(frozen=True)
class Series:
    """Runs of one curve (`series.group`). `runs`: index into the table; `x` [n] on the data axis."""

    label: str
    draft: str
    runs: NDArray[np.int64]
    x: Array
    scale: Array  # data_scale of each run
    draft_steps: int
    fits: dict[str, QuantityFit]
    positions: list[PositionModel] = field(default_factory=list)

    @property
    def base(self) -> float:
        """The data axis at 1x."""
        i = int(self.scale.argmin())
        return float(self.x[i] / self.scale[i])

    @property
    def scales(self) -> list[float]:
        return sorted({float(s) for s in self.scale})

    @property
    def beyond(self) -> list[float]:
        """Multiples of the 1x data that have not been measured, at which predictions are shown."""
        return [self.scales[-1] * m for m in EXTRAPOLATE]


@dataclass(frozen=True)
class SlopeComparison:
    """Two series' gains per doubling, on the same replicates. `probability` that the first one's is larger.
    `seeds_known`: whether the replicates hold the variation between seeds."""

    first: str
    second: str
    difference: Estimate
    probability: float
    replicates: int
    seeds_known: bool


@dataclass(frozen=True)
class Analysis:
    table: Table
    axis: str
    series: list[Series]
    # (draft, and the target where there are several; quantity; result): forms with draft size or epochs
    joint: list[tuple[str, str, FitResult]]
    comparisons: list[SlopeComparison]
    warnings: list[str]
    method: str = METHOD
    wanted: tuple[float, ...] = ()  # values of tau whose data are asked for; none: some round ones

    @property
    def axis_title(self) -> str:
        return AXES[self.axis]

"""Replicates of a study: prompts resampled within tasks, seeds within points.

All runs of a study are evaluated on the same prompts, so prompts are crossed with runs, not nested in them: one draw of
prompts serves all runs, and what is common to them cancels in a slope. Seeds are few (two or three a point): resampling
them as they are would understate their variance (by a half with two) and ignore that it is poorly known. So the
seed deviations within points are pooled over a series on the fitted scale (log L), the part that prompt noise explains
is taken off, and each replicate draws the variance from its own uncertainty (scaled inverse chi-square), then the
deviations. With two seeds and four scales this covers 95 % where plain resampling of seeds does not (docs/analysis.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analysis.forms import Array

METHOD = (
    "bootstrap over prompts (resampled within tasks, the same draw for all runs) and seeds (pooled variance within "
    "points, less its prompt part, with its own uncertainty)"
)


@dataclass(frozen=True)
class Counts:
    """Acceptance counts of n runs on P prompts; zeros where a run has no such prompt. All float64.

    `task` [P] int, `tokens` and `forwards` [n, P], `drafted` and `accepted` [n, P, K].
    """

    task: NDArray[np.int64]
    tokens: Array
    forwards: Array
    drafted: Array
    accepted: Array

    @property
    def steps(self) -> int:
        return self.drafted.shape[-1]

    def select(self, runs: NDArray[np.int64]) -> Counts:
        return Counts(self.task, self.tokens[runs], self.forwards[runs], self.drafted[runs], self.accepted[runs])

    def prompt_weights(self, replicates: int, rng: np.random.Generator) -> Array:
        """How often each prompt is drawn, [R, P]: with replacement, within its task."""
        weights = np.zeros((replicates, len(self.task)))
        for task in np.unique(self.task):
            members = np.flatnonzero(self.task == task)
            weights[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), replicates)
        return weights

    def measure(self, weights: Array | None = None) -> dict[str, Array]:
        """tau and alpha_i of each run under prompt `weights` [R, P], each [R, n] (default: every prompt once, R = 1).

        tau = sum tokens / sum forwards; alpha_i = sum accepted / sum drafted. An alpha of exactly 0 or 1 is moved in by
        half a count, so that its logarithms exist; NaN where a run compared nothing.
        """
        w = np.ones((1, len(self.task))) if weights is None else weights
        with np.errstate(invalid="ignore", divide="ignore"):
            out = {"tau": (w @ self.tokens.T) / (w @ self.forwards.T)}
            for i in range(self.steps):
                drafted, accepted = w @ self.drafted[..., i].T, w @ self.accepted[..., i].T
                half = np.minimum(0.5, drafted / 4)
                out[f"alpha_{i}"] = np.clip(accepted, half, drafted - half) / drafted
        return out


WITHIN, AROUND = "seeds within points", "scatter around a straight line"
CHI2_MEDIAN = 0.4549  # of one degree of freedom


@dataclass(frozen=True)
class SeedVariance:
    """Run-to-run variance of log L at fixed data: `total` as seen within points, of which `prompt` is prompt noise.

    `typical` is the total from the median of squared deviations, which one bad run does not stretch: it says what is an
    outlier. `freedom`: degrees of freedom of `total`; 0 where it could not be estimated. `source` says from what.
    """

    total: float
    prompt: float
    typical: float
    freedom: int
    source: str

    @property
    def known(self) -> bool:
        """Whether replicates hold the variation between seeds; else that of prompts alone."""
        return self.freedom > 0

    @property
    def seed(self) -> float:
        """The part that is not prompt noise."""
        return max(0.0, self.total - self.prompt)

    @property
    def typical_seed(self) -> float:
        """The same of the typical variance."""
        return max(0.0, self.typical - self.prompt)


def _within(log_loss: Array, cell: NDArray[np.int64]) -> tuple[Array, int]:
    """Deviations [..., n] from the means of the cells, and the degrees of freedom they have."""
    out = np.zeros_like(log_loss)
    freedom = 0
    for c in np.unique(cell):
        members = np.flatnonzero(cell == c)
        out[..., members] = log_loss[..., members] - log_loss[..., members].mean(-1, keepdims=True)
        freedom += len(members) - 1
    return out, freedom


def around_line(log_loss: Array, doublings: Array) -> tuple[Array, int]:
    """Deviations [..., n] from a straight line in log2 x."""
    basis = np.stack([np.ones_like(doublings), doublings], -1)
    hat = basis @ np.linalg.pinv(basis)
    return log_loss - log_loss @ hat.T, len(doublings) - 2


def seed_variance(log_loss: Array, replicates: Array | None, cell: NDArray[np.int64], doublings: Array) -> SeedVariance:
    """Pooled seed variance of a series.

    `log_loss` [n] as measured; `replicates` [R, n] under resampled prompts (None: unknown prompt noise); `cell` [n]
    numbers the points (runs that differ in seed alone); `doublings` [n] = log2 x, used where no point has two seeds:
    then the scatter around a straight line stands in for the seeds (with at least four runs).
    """

    def deviate(values: Array) -> tuple[Array, int]:
        return around_line(values, doublings) if source == AROUND else _within(values, cell)

    source = WITHIN
    deviations, freedom = deviate(log_loss)
    if freedom == 0:
        if len(log_loss) < 4 or len(np.unique(doublings)) < 3:
            return SeedVariance(0.0, 0.0, 0.0, 0, "one seed a point and too few points")
        source = AROUND
        deviations, freedom = deviate(log_loss)
    total = float((deviations**2).sum() / freedom)
    squares = deviations[deviations != 0] ** 2  # a point with one seed tells nothing
    typical = float(np.median(squares) * len(squares) / freedom / CHI2_MEDIAN) if len(squares) else 0.0
    if replicates is None:
        return SeedVariance(total, 0.0, typical, freedom, source)
    noise, _ = deviate(replicates - replicates.mean(0))
    return SeedVariance(total, float((noise**2).sum(-1).mean() / freedom), typical, freedom, source)


def draw_seeds(variance: SeedVariance, shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """Seed deviations of log L, [R, n]: a variance from its posterior each replicate, then normal deviations."""
    replicates, runs = shape
    if not variance.known:
        return np.zeros(shape)
    total = variance.total * variance.freedom / rng.chisquare(variance.freedom, replicates)
    sd = np.sqrt(np.maximum(0.0, total - variance.prompt))
    return sd[:, None] * rng.standard_normal((replicates, runs))


def resample_runs(
    prompt_log_loss: Array, variance: SeedVariance, cell: NDArray[np.int64], rng: np.random.Generator
) -> Array:
    """log L of the runs in each replicate, [R, n], from values under resampled prompts [R, n].

    Where seeds were estimated within points, a run's value is its point's mean over seeds plus a drawn seed deviation.
    """
    out = prompt_log_loss.copy()
    if variance.source == WITHIN:
        deviations, _ = _within(out, cell)
        out -= deviations
    return out + draw_seeds(variance, (len(out), out.shape[1]), rng)

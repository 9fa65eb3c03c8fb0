"""Which form: by the error at the largest scale when it is held out, and no finer than that error is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.fitting import FAILED, FitResult
from analysis.forms import Array
from analysis.solver import solve

SELECTION_REPLICATES = 300


@dataclass(frozen=True)
class Selection:
    """`best` by the rule of `select`; `tied`: forms that the data cannot tell from it; `wins`: share of bootstrap
    replicates in which a form has the smallest held-out error; `reason` in words."""

    best: str
    tied: list[str]
    wins: dict[str, float]
    standard_error: float | None
    reason: str


def held_out_draws(result: FitResult) -> Array:
    """Error at the held-out largest scale in each bootstrap replicate, [R]."""
    data = result.data
    if data.replicates is None:
        raise ValueError("no bootstrap replicates: pass data with replicates")
    y = data.replicates[:SELECTION_REPLICATES]
    held = data.largest
    theta, _, _ = solve(result.form, data.inputs, y, ~held / data.sigma)
    predicted = data.quantity.from_loss(result.form.loss(theta, data.inputs[held]))
    return (predicted - data.quantity.from_loss(np.exp(y[:, held]))).mean(-1)


def select(results: list[FitResult]) -> Selection | None:
    """The form with the smallest absolute error at the held-out largest scale.

    That error is itself noisy: forms within one bootstrap standard error of the smallest are tied, and among the tied
    the identified ones go first, then the lowest AICc. None with two scales or fewer.
    """
    candidates = {r.name: r for r in results if r.held_out is not None and r.status != FAILED and r.data.scales > 2}
    if not candidates:
        return None
    errors = {name: abs(r.held_out or 0.0) for name, r in candidates.items()}
    smallest = min(errors, key=lambda name: errors[name])
    if candidates[smallest].data.replicates is None:
        return Selection(smallest, [smallest], {}, None, "smallest error at the held-out largest scale")
    draws = {name: held_out_draws(r) for name, r in candidates.items()}
    winner = np.abs(np.stack(list(draws.values()))).argmin(0)
    wins = {name: float((winner == i).mean()) for i, name in enumerate(draws)}
    error = float(draws[smallest].std(ddof=1))
    tied = [name for name in candidates if errors[name] <= errors[smallest] + error]

    def order(name: str) -> tuple[bool, float]:
        r = candidates[name]
        return (not r.ok, np.inf if r.aicc is None else r.aicc)

    best = min(tied, key=order)
    reason = "smallest error at the held-out largest scale"
    if len(tied) > 1:
        reason = (
            f"{len(tied)} forms predict the held-out largest scale equally well (within one standard error); of these, "
            "identified ones first, the lowest AICc"
        )
    return Selection(best, tied, wins, error, reason)

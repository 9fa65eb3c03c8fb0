"""Which form: by the error at the largest scale when it is held out, and no finer than that error is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.fitting import FAILED, Estimate, FitResult
from analysis.forms import CONSTANT, Array
from analysis.solver import solve

SELECTION_REPLICATES = 300
# Bootstrap standard errors of the smallest held-out error within which forms are not told apart. With one, the union of
# their intervals covers a truth beyond the data in 76 to 100 % of simulated studies, with 1.5 in 87 to 100 %
# (docs/analysis.md).
TIE = 1.5


@dataclass(frozen=True)
class Selection:
    """`best` by the rule of `select`; `tied`: forms that the data cannot tell from it, itself among them; `wins`: share
    of bootstrap replicates in which a form has the smallest held-out error; `reason` in words."""

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


def select(results: list[FitResult], gain: Estimate | None = None) -> Selection | None:
    """The form with the smallest absolute error at the held-out largest scale.

    That error is itself noisy: forms within `TIE` bootstrap standard errors of the smallest are tied, and `_of_tied`
    draws one. `gain` for a doubling: where its interval says that data matter, no constant is considered. None with two
    scales or fewer.
    """
    candidates = {r.name: r for r in results if r.held_out is not None and r.status != FAILED and r.data.scales > 2}
    data_matter = gain is not None and gain.lo is not None and gain.hi is not None and not gain.lo <= 0 <= gain.hi
    if len(candidates) > 1 and data_matter:
        candidates.pop(CONSTANT.name, None)
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
    tied = [name for name in candidates if errors[name] <= errors[smallest] + TIE * error]
    if len(tied) == 1:
        return Selection(smallest, tied, wins, error, "smallest error at the held-out largest scale")
    best, how = _of_tied([candidates[name] for name in tied])
    return Selection(best, tied, wins, error, how)


def _of_tied(tied: list[FitResult]) -> tuple[str, str]:
    """The form that is drawn, and why: an identified one before others, then the lowest AICc; where the runs are too
    few for that of some form, the smallest error over every scale left out once."""
    identified = [r for r in tied if r.ok]
    pool = identified or tied
    if len(pool) == 1:
        return pool[0].name, "the only one whose parameters the data bound"
    which = "the identified one" if identified else "though all of them are under-identified, the one"
    if all(r.aicc is not None for r in pool):
        return min(pool, key=lambda r: r.aicc or 0.0).name, f"{which} with the lowest AICc"
    best = min(pool, key=lambda r: np.inf if r.leave_one_out is None else r.leave_one_out)
    return best.name, f"{which} with the smallest leave-one-scale-out error"

"""One series of runs fitted by one form: parameters with intervals, a status that says what they are worth, a curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as f_distribution
from scipy.stats import t as t_distribution

from analysis.forms import Array, Form
from analysis.quantities import Quantity
from analysis.solver import HUBER, refine, solve, solve_many_starts

CONVERGED, AT_BOUND, UNDER_IDENTIFIED, FAILED = "converged", "at bound", "under-identified", "failed"
LEVEL = 0.95
OUTLIER = 0.01  # probability that a fit without outliers has a run marked as one
PROFILE_POINTS = 41


@dataclass(frozen=True)
class Data:
    """What a series brings to a fit: n runs.

    `inputs` [n, d] relative to the smallest point, `reference` [d] the units taken out, `loss` [n], `sigma` [n]
    standard error of log loss (without the prompt noise that all runs share), `scale` [n] labels equal inputs,
    `replicates` [R, n] log loss under the bootstrap (None: no intervals).
    """

    quantity: Quantity
    inputs: Array
    reference: Array
    loss: Array
    sigma: Array
    scale: NDArray[np.int64]
    replicates: Array | None = None

    @property
    def log_loss(self) -> Array:
        return np.log(self.loss)

    @property
    def scales(self) -> int:
        return len(np.unique(self.scale))

    @property
    def largest(self) -> NDArray[np.bool_]:
        """The runs at the largest data, whatever their other inputs."""
        return self.inputs[:, 0] >= self.inputs[:, 0].max() * (1 - 1e-9)


@dataclass(frozen=True)
class Estimate:
    """A number with its bootstrap interval. `profile`: by the objective, given these prompts; a side is None where the
    data do not bound it, and then the number is not `identified`."""

    value: float
    lo: float | None = None
    hi: float | None = None
    se: float | None = None
    profile: tuple[float | None, float | None] | None = None
    identified: bool = True

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "se": self.se,
            "bootstrap_95": None if self.lo is None else [self.lo, self.hi],
            "profile_95": None if self.profile is None else list(self.profile),
            "identified": self.identified,
        }


@dataclass(frozen=True)
class Prediction:
    """A curve in the quantity's own unit: `value`, `lo`..`hi` for the mean, `run_lo`..`run_hi` for one new run."""

    inputs: Array
    value: Array
    lo: Array | None = None
    hi: Array | None = None
    run_lo: Array | None = None
    run_hi: Array | None = None


@dataclass(frozen=True)
class FitResult:
    """A fitted form. Numbers of an under-identified fit are to be read with `messages`, never alone.

    `theta` [p] in the order of `form.names`; `draws` [R, p] bootstrap replicates; `covariance` [p, p] of the draws.
    `outliers` [n]: runs that a fit of the others does not expect; they stay in the fit.
    `held_out`: predicted minus measured mean at the largest scale, fitted on the others; `leave_one_out`: root mean
    square of the same over every scale left out; both in the quantity's unit. `aicc` from the robust objective.
    """

    form: Form
    data: Data
    theta: Array
    status: str
    messages: list[str]
    objective: float
    outliers: NDArray[np.bool_]
    parameters: dict[str, Estimate] = field(default_factory=dict)
    draws: Array | None = None
    covariance: Array | None = None
    aicc: float | None = None
    held_out: float | None = None
    leave_one_out: float | None = None

    @property
    def name(self) -> str:
        return self.form.name

    @property
    def ok(self) -> bool:
        """Whether every parameter is determined by the data."""
        return self.status in (CONVERGED, AT_BOUND)

    @property
    def residuals(self) -> Array:
        """Standardised residuals of log loss [n] with the sign of the quantity's own: positive where the measured value
        lies above the curve."""
        residual = (self.data.log_loss - np.log(self.form.loss(self.theta, self.data.inputs))) / self.data.sigma
        return -residual if self.data.quantity.rises else residual

    def curve(self, inputs: Array) -> Array:
        """The quantity at relative `inputs` [m, d] -> [m]."""
        return self.data.quantity.from_loss(self.form.loss(self.theta, inputs))

    def predict(self, data: Sequence[float] | Array, level: float = LEVEL) -> Prediction:
        """The quantity at `data` ([m], in units of the axis; or [m, d] for forms with more inputs), with bands.

        The band is the bootstrap's percentile interval of the curve; a new run adds its own seed and prompt noise.
        """
        raw = np.asarray(data, dtype=float)
        inputs = (raw[:, None] if raw.ndim == 1 else raw) / self.data.reference
        value = self.curve(inputs)
        if self.draws is None:
            return Prediction(raw, value)
        loss = self.form.loss(self.draws, inputs)  # [R, m]
        noise = np.random.default_rng(0).normal(0, np.median(self.data.sigma), (len(loss), 1))
        tails = [(1 - level) / 2, (1 + level) / 2]
        lo, hi = np.quantile(self.data.quantity.from_loss(loss), tails, axis=0)
        run_lo, run_hi = np.quantile(self.data.quantity.from_loss(loss * np.exp(noise)), tails, axis=0)
        return Prediction(raw, value, lo, hi, run_lo, run_hi)

    def to_json(self) -> dict[str, Any]:
        """Plain data, no NaN: what `fits.json` holds."""
        return {
            "form": self.name,
            "title": self.form.title,
            "equation": self.form.equation,
            "loss": self.data.quantity.loss_symbol,
            "reference": [float(r) for r in self.data.reference],
            "status": self.status,
            "messages": self.messages,
            "parameters": {name: e.to_json() for name, e in self.parameters.items()},
            "covariance": None if self.covariance is None else self.covariance.tolist(),
            "objective": self.objective,
            "aicc": self.aicc,
            "held_out_error": self.held_out,
            "leave_one_scale_out_rms": self.leave_one_out,
            "runs": len(self.data.loss),
            "scales": self.data.scales,
            "standardised_residuals": [float(r) for r in self.residuals],
        }


def fit(form: Form, data: Data, delta: float = HUBER, profiles: bool = True) -> FitResult:
    """Fit one form: many starts, Huber on standardised log residuals (sums, not means), then intervals and checks.

    `delta` is Huber's threshold in standard errors. `profiles=False` leaves out the profile intervals and with them the
    identification check by open profiles (used inside simulations).
    """
    weight = 1 / data.sigma
    theta, cost, converged = solve_many_starts(form, data.inputs, data.log_loss, weight, delta)
    draws = None
    if data.replicates is not None:
        draws, _, _ = solve(form, data.inputs, data.replicates, weight, delta)
    profile = _profiles(form, data, theta, cost, delta) if profiles else {}
    at_bound = _at_bound(form, theta)
    parameters = {
        name: _estimate(theta[j], None if draws is None else draws[:, j], profile.get(name), bool(at_bound[j]))
        for j, name in enumerate(form.names)
    }
    status, messages = _status(form, data, at_bound, converged, parameters)
    held_out, leave_one_out = _left_out_errors(form, data, delta)
    return FitResult(
        form=form,
        data=data,
        theta=theta,
        status=status,
        messages=messages,
        objective=cost,
        outliers=_outliers(form, data, delta),
        parameters=parameters,
        draws=draws,
        covariance=None if draws is None else np.atleast_2d(np.cov(draws, rowvar=False)),
        aicc=aicc(cost, len(data.loss), len(theta)),
        held_out=held_out,
        leave_one_out=leave_one_out,
    )


def aicc(objective: float, runs: int, parameters: int) -> float | None:
    """Akaike's criterion with the small-sample term, from the robust objective; the noise level counts as a parameter.

    None where the runs are too few for the correction (runs <= parameters + 2).
    """
    k = parameters + 1
    if runs - k - 1 <= 0:
        return None
    return float(runs * np.log(max(2 * objective, 1e-12) / runs) + 2 * k + 2 * k * (k + 1) / (runs - k - 1))


def _at_bound(form: Form, theta: Array) -> NDArray[np.bool_]:
    """[p]: which parameters lie on a bound of their range."""
    tolerance = 1e-6 * np.maximum(1.0, np.abs(theta))
    return (theta - np.array(form.lower) < tolerance) | (np.array(form.upper) - theta < tolerance)


def _estimate(
    value: float, draws: Array | None, profile: tuple[float | None, float | None] | None, at_bound: bool
) -> Estimate:
    closed = profile is None or None not in profile
    # Replicates of a parameter that the data leave open pile up on its bound: their interval would look certain.
    if draws is None or (at_bound and not closed):
        return Estimate(float(value), profile=profile, identified=closed)
    lo, hi = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(lo), float(hi), float(draws.std(ddof=1)), profile, closed)


def _status(
    form: Form, data: Data, at_bound: NDArray[np.bool_], converged: bool, parameters: dict[str, Estimate]
) -> tuple[str, list[str]]:
    messages = []
    bound = [name for name, there in zip(form.names, at_bound, strict=True) if there]
    open_ended = [n for n, e in parameters.items() if not e.identified]
    if not converged:
        return FAILED, ["the solver did not converge"]
    if bound:
        messages.append(f"{', '.join(bound)} lies on the bound of its range")
    if data.scales < form.scales_needed:
        messages.append(
            f"{data.scales} scales for {len(form.names)} parameters: at least {form.scales_needed} are needed to "
            "determine the form and leave one scale that could contradict it"
        )
    if open_ended:
        messages.append(f"the data do not bound {', '.join(open_ended)} on both sides")
    if data.scales < form.scales_needed or open_ended:
        return UNDER_IDENTIFIED, messages
    return (AT_BOUND if bound else CONVERGED), messages


def _outliers(form: Form, data: Data, delta: float) -> NDArray[np.bool_]:
    """Runs too far from the fit of all others: externally studentised residuals against Student's t, Bonferroni.

    A run is left out of its own yardstick, since it would stretch it; leverage is taken at its mean, p / n.
    """
    n, p = len(data.loss), len(form.names)
    freedom = n - 1 - p
    if freedom < 2:
        return np.zeros(n, dtype=bool)
    kept = ~np.eye(n, dtype=bool)
    y = np.broadcast_to(data.log_loss, (n, n))
    theta, _, _ = solve(form, data.inputs, y, kept / data.sigma, delta)
    residual = (y - np.log(form.loss(theta, data.inputs))) / data.sigma
    scatter = np.sqrt((residual**2 * kept).sum(1) / freedom * (1 + p / n))
    limit = float(t_distribution.ppf(1 - OUTLIER / (2 * n), freedom))
    return np.abs(residual[~kept]) > limit * np.maximum(scatter, 1e-9)


def _left_out_errors(form: Form, data: Data, delta: float) -> tuple[float | None, float | None]:
    """(error at the held-out largest scale, root mean square error over every scale left out once).

    None where too few scales remain to determine the form.
    """
    scales = np.unique(data.scale)
    kept = np.concatenate([data.scale[None, :] != scales[:, None], ~data.largest[None, :]])
    if min(len(np.unique(data.scale[k])) for k in kept) < len(form.names):
        return None, None
    y = np.broadcast_to(data.log_loss, kept.shape)
    theta, _, _ = solve(form, data.inputs, y, kept / data.sigma, delta)
    predicted = data.quantity.from_loss(form.loss(theta, data.inputs))  # [scales + 1, n]
    measured = data.quantity.from_loss(data.loss)
    errors = np.array([(p[~k] - measured[~k]).mean() for p, k in zip(predicted, kept, strict=True)])
    return float(errors[-1]), float(np.sqrt((errors[:-1] ** 2).mean()))


def _profiles(
    form: Form, data: Data, theta: Array, cost: float, delta: float
) -> dict[str, tuple[float | None, float | None]]:
    """Profile interval of each parameter: values at which the refitted objective stays within the F threshold.

    A side is None where the objective does not cross the threshold before the parameter's bound (or far out, where it
    has none): the data do not bound it there. Conditional on the prompts: their common noise is in the bootstrap alone.
    """
    freedom = len(data.loss) - len(theta)
    if freedom < 1:
        return dict.fromkeys(form.names, (None, None))
    scatter = max(2 * cost / freedom, 1e-12)
    threshold = cost + 0.5 * scatter * float(f_distribution.ppf(LEVEL, 1, freedom))
    grid = _profile_grid(form, theta)  # [p, 2, m]
    p, _, m = grid.shape
    rows = p * 2 * m
    fixed = np.repeat(np.arange(p), 2 * m)
    starts, lower, upper = (np.tile(np.asarray(v, dtype=float), (rows, 1)) for v in (theta, form.lower, form.upper))
    for bound in (starts, lower, upper):
        bound[np.arange(rows), fixed] = grid.reshape(-1)
    y, weight = np.tile(data.log_loss, (rows, 1)), np.tile(1 / data.sigma, (rows, 1))
    _, profile, _ = refine(form, starts, data.inputs, y, weight, lower, upper, delta)
    profile = profile.reshape(p, 2, m)
    return {
        name: (_crossing(grid[j, 0], profile[j, 0], threshold), _crossing(grid[j, 1], profile[j, 1], threshold))
        for j, name in enumerate(form.names)
    }


def _profile_grid(form: Form, theta: Array) -> Array:
    """Values at which each parameter is held, from the estimate towards both bounds in growing steps, [p, 2, m]."""
    bounds = np.stack([form.lower, form.upper], -1)
    far = 1e3 * np.maximum(np.abs(theta), 1.0)[:, None]
    reach = np.where(np.isfinite(bounds), np.abs(bounds - theta[:, None]), far)
    steps = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, PROFILE_POINTS)])
    return theta[:, None, None] + np.array([-1.0, 1.0])[:, None] * reach[..., None] * steps


def _crossing(values: Array, profile: Array, threshold: float) -> float | None:
    """Where a profile first exceeds the threshold, by linear interpolation; None where it never does."""
    above = np.flatnonzero(profile > threshold)
    if not len(above):
        return None
    k = int(above[0])
    share = (threshold - profile[k - 1]) / (profile[k] - profile[k - 1])
    return float(values[k - 1] + share * (values[k] - values[k - 1]))

"""The batched fitter finds what scipy finds, one dataset at a time."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import least_squares

from analysis import forms, solver
from analysis.forms import Form

X = np.repeat([1.0, 2, 4, 8, 16, 32], 2)[:, None]
TRUTHS: list[tuple[Form, list[float]]] = [
    (forms.CONSTANT, [2.7]),
    (forms.LOG_LINEAR, [2.83, 0.083]),
    (forms.logit_linear(3.0), [-2.8, 0.33]),
    (forms.POWER, [2.83, 0.046]),
    (forms.POWER_FLOOR, [1.2, 1.6, 0.3]),
    (forms.HYPERBOLA, [1.5, 1.4, 5.0]),
    (forms.BROKEN_POWER, [2.8, 0.02, 0.25, 5.0]),
]


@pytest.mark.parametrize(("form", "truth"), TRUTHS, ids=lambda v: v.name if isinstance(v, Form) else "")
def test_exact_data_give_the_exact_parameters(form: Form, truth: list[float]) -> None:
    theta = np.array(truth)
    found, cost, converged = solver.solve_many_starts(form, X, np.log(form.loss(theta, X)), np.full(len(X), 200.0))
    assert converged
    assert cost < 1e-9
    np.testing.assert_allclose(found, theta, rtol=1e-4)


@pytest.mark.parametrize(("form", "truth"), TRUTHS, ids=lambda v: v.name if isinstance(v, Form) else "")
def test_noisy_fits_reach_scipys_objective(form: Form, truth: list[float]) -> None:
    rng = np.random.default_rng(1)
    weight = np.full(len(X), 1 / 0.005)
    y = np.log(form.loss(np.array(truth), X)) + rng.normal(0, 0.005, (5, len(X)))
    y[:, 3] += 0.05  # an outlier, so that Huber's linear part is in use
    _, cost, _ = solver.solve(form, X, y, weight)

    def residual(theta: np.ndarray, row: np.ndarray) -> np.ndarray:
        return weight * (np.log(np.maximum(form.loss(theta[None], X)[0], 1e-12)) - row)

    for k in range(len(y)):
        reference = least_squares(
            residual,
            truth,
            args=(y[k],),
            bounds=(form.lower, form.upper),
            loss="huber",
            f_scale=solver.HUBER,
            xtol=1e-12,
            ftol=1e-12,
        )
        assert cost[k] <= reference.cost * (1 + 1e-3)


def test_a_floor_that_the_data_push_below_zero_stops_at_zero() -> None:
    y = np.log(2 * X[:, 0] ** -0.4 - 0.3)  # steeper than any power law with a floor of 0 or more
    theta, _, _ = solver.solve_many_starts(forms.POWER_FLOOR, X[:8], y[:8], np.full(8, 100.0))
    pure, _, _ = solver.solve_many_starts(forms.POWER, X[:8], y[:8], np.full(8, 100.0))
    assert theta[0] == 0
    np.testing.assert_allclose(theta[1:], pure, rtol=2e-3)  # Huber's linear part is nearly flat here


def test_weight_zero_leaves_a_run_out() -> None:
    y = np.log(forms.POWER.loss(np.array([2.0, 0.2]), X))
    y[-1] += 1.0
    weight = np.full(len(X), 100.0)
    weight[-1] = 0.0
    theta, _, _ = solver.solve(forms.POWER, X, y[None], weight)
    np.testing.assert_allclose(theta[0], [2.0, 0.2], rtol=1e-6)


def test_a_batch_equals_its_datasets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    y = np.log(forms.POWER_FLOOR.loss(np.array([1.2, 1.6, 0.3]), X)) + rng.normal(0, 0.005, (7, len(X)))
    weight = np.full(len(X), 200.0)
    together, _, _ = solver.solve(forms.POWER_FLOOR, X, y, weight)
    monkeypatch.setattr(solver, "CHUNK", 2)
    apart, _, _ = solver.solve(forms.POWER_FLOOR, X, y, weight)
    np.testing.assert_allclose(together, apart)


def test_objective_is_a_sum_so_that_twice_the_data_is_twice_the_evidence() -> None:
    theta = np.array([[2.0, 0.2]])
    y = np.log(forms.POWER.loss(theta, X)) + 0.01
    once = solver.objective(forms.POWER, theta, X, y, np.full((1, len(X)), 100.0), solver.HUBER)
    twice = solver.objective(
        forms.POWER, theta, np.concatenate([X, X]), np.tile(y, 2), np.full((1, 2 * len(X)), 100.0), solver.HUBER
    )
    assert twice[0] == pytest.approx(2 * once[0])


def test_effective_data_has_its_limits() -> None:
    unique = np.array([10.0, 10.0, 10.0])
    epochs = np.array([1.0, 2.0, 1e9])
    worth = forms.effective_data(unique, epochs, np.array(15.0))
    assert worth[0] == pytest.approx(10)  # one epoch: what is unique
    assert worth[1] == pytest.approx(10 * (1 + 15 * (1 - np.exp(-1 / 15))))
    assert worth[2] == pytest.approx(10 * 16)  # never worth more than (1 + R*) times


def test_repetition_form_recovers_how_fast_epochs_lose_their_worth() -> None:
    data, epochs = (v.ravel() for v in np.meshgrid([1.0, 2, 4, 8, 16], [1.0, 2, 4, 8, 16, 64]))
    inputs = np.stack([data, epochs], -1)
    truth = np.array([1.0, 1.8, 0.35, 12.0])
    rng = np.random.default_rng(3)
    y = np.log(forms.REPETITION.loss(truth, inputs)) + rng.normal(0, 5e-4, len(inputs))
    theta, _, _ = solver.solve_many_starts(forms.REPETITION, inputs, y, np.full(len(inputs), 2e3))
    np.testing.assert_allclose(theta, truth, rtol=0.1)

"""The joint law in size and data against the published refit of Chinchilla (Besiroglu et al., 2024, arXiv 2404.10102).

Published: E 1.8172, A 482.01, B 2085.43, alpha 0.3478, beta 0.3658, with standard errors 0.026 for E, 0.015 for
alpha, 0.021 for beta. Here from simulated points; the re-digitised points themselves are read where
EAGLE3_CHINCHILLA_CSV names their file (columns `Model Size`, `Training FLOP`, `loss`).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.forms import JOINT
from analysis.solver import solve, solve_many_starts

PUBLISHED = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
ERRORS = {"E": 0.026, "alpha": 0.015, "beta": 0.021}
DELTA = 1e-3  # Huber's threshold in log loss, as in both papers


def fit(size: np.ndarray, data: np.ndarray, loss: np.ndarray) -> dict[str, float]:
    inputs = np.stack([data / data.min(), size / size.min()], -1)
    (e, a, b, alpha, beta), _, converged = solve_many_starts(JOINT, inputs, np.log(loss), np.ones(len(loss)), DELTA)
    assert converged
    return {"E": e, "A": a * size.min() ** alpha, "B": b * data.min() ** beta, "alpha": alpha, "beta": beta}


def grid() -> tuple[np.ndarray, np.ndarray]:
    """Sizes and tokens as in the study: nine compute budgets, models from a sixth to six times the best size, [240]."""
    rng = np.random.default_rng(0)
    budget = np.repeat(np.geomspace(6e18, 3e21, 9), 27)[:240]
    size = np.sqrt(budget / 6 / 20) * np.exp(rng.uniform(-1.8, 1.8, 240))
    return size, budget / 6 / size


def law(size: np.ndarray, data: np.ndarray) -> np.ndarray:
    p = PUBLISHED
    return p["E"] + p["A"] * size ** -p["alpha"] + p["B"] * data ** -p["beta"]


def test_exact_points_give_the_published_coefficients() -> None:
    size, data = grid()
    found = fit(size, data, law(size, data))
    for name, value in PUBLISHED.items():
        assert found[name] == pytest.approx(value, rel=2e-3), name


def test_noisy_points_give_them_within_their_standard_errors() -> None:
    size, data = grid()
    rng = np.random.default_rng(1)
    inputs = np.stack([data / data.min(), size / size.min()], -1)
    y = np.log(law(size, data)) + 0.004 * rng.standard_t(4, (12, len(size)))
    theta, _, _ = solve(JOINT, inputs, y, np.ones(len(size)), DELTA)
    for name, j in (("E", 0), ("alpha", 3), ("beta", 4)):
        estimates = theta[:, j]
        assert abs(np.median(estimates) - PUBLISHED[name]) < ERRORS[name], name
        assert np.mean(np.abs(estimates - PUBLISHED[name]) < 2 * ERRORS[name]) > 0.8, name


@pytest.mark.skipif("EAGLE3_CHINCHILLA_CSV" not in os.environ, reason="EAGLE3_CHINCHILLA_CSV names no file")
def test_the_digitised_points_give_the_published_refit() -> None:
    points = pd.read_csv(Path(os.environ["EAGLE3_CHINCHILLA_CSV"]))
    points = points[points["loss"] < points["loss"].nlargest(5).min()]  # the refit leaves out the five highest losses
    size, loss = points["Model Size"].to_numpy(), points["loss"].to_numpy()
    found = fit(size, points["Training FLOP"].to_numpy() / 6 / size, loss)
    for name, error in ERRORS.items():
        assert abs(found[name] - PUBLISHED[name]) < error, name
    assert np.log(found["A"] / PUBLISHED["A"]) == pytest.approx(0, abs=0.3)
    assert np.log(found["B"] / PUBLISHED["B"]) == pytest.approx(0, abs=0.5)

"""Prompts are resampled within tasks and shared by all runs; few seeds are neither ignored nor overtrusted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.bootstrap import Counts, draw_seeds, resample_runs, seed_variance
from analysis.simulate import Design, Noise, Truth, alphas_for_tau, measure_noise, simulate, simulate_from_logits


def small_counts() -> Counts:
    rng = np.random.default_rng(0)
    forwards = rng.integers(20, 60, (3, 6)).astype(float)
    accepted = np.floor(forwards * 0.4)[..., None]
    task = np.array([0, 0, 0, 0, 1, 1])
    return Counts(task, forwards + accepted[..., 0], forwards, forwards[..., None], accepted)


def test_prompts_are_drawn_within_their_task() -> None:
    weights = small_counts().prompt_weights(50, np.random.default_rng(0))
    assert (weights[:, :4].sum(1) == 4).all()
    assert (weights[:, 4:].sum(1) == 2).all()


def test_a_draw_measures_what_the_repeated_prompts_would() -> None:
    counts = small_counts()
    weights = np.array([[2.0, 0, 1, 1, 0, 2]])
    chosen = [0, 0, 2, 3, 5, 5]
    expected = counts.tokens[:, chosen].sum(1) / counts.forwards[:, chosen].sum(1)
    np.testing.assert_allclose(counts.measure(weights)["tau"][0], expected)
    alpha = counts.accepted[:, chosen, 0].sum(1) / counts.drafted[:, chosen, 0].sum(1)
    np.testing.assert_allclose(counts.measure(weights)["alpha_0"][0], alpha)


def test_no_acceptance_at_all_still_has_a_logarithm() -> None:
    counts = small_counts()
    none = Counts(counts.task, counts.forwards, counts.forwards, counts.drafted, 0 * counts.accepted)
    every = Counts(counts.task, 2 * counts.forwards, counts.forwards, counts.drafted, counts.drafted)
    assert (none.measure()["alpha_0"] > 0).all()
    assert (every.measure()["alpha_0"] < 1).all()


@given(st.floats(1.05, 3.5), st.integers(2, 7))
@settings(max_examples=10, deadline=None)
def test_simulated_population_has_the_tau_that_was_asked_for(tau: float, steps: int) -> None:
    tau = min(tau, steps + 0.5)
    noise = Noise()
    logits = alphas_for_tau(tau, steps, noise)
    rng = np.random.default_rng(0)
    alpha = 1 / (1 + np.exp(-(logits[None, :] + noise.prompt_sd * rng.standard_normal((100_000, 1)))))
    prompt_tau = 1 + np.cumprod(alpha, -1).sum(-1)
    assert 1 / (1 / prompt_tau).mean() == pytest.approx(tau, rel=5e-3)


def test_tau_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"K \+ 1 = 4"):
        alphas_for_tau(4.2, 3, Noise())


def test_pooled_seed_variance_is_unbiased_and_free_of_prompt_noise() -> None:
    """Two seeds a point: the variance itself, not the half that the scatter of two values around their mean shows."""
    design, noise = Design(), Noise(seed_sd=0.08)
    logits = np.stack([alphas_for_tau(t, 3, noise) for t in Truth().tau(design.scales, 3)])
    rng = np.random.default_rng(0)
    cell, doublings = np.repeat(np.arange(4), 2), np.log2(design.run_scales)

    def log_miss(alpha: np.ndarray) -> np.ndarray:
        return np.log1p(-alpha)

    found, true = [], []
    for _ in range(150):
        counts = simulate_from_logits(design, logits, noise, rng)
        measured = log_miss(counts.measure()["alpha_0"][0])
        prompts = log_miss(counts.measure(counts.prompt_weights(100, rng))["alpha_0"])
        variance = seed_variance(measured, prompts, cell, doublings)
        found.append(variance.total - variance.prompt)
        alpha = counts.measure()["alpha_0"][0]
        true.append(((alpha * noise.seed_sd) ** 2).mean())
    assert np.mean(found) == pytest.approx(np.mean(true), rel=0.2)


def test_one_seed_a_point_takes_the_scatter_around_a_line_and_says_so() -> None:
    doublings = np.arange(6.0)
    rng = np.random.default_rng(0)
    log_loss = 1 - 0.1 * doublings + 0.02 * rng.standard_normal((400, 6))
    cell = np.arange(6)
    totals = [seed_variance(row, None, cell, doublings) for row in log_loss]
    assert np.mean([v.total for v in totals]) == pytest.approx(0.02**2, rel=0.15)
    assert "straight line" in totals[0].source
    short = seed_variance(log_loss[0, :3], None, cell[:3], doublings[:3])
    assert short.freedom == 0
    assert "too few points" in short.source


def test_one_bad_run_does_not_stretch_the_typical_variance() -> None:
    doublings, cell = np.repeat(np.arange(6.0), 3), np.repeat(np.arange(6), 3)
    rng = np.random.default_rng(0)
    clean = 1 - 0.1 * doublings + 0.02 * rng.standard_normal(18)
    bad = clean.copy()
    bad[4] += 0.5
    before, after = (seed_variance(y, None, cell, doublings) for y in (clean, bad))
    assert before.typical == pytest.approx(before.total, rel=0.8)
    assert after.typical < 4 * before.typical
    assert after.total > 20 * before.total


def test_drawn_seeds_have_the_tails_of_few_degrees_of_freedom() -> None:
    doublings = np.repeat(np.arange(4.0), 2)
    cell = np.repeat(np.arange(4), 2)
    log_loss = 1 - 0.1 * doublings + np.tile([0.01, -0.01], 4)
    variance = seed_variance(log_loss, None, cell, doublings)
    draws = draw_seeds(variance, (40_000, 8), np.random.default_rng(0))
    assert variance.total == pytest.approx(2 * 0.01**2)
    expected = variance.total * 4 / (4 - 2)  # mean of a scaled inverse chi-square with 4 degrees of freedom
    assert draws.var() == pytest.approx(expected, rel=0.25)
    resampled = resample_runs(np.repeat(log_loss[None], 500, 0), variance, cell, np.random.default_rng(1))
    np.testing.assert_allclose(resampled.mean(0), 1 - 0.1 * doublings, atol=5e-3)


def test_shared_prompts_cancel_in_a_slope() -> None:
    """Resampling the same prompts for all runs makes tau of a run much less certain than differences between runs."""
    design = Design(tokens=1000)
    counts = simulate(design, Truth().tau((1, 2, 4, 8), 3), Noise(prompt_scale_sd=0.0), np.random.default_rng(0))
    tau = counts.measure(counts.prompt_weights(2000, np.random.default_rng(1)))["tau"]
    centred = tau - tau.mean(0)
    apart = np.sqrt(tau[:, 0].var() + tau[:, -1].var())
    assert (centred[:, -1] - centred[:, 0]).std() < 0.8 * apart


def test_noise_is_measured_back() -> None:
    design = Design(scales=(1, 2, 4, 8, 16, 32), seeds=4, prompts=200, tokens=400)
    noise = Noise(prompt_sd=0.4, prompt_scale_sd=0.1, seed_sd=0.06)
    counts = simulate(design, Truth().tau(design.scales, 3), noise, np.random.default_rng(0))
    cell = np.repeat(np.arange(6), 4)
    found = measure_noise(counts, cell, np.log2(design.run_scales))
    assert found.prompt_sd == pytest.approx(0.4, rel=0.15)
    assert found.prompt_scale_sd == pytest.approx(0.1, rel=0.2)
    assert found.seed_sd == pytest.approx(0.06, rel=0.35)

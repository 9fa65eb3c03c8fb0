"""The minimum detectable gain: falls with more of everything, and means what it says."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_study import write_study

from analysis import analyse, load_runs, power
from analysis.design import Power


@pytest.fixture(scope="module")
def quick() -> Power:
    return power([1, 2, 4, 8], 2, simulations=60)


def test_more_data_of_any_kind_sees_smaller_gains(quick: Power) -> None:
    given, *others = quick.alternatives
    assert all(row.half_width < given.half_width for row in others)
    assert 0.005 < quick.minimum_gain < 0.04


def test_text_names_the_design_and_that_the_noise_is_assumed(quick: Power) -> None:
    text = quick.text()
    assert "1x, 2x, 4x, 8x with 2 seeds" in text
    assert "assumed" in text
    assert f"{quick.minimum_gain:.3f}" in text


def test_a_pilot_with_noisier_seeds_needs_a_larger_gain(tmp_path_factory: pytest.TempPathFactory, quick: Power) -> None:
    from analysis.simulate import Noise

    folder = write_study(tmp_path_factory.mktemp("pilot") / "p", noise=Noise(seed_sd=0.3))
    noisy = power([1, 2, 4, 8], 2, pilot=load_runs(folder), simulations=40)
    assert "measured on the pilot" in noisy.text()
    assert noisy.minimum_gain > 1.5 * quick.minimum_gain


def test_one_scale_is_no_design() -> None:
    with pytest.raises(ValueError, match="two data scales"):
        power([4], 2)


@pytest.mark.slow
def test_studies_of_that_gain_are_found_in_four_of_five(tmp_path_factory: pytest.TempPathFactory, quick: Power) -> None:
    from analysis.simulate import Truth

    found = []
    for k in range(60):
        truth = Truth(tau_1x=1.3 - 1.5 * quick.minimum_gain, gain=quick.minimum_gain)
        folder = write_study(tmp_path_factory.mktemp("power") / "s", truth, seed=k)
        gain = analyse(load_runs(folder), quantities=["tau"], replicates=200, profiles=False).series[0].fits["tau"].gain
        assert gain is not None
        found.append((gain.lo or 0) > 0)
    assert 0.65 < np.mean(found) < 0.93

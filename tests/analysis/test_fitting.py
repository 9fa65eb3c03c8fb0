"""Statuses, intervals, criteria and predictions of one fit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import linregress, t

from analysis import forms
from analysis.export import clean
from analysis.fitting import AT_BOUND, CONVERGED, UNDER_IDENTIFIED, Data, FitResult, aicc, fit
from analysis.forms import Array, Form
from analysis.quantities import quantity

SEED_SD = 0.004


def data_of(
    form: Form, theta: list[float], scales: tuple[float, ...], seeds: int = 2, sd: float = SEED_SD, base: float = 7600.0
) -> Data:
    x = np.repeat(np.array(scales, dtype=float), seeds)
    rng = np.random.default_rng(0)
    loss = form.loss(np.array(theta), x[:, None] / x.min()) * np.exp(sd * rng.standard_normal(len(x)))
    replicates = np.log(loss) + SEED_SD * rng.standard_normal((300, len(x)))
    return Data(
        quantity=quantity("tau", 3),
        inputs=(x / x.min())[:, None],
        reference=np.array([base * x.min()]),
        loss=loss,
        sigma=np.full(len(x), SEED_SD),
        scale=np.unique(x, return_inverse=True)[1],
        replicates=replicates,
    )


def test_enough_scales_converge_and_hold_the_truth() -> None:
    truth = {"E": 1.2, "A": 1.6, "b": 0.35}
    result = fit(
        forms.POWER_FLOOR, data_of(forms.POWER_FLOOR, list(truth.values()), tuple(2.0**k for k in range(9)), 3)
    )
    assert result.status == CONVERGED
    for name, value in truth.items():
        e = result.parameters[name]
        assert e.lo is not None
        assert e.hi is not None
        assert e.lo < value < e.hi
        assert e.profile is not None
        assert e.profile[0] < value < e.profile[1]


def test_fewer_scales_than_the_form_needs_is_a_status_and_a_message() -> None:
    result = fit(forms.POWER_FLOOR, data_of(forms.POWER_FLOOR, [1.2, 1.6, 0.35], (1, 2, 4)))
    assert result.status == UNDER_IDENTIFIED
    assert "at least 4 are needed" in " ".join(result.messages)
    assert result.held_out is None


def test_four_noisy_scales_do_not_identify_a_floor() -> None:
    result = fit(forms.POWER_FLOOR, data_of(forms.POWER, [2.83, 0.046], (1, 2, 4, 8), sd=0.004))
    assert result.status == UNDER_IDENTIFIED
    assert not result.parameters["E"].identified
    assert "do not bound" in " ".join(result.messages)


def test_a_parameter_on_its_bound_is_named() -> None:
    """Losses that fall faster than any allowed exponent: b stops at its bound."""
    data = data_of(forms.POWER, [2.0, 2.9], (1, 1.5, 2, 3, 4), sd=0.0)
    steep = Data(data.quantity, data.inputs, data.reference, data.loss**1.2, data.sigma, data.scale, None)
    result = fit(forms.POWER, steep, profiles=False)
    assert result.status == AT_BOUND
    assert result.messages == ["b lies on the bound of its range"]


@pytest.mark.parametrize("name", ["tau", "val_loss"])
def test_residuals_have_the_sign_of_the_quantity(name: str) -> None:
    """A run with more tau than the curve stands above it, although its loss-like quantity lies below."""
    data = replace(data_of(forms.LOG_LINEAR, [2.8, 0.05], (1, 2, 4, 8)), quantity=quantity(name, 3))
    result = fit(forms.LOG_LINEAR, data, profiles=False)
    above = data.quantity.from_loss(data.loss) - result.curve(data.inputs)
    assert (np.sign(above) == np.sign(result.residuals)).all()


def test_an_open_parameter_on_its_bound_has_no_interval() -> None:
    """Its replicates lie on the bound too, which is not what the data say of it."""
    data = data_of(forms.LOG_LINEAR, [2.8, 0.05], (1, 2, 4, 8))
    doublings = np.log2(data.inputs[:, 0])
    bent = data.loss - 0.02 * doublings**2  # faster and faster down: no floor in sight
    replicates = np.log(bent) + SEED_SD * np.random.default_rng(1).standard_normal((300, len(bent)))
    result = fit(forms.POWER_FLOOR, replace(data, loss=bent, replicates=replicates))
    floor = result.parameters["E"]
    assert (floor.value, floor.identified) == (pytest.approx(0.0, abs=1e-6), False)
    assert (floor.lo, floor.hi) == (None, None)


def test_profile_interval_of_a_line_is_students() -> None:
    """Without outliers and on a small range log L is almost linear, where the profile interval is the t interval."""
    data = data_of(forms.LOG_LINEAR, [2.83, 0.08], (1, 2, 4, 8, 16), 2)
    e = fit(forms.LOG_LINEAR, data, delta=1e6).parameters["g"]
    line = linregress(np.log2(data.inputs[:, 0]), -data.loss)
    half = line.stderr * t.ppf(0.975, len(data.loss) - 2)
    assert e.profile is not None
    lo, hi = e.profile
    assert lo is not None
    assert hi is not None
    assert lo == pytest.approx(line.slope - half, abs=0.15 * half)
    assert hi == pytest.approx(line.slope + half, abs=0.15 * half)


def test_aicc_counts_the_noise_level_and_refuses_too_few_runs() -> None:
    n, k = 8, 3  # two parameters and the noise level
    expected = n * np.log(2 * 5.0 / n) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    assert aicc(5.0, n, 2) == pytest.approx(expected)
    assert aicc(5.0, 4, 2) is None


def test_held_out_and_leave_one_out_errors_are_those_of_refits() -> None:
    data = data_of(forms.POWER, [2.83, 0.046], (1, 2, 4, 8))
    result = fit(forms.POWER, data, profiles=False)
    errors = []
    for left_out in range(4):
        keep = data.scale != left_out
        part = Data(
            data.quantity, data.inputs[keep], data.reference, data.loss[keep], data.sigma[keep], data.scale[keep]
        )
        refit = fit(forms.POWER, part, profiles=False)
        errors.append((refit.curve(data.inputs[~keep]) - data.quantity.from_loss(data.loss[~keep])).mean())
    assert result.held_out == pytest.approx(errors[-1], abs=1e-5)
    assert result.leave_one_out == pytest.approx(np.sqrt(np.mean(np.square(errors))), abs=1e-5)


def test_an_outlier_is_marked_and_hardly_moves_the_fit() -> None:
    clean_data = data_of(forms.POWER, [2.83, 0.046], (1, 2, 4, 8, 16), 3)
    loss = clean_data.loss.copy()
    loss[4] *= 1.1
    dirty = Data(clean_data.quantity, clean_data.inputs, clean_data.reference, loss, clean_data.sigma, clean_data.scale)
    before, after = (fit(forms.POWER, d, profiles=False) for d in (clean_data, dirty))
    assert not before.outliers.any()
    assert after.outliers.tolist() == [i == 4 for i in range(15)]
    assert after.theta[1] == pytest.approx(before.theta[1], abs=0.003)


def test_bands_widen_beyond_the_data_and_a_new_run_is_wider_than_the_curve() -> None:
    result = fit(forms.POWER, data_of(forms.POWER, [2.83, 0.046], (1, 2, 4, 8)), profiles=False)
    p = result.predict(7600 * np.array([4.0, 16, 64]))
    assert p.lo is not None
    assert p.hi is not None
    assert p.run_lo is not None
    assert p.run_hi is not None
    width, run_width = p.hi - p.lo, p.run_hi - p.run_lo
    assert (np.diff(width) > 0).all()
    assert (run_width > width).all()
    assert ((p.lo < p.value) & (p.value < p.hi)).all()


def test_predictions_never_leave_the_quantitys_range() -> None:
    result = fit(forms.LOG_LINEAR, data_of(forms.LOG_LINEAR, [2.83, 0.3], (1, 2, 4, 8)), profiles=False)
    p = result.predict(7600 * 2.0 ** np.array([-20.0, 20.0]))
    assert p.value.tolist() == [1.0, 4.0]


@given(st.floats(1e-3, 1e9))
@settings(max_examples=10, deadline=None)
def test_the_unit_of_the_data_does_not_matter(unit: float) -> None:
    here, there = (
        fit(forms.POWER_FLOOR, data_of(forms.POWER_FLOOR, [1.2, 1.6, 0.35], (1, 2, 4, 8, 16), base=b), profiles=False)
        for b in (1.0, unit)
    )
    np.testing.assert_allclose(here.predict([32.0]).value, there.predict([32.0 * unit]).value, rtol=1e-9)


def is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def test_json_is_plain_and_has_no_nan() -> None:
    result: FitResult = fit(forms.POWER, data_of(forms.POWER, [2.83, 0.046], (1, 2, 4)))
    plain = clean(result.to_json() | {"nan": float("nan"), "array": [np.float64(1.0)]})
    assert is_plain(plain)
    assert plain["nan"] is None
    json.dumps(plain, allow_nan=False)


def test_joint_form_reads_both_inputs() -> None:
    size, x = (v.ravel() for v in np.meshgrid([1.0, 2, 4, 8], [1.0, 2, 4, 8, 16]))
    inputs: Array = np.stack([x, size], -1)
    truth = np.array([0.8, 0.9, 1.1, 0.5, 0.4])
    data = Data(
        quantity=quantity("val_loss", 3),
        inputs=inputs,
        reference=np.array([1e6, 1e7]),
        loss=forms.JOINT.loss(truth, inputs),
        sigma=np.full(len(x), 1e-3),
        scale=np.arange(len(x)),
    )
    result = fit(forms.JOINT, data, profiles=False)
    np.testing.assert_allclose(result.theta, truth, rtol=1e-2)
    assert result.predict(np.array([[1e6, 1e7]])).value[0] == pytest.approx(0.8 + 0.9 + 1.1, rel=1e-3)


def test_clean_studies_are_rarely_said_to_have_outliers() -> None:
    marked = 0
    for seed in range(60):
        x = np.repeat([1.0, 2, 4, 8], 2)
        rng = np.random.default_rng(seed)
        loss = 2.83 * x**-0.046 * np.exp(SEED_SD * rng.standard_normal(8))
        scale = np.unique(x, return_inverse=True)[1]
        data = Data(quantity("tau", 3), x[:, None], np.ones(1), loss, np.full(8, SEED_SD), scale)
        marked += bool(fit(forms.POWER, data, profiles=False).outliers.any())
    assert marked <= 3

"""The whole analysis: series, selection, positions, comparisons, and what is said when the data are thin."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_study import write_study

from analysis import Analysis, Table, analyse, data_for_tau, load_runs, summary_text
from analysis.fitting import CONVERGED, UNDER_IDENTIFIED
from analysis.simulate import Design, Noise, Truth
from analysis.study import compose_tau

TAU = ["tau"]  # what most tests look at: fitting it alone is quicker
WIDE = Design(scales=(1, 2, 4, 8, 16, 32, 64, 128), seeds=3)


def test_gain_of_the_quick_start_holds_the_truth(analysed: Analysis) -> None:
    gain = analysed.series[0].fits["tau"].gain
    assert gain is not None
    assert gain.lo is not None
    assert gain.hi is not None
    assert gain.lo < 0.083 < gain.hi
    assert gain.hi - gain.lo < 0.06


def test_the_analysis_is_deterministic(study: Path) -> None:
    table = load_runs(study)
    first, second, other = (summary_text(analyse(table, replicates=60, seed=s, quantities=TAU)) for s in (0, 0, 1))
    assert first == second
    assert first != other


def test_four_scales_do_not_identify_a_saturating_law_and_say_so(analysed: Analysis) -> None:
    tau = analysed.series[0].fits["tau"]
    assert tau.results["power_floor"].status == UNDER_IDENTIFIED
    assert [form.name for form, _ in tau.skipped] == ["broken_power"]
    assert any("tell a slope, not a ceiling" in w for w in analysed.warnings)
    assert tau.best is not None
    assert tau.best.status == CONVERGED
    assert tau.selection is not None
    assert {"power", "log_linear"} <= set(tau.selection.tied)


def test_a_clear_saturation_is_chosen_and_recovered(tmp_path: Path) -> None:
    truth = Truth(tau_1x=1.17, floor=1.2, exponent=0.35)
    noise = Noise(prompt_scale_sd=0.01, seed_sd=0.01)
    write_study(tmp_path / "s", truth, Design(WIDE.scales, 3, prompts=64, tokens=256), noise)
    tau = analyse(load_runs(tmp_path / "s"), quantities=TAU, replicates=100).series[0].fits["tau"]
    assert tau.best is not None
    assert tau.best.name == "power_floor"
    e = tau.best.parameters["E"]
    assert e.lo is not None
    assert e.hi is not None
    assert e.lo < 1.2 < e.hi


def test_no_effect_of_data_is_called_that(tmp_path: Path) -> None:
    write_study(tmp_path / "flat", Truth(tau_1x=1.4, gain=0.0))
    analysis = analyse(load_runs(tmp_path / "flat"), quantities=TAU, replicates=150)
    assert "did not measurably change" in summary_text(analysis)
    tau = analysis.series[0].fits["tau"]
    assert tau.selection is not None
    assert tau.selection.best == "constant"


def test_position_models_agree_with_tau_and_keep_its_ceiling(analysed: Analysis) -> None:
    s = analysed.series[0]
    models = {m.form.name: m for m in s.positions}
    line = models["power"]
    inside = line.predict([s.base * m for m in s.scales]).value
    measured = [analysed.table.runs.loc[s.runs[s.scale == m], "tau"].mean() for m in s.scales]
    np.testing.assert_allclose(inside, measured, atol=0.03)
    assert line.held_out is not None
    assert abs(line.held_out) < 0.06
    for model in models.values():
        far = model.predict([s.base * 2.0**60])
        assert far.value[0] <= s.draft_steps + 1
        assert far.hi is not None
        assert far.hi[0] <= s.draft_steps + 1


def test_tau_of_the_alphas() -> None:
    assert compose_tau(np.array([0.5, 0.4, 0.1])) == pytest.approx(1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.1)


def test_data_for_a_tau_is_the_curve_read_backwards(analysed: Analysis) -> None:
    s = analysed.series[0]
    fitted = s.fits["tau"]
    best = fitted.best
    assert best is not None
    need = data_for_tau(best, 1.5, s.base)
    assert need.lo is not None
    assert need.hi is not None
    assert best.predict([need.value]).value[0] == pytest.approx(1.5, abs=1e-3)
    assert need.lo < need.value < need.hi
    together = data_for_tau(fitted, 1.5, s.base)
    ends = [data_for_tau(form, 1.5, s.base) for form in fitted.tied]
    assert len(ends) > 1
    assert together.value == need.value
    assert together.lo == min(e.lo for e in ends if e.lo is not None)
    assert together.hi is None or together.hi == max(e.hi for e in ends if e.hi is not None)
    assert (together.hi is None) == any(e.hi is None for e in ends)
    flat = fitted.results["constant"]
    assert data_for_tau(flat, 1.5, s.base).value == np.inf
    assert data_for_tau(best, 1.0, s.base).value == 0.0


def test_predictions_hold_what_every_tied_form_says(analysed: Analysis) -> None:
    s = analysed.series[0]
    fitted = s.fits["tau"]
    data = [s.base * m for m in s.beyond]
    assert s.beyond == [16.0, 64.0]
    together, parts = fitted.predict(data), [form.predict(data) for form in fitted.tied]
    assert len(parts) > 1
    assert fitted.best is not None
    np.testing.assert_array_equal(together.value, fitted.best.predict(data).value)
    for name, outermost in (("lo", np.min), ("run_lo", np.min), ("hi", np.max), ("run_hi", np.max)):
        np.testing.assert_array_equal(getattr(together, name), outermost([getattr(p, name) for p in parts], axis=0))
    assert (together.hi - together.lo > parts[0].hi - parts[0].lo).all()  # type: ignore[operator]


def test_one_seed_at_four_scales_is_not_called_a_constant_where_data_matter(tmp_path: Path) -> None:
    """AICc has no value for two parameters and four runs, and must not decide for the one that has fewer."""
    rng = np.random.default_rng(0)
    significant = 0
    for k in range(12):
        tau = 1.1 + 0.045 * np.arange(4) + rng.normal(0, 0.012, 4)
        path = tmp_path / f"{k}.csv"
        pd.DataFrame({"data_scale": [1, 2, 4, 8], "tau": tau, "draft_steps": 3, "seed": 0}).to_csv(path)
        fitted = analyse(load_runs(path), replicates=200).series[0].fits["tau"]
        assert fitted.gain is not None
        assert fitted.selection is not None
        if fitted.gain.lo is not None and fitted.gain.lo > 0:
            significant += 1
            assert fitted.selection.best != "constant"
        assert "AICc" not in fitted.selection.reason
    assert significant > 6


def test_unknown_seeds_make_no_claim(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "one", design=Design(scales=(1, 2, 4), seeds=1))
    write_study(folder, draft="eagle1", design=Design(scales=(1, 2, 4), seeds=1), seed=4)
    text = summary_text(analyse(load_runs(folder), replicates=60, quantities=TAU))
    assert "by the choice of prompts alone" in text
    assert "train a second seed" in text
    assert "95 % interval" not in text.splitlines()[0]
    assert not any("adds" in line for line in text.splitlines()[:3])


def test_two_heads_are_two_series_and_the_steeper_one_is_told(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "both", Truth(gain=0.083))
    write_study(folder, Truth(tau_1x=1.2, gain=0.02), draft="eagle1", seed=1)
    analysis = analyse(load_runs(folder), replicates=200, quantities=TAU)
    assert [s.label for s in analysis.series] == ["EAGLE-1", "EAGLE-3"]
    (c,) = analysis.comparisons
    assert (c.first, c.second) == ("EAGLE-3", "EAGLE-1")
    assert c.probability > 0.99
    assert c.difference.lo is not None
    assert c.difference.lo < 0.083 - 0.02 < (c.difference.hi or 0)
    assert "above 0.995" in summary_text(analysis)  # 200 replicates cannot show more


def test_equal_heads_are_not_told_apart(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "both")
    write_study(folder, draft="eagle1", seed=5)
    (c,) = analyse(load_runs(folder), replicates=200, quantities=TAU).comparisons
    assert 0.01 < c.probability < 0.99


def test_of_many_series_the_best_and_the_worst_are_told(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "many", Truth(gain=0.09))
    write_study(folder, Truth(gain=0.05), draft="medusa", seed=1)
    write_study(folder, Truth(gain=0.01), draft="eagle1", seed=2)
    text = summary_text(analyse(load_runs(folder), replicates=60, quantities=TAU))
    first = text.splitlines()[0]
    assert first.startswith("Of 3 series")
    assert first.index("EAGLE-3") < first.index("EAGLE-1")
    assert "Medusa adds" in text


def test_runs_that_differ_in_more_than_data_and_seed_are_apart(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "sizes", trainable=1_000_000)
    write_study(folder, trainable=4_000_000, seed=3, suffix="-big")
    analysis = analyse(load_runs(folder), replicates=50, quantities=["tau", "val_loss"])
    assert [s.label for s in analysis.series] == ["EAGLE-3, 1,000,000 parameters", "EAGLE-3, 4,000,000 parameters"]
    assert {(name, r.form.name) for _, name, r in analysis.joint} >= {("tau", "joint"), ("val_loss", "joint")}


def test_a_failed_point_is_told_and_the_rest_is_fitted(study: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(study, tmp_path / "copy")
    next(copy.glob("eagle3-x4-s1-*/result.json")).unlink()
    analysis = analyse(load_runs(copy), replicates=60, quantities=TAU)
    assert len(analysis.series[0].runs) == 7
    assert any("eagle3-x4-s1" in w and "no part in any fit" in w for w in analysis.warnings)
    assert "eagle3-x4-s1" in summary_text(analysis)


def test_an_outlier_is_told_and_stays(study: Path) -> None:
    table = load_runs(study)
    runs = table.runs.copy()
    runs.loc[2, "val_loss"] *= 1.5
    analysis = analyse(Table(runs, table.records), replicates=60, quantities=["val_loss"])
    assert any(runs.loc[2, "point"] in w and "val_loss" in w for w in analysis.warnings)
    assert len(analysis.series[0].fits["val_loss"].data.loss) == 8


@pytest.mark.parametrize(
    ("scales", "words"), [((1.0,), "1 data scale is too few"), ((1.0, 8.0), "2 data scales are too few")]
)
def test_one_or_two_scales_give_no_curve_but_a_report(tmp_path: Path, scales: tuple[float, ...], words: str) -> None:
    write_study(tmp_path / "thin", design=Design(scales=scales))
    analysis = analyse(load_runs(tmp_path / "thin"), quantities=TAU, replicates=60)
    text = summary_text(analysis)
    assert words in text
    assert "no form can be checked" in text
    assert analysis.series[0].fits["tau"].best is None


def test_one_seed_a_point_is_told(tmp_path: Path) -> None:
    write_study(tmp_path / "one", design=Design(seeds=1))
    text = summary_text(analyse(load_runs(tmp_path / "one"), replicates=60, quantities=TAU))
    assert "one seed a point" in text


def test_a_tidy_table_without_any_error_has_no_interval(tmp_path: Path) -> None:
    path = tmp_path / "peer.csv"
    pd.DataFrame({"supervised_tokens": [1e6, 2e6, 4e6], "tau": [2.0, 2.2, 2.41], "draft_steps": 7}).to_csv(path)
    analysis = analyse(load_runs(path))
    gain = analysis.series[0].fits["tau"].gain
    assert gain is not None
    assert gain.lo is None
    assert gain.value == pytest.approx(0.2, abs=0.02)
    assert "without an interval" in summary_text(analysis)


def test_reported_intervals_are_used_where_there_are_no_records(tmp_path: Path) -> None:
    tau = np.array([2.0, 2.2, 2.41, 2.6])
    frame = pd.DataFrame({"data_scale": [1, 2, 4, 8], "tau": tau, "tau_lo": tau - 0.1, "tau_hi": tau + 0.1})
    frame.assign(draft_steps=7).to_csv(tmp_path / "peer.csv")
    analysis = analyse(load_runs(tmp_path / "peer.csv"), replicates=2000)
    gain = analysis.series[0].fits["tau"].gain
    assert gain is not None
    assert gain.se is not None
    alone = (0.1 / 1.96) / np.sqrt(5)  # independent errors, log2 of the data 0 to 3: sum of squares 5
    assert gain.se >= 0.8 * alone
    assert any("reported intervals" in w for w in analysis.warnings)


def test_an_axis_or_a_quantity_that_runs_lack_is_refused(study: Path) -> None:
    with pytest.raises(ValueError, match="axis='hours'"):
        analyse(load_runs(study), axis="hours")
    with pytest.raises(ValueError, match="measured alpha_7"):
        analyse(load_runs(study), quantities=["alpha_7"])


def test_different_stores_are_a_warning(study: Path) -> None:
    table = load_runs(study)
    runs = table.runs.copy()
    runs.loc[0, "store_fingerprint"] = "another"
    assert any(
        "different stores" in w for w in analyse(Table(runs, table.records), replicates=30, quantities=TAU).warnings
    )


def test_targets_have_curves_of_their_own(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "targets", trainable=1_000_000)
    write_study(folder, trainable=4_000_000, seed=3, suffix="-large")
    table = load_runs(folder)
    large = table.runs["point"].str.endswith("-large")
    runs = table.runs.assign(target=np.where(large, "large", "small"), store_fingerprint=np.where(large, "b", "a"))
    analysis = analyse(Table(runs, table.records), replicates=50, quantities=TAU)
    assert [s.label for s in analysis.series] == ["EAGLE-3, large", "EAGLE-3, small"]
    assert [c.replicates for c in analysis.comparisons] == [50]
    assert not analysis.joint  # a head is larger there because its target is: no law of the draft's size
    assert not any("different stores" in w for w in analysis.warnings)

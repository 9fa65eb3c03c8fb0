"""Which runs form a series: what differs besides data and seed is told, and takes no more apart than it must."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from configured import configure
from synthetic_study import write_study

from analysis import analyse, load_runs
from analysis.series import group
from analysis.simulate import Design

ONE_SEED = Design(seeds=1)


def series_of(*paths: Path) -> dict[str, list[float]]:
    """Label -> data scale of each run."""
    runs = load_runs(paths).finished
    return {label: sorted(runs.loc[members, "data_scale"]) for label, members in group(runs)}


def cautions_of(folder: Path) -> list[str]:
    return analyse(load_runs(folder), replicates=30, quantities=["val_loss"], profiles=False).warnings


def test_another_objective_at_one_scale_is_no_point_of_the_curve(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    configure(folder, "*", train={"step_weight": 0.8})
    configure(folder, "*-x8-*", train={"step_weight": 0.0})
    assert series_of(folder) == {"EAGLE-3": [1, 2, 4], "EAGLE-3, train.step_weight=0": [8]}


def test_one_extra_point_leaves_the_rest_together(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    write_study(folder, design=ONE_SEED, draft="eagle1", seed=1)
    write_study(folder, design=Design(scales=(8,), seeds=1), suffix="-extra", seed=2)
    configure(folder, "*-extra", optim={"lr": 0.0005})
    assert series_of(folder) == {
        "EAGLE-1": [1, 2, 4, 8],
        "EAGLE-3": [1, 2, 4, 8],
        "EAGLE-3, optim.lr=0.0005": [8],
    }


def test_two_values_at_every_scale_are_two_curves_in_the_order_of_the_values(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    write_study(folder, design=ONE_SEED, suffix="-high", seed=1)
    configure(folder, "*-high", optim={"lr": 0.01}, train={"epochs": 4})
    assert series_of(folder) == {
        "EAGLE-3, train.epochs=2, optim.lr=0.002": [1, 2, 4, 8],
        "EAGLE-3, train.epochs=4, optim.lr=0.01": [1, 2, 4, 8],
    }


def test_a_learning_rate_of_each_scale_stays_one_curve_and_is_told(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    configure(folder, "*-x1-*", optim={"lr": 0.001})
    assert series_of(folder) == {"EAGLE-3": [1, 2, 4, 8]}
    first = cautions_of(folder)[0]
    assert first.startswith("EAGLE-3: optim.lr is not the same at all data scales (0.001 at 1x; 0.002 at 2x, 4x, 8x)")


def test_epochs_that_fall_with_the_data_stay_together_beside_another_learning_rate(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    write_study(folder, design=Design(scales=(4,), seeds=1), suffix="-extra", seed=2)
    for scale, epochs in ((1, 8), (2, 4), (4, 2), (8, 1)):
        configure(folder, f"*-x{scale}-*", train={"epochs": epochs})
    configure(folder, "*-extra", train={"epochs": 3}, optim={"lr": 0.01})
    assert series_of(folder) == {"EAGLE-3": [1, 2, 4, 8], "EAGLE-3, train.epochs=3, optim.lr=0.01": [4]}


def test_what_does_not_change_the_head_splits_nothing(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    configure(folder, "*-x8-*", train={"log_every": 1, "padding": "length"}, draft={"attention": "flex"})
    configure(folder, "*-x4-*", train={"objective": "soft_ce"}, draft={"medusa": {"layers": 3}}, corpus={"path": "b"})
    assert series_of(folder) == {"EAGLE-3": [1, 2, 4, 8]}


def test_of_many_settings_three_are_named(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    other = {"oov": "keep", "objective": "tv", "compute_dtype": "fp32", "regime": "steps"}
    configure(folder, "*", train={"oov": "drop", "objective": "soft_ce", "compute_dtype": "bf16"})
    configure(folder, "*-x8-*", train=other)
    _, label = series_of(folder)
    assert label.count("train.") == 3
    assert label.endswith(", 1 more settings")


def test_runs_that_nothing_tells_apart_are_repeats_and_are_told(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    write_study(folder, design=Design(scales=(2,), seeds=1), suffix="-again", seed=4)
    assert series_of(folder) == {"EAGLE-3": [1, 2, 2, 4, 8]}
    assert any("-again" in w and "count as repeats of one point" in w for w in cautions_of(folder))


def test_the_table_of_a_report_gives_the_series_of_the_report(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", design=ONE_SEED)
    configure(folder, "*-x8-*", train={"step_weights": [1, 0]}, optim={"betas": [0.9, 0.99]})
    configure(folder, "*-x[124]-*", optim={"betas": [0.9, 0.95]})
    load_runs(folder).runs.to_csv(tmp_path / "results.csv", index=False)
    expected = {"EAGLE-3": [1, 2, 4], "EAGLE-3, train.step_weights=[1, 0], optim.betas=[0.9, 0.99]": [8]}
    assert series_of(folder) == expected
    assert series_of(tmp_path / "results.csv") == expected


def test_studies_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    first = write_study(tmp_path / "a" / "s", design=ONE_SEED)
    second = write_study(tmp_path / "b" / "s", design=ONE_SEED, seed=1)
    assert series_of(first, second) == {"EAGLE-3, a/s": [1, 2, 4, 8], "EAGLE-3, b/s": [1, 2, 4, 8]}


def test_a_label_has_no_word_for_what_is_not_known(study: Path, tmp_path: Path) -> None:
    pd.DataFrame({"supervised_tokens": [1e6, 2e6], "tau": [2.0, 2.2], "draft_steps": 3, "draft": "peer"}).to_csv(
        tmp_path / "tidy.csv", index=False
    )
    assert [*series_of(study, tmp_path / "tidy.csv")] == ["EAGLE-3, quickstart, smollm2-135m", "peer, tidy"]

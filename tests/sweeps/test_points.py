"""Points: product of the axes, less the excluded ones; names, decoding, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from eagle3_train import config
from eagle3_train.files import write_json
from sweeps.estimate import TimeLeft, describe
from sweeps.points import Study, literal, plan


@pytest.fixture(scope="module")
def default() -> Study:
    return plan([])


def settings(overrides: list[str]) -> list[dict[str, str]]:
    return [point.overrides for point in plan(overrides).points]


def test_points_are_the_product_of_the_axes(default: Study) -> None:
    study = default
    assert len(study.points) == 8
    assert [(p.cfg.data.scale, p.cfg.seed) for p in study.points] == [(x, s) for x in (1, 2, 4, 8) for s in (0, 1)]
    assert len({p.name for p in study.points}) == 8
    assert study.parts[0].largest.cfg.data.scale == 8


def test_a_point_has_the_name_and_the_folder_that_its_step_alone_would_give_it() -> None:
    point = plan(["draft.steps=5"]).points[3]
    alone = config.compose(["draft.steps=5", "data.scale=2", "seed=1"])
    assert point.name == alone.point_name
    assert point.dir == alone.point_dir


def test_overrides_of_an_axis_set_its_values() -> None:
    assert settings(["seed=3", "data.scale=1,2"]) == [
        {"data.scale": "1", "seed": "3"},
        {"data.scale": "2", "seed": "3"},
    ]


def test_several_values_of_another_key_add_an_axis() -> None:
    points = plan(["seed=0", "data.scale=1", "optim.lr=1e-3,2e-3"]).points
    assert [p.cfg.optim.lr for p in points] == [1e-3, 2e-3]


def test_a_config_group_can_be_an_axis_and_be_excluded() -> None:
    points = plan(["seed=0", "data.scale=1", "engine=single,ddp", "study.exclude=[{engine: single}]"]).points
    assert [(p.overrides["engine"], p.cfg.engine.kind) for p in points] == [("ddp", "ddp")]


def test_all_axes_can_be_given_at_once_in_place_of_the_files() -> None:
    assert settings(["study.axes={data.scale: [1, 2], optim.lr: 1e-3}"]) == [
        {"data.scale": "1", "optim.lr": "0.001"},
        {"data.scale": "2", "optim.lr": "0.001"},
    ]


def test_of_repeated_overrides_the_last_holds() -> None:
    assert settings(["data.scale=1", "seed=0,1", "seed=2"]) == [{"data.scale": "1", "seed": "2"}]
    assert settings(["data.scale=1", "seed=2", "seed=0,1"]) == [
        {"data.scale": "1", "seed": "0"},
        {"data.scale": "1", "seed": "1"},
    ]


def test_what_matches_no_point_is_said() -> None:
    text = describe(plan(["data.scale=1", "seed=0", "study.exclude=[{seed: 7}]"]))
    assert "study.decode_points: {data.scale:8,seed:0} matches no point (decoded: 1 of 1)" in text
    assert "study.exclude: {seed:7} matches no point" in text
    assert "no point is decoded" not in text
    assert "no point is decoded" in describe(plan(["data.scale=2", "seed=0"]))


def test_exclusions_need_all_their_values() -> None:
    points = plan(["study.exclude=[{data.scale: 8, seed: 1}, {data.scale: 1}]"]).points
    assert [(p.cfg.data.scale, p.cfg.seed) for p in points] == [(2, 0), (2, 1), (4, 0), (4, 1), (8, 0)]


def test_decode_points(default: Study) -> None:
    decoded = [(p.cfg.data.scale, p.cfg.seed) for p in default.points if p.cfg.eval.decode]
    assert decoded == [(1, 0), (8, 0)]
    assert all(p.cfg.eval.decode for p in plan(["study.decode_points=[]"]).points)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["study.exclude=[{seed: 0}, {seed: 1}]"], "leaves none"),
        (["study.exclude=[{data.scal: 1}]"], r"'data\.scal', which is no key"),
        (["train.log_every=1,2"], "define the same point"),
        (["engine=single,ddp"], "define the same point"),
        (["capture.layer_ids=[1,2,3],[2,3,4]"], r"the axis capture\.layer_ids would change that: make a study"),
        (["data.scale=1,999"], r"corpus\.sequences"),
        (["study.axes={seed: []}"], "axis seed has no values"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(overrides)


@pytest.mark.parametrize(
    "value",
    [
        1,
        -2.5,
        1e-5,
        True,
        None,
        "name",
        "a-b/c.d",
        "1",
        "1e3",
        "true",
        "Null",
        "",
        "it's",
        "a,b=c",
        "\\",
        "{x}",
        "a b",
        [],
        [1, "1", None],
        {"a": [1], "b": {"c": "x y"}},
    ],
    ids=repr,
)
def test_values_of_a_study_file_survive_as_overrides(value: object) -> None:
    (parsed,) = OverridesParser.create().parse_overrides([f"key={literal(value)}"])
    assert parsed.value() == value
    assert type(parsed.value()) in (type(value), QuotedString)


def test_the_plan_says_what_it_will_take() -> None:
    text = describe(plan(["train.regime=steps", "train.steps=50", "data.base_sequences=4"]))
    assert "8 points, 0 done" in text
    assert "(4 sequences, 50 steps, decoded too)" in text


def test_time_left_knows_what_grows_with_the_work_and_what_does_not(tmp_path: Path) -> None:
    time_left = TimeLeft()
    one, two, four, eight = plan([f"paths.outputs={tmp_path}"]).points[::2]
    time_left.add(one, 20.0)
    assert time_left.text([eight]) == ""  # it failed: it says nothing
    write_json(one.dir / "result.json", {"wall_seconds": {"train": 10.0, "replay": 1.0, "decode": 60.0}})
    time_left.add(one, 75.0)
    assert time_left.seconds([two, four]) == pytest.approx(5 + 20 + 5 + 40)
    assert time_left.seconds([eight]) == pytest.approx(5 + 80 + 60)  # decoded too
    assert "about 2m25s for the other 1" in time_left.text([eight])


@pytest.mark.parametrize(
    "axes",
    [
        {"data.base_tokens": "1000,2000", "draft.steps": "3,5", "optim.lr": "1e-3,2e-3"},
        {"draft": "eagle3,medusa", "target": "smollm2,qwen3_8b", "train.epochs": "1,2"},
        {"draft.eagle3.layers": "1,2", "draft.eagle3.hidden_size": "64,128", "draft.init_layer": "random"},
        {"train.regime": "steps", "train.steps": "10,20"},  # which the file alone, without the axis, would lack
    ],
    ids=" ".join,
)
def test_whatever_a_study_may_vary_is_an_axis(axes: dict[str, str]) -> None:
    points = plan(["study.axes={}", *(f"{key}={values}" for key, values in axes.items())]).points
    assert len({p.name for p in points}) == len(points) == 2 ** sum("," in values for values in axes.values())

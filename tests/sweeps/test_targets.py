"""The target as an axis: each target has its own corpus and store, made once; what fails for one stops no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eagle3_train import config
from eagle3_train.files import write_json
from launch.slurm import render
from sweeps import status
from sweeps.estimate import describe
from sweeps.points import plan
from sweeps.study import batches
from tests.sweeps.conftest import Bench
from tests.sweeps.test_cost import SMOLLM2

SMALL, LARGE = "{name: small, model: /m/small}", "{name: large, model: /m/large}"
TARGETS = f"study.axes={{target: [{SMALL}, {LARGE}], data.scale: [1, 2], seed: [0]}}"


def states(bench: Bench) -> dict[str, str]:
    return {job.name: job.state for job in status.collect(bench.study)}


def test_targets_have_their_own_data_and_points_share_those_of_their_target() -> None:
    study = plan([TARGETS, "corpus.sequences=96"])
    small, large = study.parts
    assert [p.cfg.target.name for p in study.points] == ["small", "small", "large", "large"]
    assert [p.name for p in small.points + large.points] == [p.name for p in study.points]
    for part, name in ((small, "small"), (large, "large")):
        home = study.dir / "targets" / name
        for cfg in (part.cfg, *(p.cfg for p in part.points)):
            assert cfg.target.model == f"/m/{name}"
            paths = (cfg.paths.corpus, cfg.paths.store, cfg.paths.target, cfg.paths.regenerated)
            assert paths == tuple(str(home / f) for f in ("corpus", "store", "target-model", "regenerated"))
            assert cfg.point_dir.parent == study.dir  # points lie side by side, for one report


def test_a_step_alone_finds_the_data_of_its_target_and_its_point(tmp_path: Path) -> None:
    axes = "study.axes={target: [smollm2, qwen3_8b], data.scale: [1, 2]}"
    point = plan([axes]).points[3]
    alone = config.compose([axes, "target=qwen3_8b", "data.scale=2"])
    assert (alone.point_dir, alone.paths) == (point.dir, point.cfg.paths)
    config.save(alone, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml").paths == alone.paths
    one = plan([axes, "target=qwen3_8b"])  # some of the study's targets are found where they are
    assert [p.cfg.paths for p in one.points] == [point.cfg.paths] * 2


def test_a_study_of_one_target_lies_where_it_lay() -> None:
    cfg = plan(["target=qwen3_8b"]).points[0].cfg
    assert cfg.paths.store == f"{cfg.paths.study}/store"
    assert cfg.data_name == ""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["target.model=/a,/b"], "the targets /a and /b would share paths.corpus=.*give each a target.name"),
        ([TARGETS, "paths.store=/data/store"], "would share paths.store=/data/store"),
        (["target.name=a/b,c"], "target.name: 'a/b' becomes the name of a folder"),
        ([TARGETS, "corpus.max_length=128,256"], r"the axis corpus\.max_length would change that: make a study"),
    ],
)
def test_what_cannot_be_kept_apart_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(overrides)


def test_a_target_whose_points_are_all_excluded_is_not_captured() -> None:
    study = plan([TARGETS, "study.exclude=[{target.name: large}]"])
    assert [part.cfg.target.name for part in study.parts] == ["small"]


def test_the_plan_tells_what_each_target_takes_and_all_together(tmp_path: Path) -> None:
    study = plan([TARGETS, f"paths.outputs={tmp_path}", "launch.tflops=1", "plan.capture_tflops=1"])
    for part in study.parts:
        report = {"parts": {"train": {"sequences": 256, "tokens": 97529, "supervised_tokens": 72876}}}
        write_json(Path(part.cfg.paths.corpus) / "report.json", report)
        wider = {"hidden_size": 1152} if part.cfg.target.name == "large" else {}
        write_json(Path(part.cfg.paths.target) / "config.json", SMOLLM2 | wider)
    text = describe(study)
    small, large = text.index("  small:"), text.index("  large:")
    assert "disk: 429 MiB of hidden states" in text[small:large]
    assert "disk: 857 MiB of hidden states" in text[large:]
    total = text.splitlines()[-1]
    assert total.startswith("  in total: 195,058 tokens, 1.26 GiB of hidden states, ")
    flops = [float(value) for value in re.findall(r"([\d.e+]+) FLOPs to train all points", text)]
    assert float(re.findall(r"([\d.e+]+) FLOPs to train", total)[0]) == pytest.approx(sum(flops), rel=0.05)
    assert total.endswith(" for that")  # hours
    # Of one whose size is not known, only the tokens.
    (Path(study.parts[1].cfg.paths.target) / "config.json").unlink()
    assert describe(study).splitlines()[-1] == "  in total: 195,058 tokens"


def test_each_target_is_captured_once(bench: Bench) -> None:
    out = bench.run("study", TARGETS)
    names = [point["name"] for point in json.loads((bench.study / "points.json").read_text())]
    assert [line.split()[0] for line in bench.calls()][:3] == ["prepare", "prepare", "capture"]
    assert bench.calls("prepare") == ["prepare"] * 2
    assert bench.calls("capture") == ["capture 0/1"] * 2
    assert bench.calls("trained") == [f"trained {name}" for name in names]
    assert bench.calls()[-1] == "report"
    assert "[2/4]" in out
    assert "[4/4]" in out
    shared = ("prepare-small", "capture-small", "prepare-large", "capture-large")
    assert states(bench) == dict.fromkeys((*shared, *names), "done")
    found = {job.name: job.settings for job in status.collect(bench.study)}
    assert found[names[2]]["target"] == "{name:large,model:'/m/large'}"
    bench.run("study", TARGETS)
    assert len(bench.calls("prepare")) == len(bench.calls("capture")) == 2


def test_a_target_whose_data_cannot_be_made_stops_no_other(bench: Bench) -> None:
    home = bench.study / "targets" / "small"
    home.mkdir(parents=True)
    (home / "corpus").write_text("in the way")
    out = bench.run("study", TARGETS, code=1)
    assert "prepare-small: failed: exit code 2" in out
    names = [point["name"] for point in json.loads((bench.study / "points.json").read_text())]
    assert bench.calls("trained") == [f"trained {name}" for name in names[2:]]
    assert out.splitlines()[-3] == f"summary of {', '.join(names[2:])}"  # the report of what is there
    assert states(bench)["prepare-small"] == "failed"
    assert [states(bench)[name] for name in names] == ["queued", "queued", "done", "done"]
    (home / "corpus").unlink()
    bench.run("study", TARGETS)
    assert set(states(bench).values()) == {"done"}
    assert len(bench.calls("trained")) == 4


def test_missing_data_are_told_by_target(bench: Bench) -> None:
    bench.run("study", TARGETS)
    (bench.study / "targets" / "large" / "store" / "manifest.json").unlink()
    out = bench.run("study", TARGETS, "data.base_sequences=200", "corpus.sequences=400", code=2)
    assert f"2x needs 400 sequences, the store {bench.study}/targets/small/store holds 256." in out


def test_a_multirun_over_targets_is_the_study(bench: Bench) -> None:
    axes = ("target=smollm2,qwen3_8b", "data.scale=1", "seed=0")
    bench.run("-m", *axes, module="sweeps.data_scale")
    assert sorted(p.name for p in (bench.study / "targets").iterdir()) == ["qwen3-8b", "smollm2-135m"]
    assert len(bench.calls("trained")) == len(bench.calls("capture")) == 2
    assert "2 points, 2 done" in bench.run("study", *axes, "study.decode_points=[{data.scale: 2}]")


def test_on_a_cluster_points_wait_for_the_data_of_their_own_target(tmp_path: Path) -> None:
    slurm = (f"paths.outputs={tmp_path}", "launch=slurm", "launch.slurm.points_at_once=5")
    planned = plan([TARGETS, *slurm])
    found = {batch.name: batch for batch in batches(planned.cfg, [(part, part.points) for part in planned.parts])}
    assert {name: dict(batch.after) for name, batch in found.items()} == {
        "prepare-small": {},
        "capture-small": {"prepare-small": "afterok"},
        "points-small": {"prepare-small": "afterok", "capture-small": "afterok"},
        "prepare-large": {},
        "capture-large": {"prepare-large": "afterok"},
        "points-large": {"prepare-large": "afterok", "capture-large": "afterok"},
        "report": {"points-small": "afterany", "points-large": "afterany"},  # of those that can be measured
    }
    assert "#SBATCH --array=0-1%2" in render(found["points-small"])  # the five are shared out
    assert f"{tmp_path}/quickstart/steps/capture-large/config.yaml" in render(found["capture-large"])
    alone = plan([*slurm, "data.scale=1", "seed=0"])
    *_, report = batches(alone.cfg, [(part, part.points) for part in alone.parts])
    assert report.after == {"points": "afterany", "prepare": "afterok", "capture": "afterok"}


def test_each_target_rolls_in_its_own_sessions(bench: Bench) -> None:
    bench.run("study", TARGETS, "store.mode=rolling", "store.cap_gib=1", "data.window=8")
    assert len(bench.calls("trained")) == len(bench.calls("rolled")) == 4
    sessions = {path.stem: list(json.loads(path.read_text())) for path in (bench.study / "rolling").glob("all-*.json")}
    names = [point["name"] for point in json.loads((bench.study / "points.json").read_text())]
    assert sessions == {"all-small": names[:2], "all-large": names[2:]}

"""A study with a rolling store, as its user runs it: real rooms on a tiny target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_train.config import CoupledConfig, compose, save
from eagle3_train.files import write_json
from launch.command import environment
from launch.coupled import Coupled, _version, advice, balanced, make_session, waiting
from launch.slurm import render
from sweeps.cost import Data, captured_tokens
from sweeps.estimate import describe
from sweeps.points import plan
from sweeps.status import collect
from sweeps.study import coupled_batches
from tests.capture.test_capture import write_chats
from tests.sweeps.conftest import Bench

ROOT = Path(__file__).parents[2]
STUDY = (
    "target.name=tiny", "corpus.sequences=32", "corpus.validation_sequences=4", "corpus.held_out_fraction=0.3",
    "corpus.min_supervised=4", "corpus.near_duplicates=null", "corpus.max_length=128", "capture.shards=16",
    "capture.batch_tokens=1024", "eval.tasks=[{name: held, source: held_out, prompts: 4, new_tokens: 8}]",
    "eval.decode=false", "eval.decode_tasks=[]", "eval.bootstrap=20", "store.dtype=fp32", "store.row_group_mib=1",
    "data.base_sequences=16", "data.window=6", "data.scale=1,2", "seed=0", "draft.steps=2", "draft.vocab_size=100",
    "train.batch_tokens=160", "train.epochs=2", "store.mode=rolling", "launch.rolling.points_at_once=2",
    "launch.rolling.capture_threads=1", "launch.rolling.train_threads=2",
)  # fmt: skip


def study(folder: Path, target: Path, *overrides: str, code: int = 0) -> str:
    where = (f"paths.outputs={folder}/outputs", f"target.model={target}", f"corpus.path={folder}/chats.json")
    done = subprocess.run(
        [sys.executable, "-m", "eagle3_train.cli", "study", *STUDY, *where, *overrides],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_points_share_the_passes_of_workers_that_run_beside_them(tmp_path: Path, tiny_target: Path) -> None:
    write_chats(tmp_path / "chats.json", 100)
    refused = study(tmp_path, tiny_target, "store.cap_gib=0.0001", code=2)
    folder = tmp_path / "outputs" / "quickstart"
    assert "store.cap_gib=0.0001 is too small for eagle3-x1-s0" in refused
    assert not (folder / "store").exists()
    out = study(tmp_path, tiny_target, "store.cap_gib=0.0008")
    assert "group 1 of 1: eagle3-x1-s0" in out
    assert " share their passes: " in out
    assert out.count("started again") == 0
    assert "rolling: capture waited" in out
    assert "threads" in out.partition("rolling: ")[2] or "both wait" in out  # by how fast this machine is
    results = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    assert sorted(r["data_scale"] for r in results) == [1, 2]
    assert all(r["tau_replay"]["held"]["tau"] >= 1 for r in results)
    lines = [json.loads(line) for line in (folder / "capture.jsonl").read_text().splitlines()]
    captured = sum(line["store"] == "train" for line in lines)
    assert 16 < captured <= 32  # at most one pass an epoch, for both; each alone: 16 and 32
    assert not list((folder / "store").glob("shard-*"))


ROLLS = ("study", "data.scale=1,2", "seed=0", "store.mode=rolling", "store.cap_gib=1", "data.window=8")


def test_both_sides_run_at_once_and_one_that_is_killed_is_started_again(bench: Bench) -> None:
    out = bench.run(
        *ROLLS, "launch.rolling.points_at_once=2", "launch.rolling.workers=2", FAKE_SECONDS="2",
        FAKE_ROLL_DIES=str(bench.folder / "died"),
    )  # fmt: skip
    assert sorted(bench.calls("roll")) == ["roll 0/2", "roll 0/2", "roll 1/2"]
    assert "roll-0-" in out
    assert "killed by SIGKILL (out of memory?); started again" in out
    order = [line.split()[0] for line in bench.calls()]
    assert order[:2] == ["prepare", "capture"]
    assert max(order.index("train"), order.index("roll")) < order.index("trained")
    assert (order.count("rolled"), order[-1]) == (2, "report")


def test_a_point_that_fails_is_expected_no_more_and_stops_nobody(bench: Bench) -> None:
    out = bench.run(*ROLLS, "launch.rolling.points_at_once=2", code=1, FAKE_FAIL="x2-s0")
    assert len(bench.calls("trained")) == 1
    assert len(bench.calls("rolled")) == 1
    assert "the loss is not finite" in out
    assert not list((bench.study / "rolling").glob("0-*"))


def test_points_whose_workers_have_failed_for_good_do_not_wait_for_them(bench: Bench) -> None:
    out = bench.run(*ROLLS, "launch.rolling.points_at_once=2", code=1, FAKE_SECONDS="100", FAKE_ROLL_FAIL="1")
    assert "error: the store is being captured" in out
    assert out.count(": without capture") >= 2
    assert bench.calls("trained") == []


def test_groups_follow_each_other(bench: Bench) -> None:
    bench.run(*ROLLS)
    rooms = [line.split()[0] for line in bench.calls()]
    assert sorted(rooms[2:6]) == sorted(rooms[6:10]) == ["roll", "rolled", "train", "trained"]


def test_on_a_cluster_two_coupled_jobs_start_beside_each_other(tmp_path: Path) -> None:
    planned = plan([*STUDY, "store.cap_gib=1", "launch=slurm", "launch.rolling.workers=3", f"paths.outputs={tmp_path}"])
    workers, points = coupled_batches(planned.parts[0], planned.points, {"capture": "afterok"})
    assert (workers.name, points.name) == ("roll-0", "points-0")
    assert workers.after == points.after == {"capture": "afterok"}
    assert "--array=0-2%3" in render(workers)
    assert "--part 2/3" in render(workers)
    assert "--array=0-1%2" in render(points)
    assert {job.cfg.launch.rolling.session for job in (*workers.jobs, *points.jobs)} == {
        workers.jobs[0].cfg.launch.rolling.session
    }
    one_by_one = [*STUDY, "store.cap_gib=1", "launch=slurm", "launch.rolling.points_at_once=1"]
    planned = plan([*one_by_one, f"paths.outputs={tmp_path}"])
    *_, second = coupled_batches(planned.parts[0], planned.points, {"capture": "afterok"})
    assert second.after == {"capture": "afterok", "roll-0": "afterany", "points-0": "afterany"}


@pytest.mark.parametrize(
    ("waited", "words"),
    [
        ((0.5, 0.0), "of 8 threads, 2 for capture and 6 for training"),
        ((0.0, 0.5), "of 8 threads, 4 for capture and 4 for training"),
        ((0.1, 0.1), "the split of 3 to 5 threads is balanced"),
        ((0.0, 0.15), "no split of 8 threads is nearer to balance than 3 to 5"),
    ],
)
def test_the_split_that_would_balance(waited: tuple[float, float], words: str) -> None:
    assert words in balanced(3, 5, *waited, "threads")


def test_where_both_sides_wait_the_cause_is_named_and_no_split(tmp_path: Path) -> None:
    split = CoupledConfig(capture_threads=1, train_threads=1)
    for kind in ("local", "slurm"):
        words = advice(kind, [split], [split], 0.49, 0.83)
        assert "store.cap_gib" in words
        assert "data.window" in words
        assert "balance" not in words
    assert advice("local", [split], [split], 0.1, 0.1).endswith("the split of 1 to 1 threads is balanced")
    assert advice("local", [CoupledConfig()], [CoupledConfig()], 0.5, 0.1) == ""  # nothing is split


def trained(folder: Path, session: str, train: float, data: float) -> None:
    cfg = compose([f"paths.outputs={folder.parent.parent}", *ROLLS[3:], f"launch.rolling.session={session}"])
    save(cfg, folder / "config.yaml")
    write_json(folder / "train.json", {"wall_seconds": {"train": train, "data": data}})


def test_how_the_sides_of_the_last_group_waited_is_seen_from_files_alone(tmp_path: Path) -> None:
    cfg = compose([f"paths.outputs={tmp_path}", "launch=slurm", "launch.rolling.workers=4", *ROLLS[3:]])
    folder = Path(cfg.paths.study)
    assert waiting(cfg) == ""
    trained(folder / "x1", "1", 30.0, 10.0)
    assert waiting(cfg) == ""
    trained(folder / "x2", "1", 50.0, 10.0)
    trained(folder / "x0", "0", 1.0, 99.0)  # of the group before, with what its worker said
    lines = [{"session": "0", "worker": 0, "shards": 9, "busy_s": 99.0, "waited_s": 0.0}]
    lines += [{"session": "1", "worker": n, "shards": 9, "busy_s": 10.0, "waited_s": 30.0} for n in (1, 0, 2, 3)]
    (folder / "rolling.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert waiting(cfg) == (
        "rolling, the last group that has ended: capture waited 75 % of its time, training 20 %; "
        "launch.rolling.workers=1 in place of 4 would balance"
    )
    cfg.launch.rolling.workers = 2
    (folder / "rolling.jsonl").write_text(json.dumps(lines[1] | {"waited_s": 3.0}) + "\n")
    assert waiting(cfg).endswith("training 20 %; launch.rolling.workers=2 is balanced")


def test_of_a_group_that_runs_the_figures_so_far_are_those_of_its_signs_and_logs(tmp_path: Path) -> None:
    cfg = compose([f"paths.outputs={tmp_path}", "launch.rolling.workers=2", *ROLLS[3:]])
    folder = Path(cfg.paths.study)
    sign = {"beat": 3, "owner": "1-ab", "ended": False, "busy_s": 30.0, "waited_s": 10.0}
    for number in (0, 1):
        write_json(Path(cfg.paths.store) / "workers" / f"{number}.json", sign)
    write_json(folder / "rolling" / "1-ab.json", {"x1": {}})
    assert waiting(cfg) == ""  # the point has logged nothing
    write_json(folder / "x1" / "status.json", {"started": 100.0})
    rows = [
        {"time": 50.0, "tokens": 1000, "tokens_per_s": 1.0, "data_wait": 1.0},  # of an attempt before
        {"time": 150.0, "tokens": 2000, "tokens_per_s": 10.0, "data_wait": 0.2},
        {"time": 160.0, "val_loss": 1.0},
        {"time": 170.0, "tokens": 2100, "tokens_per_s": 10.0, "data_wait": 0.0},
    ]
    (folder / "x1" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    # Training: 100 s at 20 % and 10 s at 0 %.
    assert waiting(cfg) == "rolling, the group that runs, so far: capture waited 25 % of its time, training 18 %"
    for number in (0, 1):
        write_json(Path(cfg.paths.store) / "workers" / f"{number}.json", sign | {"ended": True})
    assert waiting(cfg) == ""


def test_a_session_that_was_made_up_for_by_a_later_one_is_neither_shown_nor_counted(tmp_path: Path) -> None:
    cfg = compose([f"paths.outputs={tmp_path}", *ROLLS[3:]])
    folder = Path(cfg.paths.study)
    save(cfg, folder / "study.yaml")
    killed = {"state": "running", "attempt": 1, "started": 1.0, "host": "here"}
    for session in ("0-a", "0-b"):
        workers, points = make_session(cfg, [cfg], 0)
        for job in (*workers, *points):
            job.cfg.launch.rolling.session = session
            save(job.cfg, job.folder / "config.yaml")
            write_json(job.folder / "status.json", killed)
    assert [s.name for s in collect(folder) if s.name.startswith("roll")] == ["roll-0-b-0-of-1"]
    write_json(points[0].folder / "config.yaml", {"damaged": True})
    assert [s.state for s in collect(folder) if s.name == points[0].name] == ["damaged"]


def test_a_point_that_was_trained_before_the_session_is_not_counted_whatever_the_clocks_say(tmp_path: Path) -> None:
    cfg = compose([f"paths.outputs={tmp_path}", *ROLLS[3:]])
    workers, points = make_session(cfg, [cfg], 0)
    coupled = Coupled(workers, points)
    path = points[0].folder / "train.json"
    write_json(path, {"wall_seconds": {"train": 30.0, "data": 10.0}})
    os.utime(path, (2e9, 2e9))  # of a server whose clock is ahead
    line = {"session": points[0].cfg.launch.rolling.session, "worker": 0, "busy_s": 1.0, "waited_s": 1.0}
    (Path(cfg.paths.study) / "rolling.jsonl").write_text(json.dumps(line) + "\n")
    before = {points[0].name: _version(path)}
    assert "no point was trained" in coupled._balance(before)
    write_json(path, {"wall_seconds": {"train": 30.0, "data": 10.0}})
    os.utime(path, (1e9, 1e9))
    assert "training 25 %" in coupled._balance(before)


@pytest.mark.parametrize(
    ("gpus", "visible"),
    [("[0,1,2]", ["0", "1,2"]), ("[5]", ["5", "5"]), ("[]", [None, None])],
    ids=["more than processes", "fewer", "all see all"],
)
def test_each_process_sees_the_gpus_and_threads_of_its_side(tmp_path: Path, gpus: str, visible: list[str]) -> None:
    split = [f"launch.rolling.{side}_gpus={gpus}" for side in ("capture", "train")]
    split += ["launch.rolling.workers=2", "launch.rolling.capture_threads=6", "launch.rolling.train_threads=3"]
    cfg = compose([f"paths.outputs={tmp_path}", *ROLLS[3:], *split])
    workers, points = make_session(cfg, [cfg, compose([f"paths.outputs={tmp_path}", *ROLLS[3:], *split, "seed=1"])], 0)
    for jobs, threads in ((workers, "3"), (points, "1")):
        environments = [environment(job) for job in jobs]
        assert [e.get("CUDA_VISIBLE_DEVICES") for e in environments] == visible
        assert [e["OMP_NUM_THREADS"] for e in environments] == [threads, threads]
    assert [(e["RANK"], e["WORLD_SIZE"]) for e in map(environment, workers)] == [("0", "2"), ("1", "2")]


def test_the_plan_tells_what_either_way_to_feed_later_epochs_costs(tmp_path: Path) -> None:
    four = ["data.scale=1,2,4,8", "seed=0", "store.mode=rolling", "store.cap_gib=1", "train.epochs=2"]
    data = Data(96, 9600.0, 5000.0, exact=True)
    captured = {}
    for at_once in (4, 2, 1):
        points = plan([*four, f"launch.rolling.points_at_once={at_once}", f"paths.outputs={tmp_path}"]).points
        for choice in ("recapture", "fp8"):
            captured[choice, at_once] = captured_tokens([point.cfg for point in points], data, choice)
    assert captured == {
        ("recapture", 4): 2 * 9600, ("recapture", 2): 2 * (2400 + 9600), ("recapture", 1): 2 * 18000,
        ("fp8", 4): 9600, ("fp8", 2): 2400 + 9600, ("fp8", 1): 18000,
    }  # fmt: skip
    planned = plan([*four, "store.later_epochs=fp8", "launch.rolling.points_at_once=4", f"paths.outputs={tmp_path}"])
    text = describe(planned)
    assert "rolling: at most 1 GiB of the hidden states at a time" in text
    assert "store.later_epochs=fp8 (chosen): " in text
    assert "store.later_epochs=recapture: " in text
    assert "up to 4 points share their passes" in text
    assert "will be refused" not in text


@pytest.mark.parametrize(("cap_gib", "is_warned"), [(0.0087, True), (0.0089, False)])
def test_a_cap_below_two_windows_is_said_before_anything_is_prepared(
    tmp_path: Path, cap_gib: float, is_warned: bool
) -> None:
    """Two windows of 8 sequences of 128 tokens of 4 x 576 x 2 bytes: 9.0 MiB, or 0.00879 GiB."""
    sizes = "hidden_size: 576, intermediate_size: 1536, num_hidden_layers: 30, vocab_size: 49152"
    shape = f"target.shape={{{sizes}, num_attention_heads: 9}}"
    rolls = ["data.scale=2", "seed=0", "store.mode=rolling", f"store.cap_gib={cap_gib}", "data.window=8"]
    lengths = ["corpus.max_length=128", "plan.tokens_per_sequence=364", f"paths.outputs={tmp_path}"]
    text = describe(plan([*rolls, *lengths, shape]))
    assert (f"store.cap_gib={cap_gib:g} will be refused" in text) == is_warned
    assert "each point has passes of its own" in text
    assert "(assumed: all of corpus.max_length=128 tokens, below plan.tokens_per_sequence=364)" in text

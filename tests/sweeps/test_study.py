"""The study as its user runs it: killed, failing, twice at once. The rooms that do the work are stand-ins that note
their calls; the command line, the launcher and the study are the real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from eagle3_train import config
from eagle3_train.config import digest
from eagle3_train.files import write_json
from launch.supervise import GRACE_S
from sweeps import commands, status
from sweeps.points import Point
from sweeps.study import adopt
from tests.sweeps.conftest import Bench, wait_until

TWO = ("study", "data.scale=1,2", "seed=0")
NAMES = [config.compose([f"data.scale={scale}", "seed=0"]).point_name for scale in (1, 2)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def states(bench: Bench) -> dict[str, status.JobStatus]:
    return {job.name: job for job in status.collect(bench.study)}


def steps(bench: Bench, name: str) -> list[int]:
    path = bench.study / name / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_study_does_everything_once(bench: Bench) -> None:
    out = bench.run(*TWO)
    trained = [line for name in NAMES for line in (f"train {name}", f"trained {name}")]
    assert bench.calls() == ["prepare", "capture 0/1", *trained, "report"]
    for number, name in enumerate(NAMES, 1):
        assert f"[{number}/2] {name}: done in" in out
        assert config.load(bench.study / name / "config.yaml").point_name == name
    assert f"{NAMES[0]} | step 10 of 10" in out  # the children's progress is seen
    assert out.splitlines()[-3:] == [f"summary of {', '.join(NAMES)}", "", f"Report: {bench.study}/report/report.html"]
    assert config.load(bench.study / "study.yaml").study.axes == {"data.scale": [1, 2], "seed": [0]}

    out = bench.run(*TWO, "train.log_every=3", "tracker.project=other")  # what does not define a result
    assert "2 points, 2 done" in out
    assert bench.calls() == ["prepare", "capture 0/1", *trained, "report", "report"]


def test_a_point_that_another_study_has_done_is_shared(bench: Bench) -> None:
    bench.run("study", "data.scale=1", "seed=0")
    other = ("study", "data.scale=1,2", "seed=0", "study.name=other")
    out = bench.run(*other)
    assert f"{NAMES[0]}: done by study 'quickstart', shared" in out
    assert bench.calls("train") == [f"train {name}" for name in NAMES]
    assert out.splitlines()[-3] == f"summary of {', '.join(NAMES)}"  # its report has both
    shutil.rmtree(bench.study)
    bench.run(*other)
    assert bench.calls("train") == [f"train {name}" for name in (*NAMES, NAMES[0])]


def test_two_processes_may_share_a_point_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config.compose([f"paths.outputs={tmp_path}", "eval.decode=false"])
    transcripts = {task.name: "t" for task in cfg.eval.tasks}
    identities = {"train_identity": digest(cfg.point_identity), "eval_identity": digest(cfg.eval_identity)}
    write_json(tmp_path / "other" / cfg.point_name / "result.json", identities | {"transcripts": transcripts})
    cfg.point_dir.parent.mkdir(parents=True)
    link = Path.symlink_to

    def second(self: Path, target: str) -> None:
        link(self, target)  # the other process was a moment quicker
        link(self, target)

    monkeypatch.setattr(Path, "symlink_to", second)
    assert adopt(Point(cfg.point_name, cfg, {}))
    assert (cfg.point_dir / "result.json").is_file()


def test_changed_data_under_the_same_path_are_trained_on_anew(bench: Bench) -> None:
    source = bench.folder / "chats.json"
    source.write_text("[]")
    mine = (*TWO, f"corpus.path={source}")
    bench.run(*mine)
    source.write_text("[{}]")
    out = bench.run(*mine)
    assert "settings or input of prepare and capture have changed" in out
    assert len(bench.calls("prepare")) == len(bench.calls("capture")) == 2
    assert bench.calls("train") == [f"train {name}" for name in (*NAMES, *NAMES)]
    for name in NAMES:
        assert steps(bench, name) == list(range(1, 11))  # from the start
        (kept,) = (bench.study / name).glob("of-another-store-*")
        assert (kept / "result.json").is_file()
    shutil.rmtree(bench.study / "store")  # a finished study needs it no more
    assert "2 points, 2 done" in bench.run(*mine)
    assert len(bench.calls("prepare")) == len(bench.calls("capture")) == 2


def test_killed_in_the_middle_and_run_again(bench: Bench) -> None:
    process = bench.start(*TWO, FAKE_SECONDS="2")
    wait_until(lambda: len(steps(bench, NAMES[0])) >= 2)
    os.kill(bench.pids()[-1], signal.SIGKILL)  # one point dies; the study goes on with the next
    wait_until(lambda: len(steps(bench, NAMES[1])) >= 2)
    orphan = bench.pids()[-1]
    process.kill()
    process.wait()
    wait_until(lambda: not alive(orphan), 10)
    assert [states(bench)[name].state for name in NAMES] == ["failed", "stopped"]
    assert str(states(bench)[NAMES[0]].reason).startswith("killed by SIGKILL (out of memory?): step ")
    assert all(0 < len(steps(bench, name)) < 10 for name in NAMES)

    bench.run(*TWO)
    assert bench.calls("trained") == [f"trained {name}" for name in NAMES]
    assert len(bench.calls("prepare")) == len(bench.calls("capture")) == 1
    for name in NAMES:
        assert steps(bench, name) == list(range(1, 11))  # each continued where it was


def test_ctrl_c_ends_the_children_and_says_how_to_go_on(bench: Bench) -> None:
    process = bench.start(*TWO, FAKE_SECONDS="600")
    wait_until(lambda: len(bench.calls("train")) == 1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert time.monotonic() - started < GRACE_S  # at once: the signal was enough
    assert process.returncode == 130
    assert "the same command continues" in out.splitlines()[-1]
    assert not alive(bench.pids()[-1])
    assert len(bench.calls("train")) == 1


def test_sigterm_says_how_to_go_on(bench: Bench) -> None:
    process = bench.start(*TWO, FAKE_SECONDS="600")
    wait_until(lambda: len(bench.calls("train")) == 1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "stopped by SIGTERM; the same command continues" in out.splitlines()[-1]
    assert not alive(bench.pids()[-1])
    # A damaged file hides no other job.
    (bench.study / NAMES[0] / "config.yaml").write_text("a: [1")
    seen = states(bench)
    assert [seen[name].state for name in ("prepare", *NAMES)] == ["done", "damaged", "queued"]
    assert f"{NAMES[0]}/config.yaml is damaged" in str(seen[NAMES[0]].reason)
    (bench.study / NAMES[0] / "status.json").write_text("[1]")
    assert "does not hold what it should" in str(states(bench)[NAMES[0]].reason)
    moved = bench.study.parent / "moved"
    bench.study.rename(moved)
    assert {s.name: s.state for s in status.collect(moved)}["prepare"] == "done"


def test_a_failing_point_stops_no_other_and_is_shown_with_its_log(bench: Bench) -> None:
    out = bench.run(*TWO, code=1, FAKE_FAIL="x1-")
    assert bench.calls("trained") == [f"trained {NAMES[1]}"]
    assert bench.calls()[-1] == "report"  # of the points that are there
    assert f"{NAMES[0]}: failed: exit code 1" in out
    assert "    RuntimeError: the loss is not finite" in out.splitlines()
    assert [states(bench)[name].state for name in NAMES] == ["failed", "done"]
    assert "the loss is not finite" in str(states(bench)[NAMES[0]].reason)
    bench.run(*TWO)
    assert bench.calls("trained") == [f"trained {name}" for name in reversed(NAMES)]


def test_a_failing_shared_step_stops_the_study(bench: Bench) -> None:
    bench.study.mkdir(parents=True)
    (bench.study / "corpus").write_text("in the way")
    out = bench.run(*TWO, code=1)
    assert "failed: prepare: failed: exit code 2" in out
    assert bench.calls() == ["prepare"]


def test_two_studies_at_once_share_the_work(bench: Bench) -> None:
    studies = [bench.start(*TWO, FAKE_SECONDS="2") for _ in range(2)]
    outs = [process.communicate(timeout=300)[0] for process in studies]
    assert [process.returncode for process in studies] == [0, 0], outs
    assert sorted(bench.calls("train")) == [f"train {name}" for name in NAMES]  # none twice
    assert len(bench.calls("prepare")) == len(bench.calls("capture")) == 1
    assert all("Report: " in out.splitlines()[-1] for out in outs)  # both ended with the whole study


def test_a_study_larger_than_its_store_says_what_is_to_be_captured(bench: Bench) -> None:
    bench.run(*TWO)
    for more, needs in (
        (("corpus.sequences=null", "data.base_sequences=200"), "2x needs 400 sequences"),
        (("corpus.sequences=1000", "data.base_sequences=200"), "2x needs 400 sequences"),
        (("data.base_tokens=781",), "2x needs 1,562 tokens"),
    ):
        out = bench.run(*TWO, *more, code=2)
        assert f"error: study 'quickstart': {needs}, the store {bench.study}/store holds 256. A store does not" in out
        assert "all 400 sequences (about 1,562 tokens, 6.9 MiB) are to be captured anew, and all points" in out
        assert "take corpus.sequences=400 and another study.name (or paths.store)" in out
        assert f"{needs}, the store" in bench.run(*TWO, *more, "dry_run=true")
    assert len(bench.calls("prepare")) == 1


def test_a_finished_study_with_more_sequences_is_planned_as_what_it_is(bench: Bench) -> None:
    """Another study: its points are new, and all of its store is captured."""
    bench.run(*TWO)
    cfg = config.load(bench.study / NAMES[0] / "config.yaml")
    write_json(bench.study / "store" / "origin.json", cfg.data_identity)
    report = bench.study / "corpus" / "report.json"
    write_json(report, json.loads(report.read_text()) | {"identity": {"corpus.sequences": 96}})
    assert "captured already, all points are done" in bench.run(*TWO, "dry_run=true")
    more = (*TWO, "corpus.sequences=512")
    for words, code in (("dry_run=true",), 0), ((), 2):
        out = bench.run(*more, *words, code=code)
        assert f"the store {bench.study}/store was captured with corpus.sequences=96, now 512. A store does not" in out
        assert "all 512 sequences (about 2,000 tokens, 8.8 MiB) are to be captured anew, and all points" in out
        assert "restore that, or go on with another study.name (or paths.store)" in out
    out = bench.run(*more, "dry_run=true")
    assert "2 points, 0 done" in out
    assert "512 sequences, about 2,000 tokens, about 1,000 of them supervised (assumed: as long as the 256 that" in out
    assert len(bench.calls("prepare")) == 1
    assert "2 points, 2 done" in bench.run(*TWO)  # what is finished stays so


def test_a_study_that_grows_is_planned_by_what_is_left(bench: Bench) -> None:
    bench.run(*TWO)
    left = bench.run("study", "data.scale=1,2", "seed=1", "dry_run=true")
    both = bench.run("study", "data.scale=1,2", "seed=0,1", "dry_run=true")
    assert "4 points, 2 done" in both
    (work,) = re.findall(r"captured already, (\S+) FLOPs to train all points", left)
    assert f"captured already, {work} FLOPs to train the 2 points that are left, " in both


def test_a_watched_study_is_looked_at_until_nothing_is_left_to_do(bench: Bench) -> None:
    process = bench.start(*TWO, FAKE_SECONDS="4")
    wait_until(lambda: len(steps(bench, NAMES[0])) >= 1)
    out = bench.run("study", "status", "--watch")
    assert "4 done" in out.splitlines()[-1]
    assert process.wait() == 0


def test_a_dry_run_does_nothing(bench: Bench) -> None:
    out = bench.run(*TWO, "dry_run=true", "corpus.sequences=256", "launch.tflops=0.1")
    assert "2 points, 0 done" in out
    assert all(name in out for name in ("eagle3-x1-s0-", "eagle3-x2-s0-"))
    assert "256 sequences, about 93,184 tokens, about 72,684 of them supervised" in out
    assert "disk: about 410 MiB" in out  # of 4 x 576 bf16 a token
    assert re.search(r"about \S+ FLOPs to capture, about \S+ FLOPs to train all points, \S+ at launch.tflops=0.1", out)
    assert list(bench.folder.iterdir()) == []


def test_status_follows_a_running_point(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    process = bench.start(*TWO, FAKE_SECONDS="30")
    wait_until(lambda: len(steps(bench, NAMES[0])) >= 3)
    seen = states(bench)
    assert list(seen) == ["prepare", "capture", *NAMES]
    running = seen[NAMES[0]]
    assert (running.state, running.steps, running.tokens_per_s) == ("running", 10, 100.0)
    assert running.step
    assert running.seconds_left == pytest.approx((10 - running.step) * 3.0, rel=0.5)
    assert seen[NAMES[1]].state == "queued"
    status.show(bench.study)
    assert "2 done, 1 running, 1 queued" in capsys.readouterr().out
    assert json.loads(status.as_json(bench.study))[NAMES[0]]["state"] == "running"
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert states(bench)[NAMES[0]].state == "stopped"
    commands.logs(bench.study, NAMES[0][:12])  # the beginning of a name will do
    assert "step 2 of 10" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"more than one.*{NAMES[1]}"):
        commands.logs(bench.study, "eagle3")

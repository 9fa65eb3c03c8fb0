"""`eagle3 study retry | cancel | logs` on studies that failed or were stopped."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from eagle3_train.files import write_json
from sweeps import status
from tests.sweeps.conftest import Bench, wait_until
from tests.sweeps.test_study import NAMES, TWO, alive, states, steps

OPTIONS = TWO[1:]  # a user repeats the words that started the study


def test_retry_runs_what_failed_and_writes_the_report_anew(bench: Bench) -> None:
    bench.run(*TWO, code=1, FAKE_FAIL="x1-")
    out = bench.run("study", "retry", *OPTIONS, code=1, FAKE_FAIL="x1-")
    assert f"{NAMES[0]}: failed: exit code 1" in out
    assert "    RuntimeError: the loss is not finite" in out
    assert "no point is done by this" in out
    assert len(bench.calls("report")) == 1
    out = bench.run("study", "retry", *OPTIONS)
    assert f"{NAMES[0]}: done in" in out
    assert bench.calls("trained") == [f"trained {name}" for name in reversed(NAMES)]
    assert len(bench.calls("report")) == 2
    assert states(bench)[NAMES[0]].attempt == 3
    assert "no job of this study has failed" in bench.run("study", "retry", *OPTIONS)
    assert "2 points, 2 done" in bench.run(*TWO)


def test_a_shared_step_that_is_named_looks_again_at_what_it_made(bench: Bench) -> None:
    bench.run(*TWO)
    out = bench.run("study", "retry", "capture")
    assert len(bench.calls("capture")) == 2
    assert "`eagle3 study` goes on" in out
    assert states(bench)["capture"].state == "done"
    bench.run("study", "retry", NAMES[1])  # there is nothing of a done point to do again
    assert len(bench.calls("train")) == 2


def test_a_part_of_a_step_is_run_again_as_that_part(bench: Bench) -> None:
    bench.run(*TWO)
    whole = bench.study / "steps" / "capture"
    for number, state in ((0, "failed"), (1, "done")):
        part = shutil.copytree(whole, whole.with_name(f"capture-{number}-of-2"))
        last = json.loads((part / "status.json").read_text())
        write_json(part / "status.json", last | {"state": state, "reason": "exit code 1" if state == "failed" else ""})
    assert states(bench)["capture-0-of-2"].state == "done"  # the whole is
    (whole / "done.json").unlink()
    seen = states(bench)
    assert [seen[name].state for name in ("capture-0-of-2", "capture-1-of-2")] == ["failed", "done"]
    bench.run("study", "retry")
    assert bench.calls("capture") == ["capture 0/1", "capture 0/2"]
    assert states(bench)["capture-0-of-2"].state == "done"


def test_what_cannot_be_run_again_is_said(bench: Bench) -> None:
    process = bench.start(*TWO, FAKE_SECONDS="100")
    wait_until(lambda: len(steps(bench, NAMES[0])) >= 1)
    assert f"{NAMES[0]}: another process works on it" in bench.run("study", "retry", NAMES[0])
    out = bench.run("study", "retry", NAMES[1], code=2)
    assert f"{NAMES[1]} has not been started yet: `eagle3 study` runs it" in out
    bench.run("study", "cancel")
    process.wait(timeout=60)


def test_cancel_ends_a_study_and_the_same_command_goes_on(bench: Bench) -> None:
    process = bench.start(*TWO, FAKE_SECONDS="60")
    wait_until(lambda: len(steps(bench, NAMES[0])) >= 1)
    pid = bench.pids()[-1]
    assert f"told to stop: {NAMES[0]}" in bench.run("study", "cancel", *OPTIONS)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out.splitlines()[-1] == "failed: cancelled by `eagle3 study cancel`; the same command continues"
    assert not alive(pid)
    assert bench.calls("train") == [f"train {NAMES[0]}"]  # nothing else was begun
    seen = states(bench)
    assert [(seen[name].state, seen[name].reason) for name in NAMES] == [("stopped", "cancelled"), ("queued", None)]
    assert "told to stop: nothing, no job runs now" in bench.run("study", "cancel")
    bench.run("study", "retry")
    assert bench.calls("trained") == [f"trained {NAMES[0]}"]
    assert steps(bench, NAMES[0]) == list(range(1, 11))  # it went on where it was


def test_cancelling_a_retry_ends_it(bench: Bench) -> None:
    bench.run(*TWO, code=1, FAKE_FAIL="-s0-")
    for name in NAMES:
        (bench.study / name / "metrics.jsonl").unlink()  # from the start, so that it takes its time
    process = bench.start("study", "retry", FAKE_SECONDS="60")
    wait_until(lambda: len(bench.calls("train")) == 3)
    bench.run("study", "cancel")
    out, _ = process.communicate(timeout=60)
    assert "cancelled by `eagle3 study cancel`" in out.splitlines()[-1]
    assert len(bench.calls("train")) == 3


def test_retry_works_where_the_study_was_moved_to(bench: Bench) -> None:
    bench.run(*TWO, code=1, FAKE_FAIL="x1-")
    moved = bench.study.with_name("moved")
    os.rename(bench.study, moved)
    bench.run("study", "retry", "study.name=moved")
    assert not bench.study.exists()
    assert {s.name: s.state for s in status.collect(moved)}[NAMES[0]] == "done"


def test_a_point_that_was_done_otherwise_is_to_be_run_again(bench: Bench) -> None:
    bench.run(*TWO)
    path = bench.study / NAMES[0] / "result.json"
    write_json(path, json.loads(path.read_text()) | {"eval_identity": "another"})
    found = states(bench)[NAMES[0]]
    assert found.state == "queued"
    assert "with other settings or data than now" in str(found.reason)


def test_logs_show_the_end_of_a_jobs_log(bench: Bench) -> None:
    bench.run(*TWO, code=1, FAKE_FAIL="x1-")
    out = bench.run("study", "logs", NAMES[0][:12], *OPTIONS)
    assert "step 10 of 10" in out
    assert "RuntimeError: the loss is not finite" in out.splitlines()[-1]
    out = bench.run("study", "logs", "eagle3", code=2)
    assert f"'eagle3' is more than one job of {bench.study}: {', '.join(NAMES)}" in out
    out = bench.run("study", "logs", "eagle", "study.name=none", code=2)
    assert "holds no study yet" in out


@pytest.mark.parametrize("words", [("retry", "-x"), ("stop",)])
def test_words_that_are_no_command(bench: Bench, words: tuple[str, ...]) -> None:
    bench.run("study", "data.scale=1", "seed=0")
    bench.run("study", *words, code=2)

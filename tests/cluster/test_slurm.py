"""Studies on a real SLURM of two nodes, which this file starts itself (cluster.sh): jobs are submitted, cut short,
requeued, and end as they should. One study trains real heads; elsewhere the rooms that do the work are stand-ins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.lock import holder_of
from sweeps import status
from tests.capture.test_capture import overrides, write_chats
from tests.sweeps.conftest import ROOT, Bench, wait_until
from tests.sweeps.test_study import NAMES
from tests.sweeps.test_targets import TARGETS
from tests.train.results import losses

SCRIPT = Path(__file__).parent / "cluster.sh"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("EAGLE3_TEST_SLURM" not in os.environ, reason="EAGLE3_TEST_SLURM=1 asks for it"),
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs root and SLURM (missing: {MISSING})"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder, over = tmp_path_factory.mktemp("slurm"), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin:/sbin")
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        try:
            subprocess.run([SCRIPT, "start", folder], check=True, timeout=120)
            hurry = threading.Thread(target=cut_waits_short, args=(over,))
            hurry.start()
            yield
            over.set()
            hurry.join()
        finally:
            subprocess.run([SCRIPT, "stop", folder], check=True)


def cut_waits_short(over: threading.Event) -> None:
    """SLURM lets a requeued job wait for two minutes. A few seconds it needs: it would take the end of the last attempt
    for that of a next one which runs already."""
    seen: set[str] = set()
    while not over.wait(2):
        lines = slurm("squeue", "--noheader", "--format=%i %T %r").splitlines()
        waiting = {line.split()[0] for line in lines if line.endswith("PENDING BeginTime")}
        for job in waiting & seen:  # it may have been cancelled since
            subprocess.run(["scontrol", "update", f"jobid={job}", "starttime=now"], check=False)
        seen = waiting


@pytest.fixture
def bench(cluster: None, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()
    subprocess.run(["scancel", *submissions(bench).values()], check=True)


@pytest.fixture(scope="module")
def limited(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A study whose point needs longer than its time limit, which SLURM counts in minutes: submitted first, looked at
    last."""
    bench = Bench(tmp_path_factory.mktemp("limited"))
    limit = ("launch.slurm.time=0:01:00", "launch.slurm.signal_seconds=1", "launch.slurm.options=['--nodelist=n1']")
    bench.run("study", "data.scale=1", "seed=0", "launch=slurm", *limit, FAKE_SECONDS="110")
    return bench


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def submissions(bench: Bench) -> dict[str, str]:
    """Name of a batch -> SLURM's id."""
    ids: dict[str, str] = json.loads((bench.study / "slurm" / "jobs.json").read_text())
    return ids


def wait_for_the_end(bench: Bench) -> None:
    """Of all jobs of the study."""
    ids, deadline = ",".join(submissions(bench).values()), time.monotonic() + 300
    while left := slurm("squeue", "--noheader", "--jobs", ids, "--format=%i %T %r"):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)  # a look starts a process


def names(bench: Bench) -> list[str]:
    """Of the points, in the order of the array."""
    return [point["name"] for point in json.loads((bench.study / "points.json").read_text())]


def states(bench: Bench) -> dict[str, str]:
    return {job.name: job.state for job in status.collect(bench.study)}


def steps(bench: Bench, name: str) -> list[int]:
    path = bench.study / name / "metrics.jsonl"
    return [row["step"] for row in map(json.loads, path.read_text().splitlines())] if path.exists() else []


def attempts(bench: Bench, name: str) -> int:
    return int(json.loads((bench.study / name / "status.json").read_text())["attempt"])


@contextmanager
def set_down(node: str) -> Iterator[None]:
    """As an operator does. SLURM keeps apart badly what a job left on a node and the same job there anew: no job that
    ran there may come back before it is long gone."""
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    try:
        yield
    finally:
        slurm("scontrol", "update", f"nodename={node}", "state=resume")


def test_a_requeued_head_is_the_undisturbed_one_to_the_bit(bench: Bench, limited: Bench, tiny_target: Path) -> None:
    """Real steps from conversations to report, of a tiny target. The node of both heads is set down; then one of
    them is told to stop, as it is ahead of a time limit."""
    write_chats(bench.folder / "chats.json")
    keys = (*overrides(bench.folder, tiny_target), "data.base_sequences=10", "data.scale=1", "draft.vocab_size=100")
    keys = (*keys, "train.epochs=250", "train.log_every=1", f"paths.outputs={bench.study.parent}")
    real = {"PYTHONPATH": str(ROOT)}
    bench.run("study", *keys, "seed=0,1", "launch=slurm", "launch.slurm.options=['--nodelist=n2']", **real)
    first, second = names(bench)
    points = submissions(bench)["points"]
    wait_until(lambda: min(len(steps(bench, name)) for name in (first, second)) >= 20, every=0.1)
    same_data = [f"paths.{part}={bench.study / part}" for part in ("corpus", "store")]
    alone = ("study.name=undisturbed", *same_data)
    with set_down("n2"):
        for job in (f"{points}_0", f"{points}_1", submissions(bench)["report"]):
            slurm("scontrol", "update", f"jobid={job}", "reqnodelist=n1")
        wait_until(lambda: attempts(bench, first) == 2, every=0.1)
        done = len(steps(bench, first))
        wait_until(lambda: len(steps(bench, first)) > done, every=0.1)
        slurm("scancel", "--signal=USR2", "--batch", f"{points}_0")
        undisturbed = [bench.start("train", *keys, f"seed={seed}", *alone, **real) for seed in (0, 1)]
        assert [(process.communicate()[0], process.returncode)[1] for process in undisturbed] == [0, 0]
        wait_for_the_end(bench)
    assert [attempts(bench, name) for name in (first, second)] == [3, 2]
    for name in (first, second):
        assert states(bench)[name] == "done"
        disturbed, whole = bench.study / name, bench.study.parent / "undisturbed" / name
        assert len(losses(whole)) > 100
        assert losses(disturbed) == losses(whole)  # no step is there twice
        heads = [max(point.glob("checkpoints/*/head.safetensors")) for point in (disturbed, whole)]
        assert heads[0].read_bytes() == heads[1].read_bytes()
    assert ": failed" not in "".join(path.read_text() for path in bench.study.glob("slurm/points-*.txt"))
    assert (bench.study / "report" / "report.html").is_file()


def test_a_study_of_four_points_runs_to_its_report_whatever_happens_to_its_jobs(bench: Bench, limited: Bench) -> None:
    four = ("study", "data.scale=1,2", "seed=0,1", "launch=slurm", "launch.slurm.capture_jobs=2")
    bench.run(*four, FAKE_SECONDS="15", FAKE_FAIL="x2-s1")
    assert "is in the queue already" in bench.run(*four, code=2)  # submitted once
    points, failing = submissions(bench)["points"], names(bench)[3]
    wait_until(lambda: all(len(steps(bench, name)) >= 2 for name in names(bench)), every=0.1)
    assert sorted(bench.calls("capture")) == ["capture 0/2", "capture 1/2"]
    slurm("scancel", "--signal=USR2", "--batch", f"{points}_0")  # what SLURM sends before the time limit
    slurm("scancel", "--signal=TERM", f"{points}_1")  # to the step alone
    wait_for_the_end(bench)
    assert [states(bench)[name] for name in names(bench)] == ["done", "done", "done", "failed"]
    assert [attempts(bench, name) for name in names(bench)] == [2, 2, 1, 1]
    for name in names(bench)[:3]:
        assert steps(bench, name) == list(range(1, 11))  # it went on where it was; no step is there twice
        assert holder_of(bench.study / name / ".lock") is None
    assert len(bench.calls("trained")) == 3
    assert bench.calls()[-1] == "report"
    reason = next(job.reason for job in status.collect(bench.study) if job.name == failing)
    assert reason == "exit code 1: RuntimeError: the loss is not finite"
    assert "RuntimeError: the loss is not finite" in bench.run("study", "logs", failing)

    # What is left is submitted again, and nothing else.
    bench.run(*four)
    assert list(submissions(bench)) == ["points", "report"]
    wait_for_the_end(bench)
    assert states(bench)[failing] == "done"
    assert len(bench.calls("trained")) == 4
    assert len(bench.calls("prepare")) == 1


def test_a_failing_shared_step_ends_what_depends_on_it(bench: Bench, limited: Bench) -> None:
    bench.study.mkdir(parents=True)
    (bench.study / "corpus").write_text("in the way")
    bench.run("study", "data.scale=1", "seed=0", "launch=slurm")
    wait_for_the_end(bench)
    assert states(bench)["prepare"] == "failed"
    assert bench.calls() == ["prepare"]


def test_a_target_whose_data_cannot_be_made_stops_no_other(bench: Bench, limited: Bench) -> None:
    home = bench.study / "targets" / "small"
    home.mkdir(parents=True)
    (home / "corpus").write_text("in the way")
    bench.run("study", TARGETS, "launch=slurm", "launch.slurm.capture_jobs=2")
    wait_for_the_end(bench)
    seen = states(bench)
    assert [seen[name] for name in names(bench)] == ["queued", "queued", "done", "done"]
    assert [seen[f"{step}-small"] for step in ("prepare", "capture")] == ["failed", "queued"]
    assert [seen[f"capture-large{part}"] for part in ("", "-0-of-2", "-1-of-2")] == ["done"] * 3
    assert bench.calls()[-1] == "report"
    (home / "corpus").unlink()
    bench.run("study", "retry", "launch=slurm")
    wait_for_the_end(bench)
    assert states(bench)["prepare-small"] == "done"
    bench.run("study", TARGETS, "launch=slurm", "launch.slurm.capture_jobs=2")
    assert list(submissions(bench)) == ["capture-small", "points-small", "report"]
    wait_for_the_end(bench)
    assert [states(bench)[name] for name in names(bench)] == ["done"] * 4


def test_cancel_ends_everything(bench: Bench, limited: Bench) -> None:
    bench.run("study", "data.scale=1", "seed=0", "launch=slurm", FAKE_SECONDS="600")
    wait_until(lambda: len(bench.calls("train")) == 1)
    pid = bench.pids()[-1]
    out = bench.run("study", "cancel", "launch=slurm")
    assert NAMES[0] in out
    wait_for_the_end(bench)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_ranks_on_two_nodes_find_each_other(bench: Bench, limited: Bench) -> None:
    two = ("launch=slurm", "launch.nodes=2", "launch.nproc_per_node=2", "engine=ddp")
    bench.run("study", "data.scale=1", "seed=0", *two)
    wait_for_the_end(bench)
    assert sorted(bench.calls("capture")) == [f"capture {rank}/4" for rank in range(4)]
    assert len(bench.calls("train")) == 4
    assert states(bench)[NAMES[0]] == "done"


def test_what_fails_on_one_of_two_nodes_is_not_put_back(bench: Bench, limited: Bench) -> None:
    """srun ends the other node, and reports how that ended: as a job that is to be continued."""
    two = ("launch=slurm", "launch.nodes=2", "engine=ddp", "data.scale=1", "seed=0")
    bench.run("study", *two, FAKE_FAIL_RANK="1", FAKE_SECONDS="100")
    wait_for_the_end(bench)
    assert (states(bench)[NAMES[0]], attempts(bench, NAMES[0])) == ("failed", 1)
    assert "the store is damaged" in bench.run("study", "logs", NAMES[0])


def test_both_sides_of_a_rolling_store_run_in_coupled_jobs(bench: Bench, limited: Bench) -> None:
    rolls = ("store.mode=rolling", "store.cap_gib=1", "data.window=8", "launch.rolling.points_at_once=2")
    bench.run("study", "data.scale=1,2", "seed=0", "launch=slurm", *rolls, FAKE_SECONDS="3", FAKE_FAIL="x2-s0")
    assert list(submissions(bench)) == ["prepare", "capture", "roll-0", "points-0", "report"]
    wait_for_the_end(bench)
    assert [states(bench)[name] for name in names(bench)] == ["done", "failed"]
    assert bench.calls("roll") == ["roll 0/1"]
    assert len(bench.calls("rolled")) == 1  # it waits no more for the point that has failed
    assert bench.calls()[-1] == "report"


def test_a_rolling_study_whose_worker_is_cut_short_has_the_heads_of_the_whole_store(
    bench: Bench, limited: Bench, tiny_target: Path
) -> None:
    """Real steps of a tiny target: two workers and two points in coupled jobs on two nodes."""
    write_chats(bench.folder / "chats.json", 100)
    keys = (*overrides(bench.folder, tiny_target), "corpus.sequences=48", "corpus.max_length=128", "eval.tasks=[]")
    keys = (*keys, "data.base_sequences=48", "data.window=6", "data.scale=1", "draft.steps=2", "draft.vocab_size=100")
    keys = (*keys, "train.batch_tokens=160", "train.epochs=6", "capture.shards=24", "store.row_group_mib=1")
    keys = (*keys, f"paths.outputs={bench.study.parent}")
    rolls = (
        "store.mode=rolling",
        "store.cap_gib=0.0008",
        "launch.rolling.workers=2",
        "launch.rolling.points_at_once=2",
    )
    real = {"PYTHONPATH": str(ROOT)}
    bench.run("study", *keys, *rolls, "seed=0,1", "launch=slurm", **real)
    log = bench.study / "capture.jsonl"
    wait_until(lambda: log.exists() and log.read_text().count('"train"') >= 30, every=0.1)
    os.kill(json.loads((bench.study / "store" / "workers" / "0.json").read_text())["pid"], signal.SIGKILL)
    wait_for_the_end(bench)
    workers = [job for job in status.collect(bench.study) if job.name.startswith("roll-")]
    assert [job.state for job in workers] == ["done", "done"]
    assert max(job.attempt for job in workers) == 2
    assert "training" in bench.run("study", "status", *keys, **real)
    assert not list((bench.study / "store").glob("*shard-*"))
    alone = ("study.name=whole", f"paths.corpus={bench.study / 'corpus'}")
    for step, more in (("capture", ()), ("train", ("seed=0",)), ("train", ("seed=1",))):
        bench.run(step, *keys, *alone, *more, **real)
    for name in names(bench):
        assert states(bench)[name] == "done"
        points = bench.study / name, bench.study.parent / "whole" / name
        heads = [max(point.glob("checkpoints/*/head.safetensors")) for point in points]
        assert heads[0].read_bytes() == heads[1].read_bytes()


def test_a_job_that_needs_longer_than_its_time_limit_is_requeued_until_it_is_done(limited: Bench) -> None:
    # SLURM looks at time limits now and then: the signal comes half a minute to one and a half after the start. No
    # node of this study was set down.
    wait_for_the_end(limited)
    assert attempts(limited, NAMES[0]) > 1
    assert states(limited)[NAMES[0]] == "done"
    assert steps(limited, NAMES[0]) == list(range(1, 11))
    assert limited.calls()[-1] == "report"

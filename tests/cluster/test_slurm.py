"""Studies on a real SLURM of two nodes, which this file starts itself (cluster.sh). The rooms that do the work are
stand-ins; what is tested is that jobs are submitted, cut short, requeued, and end as they should."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.lock import holder_of
from sweeps import status
from tests.sweeps.conftest import Bench, wait_until
from tests.sweeps.test_study import NAMES

SCRIPT = Path(__file__).parent / "cluster.sh"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("EAGLE3_TEST_SLURM" not in os.environ, reason="EAGLE3_TEST_SLURM=1 asks for it"),
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs root and SLURM (missing: {MISSING})"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("slurm")
    env = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run([SCRIPT, "start", folder], check=True, env=env, timeout=120)
    yield folder
    subprocess.run([SCRIPT, "stop", folder], check=True, env=env)


@pytest.fixture
def bench(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("SLURM_CONF", str(cluster / "slurm.conf"))
    yield Bench(tmp_path)
    subprocess.run(["scancel", "--user=root"], check=True)


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def queue() -> list[str]:
    return slurm("squeue", "--noheader", "--format=%i %T %N").splitlines()


def is_empty() -> bool:
    """Whether the queue is; SLURM lets a requeued job wait for two minutes, which is cut short here."""
    for line in slurm("squeue", "--noheader", "--format=%i %r").splitlines():
        if line.endswith("BeginTime"):
            slurm("scontrol", "update", f"jobid={line.split()[0]}", "starttime=now")
    time.sleep(0.5)
    return not queue()


def submitted(bench: Bench, name: str) -> str:
    ids: dict[str, str] = json.loads((bench.study / "slurm" / "jobs.json").read_text())
    return ids[name]


def states(bench: Bench) -> dict[str, str]:
    return {job.name: job.state for job in status.collect(bench.study)}


def steps(bench: Bench, name: str) -> list[int]:
    path = bench.study / name / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def attempts(bench: Bench, name: str) -> int:
    return int(json.loads((bench.study / name / "status.json").read_text())["attempt"])


def test_a_study_runs_to_its_report_whatever_happens_to_its_jobs(bench: Bench) -> None:
    four = ("study", "data.scale=1,2", "seed=0,1", "launch=slurm", "launch.slurm.capture_jobs=2")
    bench.run(*four, FAKE_SECONDS="20", FAKE_FAIL="x2-s1")
    names = [p["name"] for p in json.loads((bench.study / "points.json").read_text())]
    assert "is in the queue already" in bench.run(*four, code=2)  # submitted once
    points = submitted(bench, "points")
    wait_until(lambda: all(len(steps(bench, name)) >= 2 for name in names))
    assert sorted(bench.calls("capture")) == ["capture 0/2", "capture 1/2"]
    slurm("scancel", "--signal=USR2", "--batch", f"{points}_0")  # what SLURM sends before the time limit
    slurm("scancel", "--signal=TERM", f"{points}_1")  # to the step alone
    # A node goes down with what runs on it, then comes back.
    node = next(line.split()[2] for line in queue() if line.startswith(f"{points}_2 "))
    slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    wait_until(lambda: not any(line.endswith(f"RUNNING {node}") for line in queue()))
    # Perhaps it has come back by itself: then there is nothing to resume.
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
    wait_until(is_empty)
    assert [states(bench)[name] for name in names] == ["done", "done", "done", "failed"]
    for name in names[:3]:
        assert attempts(bench, name) > 1
        assert steps(bench, name) == list(range(1, 11))  # it went on where it was; no step is there twice
        assert holder_of(bench.study / name / ".lock") is None
    assert len(bench.calls("trained")) == 3
    assert bench.calls()[-1] == "report"
    reason = next(job.reason for job in status.collect(bench.study) if job.name == names[3])
    assert reason == "exit code 1: RuntimeError: the loss is not finite"

    # What is left is submitted again, and nothing else.
    bench.run(*four)
    assert list(json.loads((bench.study / "slurm" / "jobs.json").read_text())) == ["points", "report"]
    wait_until(is_empty)
    assert states(bench)[names[3]] == "done"
    assert len(bench.calls("trained")) == 4
    assert len(bench.calls("prepare")) == 1


def test_a_job_that_needs_longer_than_its_time_limit_is_requeued_until_it_is_done(bench: Bench) -> None:
    # SLURM sends the signal up to a minute early: here 30 to 90 seconds after the start.
    limit = ("launch.slurm.time=2", "launch.slurm.signal_seconds=30")
    bench.run("study", "data.scale=1", "seed=0", "launch=slurm", *limit, FAKE_SECONDS="100")
    wait_until(is_empty)
    assert attempts(bench, NAMES[0]) > 1
    assert states(bench)[NAMES[0]] == "done"
    assert steps(bench, NAMES[0]) == list(range(1, 11))
    assert bench.calls()[-1] == "report"


def test_a_failing_shared_step_ends_what_depends_on_it(bench: Bench) -> None:
    bench.study.mkdir(parents=True)
    (bench.study / "corpus").write_text("in the way")
    bench.run("study", "data.scale=1", "seed=0", "launch=slurm")
    wait_until(is_empty)
    assert states(bench)["prepare"] == "failed"
    assert bench.calls() == ["prepare"]


def test_cancel_ends_everything(bench: Bench) -> None:
    bench.run("study", "data.scale=1", "seed=0", "launch=slurm", FAKE_SECONDS="600")
    wait_until(lambda: len(steps(bench, NAMES[0])) == 0 and len(bench.calls("train")) == 1)
    pid = bench.pids()[-1]
    out = bench.run("study", "cancel", "launch=slurm")
    assert NAMES[0] in out
    wait_until(is_empty)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def test_ranks_on_two_nodes_find_each_other(bench: Bench) -> None:
    two = ("launch=slurm", "launch.nodes=2", "launch.nproc_per_node=2", "engine=ddp")
    bench.run("study", "data.scale=1", "seed=0", *two)
    wait_until(is_empty)
    assert sorted(bench.calls("capture")) == [f"capture {rank}/4" for rank in range(4)]
    assert len(bench.calls("train")) == 4
    assert states(bench)[NAMES[0]] == "done"

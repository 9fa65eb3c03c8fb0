"""What a SLURM job does when its step has ended: with an srun and an scontrol of our own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3_train import config
from launch import worker
from launch.command import environment, grace
from launch.jobs import Job

SRUN = """#!/bin/sh
# as srun where one of its tasks ends: it ends the others, and reports the highest code
echo "srun: error: n2: task 1: Exited with exit code $FIRST" >&2
echo "srun: error: n1: task 0: Exited with exit code 143" >&2
mkdir -p "$STEP"
exit 143
"""
SCONTROL = '#!/bin/sh\n[ "$1" = show ] && echo n1 || echo "$@" >> "$NOTES"\n'


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a point as a SLURM job does; how often it has been put back into the queue by then. `first`: exit code of
    the first task to end; `step`: of a checkpoint that it leaves."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    keys = ("launch=slurm", "launch.nodes=2", "engine=ddp", "launch.slurm.attempts=2", f"paths.outputs={tmp_path}")
    job = Job("point", config.compose(list(keys)))
    config.save(job.cfg, job.folder / "config.yaml")
    notes = tmp_path / "notes"
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "NOTES": str(notes)}
    for name, value in slurm.items() | {("PATH", f"{tmp_path}:{os.environ['PATH']}")}:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["worker", "point", str(job.folder / "config.yaml")])

    def run(first: int = 143, step: int = 0, restarts: int = 1) -> int:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        monkeypatch.setenv("FIRST", str(first))
        monkeypatch.setenv("STEP", str(job.folder / (f"checkpoints/step-{step:08d}" if step else ".")))
        assert worker.main() == 1
        return notes.read_text().count("requeue 7") if notes.exists() else 0

    return run


def test_a_job_is_put_back_as_long_as_it_gets_on(attempt: Callable[..., int]) -> None:
    assert attempt(restarts=0) == 1  # got nowhere, once
    assert attempt(step=100) == 2
    assert attempt(step=200) == 3
    assert attempt() == 4
    assert attempt() == 4  # twice in a row
    assert attempt(restarts=0) == 5  # submitted by hand


def test_a_step_that_failed_on_one_node_is_not_put_back(attempt: Callable[..., int], tmp_path: Path) -> None:
    assert attempt(first=2) == 0
    (status,) = tmp_path.glob("*/*/status.json")
    assert {"state": "failed", "reason": "exit code 2"}.items() <= json.loads(status.read_text()).items()
    assert attempt(first=137) == 1  # a rank that ran out of memory


def test_torchrun_leaves_its_ranks_the_time_that_slurm_gives() -> None:
    keys = ("launch=slurm", "launch.nproc_per_node=2", "engine=ddp", "launch.slurm.signal_seconds=300")
    job = Job("point", config.compose(list(keys)))
    assert environment(job)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "285"
    assert grace(job.cfg) == 285

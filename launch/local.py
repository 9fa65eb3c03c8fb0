"""`launch=local`: a job as child processes on this machine."""

from __future__ import annotations

import os
import sys

from eagle3_train import config
from launch.jobs import Job
from launch.lock import Lock
from launch.supervise import Outcome, supervise


def run(job: Job, wait: bool = True) -> Outcome:
    """Run a job unless it is done, alone: while another process works on it, wait for that one, or with `wait=False`
    return "busy"."""
    lock = Lock(job.folder / ".lock")
    if wait:
        lock.acquire()
    elif not lock.try_acquire():
        return Outcome("busy")
    try:
        if job.is_done():  # perhaps the other process has done it
            return Outcome("done")
        config.save(job.cfg, job.folder / "config.yaml")
        outcome = supervise(command(job), job.folder, job.name, environment(job), lock.lost.is_set)
        if outcome.state == "done":
            job.stamp()
            if not job.is_done():
                return Outcome("failed", outcome.seconds, "it ended well, but what it should have written is missing")
        return outcome
    finally:
        lock.release()


def command(job: Job) -> list[str]:
    """The command line of a job: one process, or torchrun with several on this machine."""
    step = ["-m", "eagle3_train.cli", job.step, "--resolved", str(job.folder / "config.yaml")]
    if job.processes == 1:
        return [sys.executable, *step]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes)]
    return [sys.executable, *torchrun, *step]


def environment(job: Job) -> dict[str, str]:
    """torchrun gives each of several processes one thread; here they share the machine's cores."""
    if job.processes == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // job.processes))}

"""What a SLURM job runs: one job of ours, supervised, requeued where it was cut short.

    python -m launch.worker STEP CONFIG [--part I/N]

SIGUSR2, which SLURM sends before the time limit (and `scancel --signal=USR2 --batch` at any time), ends the step in
good order and puts the job back into the queue; so does a step that was killed from outside, by a signal. A step that
failed by itself stays failed. Attempts are counted in the job's status.json and limited by launch.slurm.attempts.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from eagle3_train import config
from eagle3_train.cli import guarded
from eagle3_train.console import say
from eagle3_train.files import read_json
from launch.coupled import give_up
from launch.jobs import TRAINS, Job
from launch.local import run
from launch.supervise import cut_short

MARGIN_S = 15.0  # of the time between the signal and the limit: for what comes after the step has ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step")
    parser.add_argument("config", type=Path)
    parser.add_argument("--part", help="I/N: job I of N that divide the work between them")
    options = parser.parse_args()
    part = tuple(int(n) for n in options.part.split("/")) if options.part else None
    job = Job(options.step, config.load(options.config), part)  # type: ignore[arg-type]
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    signal.signal(signal.SIGUSR2, note)
    os.environ["EAGLE3_HEAD"] = _head()
    grace = max(1.0, job.cfg.launch.slurm.signal_seconds - MARGIN_S)
    outcome = run(job, stop=lambda: "preempted" if told else "", grace=grace)
    say(f"{job.name}: {outcome.state} {outcome.reason}")
    if outcome.state == "done":
        return 0
    if cut_short(outcome) and _attempt(job) < job.cfg.launch.slurm.attempts:
        # Refused where SLURM has requeued it already, since a node went down.
        subprocess.run(["scontrol", "requeue", _id()], check=False)
    elif job.step in TRAINS:
        give_up(job)
    return 1


def _attempt(job: Job) -> int:
    return int(read_json(job.folder / "status.json")["attempt"])


def _id() -> str:
    """The name by which SLURM requeues this job, an element of an array or not."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _head() -> str:
    """Address of the first of the nodes that SLURM gave: that by which SLURM itself reaches it."""
    first = _scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()[0]
    settings = dict(word.partition("=")[::2] for word in _scontrol("show", "node", "--oneliner", first).split())
    return settings.get("NodeAddr", first)


def _scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(guarded(main))

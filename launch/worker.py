"""What a SLURM job runs: one job of ours, supervised, requeued where it was cut short.

    python -m launch.worker STEP CONFIG [--part I/N]

SIGUSR2, which SLURM sends before the time limit (and `scancel --signal=USR2 --batch` at any time), ends the step in
good order and puts the job back into the queue; so does a step that was killed from outside, by a signal. A step that
failed by itself stays failed, and so does one that was put back launch.slurm.attempts times in a row and got nowhere:
its status.json counts them (`stalled`).
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
from eagle3_train.files import read_json, write_json
from eagle3_train.trained import CHECKPOINTS, RECORD, checkpoint_steps
from launch.command import grace
from launch.coupled import give_up
from launch.jobs import TRAINS, Job
from launch.local import run
from launch.supervise import cut_short


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
    if job.nodes > 1:
        os.environ["EAGLE3_HEAD"] = _head()
    before = progress(job)
    outcome = run(job, stop=lambda: "preempted" if told else "", grace=grace(job.cfg))
    say(f"{job.name}: {outcome.state} {outcome.reason}")
    if outcome.state == "done":
        return 0
    if cut_short(outcome) and _stalled(job, before) < job.cfg.launch.slurm.attempts:
        # Refused where SLURM has requeued it already, since a node went down.
        subprocess.run(["scontrol", "requeue", _id()], check=False)
        return 1
    if cut_short(outcome):
        say(f"{job.name}: the last {job.cfg.launch.slurm.attempts} attempts got nowhere: not put back into the queue")
    if job.step in TRAINS:
        give_up(job)
    return 1


def progress(job: Job) -> list[object]:
    """What a job has reached that another attempt will not do again; changes when there is more of it."""
    if job.step in TRAINS:
        last = max(checkpoint_steps(job.folder / CHECKPOINTS), default=0)
        return [last, (job.folder / RECORD).is_file(), (job.folder / "result.json").is_file()]
    shards = Path(job.cfg.paths.data) / "capture.jsonl"  # a line each
    return [shards.stat().st_size if shards.is_file() else 0]


def _stalled(job: Job, before: list[object]) -> int:
    """Attempts in a row, this one the last, that got nowhere. `before`: its `progress` when it began. A submission by
    hand begins to count anew."""
    path = job.folder / "status.json"
    status = read_json(path)
    earlier = status.get("stalled", 0) if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else 0
    stalled = 0 if progress(job) != before else int(earlier) + 1
    write_json(path, status | {"stalled": stalled})
    return stalled


def _id() -> str:
    """The name by which SLURM requeues this job, an element of an array or not."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def _head() -> str:
    """Address of the first of the nodes that SLURM gave: that by which SLURM itself reaches it."""
    nodes = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    first = subprocess.run(nodes, check=True, capture_output=True, text=True).stdout.split()[0]
    # This asks SLURM's controller, which may be away for a moment: then its name, which is the address as a rule.
    node = subprocess.run(
        ["scontrol", "show", "node", "--oneliner", first], check=False, capture_output=True, text=True
    )
    settings = dict(word.partition("=")[::2] for word in node.stdout.split())
    return settings.get("NodeAddr", first)


if __name__ == "__main__":
    sys.exit(guarded(main))

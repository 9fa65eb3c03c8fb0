"""One step through a launcher: `eagle3 train launch=slurm ...`."""

from __future__ import annotations

import shlex

from eagle3_train.cli import Failed
from eagle3_train.config import Config
from eagle3_train.console import say
from eagle3_train.exits import Unfinished
from launch import slurm
from launch.command import command
from launch.jobs import Job
from launch.local import run


def launch(step: str, cfg: Config) -> int:
    """Run or submit a step; with `dry_run=true` show what would be run. Returns the exit code."""
    job = Job(step, cfg)
    if cfg.launch.kind == "slurm":
        batches = slurm.batches_of_step(job)
        if cfg.dry_run:
            say(slurm.show(batches))
        else:
            slurm.submit(batches)
        return 0
    say(shlex.join(command(job)))
    if cfg.dry_run:
        return 0
    outcome = run(job)
    if outcome.state == "preempted":
        raise Unfinished(f"{job.name}: {outcome.reason}")
    if outcome.state != "done":
        raise Failed(outcome.text(job.name))
    return 0

"""`launch=slurm`: jobs as sbatch scripts that a person can read, and their submission.

A script does one thing: it becomes `python -m launch.worker STEP CONFIG`, which supervises the step on the nodes that
SLURM gave (launch/worker.py). Scripts are kept in `<study>/slurm/`, with `jobs.json`, which says what was submitted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_train import config
from eagle3_train.config import Config
from eagle3_train.console import say
from eagle3_train.files import read_json, write_json, write_text
from launch.jobs import DIVIDED, OF_STUDY, Job


@dataclass(frozen=True)
class Batch:
    """One submission: jobs of the same kind, as an array. `after`: what it waits for, name of a batch -> SLURM's
    condition (afterok: it has succeeded; afterany: it has ended); those that are not submitted are no matter."""

    name: str
    jobs: Sequence[Job]
    after: Mapping[str, str] = field(default_factory=dict)
    at_once: int = 1


def folder(cfg: Config) -> Path:
    return Path(cfg.paths.study) / "slurm"


def render(batch: Batch) -> str:
    """The sbatch script of a batch."""
    first = batch.jobs[0]
    cfg, slurm = first.cfg, first.cfg.launch.slurm
    options: dict[str, object] = {
        "job-name": f"{cfg.study.name}-{batch.name}",
        "chdir": os.getcwd(),
        "output": folder(cfg) / f"{batch.name}-%a.txt",
        "open-mode": "append",
        "nodes": max(job.nodes for job in batch.jobs),
        "ntasks-per-node": 1,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "mem": slurm.memory,
        "cpus-per-task": slurm.cpus_per_node,
        "gpus-per-node": slurm.gpus_per_node,
        # Told in time, a job saves its work and is requeued; B: only the worker is told, which tells the ranks.
        "signal": f"B:USR2@{slurm.signal_seconds}",
        "array": f"0-{len(batch.jobs) - 1}%{batch.at_once}",
    }
    head = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    head += ["#SBATCH --requeue", "#SBATCH --kill-on-invalid-dep=yes", *(f"#SBATCH {o}" for o in slurm.options)]
    steps = [_worker_arguments(job) for job in batch.jobs]
    python = shlex.quote(slurm.python or sys.executable)
    return "\n".join(
        [
            "#!/bin/bash",
            *head,
            "set -eu",
            *slurm.setup,
            "jobs=(",
            *(f"  {shlex.quote(shlex.join(step))}" for step in steps),
            ")",
            "# exec: the signal of SLURM reaches the worker itself",
            f'eval exec {python} -m launch.worker "${{jobs[$SLURM_ARRAY_TASK_ID]}}"',
            "",
        ]
    )


def show(batches: Sequence[Batch]) -> str:
    """What would be submitted: the order with what each waits for, then the scripts."""
    words = {"afterok": "has succeeded", "afterany": "has ended, well or not"}
    names = {batch.name for batch in batches}
    lines = ["# order of submission:"]
    for number, batch in enumerate(batches, 1):
        after = [f"{name} {words[condition]}" for name, condition in batch.after.items() if name in names]
        when = f"when {', and '.join(after)}" if after else "at once"
        most = f", at most {batch.at_once} at a time" if batch.at_once < len(batch.jobs) else ""
        lines.append(f"#   {number}. {batch.name}: {len(batch.jobs)} job(s){most}, starts {when}")
    return "\n".join([*lines, *(f"\n# {batch.name}\n{render(batch)}" for batch in batches)])


def batches_of_step(job: Job, after: Mapping[str, str] | None = None) -> list[Batch]:
    """A step as a batch; capture as an array of jobs that share its shards out."""
    parts = job.cfg.launch.slurm.capture_jobs
    jobs = (
        [job] if job.step not in DIVIDED or parts == 1 else [Job(job.step, job.cfg, (i, parts)) for i in range(parts)]
    )
    name = job.whole if job.step in OF_STUDY else job.step
    return [Batch(name, jobs, after or {}, at_once=len(jobs))]


def submit(batches: Sequence[Batch]) -> dict[str, str]:
    """Write the scripts and submit them, each after the one that it names. Returns batch name -> SLURM job id.

    Raises ValueError without a SLURM on this machine, or while an earlier submission of the study is in the queue.
    """
    cfg = batches[0].jobs[0].cfg
    if shutil.which("sbatch") is None:
        raise ValueError("launch=slurm: there is no sbatch on this machine; dry_run=true shows the scripts without it")
    if waiting := in_queue(cfg):
        raise ValueError(
            f"study {cfg.study.name!r} is in the queue already as job {', '.join(waiting)}: wait for it "
            "(eagle3 study status), or end it (eagle3 study cancel)"
        )
    ids: dict[str, str] = {}
    for batch in batches:
        for job in batch.jobs:
            config.save(job.cfg, job.folder / "config.yaml")
        script = folder(cfg) / f"{batch.name}.sbatch"
        write_text(script, render(batch))
        command = ["sbatch", "--parsable"]
        if conditions := [f"{condition}:{ids[name]}" for name, condition in batch.after.items() if name in ids]:
            command.append(f"--dependency={','.join(conditions)}")
        done = subprocess.run([*command, str(script)], capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"sbatch refused {script}: {done.stderr.strip()}")
        ids[batch.name] = done.stdout.strip().split(";")[0]
        write_json(folder(cfg) / "jobs.json", ids)
        say(f"{batch.name}: {len(batch.jobs)} job(s), submitted as {ids[batch.name]} ({script})")
    return ids


def in_queue(cfg: Config) -> list[str]:
    """Ids of the study's submissions that SLURM still has."""
    path = folder(cfg) / "jobs.json"
    ids = list(read_json(path).values()) if path.is_file() else []
    if not ids:
        return []
    out = subprocess.run(
        ["squeue", "--noheader", "--format=%A", "--jobs", ",".join(ids)], capture_output=True, text=True
    )
    return sorted(set(out.stdout.split())) if out.returncode == 0 else []  # an error: SLURM has forgotten them


def cancel(cfg: Config) -> None:
    if ids := in_queue(cfg):
        subprocess.run(["scancel", *ids], check=True)
        say(f"cancelled SLURM jobs {', '.join(ids)}")


def _worker_arguments(job: Job) -> list[str]:
    part = [] if job.part is None else ["--part", f"{job.part[0]}/{job.part[1]}"]
    return [job.step, str(job.folder / "config.yaml"), *part]

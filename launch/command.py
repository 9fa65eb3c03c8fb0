"""The command line of a job's processes, and their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping

from eagle3_train.config import Config
from launch.jobs import TRAINS, Job

MARGIN_S = 15.0  # of the time between SLURM's signal and its limit: for what comes after the step has ended


def command(job: Job, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What this node has to run for its part of a job: the step itself, or torchrun with several ranks of it; inside a
    SLURM allocation, srun with one of these on each of its nodes."""
    launch = job.cfg.launch
    python = [(launch.kind == "slurm" and launch.slurm.python) or sys.executable]
    step = ["-m", "eagle3_train.cli", job.step, "--resolved", str(job.folder / "config.yaml")]
    if job.nodes * job.processes == 1:
        ranks = [*python, *step]
    else:
        meeting = _meeting(job, environ) if job.nodes > 1 else ["--standalone"]
        by_rank = ["--log-dir", str(job.folder / "ranks"), "--tee", "3"]  # also to our own log, with the rank in front
        torchrun = ["-m", "eagle3_train.elastic", *meeting, "--nproc-per-node", str(job.processes), *by_rank]
        ranks = [*python, *torchrun, *step]
    if not _in_allocation(job, environ):
        return ranks
    nodes = str(job.nodes)
    layout = ["--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
    return ["srun", *layout, *launch.slurm.srun, *ranks]


def terminator(job: Job, environ: Mapping[str, str] = os.environ) -> Callable[[], None] | None:
    """How to tell the ranks of a job to end, where a signal to our child is not the way (None: it is). srun answers
    SIGTERM by killing its tasks outright; SLURM, when asked, hands the signal on to them."""
    if not _in_allocation(job, environ):
        return None

    def tell() -> None:
        # Where SLURM does not take it, the steps are over or SLURM ends them itself; after the grace they are killed.
        subprocess.run(["scancel", "--signal=TERM", environ["SLURM_JOB_ID"]], check=False)

    return tell


def grace(cfg: Config) -> float:
    """Seconds that the ranks of a SLURM job have for their last checkpoint, from the signal on."""
    return max(1.0, cfg.launch.slurm.signal_seconds - MARGIN_S)


def environment(job: Job) -> dict[str, str]:
    """torchrun gives each of several processes one thread; here they share the machine's cores, or what their side of a
    rolling store has of it."""
    env = dict(job.cfg.launch.slurm.env) if job.cfg.launch.kind == "slurm" else {}
    if job.nodes * job.processes > 1:
        env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] "} | env
        if job.cfg.launch.kind == "slurm":  # else torchrun kills its ranks 30 s after the signal, whatever they save
            env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace(job.cfg)))} | env
    if job.part is not None:
        env |= {"RANK": str(job.part[0]), "WORLD_SIZE": str(job.part[1])}
    split = job.cfg.launch.rolling
    sides = {"roll": (split.capture_threads, split.capture_gpus)}
    sides |= dict.fromkeys(TRAINS, (split.train_threads, split.train_gpus))
    threads, gpus = sides.get(job.step, (None, [])) if job.cfg.rolls else (None, [])
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    if threads:
        return {"OMP_NUM_THREADS": str(max(1, threads // job.processes))} | env
    if job.processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env = {"OMP_NUM_THREADS": str(max(1, cores // job.processes))} | env
    return env


def _in_allocation(job: Job, environ: Mapping[str, str]) -> bool:
    return job.cfg.launch.kind == "slurm" and "SLURM_JOB_ID" in environ


def _meeting(job: Job, environ: Mapping[str, str]) -> list[str]:
    """Where the torchruns of several nodes find each other, and under which name."""
    if job.cfg.launch.kind == "slurm":
        # One of the hosts that SLURM gave, and a port that other jobs on it are unlikely to use.
        head, number = environ["EAGLE3_HEAD"], int(environ["SLURM_JOB_ID"])
        endpoint, name = f"{head}:{20000 + number % 20000}", f"{number}-{environ.get('SLURM_RESTART_COUNT', '0')}"
    else:
        endpoint, name = str(job.cfg.launch.rendezvous), job.name
    meeting = {"backend": "c10d", "endpoint": endpoint, "id": name}
    # The nodes of a study come to a point one after the other; the last may still be busy with the point before.
    meeting["conf"] = "join_timeout=3600"
    options = [word for key, value in meeting.items() for word in (f"--rdzv-{key}", value)]
    return ["--nnodes", str(job.nodes), *options]

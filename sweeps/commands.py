"""`eagle3 study WORD`: how a study stands, its logs, and what to do about failed or running points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from eagle3_train import config
from eagle3_train.cli import Failed
from eagle3_train.config import Config
from eagle3_train.console import duration, say
from launch import Job, slurm
from launch import cancel as leave_word
from launch import run as run_job
from launch.coupled import waiting
from launch.supervise import tail
from sweeps import status
from sweeps.points import split
from sweeps.study import CANCELLED


def run(words: Sequence[str], overrides: Sequence[str], usage: Mapping[str, str]) -> int:
    """Do what `words` say with the study that `overrides` name. `usage`: the commands that there are, for the error."""
    fixed, _ = split(overrides)  # a user repeats the words that started the study; its axes are known by now
    cfg = config.compose([*fixed.values()])
    study = Path(cfg.paths.study)
    match list(words):
        case ["status"]:
            status.show(study)
            plan = study / "study.yaml"  # as it was started: who asks need not repeat how it is launched
            if words := waiting(config.relocated(config.load(plan), study) if plan.is_file() else cfg):
                say(words)
        case ["status", "--json"] | ["--json", "status"]:
            print(status.as_json(study))
        case ["status", "--watch"] | ["--watch", "status"]:
            status.watch(study)
        case ["logs", name]:
            logs(study, name)
        case ["retry", *names]:
            retry(cfg, names)
        case ["cancel"]:
            cancel(cfg)
        case _:
            raise ValueError(
                f"eagle3 study {' '.join(words)}: not understood; after `study` may stand {', '.join(usage)}"
            )
    return 0


def retry(cfg: Config, names: Sequence[str]) -> None:
    """Run jobs again, as they were configured: the named ones, or all that failed or were stopped; then the report. How
    they are launched is said by `cfg`."""
    study = Path(cfg.paths.study)
    chosen = [find(study, name) for name in names]
    if not names:
        bad = {s.name for s in status.collect(study) if s.state in ("failed", "stopped")}
        chosen = [job for job in status.jobs(study) if job.name in bad]
    if not chosen:
        say("no job of this study has failed")
        return
    jobs = [_again(study, found, cfg) for found in chosen]
    if cfg.rolls or any(job.cfg.rolls for job in jobs):
        raise ValueError("with store.mode=rolling give `eagle3 study` again: it captures for the points that are left")
    for job in jobs:
        job.forget()
    report = Job("report", cfg)
    if cfg.launch.kind == "slurm":
        again = slurm.Batch("retry", jobs, at_once=cfg.launch.slurm.points_at_once)
        slurm.submit([again, slurm.Batch("report", [report], {again.name: "afterany"})])
        return
    failed, points_done = [], 0
    for job in jobs:
        outcome = run_job(job, wait=False)
        if outcome.state == "cancelled":
            raise Failed(CANCELLED)
        if outcome.state == "busy":
            say(f"{job.name}: another process works on it")
            continue
        say(f"{job.name}: {outcome.state} in {duration(outcome.seconds)}")
        if outcome.state != "done":
            failed.append(outcome.text(job.name))
        points_done += job.step == "point" and outcome.state == "done"
    if not points_done:
        say("no point is done by this: `eagle3 study` goes on with those that are left")
    elif (outcome := run_job(report)).state != "done":
        failed.append(outcome.text(report.name))
    if failed:
        raise Failed("\n".join(failed))


def _again(study: Path, found: status.JobFolder, cfg: Config) -> Job:
    path = found.folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{found.name} has not been started yet: `eagle3 study` runs it")
    resolved = config.relocated(config.load(path), study)
    resolved.launch = cfg.launch
    return Job(found.step, resolved, found.part)


def cancel(cfg: Config) -> None:
    """End all jobs of a study, wherever they run."""
    study = Path(cfg.paths.study)
    running = [s.name for s in status.collect(study) if s.state == "running"]
    leave_word(study)
    if cfg.launch.kind == "slurm":
        slurm.cancel(cfg)
    say(f"told to stop: {', '.join(running) or 'nothing, no job runs now'}")


def find(study: Path, name: str) -> status.JobFolder:
    """The job of this name, or whose name begins so."""
    jobs = status.jobs(study)
    found = [job for job in jobs if job.name == name] or [job for job in jobs if job.name.startswith(name)]
    if len(found) != 1:
        names = ", ".join(job.name for job in found or jobs)
        raise ValueError(f"{name!r} is {'more than one' if found else 'no'} job of {study}: {names}")
    return found[0]


def logs(study: Path, name: str) -> None:
    """Print the end of a job's log. `name`: a point, or prepare or capture, or the beginning of one."""
    for line in tail(find(study, name).folder / "log.txt", lines=200):
        say(line)

"""Run a study: prepare and capture once, then every point that is not done.

It may be stopped anywhere and run again, and by several processes at once, which share the points out among themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_train import config
from eagle3_train.cli import Failed
from eagle3_train.config import Config
from eagle3_train.console import duration, say
from eagle3_train.files import write_json
from launch import Coupled, Job, Outcome, make_session, run, slurm, write_session
from launch.jobs import SHARED, detach, is_measured
from launch.lock import Lock, holder_of
from sweeps.estimate import TimeLeft, describe, missing_data
from sweeps.points import Point, Study, plan

ALL = "all"  # the session of the steps that points share
POLL_S = 2.0  # between looks at points that other processes work on


@dataclass
class Report:
    """What a run of a study did. `failed`: point name -> how it ended."""

    study: Study
    submitted: bool = False  # to a cluster: the points are to come
    failed: dict[str, Outcome] = field(default_factory=dict)


# Points (name -> Config.reading) of a study with a rolling store, in groups that share the passes over it; none where
# what is there is a whole store. ValueError where a point does not fit the cap.
Share = Callable[[Config, dict[str, dict[str, int | None]]], list[list[str]]]


def run_study(
    overrides: Sequence[str],
    verify: Callable[[Config], None] = lambda cfg: None,
    share: Share = lambda cfg, readings: [],
) -> Report:
    """Plan the study that `overrides` describe and run what is left of it. With `dry_run=true`: print the plan only.
    `verify` may refuse the configuration of a point (ValueError) before anything is done; `share` is asked once the
    corpus is prepared.

    A failing point does not stop the others. Raises `cli.Failed` where a shared step fails, or where the study was
    cancelled. On a cluster (`launch=slurm`) it submits what is left and returns.
    """
    study = plan(overrides)
    if study.cfg.rolls and study.cfg.launch.kind == "torchrun":
        raise ValueError(
            "store.mode=rolling with launch=torchrun: a study starts both sides with launch=local or launch=slurm; by "
            "hand, start eagle3 roll on some machines and eagle3 train on others"
        )
    for point in study.points:
        verify(point.cfg)
    if not study.cfg.dry_run and (missing := missing_data(study)):
        raise ValueError(f"study {study.cfg.study.name!r}: {missing}")
    say(describe(study))
    report = Report(study)
    changed = [step for step in SHARED if Job(step, study.cfg).has_changed()]
    left = study.points if changed else _not_done(study)
    on_cluster = study.cfg.launch.kind == "slurm"
    if changed:
        say(f"settings or input of {' and '.join(changed)} have changed: done points are looked at again after it")
    if study.cfg.dry_run:
        if on_cluster and left:
            say(slurm.show(batches(study, left)))
        return report
    record(study)
    left = [p for p in left if not adopt(p)]
    if study.cfg.rolls:  # whether they fit the cap is looked at before the capture
        study.cfg.launch.rolling.session = ALL
        write_json(study.cfg.session_file, _readings(left))
    if on_cluster and left:
        submitted = batches(study, left)
        for batch in submitted:
            if batch.jobs[0].cfg.launch.rolling.session and batch.jobs[0].step == "point":
                write_session(batch.jobs)
        slurm.submit(submitted)
        report.submitted = True
        return report
    if left:
        share_data(study.cfg, SHARED[:1])
        groups = share(study.cfg, _readings(left)) if study.cfg.rolls else []  # refused before the capture
        share_data(study.cfg, SHARED[1:])
        if groups:
            _run_coupled(report, groups)
        _run_points(report, _not_done(study, report))  # of the data as they are now
    for name, outcome in report.failed.items():
        say(outcome.text(name))
    return report


def _not_done(study: Study, report: Report | None = None) -> list[Point]:
    failed = report.failed if report else {}
    return [p for p in study.points if p.name not in failed and not Job("point", p.cfg).is_done()]


def _readings(points: Sequence[Point]) -> dict[str, dict[str, int | None]]:
    return {p.name: p.cfg.reading for p in points if _reads(p)}


def _reads(point: Point) -> bool:
    """Whether a point reads the training store."""
    return point.cfg.train.regime != "none"


def adopt(point: Point) -> bool:
    """Share a point that another study of the same outputs has done: by a link to its folder. True: it is done now."""
    detach(point.cfg)
    if point.dir.exists():
        return False
    for folder in sorted(Path(point.cfg.paths.outputs).glob(f"*/{point.name}")):
        if is_measured(point.cfg, folder):
            with suppress(FileExistsError):  # another process of this study was first
                point.dir.symlink_to(os.path.relpath(folder, point.dir.parent))
            say(f"{point.name}: done by study {folder.parent.name!r}, shared")
            return True
    return False


def batches(study: Study, left: list[Point]) -> list[slurm.Batch]:
    """What is left of a study as submissions: prepare -> capture -> points -> report. The report comes when the points
    have ended, well or not; where the data could not be made, SLURM drops all that follows."""
    chain: list[slurm.Batch] = []
    for step, after in zip(SHARED, ({}, {SHARED[0]: "afterok"}), strict=True):
        job = Job(step, study.cfg)
        if not job.is_done():
            chain += slurm.batches_of_step(job, after)
    data = dict.fromkeys(SHARED, "afterok")
    training = coupled_batches(study, left, data)
    ended = {batch.name: "afterany" for batch in training if batch.name.startswith("points")}
    return [*chain, *training, slurm.Batch("report", [Job("report", study.cfg)], {**ended, **data})]


def coupled_batches(study: Study, left: list[Point], data: Mapping[str, str]) -> list[slurm.Batch]:
    """The points; with a rolling store, so many at once as share its passes, each group with an array of workers that
    start beside it, one group after the other. Whether the groups fit the cap is seen when the workers start."""
    launch = study.cfg.launch
    reading = [p for p in left if study.cfg.rolls and _reads(p)]
    others = [Job("point", p.cfg) for p in left if not (study.cfg.rolls and _reads(p))]
    found = [slurm.Batch("points", others, data, at_once=launch.slurm.points_at_once)] if others else []
    before: dict[str, str] = {}
    size = launch.rolling.points_at_once
    for number, start in enumerate(range(0, len(reading), size)):
        workers, points = make_session(study.cfg, [p.cfg for p in reading[start : start + size]], number)
        after = {**data, **before}
        found.append(slurm.Batch(f"roll-{number}", workers, after, at_once=len(workers)))
        found.append(slurm.Batch(f"points-{number}", points, after, at_once=len(points)))
        before = dict.fromkeys((f"roll-{number}", f"points-{number}"), "afterany")
    return found


def record(study: Study) -> None:
    """Write what the study is, so that `status`, `logs` and the report need no overrides."""
    config.save(study.cfg, study.dir / "study.yaml")
    points = [{"name": p.name, "overrides": p.overrides, "decode": p.cfg.eval.decode} for p in study.points]
    write_json(study.dir / "points.json", points)


def share_data(cfg: Config, steps: Sequence[str] = SHARED) -> None:
    """Prepare and capture what the points of a study share, unless it is there. No point can run where this fails."""
    for step in steps:
        job = Job(step, cfg)
        if job.is_done():
            say(f"{step}: done already")
            continue
        outcome = run(job)
        if outcome.state != "done":
            raise Failed(outcome.text(step))
        say(f"{step}: done in {duration(outcome.seconds)}")


def _run_coupled(report: Report, groups: list[list[str]]) -> None:
    """Group after group, each with capture workers beside it; one process of a study at a time."""
    study = report.study
    lock = Lock(study.dir / "rolling" / ".lock")
    if not lock.try_acquire():
        say("another process runs the rolling part of this study; waiting for its end")
        lock.acquire()
    try:
        for number, group in enumerate(groups):
            left = [p for p in _not_done(study) if p.name in group]
            if not left:
                continue
            workers, points = make_session(study.cfg, [p.cfg for p in left], number)
            outcomes = Coupled(workers, points).run()
            if any(outcome.state == "cancelled" for outcome in outcomes.values()):
                raise Failed("cancelled by `eagle3 study cancel`; the same command continues")
            for name, outcome in outcomes.items():
                say(f"{name}: {outcome.state} in {duration(outcome.seconds)}")
                if outcome.state not in ("done", "busy"):
                    report.failed[name] = outcome
    finally:
        lock.release()


def _run_points(report: Report, left: list[Point]) -> None:
    total, time_left = len(report.study.points), TimeLeft()
    waiting: set[str] = set()
    while left:
        busy = []
        for point in left:
            outcome = run(Job("point", point.cfg), wait=False)
            if outcome.state == "busy":
                busy.append(point)
                if point.name not in waiting:
                    waiting.add(point.name)
                    say(f"{point.name}: another process works on it ({_who(point)})")
                continue
            if outcome.state == "cancelled":
                raise Failed("cancelled by `eagle3 study cancel`; the same command continues")
            if outcome.state != "done":
                report.failed[point.name] = outcome
            time_left.add(point, outcome.seconds)
            rest = left[left.index(point) + 1 :] + busy
            number = total - len(rest)
            after = time_left.text(rest)
            say(f"[{number}/{total}] {point.name}: {outcome.state} in {duration(outcome.seconds)}{after}")
        left = busy
        if left:
            time.sleep(POLL_S)


def _who(point: Point) -> str:
    holder = holder_of(point.dir / ".lock")
    return f"process {holder.pid} on {holder.host}" if holder else "just ended"

"""Run a study: prepare and capture once, then every point that is not done.

It may be stopped anywhere and run again, and by several processes at once, which share the points out among themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from sweeps.points import Part, Point, Study, plan

ALL = "all"  # the session of the steps that points share
CANCELLED = "cancelled by `eagle3 study cancel`; the same command continues"
POLL_S = 2.0  # between looks at points that other processes work on


class SharedStepFailed(Failed):
    """A step that points share did not succeed."""

    def __init__(self, name: str, outcome: Outcome) -> None:
        super().__init__(outcome.text(name))
        self.name, self.outcome = name, outcome


@dataclass
class Report:
    """What a run of a study did. `failed`: name of a point, or of a step that points share -> how it ended."""

    study: Study
    submitted: bool = False  # to a cluster: the points are to come
    failed: dict[str, Outcome] = field(default_factory=dict)

    @property
    def begun(self) -> list[Path]:
        """Folders of the points that have been started; empty where none of them has a result."""
        folders = [p.dir for p in self.study.points if (p.dir / "config.yaml").is_file()]
        return folders if any((folder / "result.json").is_file() for folder in folders) else []


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

    A failing point does not stop the others, nor does a failing shared step those of other targets. Raises `cli.Failed`
    where all points share a step that fails, or where the study was cancelled. On a cluster (`launch=slurm`) it submits
    what is left and returns.
    """
    study = plan(overrides)
    if study.cfg.rolls and study.cfg.launch.kind == "torchrun":
        raise ValueError(
            "store.mode=rolling with launch=torchrun: a study starts both sides with launch=local or launch=slurm; by "
            "hand, start eagle3 roll on some machines and eagle3 train on others"
        )
    for point in study.points:
        verify(point.cfg)
    for part in study.parts:
        if not study.cfg.dry_run and (missing := missing_data(part.largest.cfg)):
            raise ValueError(f"study {study.cfg.study.name!r}: {missing}")
    say(describe(study))
    report = Report(study)
    left = [(part, _to_look_at(part)) for part in study.parts]
    on_cluster = study.cfg.launch.kind == "slurm"
    if study.cfg.dry_run:
        if on_cluster and any(points for _, points in left):
            say(slurm.show(batches(study.cfg, left)))
        return report
    record(study)
    left = [(part, [p for p in points if not adopt(p)]) for part, points in left]
    left = [(part, points) for part, points in left if points]
    for part, points in left:
        if part.cfg.rolls:  # whether they fit the cap is looked at before the capture
            part.cfg.launch.rolling.session = "-".join(filter(None, (ALL, part.cfg.data_name)))
            write_json(part.cfg.session_file, _readings(points))
    if on_cluster and left:
        submitted = batches(study.cfg, left)
        for batch in submitted:
            if batch.jobs[0].cfg.launch.rolling.session and batch.jobs[0].step == "point":
                write_session(batch.jobs)
        slurm.submit(submitted)
        report.submitted = True
        return report
    _run_parts(report, left, share)
    for name, outcome in report.failed.items():
        say(outcome.text(name))
    return report


def _to_look_at(part: Part) -> list[Point]:
    """The points that are not done; all, where the data will be made anew."""
    changed = [job.name for step in SHARED if (job := Job(step, part.cfg)).has_changed()]
    if not changed:
        return _not_done(part.points)
    say(f"settings or input of {' and '.join(changed)} have changed: done points are looked at again after it")
    return part.points


def _run_parts(report: Report, left: Sequence[tuple[Part, list[Point]]], share: Share) -> None:
    """Prepare the data of all targets, so that a mistake in one of them shows early; then, target by target, capture
    and run the points."""
    ready: list[tuple[Part, list[list[str]]]] = []
    for part, points in left:
        with _going_on(report):
            share_data(part.cfg, SHARED[:1])
            ready.append((part, share(part.cfg, _readings(points)) if part.cfg.rolls else []))
    for number, (part, groups) in enumerate(ready):
        with _going_on(report):
            share_data(part.cfg, SHARED[1:])
            if groups:
                _run_coupled(report, part, groups)
            later = sum(len(_not_done(other.points)) for other, _ in ready[number + 1 :])
            _run_points(report, _not_done(part.points, report), later)  # of the data as they are now


@contextmanager
def _going_on(report: Report) -> Iterator[None]:
    """Without the points of one target, where its data could not be made and there are others."""
    try:
        yield
    except SharedStepFailed as e:
        if len(report.study.parts) == 1:
            raise
        report.failed[e.name] = e.outcome
        say(f"{e.name}: {e.outcome.state}: the points that need it are left out")


def _not_done(points: Sequence[Point], report: Report | None = None) -> list[Point]:
    failed = report.failed if report else {}
    return [p for p in points if p.name not in failed and not Job("point", p.cfg).is_done()]


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


def batches(cfg: Config, left: Sequence[tuple[Part, list[Point]]]) -> list[slurm.Batch]:
    """What is left of the study `cfg` as submissions: for each target prepare -> capture -> points, then the report. It
    comes when the points have ended, well or not; where the data could not be made, SLURM drops all that follows,
    except, of several targets, the report of the others."""
    chain: list[slurm.Batch] = []
    ended: dict[str, str] = {}
    made: dict[str, str] = {}
    left = [(part, points) for part, points in left if points]
    for part, points in left:
        shared = [Job(step, part.cfg) for step in SHARED]
        for job, after in zip(shared, ({}, {shared[0].whole: "afterok"}), strict=True):
            if not job.is_done():
                chain += slurm.batches_of_step(job, after)
        data = {job.whole: "afterok" for job in shared}
        training = coupled_batches(part, points, data, len(left))
        chain += training
        ended |= {batch.name: "afterany" for batch in training if batch.name.startswith("points")}
        made |= data
    return [*chain, slurm.Batch("report", [Job("report", cfg)], ended | (made if len(left) == 1 else {}))]


def coupled_batches(part: Part, left: list[Point], data: Mapping[str, str], among: int = 1) -> list[slurm.Batch]:
    """The points of one target; with a rolling store, so many at once as share its passes, each group with an array of
    workers that start beside it, one group after the other. Whether the groups fit the cap is seen when the workers
    start. `among`: targets that share the number of points that may run at once."""
    launch, suffix = part.cfg.launch, f"-{part.cfg.data_name}" if part.cfg.data_name else ""
    reading = [p for p in left if part.cfg.rolls and _reads(p)]
    others = [Job("point", p.cfg) for p in left if not (part.cfg.rolls and _reads(p))]
    at_once = max(1, launch.slurm.points_at_once // among)
    found = [slurm.Batch(f"points{suffix}", others, data, at_once=at_once)] if others else []
    before: dict[str, str] = {}
    size = launch.rolling.points_at_once
    for number, start in enumerate(range(0, len(reading), size)):
        workers, points = make_session(part.cfg, [p.cfg for p in reading[start : start + size]], number)
        capturing, training = f"roll{suffix}-{number}", f"points{suffix}-{number}"
        after = {**data, **before}
        found.append(slurm.Batch(capturing, workers, after, at_once=len(workers)))
        found.append(slurm.Batch(training, points, after, at_once=len(points)))
        before = dict.fromkeys((capturing, training), "afterany")
    return found


def record(study: Study) -> None:
    """Write what the study is, so that `status`, `logs` and the report need no overrides."""
    config.save(study.cfg, study.dir / "study.yaml")
    for part in study.parts:
        if part.cfg.data_name:
            config.save(part.cfg, study.dir / "targets" / part.cfg.data_name / "study.yaml")
    points = [{"name": p.name, "overrides": p.overrides, "decode": p.cfg.eval.decode} for p in study.points]
    write_json(study.dir / "points.json", points)


def share_data(cfg: Config, steps: Sequence[str] = SHARED) -> None:
    """Prepare and capture what points share, unless it is there. No point of it can run where this fails."""
    for step in steps:
        job = Job(step, cfg)
        if job.is_done():
            say(f"{job.name}: done already")
            continue
        outcome = run(job)
        if outcome.state == "cancelled":
            raise Failed(CANCELLED)
        if outcome.state != "done":
            raise SharedStepFailed(job.name, outcome)
        say(f"{job.name}: done in {duration(outcome.seconds)}")


def _run_coupled(report: Report, part: Part, groups: list[list[str]]) -> None:
    """Group after group, each with capture workers beside it; one process of a study at a time."""
    lock = Lock(report.study.dir / "rolling" / ".lock")
    if not lock.try_acquire():
        say("another process runs the rolling part of this study; waiting for its end")
        lock.acquire()
    try:
        for number, group in enumerate(groups):
            left = [p for p in _not_done(part.points) if p.name in group]
            if not left:
                continue
            workers, points = make_session(part.cfg, [p.cfg for p in left], number)
            outcomes = Coupled(workers, points).run()
            if any(outcome.state == "cancelled" for outcome in outcomes.values()):
                raise Failed(CANCELLED)
            for name, outcome in outcomes.items():
                say(f"{name}: {outcome.state} in {duration(outcome.seconds)}")
                if outcome.state not in ("done", "busy"):
                    report.failed[name] = outcome
    finally:
        lock.release()


def _run_points(report: Report, left: list[Point], later: int) -> None:
    """`later`: points of other targets that come after these."""
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
                raise Failed(CANCELLED)
            if outcome.state != "done":
                report.failed[point.name] = outcome
            time_left.add(point, outcome.seconds)
            rest = left[left.index(point) + 1 :] + busy
            number = total - len(rest) - later
            after = time_left.text(rest)
            say(f"[{number}/{total}] {point.name}: {outcome.state} in {duration(outcome.seconds)}{after}")
        left = busy
        if left:
            time.sleep(POLL_S)


def _who(point: Point) -> str:
    holder = holder_of(point.dir / ".lock")
    return f"process {holder.pid} on {holder.host}" if holder else "just ended"

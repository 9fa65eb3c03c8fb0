"""Run a study: prepare and capture once, then every point that is not done.

It may be stopped anywhere and run again, and by several processes at once, which share the points out among themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle3_train import config
from eagle3_train.cli import Failed
from eagle3_train.config import Config
from eagle3_train.console import duration, say
from eagle3_train.files import write_json
from launch import Job, Outcome, run
from launch.lock import holder_of
from sweeps.estimate import TimeLeft, describe
from sweeps.points import Point, Study, plan

POLL_S = 2.0  # between looks at points that other processes work on


@dataclass
class Report:
    """What a run of a study did. `failed`: point name -> how it ended."""

    study: Study
    failed: dict[str, Outcome] = field(default_factory=dict)


def run_study(overrides: Sequence[str]) -> Report:
    """Plan the study that `overrides` describe and run what is left of it. With `dry_run=true`: print the plan only.

    A failing point does not stop the others. Raises `cli.Failed` where a shared step fails.
    """
    study = plan(overrides)
    say(describe(study))
    report = Report(study)
    if study.cfg.dry_run:
        return report
    record(study)
    left = [p for p in study.points if not Job("point", p.cfg).is_done()]
    if left:
        share_data(study.cfg)
        _run_points(report, left)
    for name, outcome in report.failed.items():
        say(failure(name, outcome))
    return report


def record(study: Study) -> None:
    """Write what the study is, so that `status`, `logs` and the report need no overrides."""
    config.save(study.cfg, study.dir / "study.yaml")
    points = [{"name": p.name, "overrides": p.overrides, "decode": p.cfg.eval.decode} for p in study.points]
    write_json(study.dir / "points.json", points)


def share_data(cfg: Config) -> None:
    """Prepare and capture what the points of a study share, unless it is there. No point can run where this fails."""
    for step in ("prepare", "capture"):
        job = Job(step, cfg)
        if job.is_done():
            say(f"{step}: done already")
            continue
        outcome = run(job)
        if outcome.state != "done":
            raise Failed(failure(step, outcome))
        say(f"{step}: done in {duration(outcome.seconds)}")


def failure(name: str, outcome: Outcome) -> str:
    """How a job failed, with the last lines of its log."""
    return "\n".join([f"{name}: {outcome.state}: {outcome.reason}", *(f"    {line}" for line in outcome.tail)])


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

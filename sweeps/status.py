"""How a study stands, from its files alone: no process is asked, so it works from any machine that sees the folder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table

from eagle3_train import config
from eagle3_train.console import console, duration, say
from eagle3_train.files import json_lines, read_json
from launch.jobs import SHARED, Job, session_of
from launch.lock import holder_of
from launch.supervise import last_words, tail

OF_A_LAUNCHER = re.compile(r"srun:|slurmstepd|[IWE]\d{4} .*torch/distributed/elastic/")  # lines of a log
IN_THE_NAME = ("draft", "data.scale", "seed")  # axes that the name of a point tells


@dataclass(frozen=True)
class JobStatus:
    """`state`: queued | running | done | failed | stopped (its process ended without saying how) | damaged (one of its
    files cannot be read). Times in seconds."""

    name: str
    state: str
    attempt: int = 0
    step: int | None = None  # optimizer steps done
    steps: int | None = None  # of so many
    tokens_per_s: float | None = None
    seconds: float | None = None  # of the last attempt
    seconds_left: float | None = None
    host: str | None = None
    reason: str | None = None
    settings: dict[str, str] = field(default_factory=dict)  # of a point: what the axes of the study set


@dataclass(frozen=True)
class JobFolder:
    """`plan`: the configuration that the study has for it now. There is none of a job that was started without one.
    `planned`: whether `eagle3 study`, as it was last given, runs it."""

    name: str
    step: str
    folder: Path
    plan: Path | None = None
    part: tuple[int, int] | None = None  # see `Job`
    settings: dict[str, str] = field(default_factory=dict)
    planned: bool = True


def jobs(study: Path) -> list[JobFolder]:
    """The shared steps, then the points of the plan, then points that were run without it."""
    if not (study / "study.yaml").is_file() and not any(study.glob("**/config.yaml")):
        raise ValueError(f"{study} holds no study yet: `eagle3 study` starts one (study=NAME chooses another)")
    plans = {path.parent.name: path for path in sorted(study.glob("targets/*/study.yaml"))}
    plans = plans or {"": study / "study.yaml"}
    planned_steps = {f"{step}-{of}" if of else step: plan for of, plan in plans.items() for step in SHARED}
    begun = sorted(p.parent.name for p in study.glob("steps/*/config.yaml"))
    shared = [
        JobFolder(name, name.partition("-")[0], study / "steps" / name, planned_steps.get(name), _part_of(name))
        for name in dict.fromkeys([*planned_steps, *begun])
    ]
    planned = _planned(study / "points.json")
    started = sorted(p.parent.name for p in study.glob("*/config.yaml"))
    names = dict.fromkeys([*planned, *started])
    points = [JobFolder(n, "point", study / n, settings=planned.get(n, {}), planned=n in planned) for n in names]
    return [*shared, *points]


def _part_of(name: str) -> tuple[int, int] | None:
    """The part that a job's name tells."""
    found = re.fullmatch(r".+-(\d+)-of-(\d+)", name)
    return (int(found[1]), int(found[2])) if found else None


def _planned(path: Path) -> dict[str, dict[str, str]]:
    """Name of a point -> what the axes set."""
    try:
        return {point["name"]: point["overrides"] for point in read_json(path)} if path.is_file() else {}
    except (KeyError, TypeError) as e:
        raise ValueError(f"{path} does not hold what it should: `eagle3 study` with the same options writes it") from e


def collect(study: Path) -> list[JobStatus]:
    """All jobs, less the workers of sessions of a rolling store that ended before their end and were made up for: every
    point that was last run in them is done, or has been run in a later one."""
    found = [(job, _readable(study, job)) for job in jobs(study)]
    unfinished = {_session(job) for job, status in found if job.step == "point" and status.state != "done"}
    return [
        status
        for job, status in found
        if job.step != "roll" or status.state in ("running", "done") or _session(job) in unfinished
    ]


def _session(job: JobFolder) -> str:
    with suppress(ValueError):  # a damaged configuration, which its row says
        return session_of(job.folder)
    return ""


def as_json(study: Path) -> str:
    """Name of the job -> its status."""
    return json.dumps({s.name: asdict(s) for s in collect(study)}, indent=1)


def show(study: Path) -> None:
    """Print the table."""
    rows = collect(study)
    # Where the output is no terminal there is no width to keep to.
    console.print(_table(rows), width=None if console.is_terminal else 200)
    say(_counts(rows))


def watch(study: Path, every: float = 2.0) -> None:
    """Show the table anew every few seconds until no job is queued or running, or Ctrl-C."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            rows = collect(study)
            live.update(Group(_table(rows), _counts(rows)), refresh=True)
            if not any(row.state in ("queued", "running") for row in rows):
                return
            time.sleep(every)


def _counts(rows: list[JobStatus]) -> str:
    counts = {state: sum(r.state == state for r in rows) for state in dict.fromkeys(r.state for r in rows)}
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def _table(rows: list[JobStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    settings = [" ".join(f"{k}={_short(v)}" for k, v in row.settings.items() if k not in IN_THE_NAME) for row in rows]
    of_points = ("settings",) if any(settings) else ()
    words = ("job", *of_points, "state", "note")
    for column in ("job", *of_points, "state", "step", "tokens/s", "time", "left", "note"):
        table.add_column(column, justify="left" if column in words else "right", overflow="fold")
    for row, setting in zip(rows, settings, strict=True):
        table.add_row(
            row.name,
            *((setting,) if of_points else ()),
            row.state,
            f"{row.step}/{row.steps or '?'}" if row.step is not None else "",
            f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "",
            duration(row.seconds) if row.seconds is not None else "",
            duration(row.seconds_left) if row.seconds_left is not None else "",
            row.reason or (f"on {row.host}" if row.state == "running" and row.host else ""),
        )
    return table


def _short(value: str) -> str:
    """Of a mapping, which stands for a model of the user's own, its name."""
    named = re.match(r"\{name:'?([\w.-]+)", value)
    return named[1] if named else value


def _readable(study: Path, job: JobFolder) -> JobStatus:
    """One job's damaged file hides no other job."""
    try:
        return replace(_status(study, job), settings=job.settings)
    except ValueError as e:
        return JobStatus(job.name, "damaged", reason=str(e))
    except (AttributeError, KeyError, TypeError):  # JSON, but not what was written there
        files = f"{job.folder}/status.json or metrics.jsonl"
        return JobStatus(job.name, "damaged", reason=f"{files} does not hold what it should: delete it")


def _status(study: Path, job: JobFolder) -> JobStatus:
    path = job.folder / "status.json"
    last: dict[str, Any] = read_json(path) if path.is_file() else {}
    holder = holder_of(job.folder / ".lock")
    attempt = last.get("attempt", 0)
    started = last.get("started")
    progress = _progress(job.folder / "metrics.jsonl")
    if holder:
        seconds = time.time() - started if started else None
        return JobStatus(job.name, "running", attempt, **progress, seconds=seconds, host=holder.host)
    seconds = last["ended"] - started if "ended" in last else None
    progress["seconds_left"] = None
    if _is_done(study, job, last):
        return JobStatus(job.name, "done", attempt, **progress, seconds=seconds)
    if not last:
        return JobStatus(job.name, "queued")
    if last["state"] == "done":
        state, reason = _done_in_part(job)
        return JobStatus(job.name, state, attempt, **progress, seconds=seconds, host=last["host"], reason=reason)
    if last["state"] == "failed":
        log = [line for line in last_words(job.folder) if not OF_A_LAUNCHER.match(line)]
        errors = [line for line in log if re.search("error", line, re.IGNORECASE)]  # ranks' last lines are mixed
        reason = ": ".join([last["reason"], *(errors or log)[-1:]])
        return JobStatus(job.name, "failed", attempt, **progress, seconds=seconds, host=last["host"], reason=reason)
    why = last.get("reason") or "its process was killed, or its machine went down"
    return JobStatus(job.name, "stopped", attempt, **progress, seconds=seconds, host=last["host"], reason=why)


def _done_in_part(job: JobFolder) -> tuple[str, str]:
    """State and reason of a job that ended well and is not done. One that the plan does not have (`eagle3 study tune`,
    `eagle3 train`, a study that was changed since) is not waited for."""
    is_trained = job.step == "point" and (job.folder / "train.json").is_file()
    if is_trained and not (job.folder / "result.json").is_file():
        what, then = "trained, not evaluated", "`eagle3 study` evaluates it"
    else:
        what, then = "done, with other settings or data than now", "`eagle3 study` runs it again"
    return ("queued", f"{what}: {then}") if job.planned else ("done", f"{what}; it is no point of the study's plan")


def _is_done(study: Path, job: JobFolder, last: Mapping[str, Any]) -> bool:
    """By what it made: points and shared steps; by how it ended: all else, and a part of a step that is not done."""
    path = job.plan if job.plan and job.plan.is_file() else job.folder / "config.yaml"
    if job.step in ("point", *SHARED) and path.is_file():
        if Job(job.step, config.relocated(config.load(path), study)).is_done():
            return True
        if job.part is None:
            return False
    return last.get("state") == "done"


def _progress(metrics: Path) -> dict[str, Any]:
    """Step, steps, tokens/s and time left, as the last lines of the training log have them."""
    # The first line is cut by reading the end only, the last may be being written.
    rows = [row for row in json_lines(tail(metrics, lines=20)) if "step" in row]
    values: dict[str, Any] = {"step": None, "steps": None, "tokens_per_s": None, "seconds_left": None}
    if not rows:
        return values
    for key in ("step", "steps", "tokens_per_s"):
        values[key] = next((row[key] for row in reversed(rows) if key in row), None)
    values["steps"] = None if values["steps"] is None else int(values["steps"])
    first, last = rows[0], rows[-1]
    if values["steps"] and last["step"] > first["step"]:
        per_step = (last["time"] - first["time"]) / (last["step"] - first["step"])
        values["seconds_left"] = max(0.0, (values["steps"] - last["step"]) * per_step)
    return values

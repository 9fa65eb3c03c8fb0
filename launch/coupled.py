"""Both sides of a rolling store on this machine: capture workers and the points that train on what they capture."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from pathlib import Path
from typing import Any

from eagle3_train.config import Config
from eagle3_train.console import say
from eagle3_train.files import json_lines, read_object, write_json
from launch.jobs import Job
from launch.local import run
from launch.supervise import Outcome, cut_short

BACKOFF_S = 2.0  # before a killed process is started again
END_S = 120.0  # for the workers, when all points have ended


def make_session(cfg: Config, points: Sequence[Config], number: int) -> tuple[list[Job], list[Job]]:
    """The jobs of a session: workers, and points that share their passes, each with its share of threads and GPUs.
    `number`: of the session in its study, for the name. `write_session` lets them be run."""
    session = f"{number}-{uuid.uuid4().hex[:8]}"
    split = cfg.launch.rolling
    workers = [_part(cfg, session, i, split.workers, "capture_threads", "capture_gpus") for i in range(split.workers)]
    training = [_part(c, session, i, len(points), "train_threads", "train_gpus") for i, c in enumerate(points)]
    return (
        [Job("roll", c, (i, len(workers))) for i, c in enumerate(workers)],
        [Job("point", c) for c in training],
    )


def _part(cfg: Config, session: str, number: int, of: int, threads: str, gpus: str) -> Config:
    part = deepcopy(cfg)
    split = part.launch.rolling
    split.session = session
    if (total := getattr(split, threads)) is not None:
        setattr(split, threads, max(1, total // of))
    if devices := getattr(split, gpus):
        first, behind = len(devices) * number // of, len(devices) * (number + 1) // of
        setattr(split, gpus, devices[first : max(behind, first + 1)])  # of fewer GPUs than processes some share one
    return part


def write_session(points: Sequence[Job]) -> None:
    """Say which runs are expected: shards are kept for them from the start."""
    write_json(points[0].cfg.session_file, {job.cfg.point_name: job.cfg.reading for job in points})


def give_up(job: Job) -> None:
    """A point that has failed for good holds nothing any more: the others go on without it. A file for each, since
    several may fail at the same time, on several machines."""
    if job.cfg.launch.rolling.session:
        path = job.cfg.given_up_file(job.cfg.point_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


class Coupled:
    """Runs a session to its end. A process that is killed from outside is started again, and goes on where it was."""

    def __init__(self, workers: Sequence[Job], points: Sequence[Job]) -> None:
        self.workers, self.points = workers, points
        self._abort = threading.Event()
        self._capture_failed = threading.Event()

    def run(self) -> dict[str, Outcome]:
        """Name of a point -> how it ended. `cli.Failed` is the caller's to raise."""
        write_session(self.points)
        before = {job.name: _version(job.folder / "train.json") for job in self.points}
        pool = ThreadPoolExecutor(len(self.workers) + len(self.points), "coupled")
        try:
            capturing = [pool.submit(self._capture, job) for job in self.workers]
            training = {pool.submit(self._train, job): job for job in self.points}
            try:
                wait(training)
            except BaseException:  # Ctrl-C, SIGTERM: both sides are ended in good order
                self._abort.set()
                wait([*training, *capturing])
                raise
            wait(capturing, timeout=END_S)  # the workers see by themselves that nobody reads any more
        finally:
            self._abort.set()
            pool.shutdown()
            for job in self.points:
                for path in (job.cfg.given_up_file(job.cfg.point_name), job.cfg.session_file):
                    path.unlink(missing_ok=True)
        say(self._balance(before))
        return {job.cfg.point_name: future.result() for future, job in training.items()}

    def _train(self, job: Job) -> Outcome:
        def stop() -> str:
            return "stopped" if self._abort.is_set() else "without capture" if self._capture_failed.is_set() else ""

        outcome = self._run(job, stop)
        if outcome.state != "done" and not self._abort.is_set():
            give_up(job)
        return outcome

    def _capture(self, job: Job) -> Outcome:
        outcome = self._run(job, lambda: "stopped" if self._abort.is_set() else "")
        if outcome.state == "failed":
            say(outcome.text(job.name))
            self._capture_failed.set()
        return outcome

    def _run(self, job: Job, stop: Callable[[], str]) -> Outcome:
        for _ in range(job.cfg.launch.rolling.restarts):
            outcome = run(job, wait=False, stop=stop)
            if stop() or not cut_short(outcome):
                return outcome
            say(f"{job.name}: {outcome.reason}; started again")
            time.sleep(BACKOFF_S)
        return run(job, wait=False, stop=stop)

    def _balance(self, before: Mapping[str, int | None]) -> str:
        """`before`: versions of the points' train.json when the session began."""
        cfg = self.workers[0].cfg
        trained = [path for job in self.points if _version(path := job.folder / "train.json") != before[job.name]]
        captured = [line for line in _captured(cfg) if line["session"] == cfg.launch.rolling.session]
        if not (shares := _shares(captured, trained)):
            return "rolling: no point was trained to its end, so nothing is known of how the sides waited"
        capture = [job.cfg.launch.rolling for job in self.workers]
        training = [job.cfg.launch.rolling for job in self.points]
        gpus = (
            len({gpu for c in capture for gpu in c.capture_gpus}),
            len({gpu for t in training for gpu in t.train_gpus}),
        )
        threads = sum(c.capture_threads or 0 for c in capture), sum(t.train_threads or 0 for t in training)
        for noun, (mine, theirs) in (("gpus", gpus), ("threads", threads)):
            if mine and theirs:
                return f"{_text(*shares)}; {balanced(mine, theirs, *shares, noun)}"
        return _text(*shares)


def waiting(cfg: Config) -> str:
    """How the two sides of a study have waited for each other so far, from its files; empty where nothing has rolled.
    With launch=slurm, where no process sees both sides."""
    captured = _captured(cfg)
    if not (shares := _shares(captured, sorted(Path(cfg.paths.study).glob("*/train.json")))):
        return ""
    workers = 1 + max(line["worker"] for line in captured if line["session"] == captured[-1]["session"])
    wanted = max(1, round(workers * (1 - shares[0]) / max(1 - shares[1], 1e-9)))
    advice = "is balanced" if wanted == workers else f"in place of {workers} would balance"
    return f"{_text(*shares)}; launch.rolling.workers={wanted} {advice}"


def balanced(capture: int, training: int, capture_waited: float, training_waited: float, noun: str) -> str:
    """The split of the same total with which neither side would wait, if both grow with what they have. `*_waited`:
    shares of time."""
    work = capture * (1 - capture_waited), training * (1 - training_waited)
    total = capture + training
    wanted = min(total - 1, max(1, round(total * work[0] / max(sum(work), 1e-9))))
    if wanted == capture:
        return f"the split of {capture} to {training} {noun} is balanced"
    keys = f"launch.rolling.capture_{noun}", f"launch.rolling.train_{noun}"
    return (
        f"of {total} {noun}, {wanted} for capture and {total - wanted} for training would balance ({', '.join(keys)})"
    )


def _shares(captured: Sequence[Mapping[str, Any]], trained: Sequence[Path]) -> tuple[float, float] | None:
    """Shares of time that capture and training waited; None where one of them has not come to an end yet. `trained`:
    the train.json of points."""
    spent = [s for path in trained if path.is_file() and "data" in (s := read_object(path)["wall_seconds"])]
    if not captured or not spent:
        return None
    return (
        _share([(line["busy_s"], line["waited_s"]) for line in captured]),
        _share([(s["train"], s["data"]) for s in spent]),
    )


def _share(times: Sequence[tuple[float, float]]) -> float:
    """Of waiting in the whole; each item is (work, waiting) in seconds."""
    waited = sum(w for _, w in times)
    return waited / max(sum(b for b, _ in times) + waited, 1e-9)


def _text(capture: float, training: float) -> str:
    return f"rolling: capture waited {100 * capture:.0f} % of its time, training {100 * training:.0f} %"


def _captured(cfg: Config) -> list[dict[str, Any]]:
    """What workers have said at their end."""
    log = Path(cfg.paths.study) / "rolling.jsonl"
    return json_lines(log.read_text(encoding="utf-8").splitlines() if log.is_file() else [])


def _version(path: Path) -> int | None:
    """Changes when the file is written anew. Not compared with any clock: the file may lie on another machine."""
    return path.stat().st_mtime_ns if path.is_file() else None

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

from eagle3_train.config import Config, CoupledConfig
from eagle3_train.console import say
from eagle3_train.files import inside, json_lines, read_object, write_json
from launch.jobs import Job, read_if_there, session_of
from launch.local import run
from launch.supervise import Outcome, cut_short

BACKOFF_S = 2.0  # before a killed process is started again
END_S = 120.0  # for the workers, when all points have ended
BOTH_WAIT = 0.25  # share of its time: above it on both sides, the sides do not overlap, whatever either has
UNEQUAL = 0.1  # difference of the shares: below it, the sides are as good as balanced


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
        if not (shares := _of_ended(_captured(cfg, cfg.launch.rolling.session), trained)):
            return "rolling: no point was trained to its end, so nothing is known of how the sides waited"
        capture = [job.cfg.launch.rolling for job in self.workers]
        training = [job.cfg.launch.rolling for job in self.points]
        return f"rolling: {_text(*shares)}{advice(cfg.launch.kind, capture, training, *shares)}"


def waiting(cfg: Config) -> str:
    """How the two sides of a study have waited for each other, from its files: of the group that runs so far, else of
    the last that has ended; empty where nothing is known of both."""
    if shares := _so_far(cfg):
        which = "the group that runs, so far"
    elif (captured := _captured(cfg)) and (shares := _of_session(cfg, captured[-1]["session"])):
        which = "the last group that has ended"
    else:
        return ""
    split = cfg.launch.rolling
    return f"rolling, {which}: {_text(*shares)}{advice(cfg.launch.kind, [split], [split], *shares)}"


def advice(
    kind: str,
    capture: Sequence[CoupledConfig],
    training: Sequence[CoupledConfig],
    capture_waited: float,
    training_waited: float,
) -> str:
    """What would let the sides wait less, after "; "; empty where the settings do not tell. `*_waited`: shares of time.
    `capture`, `training`: what the processes of either side have of the machine; with launch=slurm each has its own."""
    if min(capture_waited, training_waited) > BOTH_WAIT:
        return (
            "; both wait, which no split of the work changes: for room, which is held until the next checkpoint, once "
            "a window (a larger store.cap_gib, a smaller data.window), or, in a short session, for the other side's "
            "start and end"
        )
    if kind == "slurm":
        workers = capture[0].workers
        wanted = max(1, round(workers * (1 - capture_waited) / max(1 - training_waited, 1e-9)))
        words = "is balanced" if wanted == workers else f"in place of {workers} would balance"
        return f"; launch.rolling.workers={wanted} {words}"
    gpus = len({gpu for c in capture for gpu in c.capture_gpus}), len({gpu for t in training for gpu in t.train_gpus})
    threads = sum(c.capture_threads or 0 for c in capture), sum(t.train_threads or 0 for t in training)
    for noun, (mine, theirs) in (("gpus", gpus), ("threads", threads)):
        if mine and theirs:
            return f"; {balanced(mine, theirs, capture_waited, training_waited, noun)}"
    return ""


def balanced(capture: int, training: int, capture_waited: float, training_waited: float, noun: str) -> str:
    """The split of the same total with which neither side would wait, if both grow with what they have. `*_waited`:
    shares of time."""
    work = capture * (1 - capture_waited), training * (1 - training_waited)
    total = capture + training
    wanted = min(total - 1, max(1, round(total * work[0] / max(sum(work), 1e-9))))
    if wanted == capture:
        if abs(capture_waited - training_waited) > UNEQUAL:
            return f"no split of {total} {noun} is nearer to balance than {capture} to {training}"
        return f"the split of {capture} to {training} {noun} is balanced"
    keys = f"launch.rolling.capture_{noun}", f"launch.rolling.train_{noun}"
    return (
        f"of {total} {noun}, {wanted} for capture and {total - wanted} for training would balance ({', '.join(keys)})"
    )


def _so_far(cfg: Config) -> tuple[float, float] | None:
    """Shares of time that either side of the group that runs has waited, as its workers' signs and its points' logs
    have it; None where none runs, or one side has said nothing yet."""
    signs = [read_if_there(inside(cfg.paths.store, f"workers/{n}.json")) for n in range(cfg.launch.rolling.workers)]
    signs = [sign for sign in signs if sign and not sign["ended"]]
    session = Path(cfg.paths.study) / "rolling" / f"{signs[0]['owner']}.json" if signs else None
    if session is None or not session.is_file():
        return None
    captured = [(sign["busy_s"], sign["waited_s"]) for sign in signs]
    trained = [times for name in read_object(session) for times in _logged(Path(cfg.paths.study) / name)]
    return (_share(captured), _share(trained)) if _said(captured) and _said(trained) else None


def _logged(point: Path) -> list[tuple[float, float]]:
    """(work, waiting) in seconds of the present attempt at a point, interval by interval of its log."""
    log = point / "metrics.jsonl"
    rows = json_lines(log.read_text(encoding="utf-8").splitlines() if log.is_file() else [])
    rows = [row for row in rows if "data_wait" in row]
    began, times = read_if_there(point / "status.json").get("started", 0.0), []
    for before, row in zip([{"tokens": 0}, *rows], rows, strict=False):
        seconds = (row["tokens"] - before["tokens"]) / max(row["tokens_per_s"], 1e-9)
        if row["time"] >= began:
            times.append((seconds * (1 - row["data_wait"]), seconds * row["data_wait"]))
    return times


def _of_session(cfg: Config, session: str) -> tuple[float, float] | None:
    """The same of a group that has ended. Its points are those that were last run in it."""
    trained = [p for p in Path(cfg.paths.study).glob("*/train.json") if session_of(p.parent) == session]
    return _of_ended(_captured(cfg, session), trained)


def _of_ended(captured: Sequence[Mapping[str, Any]], trained: Sequence[Path]) -> tuple[float, float] | None:
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
    return sum(w for _, w in times) / max(_said(times), 1e-9)


def _said(times: Sequence[tuple[float, float]]) -> float:
    """Seconds in all."""
    return sum(work + waited for work, waited in times)


def _text(capture: float, training: float) -> str:
    return f"capture waited {100 * capture:.0f} % of its time, training {100 * training:.0f} %"


def _captured(cfg: Config, session: str = "") -> list[dict[str, Any]]:
    """What workers have said at their end, of one session or all."""
    log = Path(cfg.paths.study) / "rolling.jsonl"
    lines = json_lines(log.read_text(encoding="utf-8").splitlines() if log.is_file() else [])
    return [line for line in lines if session in ("", line["session"])]


def _version(path: Path) -> int | None:
    """Changes when the file is written anew. Not compared with any clock: the file may lie on another machine."""
    return path.stat().st_mtime_ns if path.is_file() else None

"""The step `roll`: capture the shards of a rolling store for the runs that read it, and delete what none needs more.

Any number of workers, no coordinator: worker i of n has the shards s with s mod n = i. What may be captured, and what
must go, follows from the marks that the runs leave in the store (`store.stream`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_train.config import Config
from eagle3_train.console import Bar, duration, progress_bar, say
from eagle3_train.device import resolve_device, tune_allocator
from eagle3_train.exits import why
from eagle3_train.files import append_line
from eagle3_train.store import Rolling, StoreSpec, inside, shard_name, shard_number
from eagle3_train.store.folder import Folder
from eagle3_train.store.rolling import KEPT, kept_spec
from eagle3_train.store.signs import READERS, WORKERS, Sign, Watch, read_sign, read_signs
from eagle3_train.store.stream import within
from eagle3_train.target import prepare_target
from eagle3_train.trained import is_trained

from .backend import Backend, open_backend
from .passes import Reading, cap_bytes, check_room, expected_runs, make_stream, read_rolling, refuse_while_captured
from .plan import Job, plan
from .run import Worker

LOG = "rolling.jsonl"  # in the study's folder: a line a worker that has come to its end
POLL_S, REMOTE_POLL_S = 0.2, 5.0  # between looks at the marks while there is no room


def roll(cfg: Config, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Capture for the expected runs until all of them have ended. Returns {"shards", "busy_s", "waited_s"}.

    Raises:
        ValueError: no rolling store, one of another spec, one that other workers capture, or runs that do not fit the
            cap.
        TimeoutError: a run that holds the room has given no sign of life for `store.silent_minutes`.
    """
    if not cfg.rolls:
        raise ValueError("eagle3 roll captures for store.mode=rolling; eagle3 capture captures a whole store")
    device = resolve_device(cfg.device)
    target = prepare_target(cfg.target, cfg.paths.target)
    job = plan(cfg, target, device)[0]
    if job.finished:
        say(f"{job.path} is a finished store: nothing rolls")
        return {"shards": 0, "busy_s": 0.0, "waited_s": 0.0}
    rolling = read_rolling(job)
    tune_allocator()
    roller = Roller(cfg, Worker(cfg, target, device, rank), job, rolling, rank, world)
    check_room(cfg, rolling, job.lengths, roller.runs)
    return roller.run()


@dataclass(frozen=True)
class Look:
    """What a worker goes by."""

    marks: Mapping[str, int]
    reach: int  # the last use that may be on disk now
    shard: int | None  # to capture next: the first of the worker's own that is missing
    stores: list[tuple[Folder, StoreSpec]]  # where it is to be written


class Roller:
    """One worker."""

    def __init__(self, cfg: Config, worker: Worker, job: Job, rolling: Rolling, rank: int, world: int) -> None:
        self.cfg, self.worker, self.job, self.rolling = cfg, worker, job, rolling
        self.rank, self.world, self.cap = rank, world, cap_bytes(cfg)
        # Which workers belong together: those of a session, or by hand those of a study.
        self.owner = cfg.launch.rolling.session or cfg.paths.study
        self.shards_in, self.copies_in = Folder(job.path), Folder(inside(job.path, KEPT))
        self.runs: Mapping[str, Reading] = expected_runs(cfg)
        self.stream = make_stream(cfg, rolling, job.lengths, self.runs)
        self._stale = self._ended_signs()
        self.captured, self.busy_s, self.waited_s = 0, 0.0, 0.0
        self._looked = 0.0
        self._last: tuple[Any, ...] = ()  # marks and reach at the last look
        self._watch = Watch(
            "run",
            60 * cfg.store.silent_minutes,
            "Start it again (the same command continues at its checkpoint), or run eagle3 roll without it",
        )

    def run(self) -> dict[str, Any]:
        self._take_over()
        total = sum(self.job.tokens(use % self.stream.n_shards) for use in range(self.stream.end) if self._is_mine(use))
        facts = {"owner": self.owner, "world": self.world, "runs": list(self.runs), "claim": None, "ended": False}
        facts["cap_bytes"] = self.cap
        sign = Sign(self.shards_in, WORKERS, str(self.rank), doing="starting", busy_s=0.0, waited_s=0.0, **facts)
        try:
            with ExitStack() as stack, progress_bar("rolling", total, "tokens", show=self.rank == 0) as bar:
                self._work(sign, stack, bar)
            sign.close(ended=True, claim=None, doing="ended: all runs have ended")
        except BaseException as e:
            with suppress(OSError):  # as a rule what has ended the work
                # What a signal ends, the launcher starts again; what fails by itself, it does not.
                sign.close(ended=True, failed=isinstance(e, Exception), claim=None, doing=f"ended: {why(e)}")
            raise
        append_line(
            Path(self.cfg.paths.study) / LOG,
            json.dumps({"session": self.cfg.launch.rolling.session, "worker": self.rank} | self._report()),
        )
        share = 100 * self.waited_s / max(self.busy_s + self.waited_s, 1e-9)
        say(
            f"roll: worker {self.rank} captured {self.captured} shards in {duration(self.busy_s)}, and waited "
            f"{duration(self.waited_s)} for the runs ({share:.0f} %)"
        )
        return self._report()

    def _take_over(self) -> None:
        """Refuse while others capture here whom this worker would disturb: of other runs, of the same number, or of
        another number of workers. Then remove what earlier ones have left."""
        ours = (self.owner, self.world)
        signs = refuse_while_captured(
            self.shards_in,
            lambda name, sign: name != str(self.rank) and (sign.get("owner"), sign.get("world")) == ours,
        )
        for name in signs:
            if not name.isdecimal() or int(name) >= self.world:
                with suppress(FileNotFoundError):  # another worker was first
                    self.shards_in.child(WORKERS).remove(f"{name}.json")
        for folder in (self.shards_in, self.copies_in):
            folder.remove_temporaries("shard-", lambda name: (shard_number(name) or 0) % self.world == self.rank)

    def _report(self) -> dict[str, Any]:
        return {"shards": self.captured, "busy_s": self.busy_s, "waited_s": self.waited_s}

    def _work(self, sign: Sign, stack: ExitStack, bar: Bar) -> None:
        backend: Backend | None = None
        claim: int | None = None
        while True:
            look = self._look()
            if all(look.marks[name] >= course.end for name, course in self.stream.courses.items()):
                return
            times = {"busy_s": self.busy_s, "waited_s": self.waited_s, "runs": list(self.runs)}
            if look.shard is None:
                claim = None
                if backend is not None and look.reach >= self.stream.end - 1:
                    stack.pop_all().close()  # all is captured: give the memory back
                    backend = None
                began = time.monotonic()
                self._wait(sign, look, times)
                self.waited_s += time.monotonic() - began
            elif claim != look.shard:
                # Said before it is begun, and looked again: a worker that sees fewer runs than we did counts it.
                claim = look.shard
                sign.say(claim=claim, doing=f"capturing shard {claim}", **times)
            else:
                self._expect_number(sign)
                if backend is None:
                    dtype = self.job.compute_dtype
                    opened = open_backend(self.cfg, self.worker.target, dtype, self.worker.device, [self.job])
                    backend = stack.enter_context(opened)
                began = time.monotonic()
                stores = [(folder.uri, spec) for folder, spec in look.stores]
                try:
                    self.worker.shard(backend, self.job, claim, bar, stores)
                except OSError:  # the other process has removed the unfinished file?
                    self._expect_number(sign)
                    raise
                claim = None  # the same shard may be due again, in a later pass
                sign.note(claim=None)
                self.captured += 1
                self.busy_s += time.monotonic() - began

    def _expect_number(self, sign: Sign) -> None:
        if sign.is_replaced():
            raise ValueError(f"worker {self.rank} seemed dead, and another process has its number now: ended")

    def _look(self) -> Look:
        """What is to be done now; what no run needs any more is deleted first.

        What is there is listed before the marks are read: what was missing then, and is needed by marks of later, no
        run has been past. The other way round, a run could have read a shard and let it be deleted in between.
        """
        present = [folder.sizes() for folder in (self.shards_in, self.copies_in)]
        self._read_runs()
        marks = self._marks()
        reach = self._reach(marks)
        self._delete(marks, reach)
        return Look(marks, reach, *self._next(present, marks, reach))

    def _reach(self, marks: Mapping[str, int]) -> int:
        """As far as the cap lets the workers go. What other workers write at the moment for runs that are expected no
        more takes room too, until it is there and deleted."""
        reach = self.stream.reach(marks, self.cap)
        if self.world == 1:
            return reach
        signs = read_signs(self.shards_in, WORKERS)
        claims = {s["claim"] for name, s in signs.items() if name != str(self.rank) and s.get("owner") == self.owner}
        while True:
            live = self.stream.on_disk(marks, reach)[0]
            foreign = [shard for shard in claims - {None} if not within(shard, live)]
            taken = sum(self.rolling.shard_bytes[s] for s in foreign)
            if self.cfg.reads_copies:
                taken += sum(self.rolling.kept_bytes[s] for s in foreign)
            if (nearer := self.stream.reach(marks, self.cap - taken)) >= reach:
                return reach
            reach = nearer

    def _read_runs(self) -> None:
        """A run that its launcher has given up is expected no more."""
        runs = expected_runs(self.cfg)
        if runs != self.runs:
            self.runs = runs
            self.stream = make_stream(self.cfg, self.rolling, self.job.lengths, runs)

    def _marks(self) -> dict[str, int]:
        """Of a run that has not shown up, and of one whose end is not of now: from its start."""
        marks = {}
        for name, course in self.stream.courses.items():
            sign = read_sign(self.shards_in, READERS, name)
            is_of_now = sign is not None and sign["session"] == self.cfg.launch.rolling.session
            if sign is None or (sign["ended"] and (not is_of_now or sign == self._stale.get(name))):
                marks[name] = 0
            else:
                marks[name] = course.end if sign["ended"] else sign["mark"]
        return marks

    def _ended_signs(self) -> dict[str, dict[str, Any]]:
        """Of runs that ended before this worker began, and whose results are gone: they will run again.

        By hand all sessions are one. What ends from now on is believed without a look: its results may lie on another
        machine.
        """
        if self.cfg.launch.rolling.session:
            return {}
        signs = {name: read_sign(self.shards_in, READERS, name) for name in self.runs}  # of the one run of `cfg`
        return {name: sign for name, sign in signs.items() if sign and sign["ended"] and not is_trained(self.cfg)}

    def _delete(self, marks: Mapping[str, int], reach: int) -> None:
        for folder, live in zip((self.shards_in, self.copies_in), self.stream.on_disk(marks, reach), strict=True):
            for name in folder.sizes():
                number = shard_number(name)
                if number is not None and not within(number, live):
                    with suppress(FileNotFoundError):  # another worker was first
                        folder.remove(name)

    def _next(
        self, present: list[dict[str, int]], marks: Mapping[str, int], reach: int
    ) -> tuple[int | None, list[tuple[Folder, StoreSpec]]]:
        """The first shard of mine that is missing, and where it is to be written."""
        spec = self.job.spec
        shards, copies = self.stream.on_disk(marks, reach)
        places = [(self.shards_in, spec, shards), (self.copies_in, kept_spec(spec), copies)]
        for shard in self.stream.order(marks, reach):
            if shard % self.world != self.rank:
                continue
            name = shard_name(shard, spec.n_shards)
            missing = [
                (folder, of)
                for (folder, of, live), there in zip(places, present, strict=True)
                if name not in there and within(shard, live)
            ]
            if missing:
                return shard, missing
        return None, []

    def _is_mine(self, use: int) -> bool:
        first_pass = self.stream.kept_bytes is None or use < self.stream.n_shards
        is_needed = any(course.needs(use) for course in self.stream.courses.values())
        return first_pass and is_needed and use % self.stream.n_shards % self.world == self.rank

    def _wait(self, sign: Sign, look: Look, times: Mapping[str, Any]) -> None:
        marks, reach = look.marks, look.reach
        going = [name for name, course in self.stream.courses.items() if marks[name] < course.end]
        lowest = min(marks[name] for name in going)
        holders = [name for name in going if marks[name] == lowest]
        ended = reach >= self.stream.end - 1
        what = (
            f"waiting for {'the end' if ended else 'room, which is held for the checkpoints'} of {', '.join(holders)}"
        )
        sign.note(doing=what, claim=None, **times)
        if (now := (*marks.values(), reach)) != self._last:  # something moves
            self._last, self._looked = now, 0.0
            self._watch.begin()
        if time.monotonic() - self._looked > REMOTE_POLL_S:
            self._looked = time.monotonic()
            self._watch.look(read_signs(self.shards_in, READERS), holders, what)
        time.sleep(POLL_S if self.shards_in.is_local else REMOTE_POLL_S)

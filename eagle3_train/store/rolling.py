"""The rolling store: shards come while it is read, and go when every run that reads it is past them (docs/rolling.md).

rolling.json        in place of the manifest: spec, fingerprint, counts, and the bytes of each shard, at most
index.parquet       sample_id, source, n_tokens, n_supervised of each row: known before anything is captured
shard-*.parquet     those that are there now; kept/: their fp8 copies, with store.later_epochs=fp8
readers/, workers/  what the two sides say of themselves (`signs`)
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .codec import read_dtype
from .counts import NAME as COUNTS
from .counts import kept_counts, write_counts
from .folder import Folder
from .index import INDEX, Index
from .manifest import MANIFEST, ROLLING, Manifest, ShardEntry, parquet_bytes, read_shard, rows_digest
from .plan import BatchPlan
from .reader import Store, _Shard
from .schema import MAY_DIFFER, SCHEMA_VERSION, Sequence, StoreSpec, arrow_schema
from .signs import READERS, WORKERS, Sign, Watch, read_signs
from .stream import Course, shards_of, within
from .writer import MAX_ROW_GROUP_ROWS, remedy, shard_rows

KEPT = "kept"
POLL_S, REMOTE_POLL_S = 0.05, 1.0  # between tries to open a shard
LOOK_S = 5.0  # between looks at what the workers say


@dataclass(frozen=True)
class Rolling:
    """What is known of a store before it is captured."""

    fingerprint: str  # that of the finished store
    spec: StoreSpec
    rows: int
    tokens: int
    supervised_tokens: int
    shard_bytes: tuple[int, ...]  # of each shard's file, at most
    kept_bytes: tuple[int, ...]  # of its fp8 copy

    @classmethod
    def read(cls, folder: Folder) -> Rolling:
        """ValueError where there is none, or one that cannot be read."""
        try:
            value = json.loads(folder.read(ROLLING))
            spec = StoreSpec.from_json({**value["spec"], "schema_version": value.pop("schema_version")}, ROLLING)
            counts = {name: tuple(value[name]) for name in ("shard_bytes", "kept_bytes")}
            return cls(**value | counts | {"spec": spec})
        except FileNotFoundError as e:
            raise ValueError(f"{folder.uri} is no rolling store yet: run eagle3 capture store.mode=rolling") from e
        except (json.JSONDecodeError, KeyError, TypeError) as e:
            raise ValueError(
                f"{folder.show(ROLLING)} is damaged ({e!r}): delete it and run eagle3 capture again, which writes it"
            ) from e

    @classmethod
    def of(cls, spec: StoreSpec, rows: pa.Table) -> Rolling:
        """`rows`: sample_id, source, n_tokens, n_supervised of all rows, in the store's order."""
        return cls(
            fingerprint=spec.fingerprint(rows_digest(rows)),
            spec=spec,
            rows=len(rows),
            tokens=int(pc.sum(rows["n_tokens"]).as_py()),
            supervised_tokens=int(pc.sum(rows["n_supervised"]).as_py()),
            shard_bytes=_most_bytes(spec, rows),
            kept_bytes=_most_bytes(kept_spec(spec), rows),
        )


def write_rolling(path: str | Path, rolling: Rolling, rows: pa.Table, counts: np.ndarray) -> None:
    """Make `path` a rolling store, of these rows (see `Rolling.of`); `counts` [V]: supervised tokens of them by id."""
    folder = Folder(path)
    folder.write(INDEX, parquet_bytes(rows))
    write_counts(folder, rolling.fingerprint, counts)
    spec = {name: value for name, value in rolling.spec.to_json().items() if name != "schema_version"}
    value = {"schema_version": SCHEMA_VERSION, **asdict(rolling), "spec": spec}
    folder.write(ROLLING, (json.dumps(value, indent=1) + "\n").encode())


def is_rolling(path: str | Path) -> bool:
    """Whether what lies at `path` rolls: a finished store does not, whatever it once was."""
    names = Folder(path).sizes()
    return ROLLING in names and MANIFEST not in names


def spec_at(path: str | Path) -> StoreSpec:
    """Of the store at `path`, finished or rolling. ValueError where there is none."""
    folder = Folder(path)
    return Rolling.read(folder).spec if is_rolling(path) else Manifest.read(folder).spec


def kept_spec(spec: StoreSpec) -> StoreSpec:
    """Of the fp8 copies that later epochs read."""
    return replace(spec, dtype="fp8")


def _most_bytes(spec: StoreSpec, rows: pa.Table) -> tuple[int, ...]:
    """Bytes of each shard's file, at most: room is given out before a shard is written.

    Beside the values: Parquet's levels (below a byte a value of a list), a length or offset a row and column, headers
    and footer entries a row group and column, and the spec, which a footer holds three times (once in base 64).
    """
    lengths = rows["n_tokens"].to_numpy().astype(np.int64)
    names = np.zeros(len(rows), np.int64)
    for column in ("sample_id", "source"):
        names += pc.binary_length(rows[column]).to_numpy()
    columns = len(arrow_schema(spec))
    footer = 16_384 + 5 * len(json.dumps(spec.to_json()))
    found = []
    for shard in range(spec.n_shards):
        part = shard_rows(spec.n_rows, spec.n_shards, shard)
        tokens, n = int(lengths[part.start : part.stop].sum()), len(part)
        payload = spec.estimate_bytes(tokens) + 2 * tokens * columns
        # A group is closed by the row that would not fit: two neighbours together are above the limit.
        groups = 2 + 2 * payload // (spec.row_group_mib << 20) + n // MAX_ROW_GROUP_ROWS
        text = int(names[part.start : part.stop].sum())
        found.append(payload + text + 8 * n * columns + 512 * groups * columns + footer)
    return tuple(found)


class Cancelled(Exception):
    """The reader was closed while it waited."""


class RollingStore(Store):
    """A store whose shards come and go. A run that `follow`s its plan here keeps the shards that it still needs."""

    def __init__(self, folder: Folder, rolling: Rolling, index: Index, limit_minutes: float = 30.0) -> None:
        super().__init__(folder, rolling.spec, rolling.fingerprint, index)
        self._entries: dict[int, tuple[ShardEntry, pa.Table]] = {}
        self._later = self  # where the rows of later epochs are read
        self._run = self._session = ""
        self._course: Course | None = None
        self._sign: Sign | None = None
        self._last_use = 0  # that any step has asked for
        self._moving = threading.Lock()  # the reading thread opens, the training one closes
        self._watch = Watch(
            "capture worker",
            60 * limit_minutes,
            "Start the workers (eagle3 roll, or eagle3 study again), then the same command: it continues at its "
            "checkpoint",
        )

    @classmethod
    def open(cls, path: str | Path, limit_minutes: float = 30.0, keeps_fp8: bool = False) -> RollingStore:
        """`limit_minutes`: of waiting for workers that give no sign of life; then TimeoutError. `keeps_fp8`: later
        epochs read fp8 copies of what the first has read."""
        folder = Folder(path)
        rolling = Rolling.read(folder)
        again = f"delete {ROLLING} beside it and run eagle3 capture again, which writes both"
        try:
            index = Index(folder, rolling.rows)
        except ValueError as e:
            raise ValueError(f"{folder.show(INDEX)} is missing or damaged: {again}") from e
        if kept_counts(folder, rolling.fingerprint, rolling.spec.vocab_size) is None:
            raise ValueError(f"{folder.show(COUNTS)} is missing or damaged: {again}")
        store = cls(folder, rolling, index, limit_minutes)
        if keeps_fp8:
            store._later = cls(
                folder.child(KEPT), replace(rolling, spec=kept_spec(rolling.spec)), store.index, limit_minutes
            )
        return store

    def require_whole(self) -> None:
        """Nothing of it need be there."""

    def follow(self, run: str, plan: BatchPlan, step: int, session: str, is_main: bool) -> None:
        self._run, self._course, self._session = run, Course(plan, len(self), self.spec.n_shards), session
        self._watch.quiet = not is_main
        if is_main:
            facts = {"session": session, "mark": self._course.mark(step), "step": step, "ended": False}
            self._sign = Sign(self.folder, READERS, run, doing=f"at step {step}", **facts)

    def needs_checkpoint(self, saved: int, step: int) -> bool:
        assert self._course
        return self._course.mark(step) > self._course.mark(saved)

    def release(self, step: int) -> None:
        assert self._course
        with self._moving:
            held = self._course.held(self._course.mark(step), self._last_use)
            for store in (self, self._later):
                for shard in list(store._entries):
                    if not within(shard, held):
                        store._shards.drop(shard)
                        del store._entries[shard]

    def saved(self, step: int) -> None:
        assert self._course
        if self._sign:
            with suppress(OSError):  # a server that is away for a moment: then it is said with the next beat
                self._sign.say(mark=self._course.mark(step), step=step)

    def finished(self, run: str, session: str) -> None:
        sign = self._sign or Sign(
            self.folder, READERS, run, session=session, mark=0, step=0, ended=True, doing="finished"
        )
        sign.close(ended=True, doing="finished")
        self._sign = None

    def read_step(
        self, plan: BatchPlan, step: int, rank: int, world: int, readers: Executor | None, cancelled: Callable[[], bool]
    ) -> list[Sequence]:
        """Waits for the shards of the whole batch, not of this rank's rows alone: ranks that wait together meet no time
        limit of a collective."""
        epochs = plan.batch_epochs(step)
        shards = shards_of(plan.batch(step), len(self), self.spec.n_shards)
        with self._moving:
            self._last_use = max(self._last_use, int((epochs * self.spec.n_shards + shards).max()))
        later = epochs > 0 if self._later is not self else np.zeros(len(epochs), bool)
        for store, wanted in ((self, shards[~later]), (self._later, shards[later])):
            self._wait_for(store, np.unique(wanted).tolist(), cancelled)
        if self._sign:
            self._sign.note(doing=f"at step {step}")
        rows = plan.rank_rows(step, rank, world)
        if not later.any():
            return self.read_batch(rows, readers)
        from_later = plan.rank_epochs(step, rank, world) > 0
        first = iter(self.read_batch(rows[~from_later], readers))
        self._later.pinned = self.pinned
        copies = iter(self._later.read_batch(rows[from_later], readers))
        dtype = read_dtype(self.spec.dtype)
        return [
            replace(s, hidden=s.hidden.to(dtype)) if is_copy else s
            for is_copy, s in ((is_copy, next(copies if is_copy else first)) for is_copy in from_later.tolist())
        ]

    def _wait_for(self, store: RollingStore, shards: list[int], cancelled: Callable[[], bool]) -> None:
        """Until all `shards` of `store` are there, and opened."""
        missing, looked, waits, began = shards, 0.0, False, time.monotonic()
        beats: dict[str, int] = {}  # of the workers, when the waiting began
        while missing := [shard for shard in missing if not store._try_open(shard)]:
            if cancelled():
                raise Cancelled
            if not waits:
                self._watch.begin()
                waits = True
            what = f"waiting for shard {missing[0]}"
            if self._sign:
                self._sign.note(doing=what)
            if time.monotonic() - looked > LOOK_S:
                workers, looked = read_signs(self.folder, WORKERS), time.monotonic()
                # A worker that has gone leaves its file, and one of its number may come again: the shard's own counts.
                world = max((sign["world"] for sign in workers.values()), default=1)
                worker = str(missing[0] % world)
                if worker in workers:
                    self._expect_no_failure(workers[worker], what)
                    self._expect_to_be_served(workers[worker], beats.setdefault(worker, workers[worker]["beat"]))
                self._watch.look(workers, [worker], what, [worker] if self._has_ended(workers.get(worker)) else [])
            # Seldom where it takes long: a thousand ranks ask the same file system.
            first = POLL_S if self.folder.is_local else REMOTE_POLL_S
            time.sleep(min(max(first, (time.monotonic() - began) / 10), REMOTE_POLL_S))

    def _has_ended(self, worker: Mapping[str, Any] | None) -> bool:
        """By its own word; not one of an earlier session, whose successor is to come."""
        return worker is not None and worker["ended"] and self._session in ("", worker["owner"])

    def _expect_no_failure(self, worker: Mapping[str, Any], what: str) -> None:
        """ValueError where a worker of this run's session has failed by itself: its launcher starts it no more. By hand
        anyone may."""
        if self._session and self._has_ended(worker) and worker.get("failed"):
            raise ValueError(f"{what}: {self._watch.describe_failed(worker)}. {self._watch.remedy}")

    def _expect_to_be_served(self, worker: Mapping[str, Any], beat: int) -> None:
        """ValueError where a worker that lives (its sign is newer than `beat`) captures for other runs alone."""
        if worker["beat"] != beat and not worker["ended"] and self._run not in worker["runs"]:
            raise ValueError(
                f"{self.folder.uri} is captured for {', '.join(worker['runs']) or 'no run'}, and not for {self._run}: "
                "wait for the end of these, and start eagle3 roll with the same overrides as this run; or run both as "
                "points of one study"
            )

    def _try_open(self, shard: int) -> bool:
        """Open a shard where it is there; it stays open until it is released."""
        if shard in self._shards:
            return True
        try:
            self._entries[shard] = self._read_entry(shard)
            self._shards.get(shard, self._open_shard)
        except FileNotFoundError:
            return False
        return True

    def _read_entry(self, shard: int) -> tuple[ShardEntry, pa.Table]:
        try:
            entry, part = read_shard(self.folder, self.spec, shard, MAY_DIFFER)
        except ValueError as e:
            raise ValueError(f"{e}. While eagle3 roll runs, it is enough to delete it: a worker redoes it") from e
        rows = shard_rows(len(self), self.spec.n_shards, shard)
        if not np.array_equal(part["n_tokens"].to_numpy(), self.index.n_tokens[rows.start : rows.stop]):
            where = self.folder.show(entry.name)
            raise ValueError(f"{where} does not hold the rows that were announced: {remedy(where)}")
        return entry, part

    def reopen(self) -> None:
        super().reopen()
        if self._later is not self:
            self._later.reopen()

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        shards = shards_of(rows, len(self), self.spec.n_shards)
        places = np.empty((3, len(rows)), np.int64)
        for shard in np.unique(shards).tolist():
            if shard not in self._entries:
                self._entries[shard] = self._read_entry(shard)
            part, here = self._entries[shard][1], shards == shard
            within = rows[here] - shard_rows(len(self), self.spec.n_shards, shard).start
            places[:, here] = [part[name].to_numpy()[within] for name in ("row_group", "row", "offset")]
        return shards, *places

    def _open_shard(self, number: int) -> _Shard:
        return self._open(self._entries[number][0], number)

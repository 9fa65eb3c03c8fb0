"""Read a store: open it from its manifest and index alone, then stream any rows in any order."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from .codec import DTYPES, decode, read_dtype
from .folder import Folder, RangeReader
from .index import Index
from .manifest import Manifest, ShardEntry
from .plan import BatchPlan
from .schema import HIDDEN, MAY_DIFFER, SCALE, Sequence, StoreSpec, arrow_schema
from .verify import Problem, id_problems, verify
from .writer import PREFIX, expect_own, read_footer, remedy

CACHED_COLUMN_BYTES = 128 << 20  # small columns of recently read row groups
RUN = 16  # neighbouring row groups whose small columns are read at once: some hundred KiB beside half a GiB of states
OPEN_SHARDS = 128
SMALL_BATCH_BYTES = 32 << 20  # on a disk, a smaller batch is copied sooner than it is handed to threads
SAME_TARGET = ("target_hash", "tokenizer_hash", "layer_ids", "hidden_size", "vocab_size")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Store:
    """A finished store. `store[i]` and `read(rows)` give sequences; rows are numbered in the store's global order.

    Every row's hidden states are one exact byte range of a shard, so a rank reads its own rows and nothing around them.
    The small columns are decoded some row groups at a time and kept in a small cache. Threads may share a store.
    """

    manifest: Manifest  # not of a rolling store
    may_differ: tuple[str, ...] = MAY_DIFFER  # fields of the spec in which shards may differ from it
    pinned: bool = False  # hidden states are read to memory from which a GPU copies by itself

    def __init__(self, folder: Folder, spec: StoreSpec, fingerprint: str, index: Index) -> None:
        self.folder, self.spec, self.fingerprint, self.index = folder, spec, fingerprint, index
        self._columns = [f.name for f in arrow_schema(spec) if f.name != HIDDEN]
        self._shards: _Cache[int, _Shard] = _Cache(OPEN_SHARDS, lambda _: 1)
        self._runs: _Cache[tuple[int, int], _Run] = _Cache(CACHED_COLUMN_BYTES, lambda g: g.nbytes)

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """Reads the manifest and the index's footer; no shard. ValueError says what is wrong and the way out."""
        folder = Folder(path)
        manifest = Manifest.read(folder)
        store = cls(folder, manifest.spec, manifest.fingerprint, Index(folder, manifest.rows))
        store.manifest, store.may_differ = manifest, manifest.may_differ
        return store

    def __len__(self) -> int:
        return self.spec.n_rows

    def expect(self, **wanted: Any) -> None:
        """Compare fields of the spec (`target_hash=`, `tokenizer_hash=`, `layer_ids=`, `dtype=` ...) before any work.

        ValueError lists what differs. An unknown name is the caller's error (AttributeError).
        """
        differences = []
        for name, value in wanted.items():
            found = getattr(self.spec, name)
            if name == "layer_ids":
                value = tuple(value)
            if found != value:
                differences.append(f"{name}: the store has {found!r}, this run wants {value!r}")
        if differences:
            raise ValueError(
                f"store {self.folder.uri} does not fit: {'; '.join(differences)}. Point paths.store at a store "
                "captured with this configuration, or capture one (eagle3 capture) into an empty folder"
            )

    def expect_same_target(self, training: StoreSpec) -> Store:
        """ValueError where the states are not those that a head reads which is trained on a store of `training`."""
        self.expect(**{name: getattr(training, name) for name in SAME_TARGET})
        return self

    def require_whole(self) -> None:
        """Compare the sizes of all shards with the manifest's, by one listing and no read: before any long work.

        ValueError names the shards that are cut or missing and what repairs them.
        """
        sizes = self.folder.sizes()
        bad = [s for s in self.manifest.shards if sizes.get(s.name) != s.bytes]
        if bad:
            shown = [
                f"{self.folder.show(s.name)} "
                + (f"has {sizes[s.name]:,} of {s.bytes:,} bytes" if s.name in sizes else "is missing")
                for s in bad[:3]
            ]
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            there = " ".join(self.folder.show(s.name) for s in bad if s.name in sizes)
            remove = f"remove them (rm {there}) and " if there else ""
            raise ValueError(
                f"{'; '.join(shown)}{more}: {remove}run eagle3 capture again (of a study: eagle3 study retry capture), "
                "which redoes these alone"
            )

    def require_own(self) -> Store:
        """Compare the spec of each shard that is there with the manifest's: a footer read a shard.

        ValueError names one that another capture wrote, or that is no whole file. Reading does the same as it comes to
        a shard.
        """
        present = self.folder.sizes()
        for name in (s.name for s in self.manifest.shards if s.name in present):
            with self.folder.open(name) as f:
                where = self.folder.show(name)
                expect_own(read_footer(f, where), self.spec, where, self.may_differ)
        return self

    def __getitem__(self, row: int) -> Sequence:
        (sequence,) = self.read_batch([row])
        return sequence

    def read(self, rows: Iterable[int], readers: int = 1) -> Iterator[Sequence]:
        """Stream sequences of `rows`, in that order, one alive at a time (`readers` of them with several threads).

        `readers` > 1 hides the latency of an object store or a disk.
        """
        if readers == 1:
            for row in rows:
                yield self[row]
            return
        ahead: deque[Future[Sequence]] = deque()
        with ThreadPoolExecutor(readers, "store-reader") as pool:
            try:
                for row in rows:
                    ahead.append(pool.submit(self.__getitem__, row))
                    if len(ahead) >= readers:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def read_batch(
        self, rows: Many[int] | np.ndarray, readers: Executor | None = None, check: bool = True, states: bool = True
    ) -> list[Sequence]:
        """Sequences of `rows`, in that order, their hidden states end to end in one tensor; without `states` these are
        of no token, and not read.

        Each is read straight to its place, and `concatenate` gives the whole without a copy. `readers`: threads that
        read rows at once; None: this one. `check`: ValueError where a token id cannot be one; `verify` looks itself.
        """
        wanted = np.asarray(rows, np.int64)
        for row in wanted[(wanted < 0) | (wanted >= len(self))]:
            raise IndexError(f"row {row} of a store of {len(self)} rows")
        spec = self.spec
        lengths = self.index.n_tokens[wanted].astype(np.int64)
        ends = np.cumsum(lengths)
        shape = (int(lengths.sum()) if states else 0, len(spec.layer_ids), spec.hidden_size)
        batch = torch.empty(shape, dtype=read_dtype(spec.dtype), pin_memory=self.pinned and states)

        def columns_of(row: int, n_tokens: int, shard_number: int, row_group: int, i: int) -> dict[str, Any]:
            shard = self._shards.get(shard_number, self._open_shard)
            run = self._runs.get((shard_number, row_group // RUN), lambda key: shard.run(key[1], self._columns))
            values = run.row(row_group % RUN, i)
            if len(values["input_ids"]) != n_tokens:
                raise ValueError(f"{shard.where} does not hold what the index says of row {row}: {remedy(shard.where)}")
            if check and (what := next(id_problems(values["input_ids"], values["target_argmax"], spec), None)):
                raise ValueError(f"{shard.where}, row {row}: {what}. {remedy(shard.where)}")
            return values

        def read_states(n_tokens: int, end: int, shard_number: int, offset: int) -> torch.Tensor:
            """As they are stored; those of the dtype of reading go to their place in the batch."""
            stored = batch[end - n_tokens : end]
            if stored.dtype != DTYPES[spec.dtype]:
                stored = torch.empty_like(stored, dtype=DTYPES[spec.dtype])
            shard = self._shards.get(shard_number, self._open_shard)
            shard.read_hidden(offset, stored.flatten().view(torch.uint8).numpy().data)
            return stored

        shards, groups, numbers, offsets = (a.tolist() for a in self._places(wanted))
        sizes = lengths.tolist()
        small = map(columns_of, wanted.tolist(), sizes, shards, groups, numbers)
        if not states:
            return [Sequence(hidden=batch, **{k: v for k, v in c.items() if k != SCALE}) for c in small]
        if self.folder.is_local and batch.nbytes < SMALL_BATCH_BYTES:
            readers = None
        reading = (readers.map if readers else map)(read_states, sizes, ends.tolist(), shards, offsets)
        columns = list(small)  # while the states are read
        sequences = []
        for stored, end, values in zip(reading, ends.tolist(), columns, strict=True):
            hidden = batch[end - len(stored) : end]
            if (scale := values.pop(SCALE, None)) is not None:
                decode(stored, torch.from_numpy(scale).view(len(stored), -1), hidden)
            sequences.append(Sequence(hidden=hidden, **values))
        return sequences

    def _places(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Shard, row group, row in it, and offset of the states, of each row."""
        index = self.index
        return index.shard[rows], index.row_group[rows], index.row[rows], index.offset[rows]

    def _open_shard(self, number: int) -> _Shard:
        return self._open(self.manifest.shards[number], number)

    def reopen(self) -> None:
        """Open every shard anew from now on: what is open may be stale after an error of a network's file system."""
        self._shards.clear()

    def _open(self, entry: ShardEntry, number: int) -> _Shard:
        shard = _Shard(self.folder, entry, number)
        expect_own(shard.metadata, self.spec, shard.where, self.may_differ)
        return shard

    def read_step(
        self, plan: BatchPlan, step: int, rank: int, world: int, readers: Executor | None, cancelled: Callable[[], bool]
    ) -> list[Sequence]:
        """A rank's share of a step. `cancelled`: ends the waiting of a store that has to wait (`RollingStore`)."""
        return self.read_batch(plan.rank_rows(step, rank, world), readers)

    # What only a store that rolls has to do (`RollingStore`), and training asks of any.

    def follow(self, run: str, plan: BatchPlan, step: int, session: str, is_main: bool) -> None:
        """A training run reads on from `step`. `is_main`: it is this process that tells others."""

    def needs_checkpoint(self, saved: int, step: int) -> bool:
        """Whether the store must keep less once a checkpoint of `step` is on disk, than with that of `saved`."""
        return False

    def release(self, step: int) -> None:
        """Close what no step from `step` on reads: on every rank, before a checkpoint of `step` is saved."""

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is on disk."""

    def finished(self, run: str, session: str) -> None:
        """The run reads no more, now or later."""

    def verify(self, progress: Callable[[int], None] = lambda n_bytes: None) -> list[Problem]:
        """Check every byte and every value; an empty list is a sound store. `progress` is told of bytes checked."""
        return list(verify(self, progress))


def concatenate(sequences: list[Sequence]) -> torch.Tensor:
    """Hidden states of all `sequences` end to end, [N, layers, H]; no copy where they lie so already (`read_batch`)."""
    tensors = [s.hidden for s in sequences]
    first = tensors[0]
    place = first.storage_offset()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or tensor.storage_offset() != place
        ):
            return torch.cat(tensors)
        place += tensor.numel()
    shape = (sum(len(t) for t in tensors), *first.shape[1:])
    return first.as_strided(shape, first.stride())


class _Shard:
    """An open shard. It is closed when the last thread that uses it lets go."""

    def __init__(self, folder: Folder, entry: ShardEntry, number: int) -> None:
        self.number, self.where = number, folder.show(entry.name)
        try:
            self._ranges = RangeReader(folder, entry.name)
            file = folder.open(entry.name)
        except FileNotFoundError as e:
            raise ValueError(f"{self.where} is missing: run eagle3 capture again, it redoes that shard alone") from e
        if file.size() != entry.bytes:
            raise ValueError(
                f"{self.where} has {file.size()} bytes, the manifest says {entry.bytes} (cut, or of another capture): "
                f"{remedy(self.where)}"
            )
        self._parquet = pq.ParquetFile(file, pre_buffer=not folder.is_local)
        self._lock = threading.Lock()  # a Parquet reader is not for two threads at once

    @property
    def metadata(self) -> pq.FileMetaData:
        return self._parquet.metadata

    def run(self, number: int, columns: list[str]) -> _Run:
        metadata = self.metadata
        groups = range(number * RUN, min((number + 1) * RUN, metadata.num_row_groups))
        rows = [metadata.row_group(g).num_rows for g in groups]
        with self._lock:
            return _Run(self._parquet.read_row_groups(groups, columns, use_threads=False), rows)

    def read_hidden(self, offset: int, into: memoryview) -> None:
        """Fill `into` with one row's bytes."""
        prefix = bytearray(PREFIX.size)
        try:
            self._ranges.read_into(offset, [memoryview(prefix), into])
        except EOFError as e:
            raise ValueError(f"{e}: {remedy(self.where)}") from e
        if PREFIX.unpack(prefix) != (len(into),):
            raise ValueError(f"{self.where} does not hold a row at byte {offset}: {remedy(self.where)}")


class _Run:
    """The small columns of neighbouring row groups, which have so many `rows`, decoded."""

    def __init__(self, table: pa.Table, rows: list[int]) -> None:
        self._first = [0, *accumulate(rows)]
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        self._scalars = {name: columns[name].to_pylist() for name in ("sample_id", "source")}
        lists = {name: column for name, column in columns.items() if pa.types.is_list(column.type)}
        self._lists = {name: (c.offsets.to_numpy(), c.values.to_numpy()) for name, c in lists.items()}
        self.nbytes = table.nbytes

    def row(self, group: int, i: int) -> dict[str, Any]:
        """Row `i` of the run's row group `group`: keyword arguments of `Sequence` other than `hidden`; arrays are
        copies, writable."""
        i += self._first[group]
        values: dict[str, Any] = {name: column[i] for name, column in self._scalars.items()}
        for name, (offsets, flat) in self._lists.items():
            values[name] = flat[offsets[i] : offsets[i + 1]].copy()
        return values


class _Cache(Generic[K, V]):
    """The most recently used values up to a total weight, from any thread; a value may be made twice at once."""

    def __init__(self, capacity: int, weight: Callable[[V], int]) -> None:
        self._capacity, self._weight = capacity, weight
        self._values: OrderedDict[K, V] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make(key)
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._total += self._weight(value)
            while self._total > self._capacity and len(self._values) > 1:
                self._total -= self._weight(self._values.popitem(last=False)[1])
        return value

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._total = 0

    def drop(self, key: K) -> None:
        with self._lock:
            if key in self._values:
                self._total -= self._weight(self._values.pop(key))

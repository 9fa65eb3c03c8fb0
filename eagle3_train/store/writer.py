"""Write shards. A shard is a Parquet file that is whole or not there, and whose bytes depend on its rows alone."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xxhash

from .codec import DTYPES, encode, problem
from .folder import Folder
from .schema import (
    CONTENT_KEY,
    HIDDEN,
    MAX_ROW_BYTES,
    MAY_DIFFER,
    SCALE,
    SPEC_KEY,
    Sequence,
    StoreSpec,
    arrow_schema,
)

MAX_ROW_GROUP_ROWS = 8192  # Arrow begins a new page after 20,000 rows, and a row group must stay one page
WRITE_BACK_BYTES = 1 << 20
PREFIX = struct.Struct("<I")  # Parquet's PLAIN encoding of a byte array: its length, then its bytes


def shard_name(shard: int, n_shards: int) -> str:
    return f"shard-{shard:05d}-of-{n_shards:05d}.parquet"


def shard_number(name: str) -> int | None:
    """Of a shard by its file's name, or by one that begins with it; None: no shard."""
    return int(name[6:11]) if name.startswith("shard-") and name[6:11].isdecimal() else None


def shard_rows(n_rows: int, n_shards: int, shard: int) -> range:
    """Rows of the global order that a shard holds: contiguous blocks whose sizes differ by at most one."""
    return range(n_rows * shard // n_shards, n_rows * (shard + 1) // n_shards)


def missing_shards(
    path: str | Path, n_shards: int, spec: StoreSpec | None = None, allow: Iterable[str] = ()
) -> list[int]:
    """Shards still to be captured. A shard that is there is whole, so it is never redone.

    With `spec`: ValueError if a shard was written under another one (fields in `allow` may differ).
    """
    folder = Folder(path)
    present = folder.sizes()
    if spec is not None:
        for shard in range(n_shards):
            if (name := shard_name(shard, n_shards)) in present:
                check_spec(read_spec(folder, name), spec, folder.show(name), allow)
    return [s for s in range(n_shards) if shard_name(s, n_shards) not in present]


def read_spec(folder: Folder, name: str) -> StoreSpec:
    """The spec a shard was written under; ValueError where it is no whole shard."""
    with folder.open(name) as f:
        return spec_of(read_footer(f, folder.show(name)), folder.show(name))


def read_footer(file: pa.NativeFile, where: str) -> pq.FileMetaData:
    try:
        return pq.read_metadata(file)
    except (pa.ArrowException, OSError) as e:
        raise ValueError(f"{where} is no whole Parquet file ({e}): {remedy(where)}") from e


# What brings back a shard that is not there.
CAPTURE_AGAIN = "eagle3 capture again, with the same overrides: it redoes the missing shards alone"


def spec_of(metadata: pq.FileMetaData, where: str) -> StoreSpec:
    values = metadata.metadata or {}
    if SPEC_KEY not in values or CONTENT_KEY not in values:
        raise ValueError(f"{where} was not written by this package: {remedy(where)}")
    return StoreSpec.from_json(json.loads(values[SPEC_KEY]), where)


def check_spec(found: StoreSpec, wanted: StoreSpec, where: str, allow: Iterable[str] = ()) -> None:
    """ValueError where what a capture finds is another one's: it is worth as much as what would take its place."""
    if differences := found.differences(wanted, tuple(allow)):
        raise ValueError(
            f"{where} was captured under another spec ({'; '.join(differences)}). Keep it: run eagle3 capture with "
            "paths.store=FOLDER (or study.name=NAME) for another store, or with the configuration of this one"
        )


def expect_own(metadata: pq.FileMetaData, spec: StoreSpec, where: str, allow: Iterable[str]) -> None:
    """ValueError where a shard, of this footer, is not of the finished store that it lies in, which is of `spec`."""
    if differences := spec_of(metadata, where).differences(spec, tuple(allow)):
        raise ValueError(f"{where} is of another capture than its store ({'; '.join(differences)}): {remedy(where)}")


def remedy(where: str) -> str:
    """What to do about one bad shard."""
    return f"delete it (rm {where}) and run {CAPTURE_AGAIN}"


def hidden_start(column: pq.ColumnChunkMetaData, payload: int) -> int:
    """Offset in the file of the first row's length prefix in a row group's hidden column.

    The column chunk is one page, uncompressed and PLAIN: a page header, then `payload` bytes of (length, bytes) pairs
    to its end. That makes every row addressable by the index alone, with no Parquet decoding at all.
    """
    header = column.total_compressed_size - payload
    if not 0 < header < 128 or column.compression != "UNCOMPRESSED" or column.has_dictionary_page:
        raise ValueError(
            f"hidden column is not a single plain page ({header} bytes besides its {payload} bytes of rows)"
        )
    return column.data_page_offset + header


class ShardWriter:
    """Context manager that writes one shard of a store; the shard appears when the block ends without an exception.

    Sequences are added in the global order, exactly `shard_rows(...)` many. Memory: twice a row group. Any number of
    processes may write any shards at once, even the same one: the first that ends gives it its name. ValueError where
    that was one of another spec.
    """

    def __init__(self, path: str | Path, shard: int, spec: StoreSpec) -> None:
        if not 0 <= shard < spec.n_shards:
            raise ValueError(f"shard {shard} of {spec.n_shards}: choose 0 to {spec.n_shards - 1}")
        self.spec, self.name = spec, shard_name(shard, spec.n_shards)
        self.expected_rows = len(shard_rows(spec.n_rows, spec.n_shards, shard))
        self.rows = self.tokens = self.supervised = 0
        self._folder = Folder(path)
        self._limit = spec.row_group_mib << 20
        self._schema = arrow_schema(spec)
        self._group: list[dict[str, Any]] = []  # small columns of the row group
        self._buffer = torch.empty(0, dtype=torch.uint8)  # hidden states of the row group, reused from group to group
        self._used = 0
        self._stack = ExitStack()

    def __enter__(self) -> ShardWriter:
        self._sink = _HashingSink(self._stack.enter_context(self._folder.create(self.name, exclusive=True)))
        self._parquet = pq.ParquetWriter(
            self._sink,
            self._schema,
            compression="NONE",
            use_dictionary=False,
            write_statistics=False,
            data_page_size=1 << 40,  # never reached: a row group is one page a column
        )
        self._stack.callback(self._close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                with self._stack:
                    self._finish()
            except FileExistsError:
                check_spec(read_spec(self._folder, self.name), self.spec, self._folder.show(self.name), MAY_DIFFER)
        else:  # `Folder.create` is handed the exception and removes the unfinished file
            self._stack.__exit__(kind, error, trace)

    def _close(self) -> None:
        """Nothing after a finished shard; else let Arrow write its footer nowhere, rather than when it is collected."""
        self._sink.discard = True
        self._parquet.close()

    def add(self, sequence: Sequence) -> None:
        """Append one sequence. Its hidden states are cast to the store's dtype, on whatever device they are."""
        self._check(sequence)
        spec = self.spec
        size = sequence.n_tokens * spec.token_bytes
        if self._group and (self._used + size > self._limit or len(self._group) >= MAX_ROW_GROUP_ROWS):
            self._flush()
        if self._used + size > len(self._buffer):
            grown = torch.empty(max(self._used + size, self._limit), dtype=torch.uint8)
            grown[: self._used] = self._buffer[: self._used]
            self._buffer = grown
        stored = self._buffer[self._used : self._used + size].view(DTYPES[spec.dtype]).view(sequence.hidden.shape)
        scale = encode(sequence.hidden, stored)
        if what := problem(stored, scale):
            way_out = "store.dtype=bf16 has the range" if spec.dtype == "fp16" else "look at the target's forward pass"
            raise ValueError(
                f"sample {sequence.sample_id!r}: states are not finite as {spec.dtype} ({what}); {way_out}"
            )
        self._used += size
        small = {name: value for name, value in sequence.__dict__.items() if name != "hidden"}
        self._group.append({**small, SCALE: scale, "n_supervised": sequence.n_supervised})
        self.rows += 1
        self.tokens += sequence.n_tokens
        self.supervised += sequence.n_supervised

    def _check(self, sequence: Sequence) -> None:
        spec, name = self.spec, f"sample {sequence.sample_id!r}"
        n = sequence.n_tokens
        if n == 0:
            raise ValueError(f"{name} has no tokens: leave it out of the corpus")
        shape = (n, len(spec.layer_ids), spec.hidden_size)
        if tuple(sequence.hidden.shape) != shape:
            raise ValueError(f"{name}: hidden states have shape {tuple(sequence.hidden.shape)}, the spec says {shape}")
        for column in ("loss_mask", "target_argmax", "target_logsumexp"):
            values = getattr(sequence, column)
            if (values is not None or column != "target_logsumexp" or spec.logsumexp) and np.shape(values) != (n,):
                raise ValueError(f"{name}: {column} has shape {np.shape(values)}, its {n} tokens need ({n},)")
        if n * spec.token_bytes > MAX_ROW_BYTES:
            raise ValueError(
                f"{name}: {n} tokens are {n * spec.token_bytes / 2**30:.2f} GiB of hidden states, and Parquet holds "
                f"less than 2 GiB a value: corpus.max_length={MAX_ROW_BYTES // spec.token_bytes} is the most here"
            )
        if self.rows >= self.expected_rows:
            raise ValueError(f"{self.name} takes {self.expected_rows} rows, and {name} is one more")

    def _flush(self) -> None:
        group, n = self._group, len(self._group)
        lengths = np.array([len(row["input_ids"]) for row in group], np.int64)

        def lists(column: str) -> pa.Array:
            kind = self._schema.field(column).type
            rows = [np.asarray(row[column]).ravel() for row in group]
            offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
            flat = pa.array(np.concatenate(rows).astype(kind.value_type.to_pandas_dtype(), copy=False))
            return pa.ListArray.from_buffers(kind, n, [None, pa.py_buffer(offsets)], children=[flat])

        offsets = np.concatenate([[0], np.cumsum(lengths * self.spec.token_bytes)])
        hidden = [None, pa.py_buffer(offsets), pa.py_buffer(self._buffer[: self._used].numpy())]
        columns: dict[str, Any] = {
            "sample_id": pa.array([row["sample_id"] for row in group], pa.string()),
            "source": pa.array([row["source"] for row in group], pa.string()),
            "n_tokens": pa.array(lengths, pa.int32()),
            "n_supervised": pa.array([row["n_supervised"] for row in group], pa.int32()),
            HIDDEN: pa.LargeBinaryArray.from_buffers(pa.large_binary(), n, hidden),
        }
        arrays = [columns[f.name] if f.name in columns else lists(f.name) for f in self._schema]
        self._parquet.write_table(pa.Table.from_arrays(arrays, schema=self._schema), row_group_size=n)
        self._group, self._used = [], 0

    def _finish(self) -> None:
        if self._group:
            self._flush()
        if self.rows != self.expected_rows:
            raise ValueError(f"{self.name} takes {self.expected_rows} rows, and {self.rows} were added")
        content = {
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "data_bytes": self._sink.written,
            "data_checksum": self._sink.hash.hexdigest(),
        }
        self._parquet.add_key_value_metadata({CONTENT_KEY: json.dumps(content)})
        self._parquet.close()


class _HashingSink:
    """What Arrow writes into: hashes the bytes on their way, so that nobody reads them again to have a checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxhash.xxh3_128()
        self.written = 0
        self.closed = self.discard = False

    def write(self, data: bytes) -> int:
        if self.discard:
            return len(data)
        self.hash.update(data)
        left = memoryview(data)
        while left:  # an unbuffered file takes at most 2 GiB at once
            left = left[self._file.write(left) :]
        self._start_writing_back(len(data))
        self.written += len(data)
        return len(data)

    def _start_writing_back(self, size: int) -> None:
        """Let the disk work while the target computes the next sequences, instead of all at once in the commit's fsync.

        DONTNEED on pages that are dirty starts their write-back, and leaves them in the cache.
        """
        if size >= WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self.written, size, os.POSIX_FADV_DONTNEED)

    def tell(self) -> int:
        return self.written

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True  # the file is closed by its owner, after fsync

"""Corpus rows and their Parquet files (docs/corpus.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle3_train.files import sweep_temporaries, temporary_path

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
    ]
)
ANEW = "delete the corpus's report.json and run `eagle3 prepare`, which writes it anew"  # the way out of damage
GROUP_ROWS = 1024  # a row group: what a reader of a few rows has to read


@dataclass(frozen=True, eq=False)
class Row:
    sample_id: str
    source: str
    input_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] uint8, 1 where the target would generate the token


class RowWriter:
    """Context manager: the file appears, whole, when the block ends without an exception."""

    def __init__(self, path: Path) -> None:
        self.path, self.temporary = path, temporary_path(path)
        self.group: list[Row] = []

    def __enter__(self) -> RowWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(self.path)
        self.parquet = pq.ParquetWriter(self.temporary, SCHEMA, compression="zstd")
        return self

    def add(self, row: Row) -> None:
        self.group.append(row)
        if len(self.group) == GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        self.parquet.write_table(
            pa.table({f.name: pa.array([getattr(r, f.name) for r in self.group], f.type) for f in SCHEMA})
        )
        self.group = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self.group:
                self._flush()
            self.parquet.close()
            if error is None:
                self.temporary.replace(self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


def read_rows(path: Path, rows: range | None = None) -> Iterator[Row]:
    """Rows of a corpus file, all or a contiguous range; reads only the row groups that hold them."""
    with _opened(path) as file:
        wanted = range(file.metadata.num_rows) if rows is None else rows
        first = 0
        for group in range(file.num_row_groups):
            n = file.metadata.row_group(group).num_rows
            here = range(max(wanted.start, first), min(wanted.stop, first + n))
            if here:
                table = file.read_row_group(group).slice(here.start - first, len(here))
                columns = [table.column(f.name).combine_chunks() for f in SCHEMA]
                for sample_id, source, ids, mask in zip(*columns, strict=True):
                    yield Row(sample_id.as_py(), source.as_py(), ids.values.to_numpy(), mask.values.to_numpy())
            first += n


def read_lengths(path: Path) -> np.ndarray:
    """Tokens of each row, [rows] int64, in row order."""
    with _opened(path) as file:
        parts = [
            pc.list_value_length(file.read_row_group(g, columns=["input_ids"]).column(0)).to_numpy()
            for g in range(file.num_row_groups)
        ]
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


def read_counts(path: Path, vocab_size: int) -> tuple[pa.Table, np.ndarray]:
    """What is known of the rows before anything is captured: a table of `sample_id`, `source`, `n_tokens`,
    `n_supervised`, in row order; and how often each token is supervised, [vocab_size] int64."""
    parts, counts = [], np.zeros(vocab_size, np.int64)
    with _opened(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            ids, masks = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
            supervised = masks.values.to_numpy() == 1
            counts += np.bincount(ids.values.to_numpy()[supervised], minlength=vocab_size)
            ends = np.concatenate([[0], np.cumsum(supervised)])[masks.offsets.to_numpy()]
            columns = {"n_tokens": pc.list_value_length(ids), "n_supervised": pa.array(np.diff(ends), pa.int32())}
            parts.append(pa.table({name: table[name] for name in ("sample_id", "source")} | columns))
    return pa.concat_tables(parts), counts


def file_state(path: Path) -> tuple[int, int, int]:
    """Inode, bytes and time of change: another one for another file in the same place."""
    found = _existing(path).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """ValueError, with the way out, where there is no such file, or it is no file of rows."""
    try:
        with pq.ParquetFile(_existing(path)) as file:
            if missing := [name for name in SCHEMA.names if name not in file.schema_arrow.names]:
                raise ValueError(f"{path} has no column {missing[0]}: {ANEW}")
            yield file
    except (pa.ArrowException, OSError) as e:
        raise ValueError(f"{path} is damaged ({e}): {ANEW}") from e


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path} is not there: {ANEW}")
    return path

"""The index: where each row lies, how long it is, where it came from. Columns are read when they are asked for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .folder import Folder

INDEX = "index.parquet"
INDEX_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("row_group", pa.int32(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),  # within the row group
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("n_supervised", pa.int32(), nullable=False),
        pa.field("source", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),  # of the row's hidden states in the shard's file
    ]
)


class Index:
    """`index.parquet`, a column at a time when it is asked for: a hundred million rows must not wait for their names.

    Columns as numpy arrays [rows]: `shard`, `row_group`, `row`, `n_tokens`, `n_supervised` (int32), `offset` (int64).
    """

    def __init__(self, folder: Folder, rows: int) -> None:
        """`rows`: as the manifest says."""
        self._folder = folder
        where = folder.show(INDEX)
        try:
            with folder.open(INDEX) as f:
                found = pq.read_metadata(f).num_rows
        except (pa.ArrowException, OSError) as e:
            raise ValueError(
                f"{where} cannot be read ({e}): write it again with: eagle3 store finalize {folder.uri}"
            ) from e
        if found != rows:
            raise ValueError(
                f"{where} has {found} rows and the manifest {rows}: write both again with: "
                f"eagle3 store finalize {folder.uri}"
            )
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def _load(self, *names: str) -> pa.Table:
        with self._folder.open(INDEX) as f:
            return pq.ParquetFile(f).read(list(names), use_threads=False)

    @cached_property
    def n_tokens(self) -> np.ndarray:
        return self._load("n_tokens")["n_tokens"].to_numpy()

    @cached_property
    def n_supervised(self) -> np.ndarray:
        return self._load("n_supervised")["n_supervised"].to_numpy()

    @cached_property
    def _places(self) -> dict[str, np.ndarray]:
        """Where a row lies: needed together, by whoever reads rows."""
        table = self._load("shard", "row_group", "row", "offset")
        return {name: table[name].to_numpy() for name in table.column_names}

    @property
    def shard(self) -> np.ndarray:
        return self._places["shard"]

    @property
    def row_group(self) -> np.ndarray:
        return self._places["row_group"]

    @property
    def row(self) -> np.ndarray:
        return self._places["row"]

    @property
    def offset(self) -> np.ndarray:
        return self._places["offset"]

    @cached_property
    def sample_id(self) -> pa.ChunkedArray:
        """Strings, in Arrow: `index.sample_id[row].as_py()`."""
        return self._load("sample_id")["sample_id"]

    @cached_property
    def source(self) -> pa.ChunkedArray:
        """Dictionary-encoded strings, in Arrow."""
        return self._load("source")["source"]

"""Supervised tokens by id, over a whole store: what a draft vocabulary is chosen from."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .folder import Folder
from .reader import Store
from .writer import expect_own

NAME = "token-counts.json"


def token_counts(store: Store) -> np.ndarray:
    """[V] int64. One scan of the small columns, a row group at a time; kept beside the shards for the next caller."""
    if (kept := kept_counts(store.folder, store.fingerprint, store.spec.vocab_size)) is not None:
        return kept
    counts = np.zeros(store.spec.vocab_size, np.int64)
    for shard in store.manifest.shards:
        with store.folder.open(shard.name) as file:
            parquet = pq.ParquetFile(file, pre_buffer=not store.folder.is_local)
            expect_own(parquet.metadata, store.spec, store.folder.show(shard.name), store.may_differ)
            for group in range(parquet.num_row_groups):
                table = parquet.read_row_group(group, ["input_ids", "loss_mask"], use_threads=False)
                ids, mask = (_values(table[name]) for name in ("input_ids", "loss_mask"))
                counts += np.bincount(ids[mask == 1], minlength=len(counts))
    write_counts(store.folder, store.fingerprint, counts)
    return counts


def kept_counts(folder: Folder, fingerprint: str, vocab_size: int) -> np.ndarray | None:
    """What `write_counts` wrote, [V] int64; None where it is missing, damaged, or of another store."""
    counts = np.zeros(vocab_size, np.int64)
    try:
        kept = json.loads(folder.read(NAME))
        counts[kept["ids"]] = kept["counts"]
        return counts if kept["fingerprint"] == fingerprint else None
    except (FileNotFoundError, ValueError, KeyError, IndexError, TypeError):
        return None


def write_counts(folder: Folder, fingerprint: str, counts: np.ndarray) -> None:
    """Keep the counts of the store of this fingerprint beside its shards."""
    seen = np.flatnonzero(counts)
    value = {"fingerprint": fingerprint, "ids": seen.tolist(), "counts": counts[seen].tolist()}
    folder.write(NAME, json.dumps(value).encode())


def _values(column: pa.ChunkedArray) -> np.ndarray:
    return np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])

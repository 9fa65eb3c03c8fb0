"""The manifest and the index: what a store holds, written last, read first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from .claim import NAME as CLAIM
from .folder import Folder
from .index import INDEX, INDEX_SCHEMA
from .schema import CONTENT_KEY, HIDDEN, MAY_DIFFER, SCHEMA_VERSION, StoreSpec, typed_fields
from .writer import (
    CAPTURE_AGAIN,
    PREFIX,
    check_spec,
    hidden_start,
    missing_shards,
    read_footer,
    read_spec,
    remedy,
    shard_name,
    shard_rows,
    spec_of,
)

MANIFEST = "manifest.json"
ROLLING = "rolling.json"  # in its place, in a store that rolls


@dataclass(frozen=True)
class ShardEntry:
    name: str
    rows: int
    tokens: int
    supervised_tokens: int
    bytes: int
    data_bytes: int  # of the file before its footer
    checksum: str  # xxh3_128 of these bytes, then of the footer


@dataclass(frozen=True)
class Manifest:
    fingerprint: str
    spec: StoreSpec
    shards: tuple[ShardEntry, ...]
    index_bytes: int
    index_checksum: str  # xxh3_128 of the file
    may_differ: tuple[str, ...] = MAY_DIFFER  # fields of the spec in which shards may differ from it

    @property
    def rows(self) -> int:
        return sum(s.rows for s in self.shards)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.shards)

    @property
    def supervised_tokens(self) -> int:
        return sum(s.supervised_tokens for s in self.shards)

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.shards)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "bytes": self.bytes,
            "spec": {k: v for k, v in self.spec.to_json().items() if k != "schema_version"},
            "may_differ": list(self.may_differ),
            "index": {"bytes": self.index_bytes, "checksum": self.index_checksum},
            "shards": [asdict(s) for s in self.shards],
        }

    @classmethod
    def read(cls, folder: Folder) -> Manifest:
        """ValueError naming what is wrong: no manifest (and which shards are missing), another version, cut."""
        where = folder.show(MANIFEST)
        try:  # without a listing, which every rank of a large job would ask a file system for
            text = folder.read(MANIFEST)
        except OSError as e:
            files = folder.sizes()
            if MANIFEST in files:
                raise
            raise ValueError(f"{folder.uri} {_unfinished(folder, files)}") from e
        try:
            value = json.loads(text)
            spec = StoreSpec.from_json({**value["spec"], "schema_version": value["schema_version"]}, where)
            shards = tuple(ShardEntry(**typed_fields(ShardEntry, s)) for s in value["shards"])
            allowed = tuple(value.get("may_differ", MAY_DIFFER))  # which the first versions did not write
            index = value["index"]
            return cls(value["fingerprint"], spec, shards, index["bytes"], index["checksum"], allowed)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as e:
            raise ValueError(
                f"{where} is damaged ({e!r}): delete it and write it again with: eagle3 store finalize {folder.uri}"
            ) from e


def _unfinished(folder: Folder, files: dict[str, int]) -> str:
    """What a folder without a manifest is."""
    if ROLLING in files:
        return (
            "is a rolling store, whose shards come and go while runs read it: eagle3 store info shows what is there; "
            "eagle3 capture store.mode=whole makes a whole store of it (docs/rolling.md)"
        )
    shards = sorted(name for name in files if name.startswith("shard-") and name.endswith(".parquet"))
    if not shards:
        return "is no store (no manifest.json, no shards): run eagle3 capture, or correct paths.store"
    n_shards = read_spec(folder, shards[0]).n_shards
    missing = missing_shards(folder.uri, n_shards)
    if missing:
        return f"is half captured: {describe_shards(missing, n_shards)} missing; run {CAPTURE_AGAIN}"
    return f"has all its shards but no manifest.json: run eagle3 store finalize {folder.uri}"


def describe_shards(shards: list[int], n_shards: int) -> str:
    """`3 of 64 shards (4, 5, 17)`."""
    shown = ", ".join(map(str, shards[:20])) + (", ..." if len(shards) > 20 else "")
    return f"{len(shards)} of {n_shards} shards ({shown})"


def finalize(path: str | Path, spec: StoreSpec, allow: Iterable[str] = ()) -> Manifest:
    """Write `index.parquet`, then `manifest.json`, which makes the folder a store. Idempotent; reads no hidden states.

    Refuses (ValueError) while shards are missing and where a shard was written under another spec, naming them.
    `allow`: fields of the spec that shards may differ in, e.g. `("generator",)` after an upgrade in mid-capture.
    """
    folder = Folder(path)
    if missing := missing_shards(path, spec.n_shards):
        raise ValueError(f"{folder.uri}: {describe_shards(missing, spec.n_shards)} missing; run {CAPTURE_AGAIN}")
    allow = tuple(allow)
    entries, parts = [], []
    for shard in range(spec.n_shards):
        entry, part = read_shard(folder, spec, shard, allow)
        entries.append(entry)
        parts.append(part)
    index = pa.concat_tables(parts).unify_dictionaries()
    data = parquet_bytes(index)
    manifest = Manifest(
        spec.fingerprint(rows_digest(index)),
        spec,
        tuple(entries),
        len(data),
        xxhash.xxh3_128_hexdigest(data),
        tuple(sorted({*MAY_DIFFER, *allow})),
    )
    text = json.dumps(manifest.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for name, content in ((INDEX, data), (MANIFEST, text.encode())):  # the manifest last
        if name not in folder.sizes() or folder.read(name) != content:
            folder.write(name, content)
    if ROLLING in folder.sizes():
        folder.remove(ROLLING)  # it rolls no more
    for prefix in ("shard-", CLAIM):
        folder.remove_temporaries(prefix)
    return manifest


def read_shard(folder: Folder, spec: StoreSpec, shard: int, allow: Iterable[str] = ()) -> tuple[ShardEntry, pa.Table]:
    """A shard's manifest entry and its part of the index, from its footer and its four small per-row columns."""
    name = shard_name(shard, spec.n_shards)
    where = folder.show(name)
    with folder.open(name) as f:
        metadata = read_footer(f, where)
        check_spec(spec_of(metadata, where), spec, where, allow)
        size = f.size()
        content = json.loads(metadata.metadata[CONTENT_KEY])
        f.seek(content["data_bytes"])
        checksum = xxhash.xxh3_128_hexdigest(content["data_checksum"].encode() + f.read())
        table = pq.read_table(f, columns=["sample_id", "source", "n_tokens", "n_supervised"])
    expected = len(shard_rows(spec.n_rows, spec.n_shards, shard))
    if metadata.num_rows != expected:
        raise ValueError(f"{where} holds {metadata.num_rows} rows instead of {expected}: {remedy(where)}")
    lengths = table["n_tokens"].to_numpy().astype(np.int64)
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    counts = np.array([g.num_rows for g in groups], np.int64)
    first_row = np.concatenate([[0], np.cumsum(counts)])
    group_of = np.repeat(np.arange(len(groups)), counts)
    # Rows of a group follow each other, each behind its length prefix.
    strides = PREFIX.size + lengths * spec.token_bytes
    ends = np.concatenate([[0], np.cumsum(strides)])
    hidden = metadata.num_columns - 1
    assert metadata.row_group(0).column(hidden).path_in_schema == HIDDEN
    starts = np.array(
        [
            hidden_start(group.column(hidden), int(ends[hi] - ends[lo]))
            for group, lo, hi in zip(groups, first_row[:-1], first_row[1:], strict=True)
        ],
        np.int64,
    )
    offsets = starts[group_of] + ends[:-1] - ends[first_row[:-1]][group_of]
    part = pa.table(
        [
            table["sample_id"],
            pa.array(np.full(expected, shard, np.int32)),
            pa.array(group_of.astype(np.int32)),
            pa.array((np.arange(expected) - first_row[group_of]).astype(np.int32)),
            table["n_tokens"],
            table["n_supervised"],
            pc.dictionary_encode(table["source"]),
            pa.array(offsets),
        ],
        schema=INDEX_SCHEMA,
    )
    entry = ShardEntry(
        name, expected, content["tokens"], content["supervised_tokens"], size, content["data_bytes"], checksum
    )
    return entry, part


def rows_digest(index: pa.Table) -> str:
    """sha256 over all sample ids and lengths, in order; how the rows are cut into shards does not matter."""
    names, name_lengths, lengths = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for batch in index.select(["sample_id", "n_tokens"]).to_batches():
        ids = batch["sample_id"]
        _, offsets_buffer, text = ids.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int32)[ids.offset : ids.offset + len(ids) + 1]
        names.update(memoryview(text)[offsets[0] : offsets[-1]])
        name_lengths.update(np.diff(offsets).tobytes())
        lengths.update(batch["n_tokens"].to_numpy().tobytes())
    return hashlib.sha256(names.digest() + name_lengths.digest() + lengths.digest()).hexdigest()


def parquet_bytes(table: pa.Table) -> bytes:
    """An index file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_statistics=False)
    return sink.getvalue().to_pybytes()

"""Check every byte and every value of a store: what is damaged, where, and what repairs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from .folder import Folder
from .index import INDEX
from .manifest import Manifest, ShardEntry
from .schema import CONTENT_KEY, Sequence, StoreSpec
from .writer import CAPTURE_AGAIN, expect_own, read_footer, remedy

if TYPE_CHECKING:
    from .reader import Store

CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Problem:
    where: str  # the file, and the row where one is known
    what: str
    repair: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n    repair: {self.repair}"


def verify(store: Store, progress: Callable[[int], None] = lambda n_bytes: None) -> Iterator[Problem]:
    """All problems of a store, shard by shard, as they are found. `progress` is told of bytes as they are checked.

    Every byte is compared with the manifest's checksums, then every value with what the spec allows. Memory: one row.
    """
    folder, manifest = store.folder, store.manifest
    finalize = f"eagle3 store finalize {folder.uri}"
    if xxhash.xxh3_128_hexdigest(folder.read(INDEX)) != manifest.index_checksum:
        yield Problem(folder.show(INDEX), "does not have the checksum of the manifest", finalize)
        return  # rows could not be found by it
    sizes = folder.sizes()
    names = {entry.name for entry in manifest.shards}
    for name in sorted(sizes):
        if name.startswith("shard-") and name not in names:
            yield Problem(folder.show(name), "is not among the manifest's shards", f"rm {folder.show(name)}")
    first = 0
    for entry in manifest.shards:
        where = folder.show(entry.name)
        what = _file_problem(folder, entry, manifest, sizes.get(entry.name))
        if what is not None:
            yield Problem(where, what, remedy(where) if entry.name in sizes else CAPTURE_AGAIN)
        else:
            yield from _row_problems(store, range(first, first + entry.rows), where)
        first += entry.rows
        progress(entry.bytes)


def _file_problem(folder: Folder, entry: ShardEntry, manifest: Manifest, size: int | None) -> str | None:
    """What is wrong with a shard as a file, or None."""
    if size is None:
        return "is missing"
    if size < entry.bytes:
        return f"is cut: {size} of {entry.bytes} bytes"
    where = folder.show(entry.name)
    with folder.open(entry.name) as f:
        data = xxhash.xxh3_128()
        while (left := entry.data_bytes - f.tell()) > 0 and (chunk := f.read(min(CHUNK_BYTES, left))):
            data.update(chunk)
        footer = f.read()
        if xxhash.xxh3_128_hexdigest(data.hexdigest().encode() + footer) == entry.checksum:
            return None
        # Damaged, or a whole shard that another capture wrote? Its own footer knows.
        try:
            metadata = read_footer(f, where)
            expect_own(metadata, manifest.spec, where, manifest.may_differ)
        except ValueError as e:
            return str(e).removeprefix(f"{where} ").split(": delete it")[0]
        own = json.loads(metadata.metadata[CONTENT_KEY])
        if own["data_bytes"] == entry.data_bytes and own["data_checksum"] != data.hexdigest():
            return "is damaged: its bytes do not have the checksum they were written with"
        return "was written again after the manifest, or its footer is damaged"


def _row_problems(store: Store, rows: range, where: str) -> Iterator[Problem]:
    for row in rows:
        (sequence,) = store.read_batch([row], check=False)
        for what in _value_problems(sequence, store.spec):
            place = (
                f"{where}, row {row} (row {int(store.index.row[row])} of row group {int(store.index.row_group[row])})"
            )
            yield Problem(place, what, remedy(where))


def id_problems(input_ids: np.ndarray, target_argmax: np.ndarray, spec: StoreSpec) -> Iterator[str]:
    """What is wrong with the token ids of a row, both [T]."""
    n = len(input_ids)
    for name, values, low in (("input_ids", input_ids, 0), ("target_argmax", target_argmax, -1)):
        if len(values) != n:
            yield f"{name} has {len(values)} entries for {n} tokens"
        elif values.min() < low or values.max() >= spec.vocab_size:
            yield f"{name} reaches from {values.min()} to {values.max()}, the vocabulary has {spec.vocab_size} entries"


def _value_problems(sequence: Sequence, spec: StoreSpec) -> Iterator[str]:
    n = sequence.n_tokens
    yield from id_problems(sequence.input_ids, sequence.target_argmax, spec)
    if len(sequence.loss_mask) != n or sequence.loss_mask.max() > 1:
        yield f"loss_mask is not one 0 or 1 for each of {n} tokens"
    if (lse := sequence.target_logsumexp) is not None and (len(lse) != n or not np.isfinite(lse).all()):
        yield f"target_logsumexp is not one finite number for each of {n} tokens"
    if not all(torch.isfinite(edge) for edge in torch.aminmax(sequence.hidden)):
        bad = (~torch.isfinite(sequence.hidden)).nonzero()[0].tolist()
        yield f"hidden state of token {bad[0]}, layer id {spec.layer_ids[bad[1]]} is not finite"

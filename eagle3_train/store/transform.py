"""New stores from old ones: `merge` several, `prune` one. Both go on where they were interrupted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .folder import Folder
from .manifest import MANIFEST, Manifest, finalize
from .plan import prefix_for_tokens
from .reader import Store
from .rolling import is_rolling
from .schema import LAYOUT_FIELDS, StoreSpec
from .target import CONFIG
from .writer import ShardWriter, missing_shards, read_spec, shard_name, shard_number, shard_rows

Progress = Callable[[int], None]


def merge(
    paths: Iterable[str | Path],
    out: str | Path,
    seed: int = 0,
    shards: int | None = None,
    progress: Progress = lambda tokens: None,
) -> Manifest:
    """One store of all sequences of several, which must be of the same target, layers and dtype.

    Rows are put in the corpus's order, ascending sha256(f"{seed}:{sample_id}"): with the corpus's seed, stores captured
    apart merge into the rows of one capture of all, in its order, and a prefix is a random sample of all of them. The
    fingerprint is another one than that capture's: the spec says what was merged.
    """
    stores = [Store.open(path) for path in paths]
    first = stores[0].spec
    for store in stores[1:]:
        if differences := store.spec.differences(first, (*LAYOUT_FIELDS, "n_rows", "config")):
            raise ValueError(
                f"{store.folder.uri} and {stores[0].folder.uri} are of different captures ({'; '.join(differences)}): "
                "only stores of one target, with the same layers and dtype, can be merged"
            )
    ids = [sample for store in stores for sample in store.index.sample_id.to_pylist()]
    if len(set(ids)) < len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise ValueError(f"sample {twice!r} is in more than one of the stores: capture disjoint corpora")
    origins = [(store, row) for store in stores for row in range(len(store))]
    order = sorted(range(len(ids)), key=lambda i: hashlib.sha256(f"{seed}:{ids[i]}".encode()).digest())
    config = {**first.config, "merged": [store.fingerprint for store in stores], "seed": seed}
    spec = replace(first, n_rows=len(ids), n_shards=shards or sum(s.spec.n_shards for s in stores), config=config)
    return _write(out, spec, [origins[i] for i in order], progress)


def prune(
    path: str | Path,
    out: str | Path,
    rows: int | None = None,
    tokens: int | None = None,
    sources: Iterable[str] | None = None,
    dtype: str | None = None,
    shards: int | None = None,
    progress: Progress = lambda tokens: None,
) -> Manifest:
    """A smaller store: rows of `sources`, of them the first `rows` or as few as hold `tokens`; in another `dtype`.

    The order stays, so the result is a nested subset of the store. The store itself is left as it is.
    """
    store = Store.open(path)
    kept = np.arange(len(store))
    if sources is not None:
        known = store.index.source.unique().to_pylist()
        if unknown := sorted(set(sources) - set(known)):
            raise ValueError(
                f"{store.folder.uri} has no source {', '.join(unknown)}: it has {', '.join(sorted(known))}"
            )
        kept = kept[pc.is_in(store.index.source.cast("string"), pa.array(list(sources))).to_numpy()]
    if tokens is not None:
        kept = kept[: prefix_for_tokens(store.index.n_tokens[kept], tokens)]
    if rows is not None:
        if rows > len(kept):
            raise ValueError(f"{store.folder.uri} has {len(kept)} such rows, fewer than the {rows} asked for")
        kept = kept[:rows]
    n_shards = shards or max(1, round(store.spec.n_shards * len(kept) / len(store)))
    config = {**store.spec.config, "pruned": store.fingerprint}
    spec = replace(store.spec, n_rows=len(kept), n_shards=n_shards, dtype=dtype or store.spec.dtype, config=config)
    return _write(out, spec, [(store, row) for row in kept.tolist()], progress)


def _write(out: str | Path, spec: StoreSpec, origins: list[tuple[Store, int]], progress: Progress) -> Manifest:
    """Copy rows into a new store, shard by missing shard, and the target's part with them."""
    _require_free(Folder(out), spec)
    for shard in missing_shards(out, spec.n_shards, spec):
        with ShardWriter(out, shard, spec) as writer:
            for i in shard_rows(spec.n_rows, spec.n_shards, shard):
                store, row = origins[i]
                sequence = store[row]
                writer.add(sequence)
                progress(sequence.n_tokens)
    source, target = origins[0][0].folder.child("target"), Folder(out).child("target")
    whole = [name for name in source.sizes() if not name.startswith(".")]
    for name in sorted(whole, key=lambda name: name == CONFIG):  # the configuration last: it says that all is there
        target.write(name, source.read(name))
    return finalize(out, spec)


def _require_free(out: Folder, spec: StoreSpec) -> None:
    """ValueError where `out` holds shards, or the manifest, of another store than the one to be written: a new store
    never takes an old one's place."""
    names = out.sizes()
    ours = {shard_name(shard, spec.n_shards) for shard in range(spec.n_shards)}
    shards = sorted(name for name in names if shard_number(name) is not None)
    same = set(shards) <= ours and (not shards or not read_spec(out, shards[0]).differences(spec))
    if not same or (MANIFEST in names and not shards) or is_rolling(out.uri):
        raise ValueError(f"{out.uri} holds another store: choose another --out; nothing was written")

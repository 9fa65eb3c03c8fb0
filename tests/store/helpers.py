"""Small stores with known contents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from eagle3_train.store import (
    Rolling,
    Sequence,
    ShardWriter,
    Store,
    StoreSpec,
    finalize,
    missing_shards,
    shard_rows,
    write_rolling,
)

VOCAB = 1000
# What the sign of a capture worker says, besides which process it is.
WORKER_FACTS: dict[str, Any] = {
    "doing": "capturing", "ended": False, "owner": "a study", "world": 1, "runs": [], "claim": None,
}  # fmt: skip


def make_spec(**changes: Any) -> StoreSpec:
    values: dict[str, Any] = {
        "target": "tiny",
        "target_hash": "t0",
        "tokenizer_hash": "k0",
        "chat_template_hash": "c0",
        "layer_ids": (2, 4, 5, 8),
        "hidden_size": 16,
        "n_layers": 8,
        "vocab_size": VOCAB,
        "dtype": "bf16",
        "compute_dtype": "fp32",
        "n_rows": 23,
        "n_shards": 4,
        "generator": "v1",
        "config": {"corpus": "abc"},
    }
    return StoreSpec(**(values | changes))


def make_sequence(spec: StoreSpec, row: int, max_tokens: int = 200) -> Sequence:
    """Row `row` of the store: the same whenever and wherever it is made. Hidden states fp32, as a target gives them."""
    rng = np.random.default_rng(row)
    n = int(rng.integers(1, max_tokens))
    return Sequence(
        sample_id=f"sample-é{row}",
        source=("sharegpt", "code")[row % 2],
        input_ids=rng.integers(0, VOCAB, n).astype(np.int32),
        loss_mask=rng.integers(0, 2, n).astype(np.uint8),
        hidden=torch.from_numpy(rng.standard_normal((n, len(spec.layer_ids), spec.hidden_size), np.float32)),
        target_argmax=rng.integers(-1, VOCAB, n).astype(np.int32),
        target_logsumexp=rng.standard_normal(n, np.float32) if spec.logsumexp else None,
    )


def capture(path: Path, spec: StoreSpec, max_tokens: int = 200) -> None:
    """What a capture does: the missing shards, one after the other."""
    for shard in missing_shards(path, spec.n_shards, spec):
        with ShardWriter(path, shard, spec) as writer:
            for row in shard_rows(spec.n_rows, spec.n_shards, shard):
                writer.add(make_sequence(spec, row, max_tokens))


def make_store(path: Path, max_tokens: int = 200, **changes: Any) -> Store:
    spec = make_spec(**changes)
    capture(path, spec, max_tokens)
    finalize(path, spec)
    return Store.open(path)


def announce(path: str | Path, spec: StoreSpec) -> Rolling:
    """What is known before the capture."""
    narrow = replace(spec, hidden_size=1)
    made = [make_sequence(narrow, row) for row in range(spec.n_rows)]
    rows = pa.table(
        {
            "sample_id": [s.sample_id for s in made],
            "source": [s.source for s in made],
            "n_tokens": pa.array([s.n_tokens for s in made], pa.int32()),
            "n_supervised": pa.array([s.n_supervised for s in made], pa.int32()),
        }
    )
    ids = np.concatenate([s.input_ids[s.loss_mask == 1] for s in made])
    rolling = Rolling.of(spec, rows)
    write_rolling(path, rolling, rows, np.bincount(ids, minlength=VOCAB))
    return rolling


def write_shard(path: str | Path, spec: StoreSpec, shard: int) -> None:
    with ShardWriter(path, shard, spec) as writer:
        for row in shard_rows(spec.n_rows, spec.n_shards, shard):
            writer.add(make_sequence(spec, row))


def of_worker(**changes: Any) -> dict[str, Any]:
    """The sign of a capture worker elsewhere."""
    return WORKER_FACTS | {"host": "elsewhere", "pid": 1, "generation": 1, "beat": 7} | changes


def of_reader(**changes: Any) -> dict[str, Any]:
    """The sign of a training run elsewhere."""
    who = {"host": "elsewhere", "pid": 1, "generation": 1, "beat": 1}
    return who | {"doing": "at step 3", "ended": False, "session": "", "mark": 4, "step": 3} | changes

"""A small store with random contents, and a configuration that trains on it in a second."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_train import config
from eagle3_train.store import Sequence, ShardWriter, StoreSpec, finalize, shard_rows, write_target_part
from tests.drafts.tiny import THETA, H, TinyTarget, V, tiny_sequence

N_LAYERS = 12


def write_store(path: Path, rows: int, seed: int = 0, shards: int = 2, damaged: Collection[int] = ()) -> StoreSpec:
    """`rows` sequences of 8 to 40 tokens with one or two assistant turns. Their next tokens follow a simple rule, so
    that there is something to learn. The states of the rows `damaged` are so large that no loss is a number."""
    spec = StoreSpec(
        target="tiny", target_hash="t", tokenizer_hash="k", chat_template_hash="c", layer_ids=(2, 6, 9, N_LAYERS),
        hidden_size=H, n_layers=N_LAYERS, vocab_size=V, dtype="fp32", compute_dtype="fp32", n_rows=rows,
        n_shards=shards, generator="test",
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    made = []
    for i in range(rows):
        length = int(rng.integers(8, 40))
        turns = [(3, length // 2), (length // 2 + 2, length)] if length > 20 else [(3, length)]
        s = tiny_sequence(length, turns, seed=1000 * seed + i)
        ids = ((np.arange(length) * 7 + int(rng.integers(V))) % V).astype(np.int32)
        states = s.hidden.float() * 0.1
        states[:, -1] += 3 * torch.nn.functional.one_hot(torch.from_numpy((ids + 7) % V % H).long(), H)
        if i in damaged:
            states[:] = 3e38
        made.append(Sequence(f"s{i}", "test", ids, s.loss_mask, states, s.target_argmax))
    for shard in range(shards):
        with ShardWriter(path, shard, spec) as writer:
            for row in shard_rows(rows, shards, shard):
                writer.add(made[row])
    finalize(path, spec)
    return spec


def make_study(
    folder: Path, rows: int = 24, damaged: Collection[int] = (), damaged_validation: Collection[int] = ()
) -> None:
    """Store, validation store and target part under `folder`/tiny/store."""
    target = TinyTarget()
    store = folder / "tiny" / "store"
    spec = write_store(store, rows, damaged=damaged)
    write_store(store / "validation", 6, seed=1, shards=1, damaged=damaged_validation)
    tensors = {"embed_tokens": target.embed_tokens, "norm_weight": target.norm_weight, "lm_head": target.lm_head}
    tensors |= {f"last_layer.{name}": t for name, t in target.last_layer.items()}
    rope = {"rope_theta": THETA, "rope_type": "default"}
    write_target_part(store, spec, tensors, target.config | {"rope_parameters": rope, "num_hidden_layers": N_LAYERS})


OVERRIDES = (
    "draft.init_layer=random",
    "study.name=tiny", "target.name=tiny", "store.dtype=fp32", "corpus.sequences=24", "corpus.max_length=64",
    "data.base_sequences=6", "data.scale=4", "draft.vocab_size=20", "draft.steps=3", "train.batch_tokens=100",
    "train.epochs=3", "train.log_every=1", "train.checkpoint_every=4", "eval.tasks=[]", "eval.decode_tasks=[]",
    "train.compute_dtype=fp32",  # curves are compared to the last digits, also where bf16 would be the default
)  # fmt: skip


def overrides(folder: Path, **keys: Any) -> list[str]:
    return [f"paths.outputs={folder}", *OVERRIDES, *(f"{k.replace('__', '.')}={v}" for k, v in keys.items())]


def tiny_config(folder: Path, **keys: Any) -> config.Config:
    """`draft__steps=5` sets `draft.steps`."""
    return config.compose(overrides(folder, **keys))

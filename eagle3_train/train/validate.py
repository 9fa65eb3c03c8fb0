"""Validation loss on held-out conversations, teacher-forced, spread over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eagle3_train.config import Config, TrainConfig
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.store import BatchPlan, Store, StoreSpec, inside
from eagle3_train.train.distributed import World
from eagle3_train.train.engines import Engine
from eagle3_train.train.losses import Validation
from eagle3_train.train.step import batch_counts

RANK_TOKENS = 4096  # of a forward pass


def open_validation(cfg: Config, head: Draft, training: StoreSpec, world: World) -> Store:
    """The validation store. ValueError, before any training, where it is not whole, not of the same target as the
    `training` store, or a draft step has no supervised row in it. A collective; no states are read."""
    store = Store.open(inside(cfg.paths.store, "validation")).expect_same_target(training)
    world.on_main(store.require_whole)
    mine = store.read_batch(np.arange(world.rank, len(store), world.size), states=False)
    counts = world.sum(batch_counts(mine, head, cfg.train.oov))
    if not np.all(counts):
        raise ValueError(
            f"the validation store {store.folder.uri} has no supervised row at draft step {int(np.argmin(counts))}: "
            "raise corpus.validation_sequences, prepare and capture again"
        )
    return store


def validate(cfg: TrainConfig, engine: Engine, store: Store) -> dict[str, Any]:
    """`val_loss` (the objective), `val_loss_steps` (CE_i), `val_kl_steps`, `val_kl` (its step 0), `val_agreement`.

    Every row of `store` counts once: the numbers do not depend on batch size or world size (up to rounding).
    """
    head, world = engine.head, engine.world
    lengths = store.index.n_tokens
    plan = BatchPlan(lengths, store.fingerprint, 0, max(RANK_TOKENS * world.size, int(lengths.max())), epochs=1)
    totals = np.zeros((4, head.steps))  # CE, entropy, agreement, rows
    head.eval()
    for step in range(len(plan)):
        sequences = list(store.read(plan.rank_rows(step, world.rank, world.size)))
        counts = batch_counts(sequences, head, cfg.oov)
        objective = Validation(counts, cfg.step_weights or cfg.step_weight, cfg.oov, engine.device, cfg.objective)
        with torch.no_grad():
            engine.loss(DraftBatch.collate_or_placeholder(sequences, head, engine.device, engine.dtype), objective)
        parts = (objective.ce_sums, objective.entropy_sums, objective.agreed)
        totals += np.stack([*(p.cpu().numpy() for p in parts), counts])
    head.train()
    ce, entropy, agreed, rows = world.sum(totals.ravel()).reshape(4, head.steps)
    ce, kl = ce / rows, (ce - entropy) / rows
    return {
        "val_loss": float(sum(cfg.step_weight**i * c for i, c in enumerate(ce))),
        "val_loss_steps": ce.tolist(),
        "val_kl": float(kl[0]),
        "val_kl_steps": kl.tolist(),
        "val_agreement": (agreed / rows).tolist(),
    }

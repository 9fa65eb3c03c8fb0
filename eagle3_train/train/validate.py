"""Validation loss on held-out conversations, teacher-forced, spread over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eagle3_train.config import Config
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.store import Store
from eagle3_train.train.distributed import World
from eagle3_train.train.losses import Validation
from eagle3_train.train.step import batch_counts

BATCH_TOKENS = 4096


def validate(cfg: Config, head: Draft, store: Store, world: World, dtype: torch.dtype) -> dict[str, Any]:
    """`val_loss` (the objective), `val_loss_steps` (CE_i), `val_kl_steps`, `val_kl` (its step 0), `val_agreement`.

    Every row of `store` counts once: the numbers do not depend on batch size or world size (up to rounding).
    """
    device = next(head.parameters()).device
    k = head.steps
    totals = np.zeros((4, k))  # CE, entropy, agreement, rows
    head.eval()
    pending: list[Any] = []

    def run() -> None:
        counts = batch_counts(pending, head, cfg.train.oov)
        objective = Validation(counts, cfg.train.step_weight, cfg.train.oov, device)
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            head(DraftBatch.collate(pending, device, dtype), objective)
        parts = (objective.ce_sums, objective.entropy_sums, objective.agreed)
        totals[:] += np.stack([*(p.cpu().numpy() for p in parts), counts])
        pending.clear()

    for sequence in store.read(range(world.rank, len(store), world.size)):
        if pending and sum(s.n_tokens for s in pending) + sequence.n_tokens > BATCH_TOKENS:
            run()
        pending.append(sequence)
    if pending:
        run()
    head.train()
    ce, entropy, agreed, rows = world.sum(totals.ravel()).reshape(4, k)
    if (rows == 0).any():
        raise ValueError(
            f"the validation store has no supervised row at draft step {int(np.argmin(rows))}: capture more"
        )
    ce, kl = ce / rows, (ce - entropy) / rows
    return {
        "val_loss": float(sum(cfg.train.step_weight**i * c for i, c in enumerate(ce))),
        "val_loss_steps": ce.tolist(),
        "val_kl": float(kl[0]),
        "val_kl_steps": kl.tolist(),
        "val_agreement": (agreed / rows).tolist(),
    }

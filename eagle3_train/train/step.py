"""One optimizer step: count what counts over the global batch, then forward and backward of each micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from eagle3_train.config import TrainConfig
from eagle3_train.drafts import Draft, DraftBatch, supervised_counts
from eagle3_train.store import BatchPlan, Sequence
from eagle3_train.train.distributed import World
from eagle3_train.train.engines import Engine
from eagle3_train.train.losses import Objective


@dataclass
class StepResult:
    """Of the global batch: all ranks hold the same numbers."""

    loss: float  # the objective, sum_i w_i L_i
    loss_steps: list[float]  # CE_i
    rows: int  # that counted at step 0
    tokens: int
    flops: float
    grad_norm: float


def batch_counts(sequences: list[Sequence], head: Draft, oov: str) -> np.ndarray:
    """[K] int64: rows of these sequences that count in the loss at each step. From masks alone, before any forward."""
    total = np.zeros(head.steps, np.int64)
    for s in sequences:
        kept = head.kept_targets(s.target_argmax) if oov == "drop" else None
        total += supervised_counts(s.loss_mask, [0, s.n_tokens], head.steps, kept)
    return total


def split(
    sequences: list[Sequence], plan: BatchPlan, step: int, world: World, cfg: TrainConfig
) -> list[list[Sequence]]:
    """A rank's share of a global batch in forward passes of at most `micro_batch_tokens`; some may be empty."""
    by_row = dict(zip(plan.rank_rows(step, world.rank, world.size).tolist(), sequences, strict=True))
    parts = plan.micro_batches(step, world.rank, world.size, cfg.micro_batch_tokens, cfg.padding == "length")
    return [[by_row[row] for row in part.tolist()] for part in parts]


def train_step(
    engine: Engine, micro_batches: list[list[Sequence]], lr: float, cfg: TrainConfig, world: World
) -> StepResult:
    """The same update for every split of a global batch into micro-batches and ranks (up to rounding)."""
    head, device = engine.head, engine.device
    local = batch_counts([s for part in micro_batches for s in part], head, cfg.oov)
    counts = world.sum(local)
    objective = Objective(counts, cfg.step_weights or cfg.step_weight, cfg.oov, device, cfg.objective, head.compiled)
    loss = torch.zeros((), device=device)
    flops, tokens = 0.0, 0
    for number, part in enumerate(micro_batches):
        batch = DraftBatch.collate_or_placeholder(part, head, device, engine.dtype, cfg.padding == "length")
        if part:
            flops += engine.outline.flops(batch)
            tokens += sum(s.n_tokens for s in part)
        loss = loss + engine.backward(batch, objective, last=number == len(micro_batches) - 1)
    grad_norm = engine.step(lr)
    sums = world.sum(np.concatenate([objective.ce_sums.cpu().numpy(), [float(loss), flops, tokens]]))
    ce = sums[: head.steps] / np.maximum(counts, 1)
    return StepResult(float(sums[-3]), ce.tolist(), int(counts[0]), int(sums[-1]), float(sums[-2]), grad_norm)

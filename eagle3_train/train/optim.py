"""AdamW and the learning rate as a function of the step alone, so that there is no scheduler state to lose."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from eagle3_train.config import OptimConfig


def make_optimizer(cfg: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over fp32 masters; weight decay on matrices only."""
    every = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), eps=cfg.eps, fused=True)


def learning_rate(cfg: OptimConfig, step: int, total: int) -> float:
    """Rate of step 0 .. total-1: linear warm-up over a fraction of the run's own steps, then decay to a fraction.

    Fractions, not step counts: a fixed warm-up would swamp the small data scales, and every scale needs its own fully
    decayed schedule for its end point to be comparable.
    """
    warmup = cfg.warmup_fraction * total
    if step + 1 < warmup:
        return cfg.lr * (step + 1) / warmup
    progress = min((step + 1 - warmup) / max(total - warmup, 1.0), 1.0)
    if cfg.decay == "constant":
        return cfg.lr
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if cfg.decay == "cosine" else 1 - progress
    return cfg.lr * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * shape)

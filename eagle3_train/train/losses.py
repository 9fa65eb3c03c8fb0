"""The training objective: sum_i w^i CE_i, each CE_i divided by the global number of rows that count at step i.

CE is soft: -sum_v p(v) log q(v), with p the target's distribution restricted to the draft vocabulary and renormalised,
q the draft's. Dividing by the *global* count makes the loss independent of packing, accumulation and world size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 512  # rows whose logits exist at once: [512, D] fp32 stays near the caches, and [R, D] is never kept


class _LinearSoftCrossEntropy(torch.autograd.Function):
    """Fused lm_head + soft cross-entropy over chunks of rows; the gradients are made in the forward pass.

    hidden [R, H], weight [D, H] (fp32 master), targets [M, D], rows [R] -> (scaled loss [], per-row CE [R] detached).
    d CE / d logits = softmax(logits) - p, since sum(p) = 1.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, scale: float, train: bool
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        ce = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if train else None
        d_weight = torch.zeros_like(weight) if train and ctx.needs_input_grad[1] else None  # None: frozen
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            h, p = hidden[part], targets[rows[part]].to(wide)
            logits = (h @ head.T).to(wide)
            lse = logits.logsumexp(-1)
            ce[part] = lse - (p * logits).sum(-1)
            if d_hidden is not None:
                grad = logits.sub_(lse[:, None]).exp_().sub_(p).mul_(scale).to(hidden.dtype)
                d_hidden[part] = grad @ head
                if d_weight is not None:
                    d_weight.addmm_(grad.T.to(weight.dtype), h.to(weight.dtype))
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(ce)
        return ce.sum() * scale, ce

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = (t if t is None else t * grads[0].to(t.dtype) for t in ctx.saved_tensors)
        return d_hidden, d_weight, None, None, None, None


class Objective:
    """The loss of one batch, called by the head once a step; keeps sums for the log.

    counts: [K] rows that count at each step, over the whole *global* batch. Steps without any row add nothing.
    """

    def __init__(self, counts: np.ndarray, step_weight: float, oov: str, device: torch.device) -> None:
        self.scales = [step_weight**i / n if n else 0.0 for i, n in enumerate(counts.tolist())]
        self.oov = oov
        self.ce_sums = torch.zeros(len(counts), dtype=torch.float64, device=device)

    def select(self, kept: Tensor) -> Tensor | None:
        return kept if self.oov == "drop" else None

    def __call__(self, step: int, hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            loss, ce = _LinearSoftCrossEntropy.apply(
                hidden, lm_head, targets, target_rows, self.scales[step], torch.is_grad_enabled()
            )
        self.ce_sums[step] += ce.sum()
        return loss

    def regress(self, step: int, hidden: Tensor, features: Tensor) -> Tensor:
        """EAGLE-1's regression: smooth L1, averaged over the feature and divided by the same global count as the CE."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            distance = F.smooth_l1_loss(hidden.to(wide), features.to(wide), reduction="sum")
        return distance * (self.scales[step] / hidden.shape[1])


class Validation(Objective):
    """The objective on held-out data, with the KL divergence and the greedy agreement of each step. No gradients."""

    def __init__(self, counts: np.ndarray, step_weight: float, oov: str, device: torch.device) -> None:
        super().__init__(counts, step_weight, oov, device)
        self.entropy_sums = torch.zeros_like(self.ce_sums)
        self.agreed = torch.zeros_like(self.ce_sums)

    def __call__(self, step: int, hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor) -> Tensor:
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            p = targets[target_rows[part]].to(torch.promote_types(targets.dtype, torch.float32))
            self.entropy_sums[step] += torch.special.entr(p).sum()
            guess = (hidden[part] @ lm_head.T.to(hidden.dtype)).argmax(-1)
            self.agreed[step] += (guess == p.argmax(-1)).sum()
        return super().__call__(step, hidden, lm_head, targets, target_rows)

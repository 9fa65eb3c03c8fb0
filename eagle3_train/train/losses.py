"""The training objective: sum_i w_i L_i, each L_i divided by the global number of rows that count at step i.

L compares p, the target's distribution restricted to the draft vocabulary and renormalised, with q, the draft's:

| `train.objective` | L of a row | its gradient in the logits z |
|---|---|---|
| soft_ce | -sum_v p log q; less p's entropy it is the forward KL | q - p |
| reverse_kl | sum_v q (log q - log p) | q (log q - log p - L) |
| tv | 1/2 sum_v abs(p - q) | q (g - sum q g) |
| hard_ce | -log q at p's most likely token | q - onehot |

with g = 1/2 sign(q - p). 1 - tv is the chance that sampling accepts a drafted token (Leviathan et al. 2023). Division
by the *global* count makes the loss independent of packing, accumulation and world size. Cross-entropies by step are
kept for the log whatever the objective is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_train.config import parse_objective
from eagle3_train.device import block_rows

CHUNK = 2048  # rows whose logits exist at once: [R, D] is never kept

Mix = tuple[tuple[str, float], ...]  # names of the table above and their weights


def _soft_ce(log_q: Tensor, q: Tensor, p: Tensor, ce: Tensor) -> tuple[Tensor, Tensor]:
    return ce, q - p


def _reverse_kl(log_q: Tensor, q: Tensor, p: Tensor, ce: Tensor) -> tuple[Tensor, Tensor]:
    # What the target rounds to zero counts as the smallest normal number, so that the divergence stays finite.
    ratio = log_q - p.clamp_min(torch.finfo(p.dtype).tiny).log()
    value = (q * ratio).sum(-1)
    return value, q * (ratio - value[:, None])


def _tv(log_q: Tensor, q: Tensor, p: Tensor, ce: Tensor) -> tuple[Tensor, Tensor]:
    difference = q - p
    g = 0.5 * difference.sign()
    return 0.5 * difference.abs().sum(-1), q * (g - (q * g).sum(-1, keepdim=True))


def _hard_ce(log_q: Tensor, q: Tensor, p: Tensor, ce: Tensor) -> tuple[Tensor, Tensor]:
    label = p.argmax(-1, keepdim=True)
    return -log_q.gather(-1, label).squeeze(-1), q.scatter_add(-1, label, -torch.ones_like(label, dtype=q.dtype))


TERMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "soft_ce": _soft_ce, "reverse_kl": _reverse_kl, "tv": _tv, "hard_ce": _hard_ce,
}  # fmt: skip


def compare(logits: Tensor, p: Tensor, mix: Mix, train: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Value [r], soft cross-entropy [r] and gradient in the logits [r, D] of the mixed objective; fp32 at least.

    logits, p [r, D]. The plain soft cross-entropy, the default, takes one exponential a number and no log q: with
    s = logsumexp(z), -sum_v p log q = s sum_v p - sum_v p z, and s follows from the largest of z and of q.
    """
    if mix == (("soft_ce", 1.0),):
        q = logits.softmax(-1)
        norm = logits.amax(-1) - q.amax(-1).log()
        ce = norm * p.sum(-1) - torch.linalg.vecdot(p, logits)
        return ce, ce, q.sub_(p) if train else None
    log_q = logits.log_softmax(-1)
    ce = -torch.linalg.vecdot(p, log_q)
    q = log_q.exp()
    value, grad = torch.zeros_like(ce), torch.zeros_like(q) if train else None
    for name, weight in mix:
        term, slope = TERMS[name](log_q, q, p, ce)
        value = value + weight * term
        grad = grad if grad is None else grad.add_(slope, alpha=weight)
    return value, ce, grad


@cache
def _compiled_compare() -> Callable[[Tensor, Tensor, Mix, bool], tuple[Tensor, Tensor, Tensor | None]]:
    return torch.compile(compare, dynamic=True)


class _LinearObjective(torch.autograd.Function):
    """Fused lm_head and objective over chunks of rows; the gradients are made in the forward pass.

    hidden [R, H], weight [D, H] (fp32 master), targets [M, D], rows [R], scales [R] -> (loss [], CE [R] detached).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor,
        scales: Tensor,
        mix: Mix,
        train: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head = weight.to(hidden.dtype)
        value, ce = (torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(2))
        d_hidden = torch.empty_like(hidden) if train else None
        d_weight = torch.zeros_like(weight) if train and ctx.needs_input_grad[1] else None
        evaluate = _compiled_compare() if compiled else compare
        block = block_rows(hidden.device)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            h = hidden[part]
            logits = h @ head.T
            for z, at, v, c in zip(*(x.split(block) for x in (logits, rows[part], value[part], ce[part])), strict=True):
                v[:], c[:], grad = evaluate(z.to(wide), targets.index_select(0, at).to(wide), mix, train)
                if grad is not None:
                    z.copy_(grad)  # the logits make room for their gradient
            if d_hidden is None:
                continue
            scale = scales[part, None].to(hidden.dtype)  # on the narrow side of the products
            torch.mm(logits, head, out=d_hidden[part])
            d_hidden[part] *= scale
            if d_weight is not None and d_weight.dtype == logits.dtype:
                d_weight.addmm_(logits.T, h * scale)
            elif d_weight is not None:
                d_weight += logits.T @ (h * scale)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(ce)
        return (value * scales).sum(), ce

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: nobody else has them, and a second backward pass is refused by torch, since they have changed.
        d_hidden, d_weight = (t if t is None else t.mul_(grads[0].to(t.dtype)) for t in ctx.saved_tensors)
        return d_hidden, d_weight, *(None,) * 6


class Objective:
    """The loss of one batch, called by the head; keeps sums for the log.

    counts: [K] rows that count at each step, over the whole *global* batch; steps without any row add nothing.
    step_weight: w, step i counts w^i, or a weight a step. objective: as in `train.objective`.
    """

    def __init__(
        self,
        counts: np.ndarray,
        step_weight: float | Sequence[float],
        oov: str,
        device: torch.device,
        objective: str = "soft_ce",
        compiled: bool = False,
    ) -> None:
        if isinstance(step_weight, int | float):
            step_weight = [float(step_weight) ** i for i in range(len(counts))]
        self.scales = [w / n if n else 0.0 for w, n in zip(step_weight, counts.tolist(), strict=True)]
        self.oov = oov
        self.mix: Mix = tuple(parse_objective(objective).items())
        self.compiled = compiled
        self.ce_sums = torch.zeros(len(counts), dtype=torch.float64, device=device)

    def select(self, kept: np.ndarray) -> np.ndarray | None:
        return kept if self.oov == "drop" else None

    def __call__(self, step: int, hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor) -> Tensor:
        return self.steps([0] * step + [len(hidden)], hidden, lm_head, targets, target_rows)

    def steps(
        self, rows_by_step: list[int], hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scales = torch.from_numpy(np.repeat(self.scales[: len(rows_by_step)], rows_by_step)).to(wide)
        scales = scales.to(hidden.device, non_blocking=True)
        with torch.autocast(hidden.device.type, enabled=False):
            loss, ce = _LinearObjective.apply(
                hidden, lm_head, targets, target_rows, scales, self.mix, torch.is_grad_enabled(), self.compiled
            )
        for step, part in enumerate(ce.split(rows_by_step)):
            self.ce_sums[step] += part.sum()
        return loss

    def regress(self, step: int, hidden: Tensor, features: Tensor) -> Tensor:
        """EAGLE-1's regression: smooth L1, averaged over the feature and divided by the same global count as the CE."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            distance = F.smooth_l1_loss(hidden.to(wide), features.to(wide), reduction="sum")
        return distance * (self.scales[step] / hidden.shape[1])


class Validation(Objective):
    """The objective on held-out data, with the KL divergence and the greedy agreement of each step. No gradients."""

    def __init__(
        self,
        counts: np.ndarray,
        step_weight: float | Sequence[float],
        oov: str,
        device: torch.device,
        objective: str = "soft_ce",
    ) -> None:
        super().__init__(counts, step_weight, oov, device, objective)
        self.entropy_sums = torch.zeros_like(self.ce_sums)
        self.agreed = torch.zeros_like(self.ce_sums)

    def steps(
        self, rows_by_step: list[int], hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor
    ) -> Tensor:
        parts = zip(hidden.split(rows_by_step), target_rows.split(rows_by_step), strict=True)
        for step, (step_hidden, step_rows) in enumerate(parts):
            for h, rows in zip(step_hidden.split(CHUNK), step_rows.split(CHUNK), strict=True):
                p = targets[rows].to(torch.promote_types(targets.dtype, torch.float32))
                self.entropy_sums[step] += torch.special.entr(p).sum()
                self.agreed[step] += ((h @ lm_head.T.to(h.dtype)).argmax(-1) == p.argmax(-1)).sum()
        return super().steps(rows_by_step, hidden, lm_head, targets, target_rows)

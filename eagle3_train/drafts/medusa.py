"""Medusa: K residual heads on the target's last hidden state, each for one position ahead; no layer, no own state.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (Medusa-1: the
target stays frozen). Head i: h = f + SiLU(W_i f + b_i), `layers` such blocks, then its own lm_head; W_i starts at 0 and
each lm_head as the target's, so that a new head says what the target itself says. f_t is the last hidden state after
the target's final norm. Head i guesses x_{t+2+i}: x_{t+1} is the target's own and known. No head reads a token, so the
guess of a position does not depend on those before it. Loss: sum_i w^i CE_i, w = 0.8 in the paper too.

Differences: the targets are the target's distributions, as for all heads here, where the paper takes the text's tokens;
the lm_heads can be cut down to the draft vocabulary. Verification is the lossless one; the paper's typical acceptance
is not offered. Trees: static ones as in the paper (`eval.trees` with `choices`), or the dynamic one, in which a node's
score is the product of its heads' probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train.config import DraftConfig
from eagle3_train.drafts.base import TargetPart
from eagle3_train.drafts.batch import DraftBatch, find_segments, plan_rows
from eagle3_train.drafts.on_target import OnTarget, Step
from eagle3_train.drafts.vocab import DraftVocab


class Block(nn.Module):
    """A residual block, the identity at first. [..., H] -> [..., H]"""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    def __init__(self, layers: int, rows: Tensor) -> None:
        super().__init__()
        size, hidden = rows.shape
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(layers)))
        self.lm_head = nn.Linear(hidden, size, bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(rows)


@dataclass
class MedusaState:
    """feature [H]: f of the last observed position; chain: drafted tokens since."""

    feature: Tensor
    chain: int = 0


class Medusa(OnTarget):
    """K Medusa heads."""

    reads = slice(-1, None)

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__(cfg, target, vocab, n_inputs)
        self.heads = nn.ModuleList(MedusaHead(cfg.medusa.layers, self.target_rows) for _ in range(cfg.steps))
        self.frozen_parameters = self.target_norm.numel()  # it reads no embedding

    def head(self, step: int) -> MedusaHead:
        head = self.heads[step]
        assert isinstance(head, MedusaHead)
        return head

    def unroll(self, batch: DraftBatch, steps: int) -> Iterator[Step]:
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), steps, batch.input_ids.device)
        index = torch.arange(len(plan[0]), device=batch.input_ids.device)
        feature = self.normed_final(batch.hidden[plan[0].anchors, -1])
        for i, rows in enumerate(plan):
            if rows.keep is not None:
                index, feature = index[rows.keep], feature[rows.keep]
            yield i, rows, self.head(i).blocks(feature), index + i

    def head_weight(self, step: int) -> Tensor:
        return self.head(step).lm_head.weight

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> MedusaState:
        return MedusaState(self.target_norm.new_zeros(self.dims.hidden))

    @torch.no_grad()
    def observe(self, state: MedusaState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """features [n, 1, H]: the target's last states, before its final norm."""
        state.feature = self.normed_final(features[-1, 0].to(self.head_weight(0).dtype))
        state.chain = 0
        return state.feature, self._logits(state, 0)

    @torch.no_grad()
    def step(self, state: MedusaState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        state.chain += 1
        return h, self._logits(state, state.chain)

    @torch.no_grad()
    def expand(
        self, state: MedusaState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        return h, self._logits(state, depth).expand(len(tokens), -1)

    def _logits(self, state: MedusaState, step: int) -> Tensor:
        head = self.head(step)
        return head.lm_head(head.blocks(state.feature))

    # -- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, batch: DraftBatch) -> float:
        """Multiply-adds counted twice; backward as twice the forward; the target's own distribution, a forward only."""
        segments = find_segments(batch.loss_mask, batch.starts)
        rows = [sum(s.rows(i) for s in segments) for i in range(self.steps)]
        matrices = sum(p.numel() for p in self.head(0).parameters() if p.dim() == 2)
        return 6.0 * sum(rows) * matrices + 2.0 * rows[0] * self.target_rows.numel()

"""An independent draft model: a small decoder that sees the text alone, nothing of the target's states.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", with the draft model distilled on
the target's distributions over the study's own tokens. Its layers have the target's shape.

Differences from a draft model off the shelf: it is trained on nothing else than this data, so it starts with the
target's frozen embeddings and, by `init_lm_head` and `init_layer`, with the target's head and last layer; its head is
cut down to the draft vocabulary. The first token of a sequence (a constant of the chat template) is not shown to it:
position t carries x_{t+1}, as for all heads here.

Step i of anchor t is the model's output at position t + i, so the K steps of training-time test are one step shifted:
the loss has one step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train.config import DraftConfig
from eagle3_train.drafts.base import DraftState, TargetPart
from eagle3_train.drafts.batch import DraftBatch, find_segments, plan_rows
from eagle3_train.drafts.decoder import DecoderLayer, causal_layer, causal_pairs, draft_rows, new_cache, observe_rows
from eagle3_train.drafts.layer import RMSNorm, Rotary, rope_inverse_frequencies
from eagle3_train.drafts.on_target import OnTarget, Step
from eagle3_train.drafts.vocab import DraftVocab


class DraftLM(OnTarget):
    """A decoder-only language model of `draft.lm.layers` layers."""

    reads = slice(0, 0)

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__(cfg, target, vocab, n_inputs)
        self.attention = cfg.attention
        self.trained_steps = 1
        self.layers = nn.ModuleList(DecoderLayer(self.dims) for _ in range(cfg.lm.layers))
        self.norm = RMSNorm(self.dims.hidden, self.dims.eps)
        self.lm_head = nn.Linear(self.dims.hidden, len(vocab.ids), bias=False)
        self.rotary = Rotary(rope_inverse_frequencies(target.config, self.dims.head_dim))
        self.randomise()
        with torch.no_grad():
            if cfg.init_lm_head == "target":
                self.lm_head.weight.copy_(self.target_rows)
                self.norm.weight.copy_(self.target_norm)
        if cfg.init_layer == "target":
            self.stack[-1].start_from(target.last_layer)

    @property
    def stack(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def unroll(self, batch: DraftBatch, steps: int) -> Iterator[Step]:
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), steps, batch.input_ids.device)
        hidden = self.norm(self._outputs(batch)[plan[0].anchors])
        index = torch.arange(len(plan[0]), device=hidden.device)
        for i, rows in enumerate(plan):
            if rows.keep is not None:
                index = index[rows.keep]
            yield i, rows, hidden[index + i], index + i

    def _outputs(self, batch: DraftBatch) -> Tensor:
        """[N, H], un-normed, of every position."""
        x = self.next_embeddings(batch)
        for layer in self.stack:
            x = causal_layer(layer, self.rotary, self.attention, batch, x)
        return x

    def head_weight(self, step: int) -> Tensor:
        return self.lm_head.weight

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> DraftState:
        return new_cache(self.dims, len(self.layers), self.lm_head.weight)

    @torch.no_grad()
    def observe(self, state: DraftState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """next_ids [n]: x_{t+1} of the n new positions; nothing is read of `features`."""
        hidden = observe_rows(self.stack, self.rotary, state, self._embed(next_ids))
        return hidden, self.lm_head(self.norm(hidden))

    @torch.no_grad()
    def step(self, state: DraftState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hidden = draft_rows(self.stack, self.rotary, state, self._embed(token.view(1)), state.chain + 1, None)[0]
        return hidden, self.lm_head(self.norm(hidden))

    @torch.no_grad()
    def expand(
        self, state: DraftState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden = draft_rows(self.stack, self.rotary, state, self._embed(tokens), depth, visible)
        return hidden, self.lm_head(self.norm(hidden))

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_tokens).to(self.lm_head.weight.dtype)

    # -- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, batch: DraftBatch) -> float:
        """Multiply-adds counted twice; backward as twice the forward; the target's own distribution, a forward only."""
        rows = sum(s.rows(0) for s in find_segments(batch.loss_mask, batch.starts))
        matrices = sum(p.numel() for p in self.layers.parameters() if p.dim() == 2)
        pairs = causal_pairs(batch) * len(self.layers)
        trained = batch.n_tokens * matrices + pairs * 2 * self.dims.n_heads * self.dims.head_dim
        trained += rows * self.lm_head.weight.numel()
        return 6.0 * trained + 2.0 * rows * self.target_rows.numel()

"""EAGLE-1 (and EAGLE-2, which drafts dynamic trees with it): regression of the target's top-layer feature.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty". The feature f_t is the target's
last hidden state *after* its final norm, as the official training code stores it (`hidden_states[-1]` of transformers)
and as vLLM hands it over: the target's head reads it as it is, and no norm stands between the prediction and the head.

Step i of anchor t: x = fc([E[x_{t+1+i}] ; h]), h = f_t at i = 0 and the own prediction of f_{t+i} after that; one
decoder layer without input norm gives the prediction of f_{t+1+i}; the target's frozen head turns it into logits.
Trained teacher-forced on true features (`trained_steps` 1), with uniform noise on them in place of the errors that
drafting has: loss = SmoothL1(prediction, f) + 0.1 x soft cross-entropy.

Differences: the head can be cut down to the draft vocabulary, so that all heads of a study can propose the same tokens
(`draft.vocab_size` = V is the paper's full one); rows that `train.oov=drop` leaves out supervise neither loss;
gradients are clipped by norm as everywhere here. Options lead to EAGLE-3 step by step (docs/heads.md): no feature loss,
fused inputs, training-time test.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train.config import DraftConfig
from eagle3_train.drafts.base import DraftState, StepLoss, TargetPart
from eagle3_train.drafts.batch import DraftBatch, find_segments, plan_rows
from eagle3_train.drafts.decoder import DecoderLayer, Unrolled, draft_rows, new_cache, observe_rows
from eagle3_train.drafts.layer import Rotary, rope_inverse_frequencies
from eagle3_train.drafts.on_target import OnTarget, Step
from eagle3_train.drafts.vocab import DraftVocab

NOISE_LENGTH = 512  # tokens of a document at which the noise has its nominal width; it falls with the length


class Eagle1(OnTarget):
    """The EAGLE-1 draft head."""

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__(cfg, target, vocab, n_inputs)
        own, hidden = cfg.eagle1, self.dims.hidden
        self.attention = cfg.attention
        self.trained_steps = own.trained_steps
        self.feature_weight, self.ce_weight, self.noise = own.feature_weight, own.ce_weight, own.noise
        fused = own.inputs == "fused"
        self.reads = slice(0, -1) if fused else slice(-1, None)
        self.fuse = nn.Linear(n_inputs * hidden, hidden, bias=False) if fused else None
        self.fc = nn.Linear(2 * hidden, hidden, bias=own.bias)
        self.layers = nn.ModuleList([DecoderLayer(self.dims, input_norm=False)])
        self.rotary = Rotary(rope_inverse_frequencies(target.config, self.dims.head_dim))
        self.frozen_parameters += self.target_rows.numel()
        # Linear maps start as torch makes them, as in the official code. The target's last layer would be no start: it
        # reads and adds to states before the final norm, which are an order of magnitude wider than the features.

    @property
    def layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def _inputs(self, states: Tensor) -> Tensor:
        """h of step 0 from the target's states that `reads` picks: [n, states, H] -> [n, H]."""
        return self.normed_final(states[:, 0]) if self.fuse is None else self.fuse(states.flatten(1))

    def _noisy(self, hidden: Tensor, batch: DraftBatch) -> Tensor:
        """Uniform within +-noise / 2, times 512 / the document's length."""
        lengths = torch.tensor(batch.starts).diff()  # on the host, which need not wait then
        width = (self.noise * NOISE_LENGTH / lengths).repeat_interleave(lengths)[:, None]
        return hidden + (torch.rand_like(hidden) - 0.5) * width.to(hidden.dtype).to(hidden.device, non_blocking=True)

    def _join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Input of the layer, [R, H]: the embedding comes first."""
        return self.fc(torch.cat((embedded, hidden), -1))

    # -- training -----------------------------------------------------------------------------------------------------

    def unroll(self, batch: DraftBatch, steps: int) -> Iterator[Step]:
        layer = self.layer
        attn = layer.self_attn
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), steps, batch.input_ids.device)
        embedded = self.next_embeddings(batch)
        start = self._inputs(batch.hidden[:, self.reads])
        if self.noise and self.training and torch.is_grad_enabled():  # never while drafting
            start = self._noisy(start, batch)
        joined = self._join(embedded, start)
        keys = Unrolled(self.rotary, self.attention, batch, *attn.key_value(joined))
        index = torch.arange(len(plan[0]), device=joined.device)
        hidden = x = joined[plan[0].anchors]
        for i, rows in enumerate(plan):
            if rows.keep is not None:
                index = index[rows.keep]
                x = self._join(embedded[rows.anchors + i], hidden[rows.keep])
                keys.extend(i, rows, *attn.key_value(x))
            hidden = layer.finish(x, keys.attend(i, rows, attn.query(x)))
            yield i, rows, hidden, index + i

    def head_weight(self, step: int) -> Tensor:
        return self.target_rows

    def step_loss(
        self,
        loss: StepLoss,
        i: int,
        hidden: Tensor,
        targets: Tensor,
        target_rows: Tensor,
        at: Tensor,
        batch: DraftBatch,
    ) -> Tensor:
        ce = super().step_loss(loss, i, hidden, targets, target_rows, at, batch)
        feature = self.normed_final(batch.hidden[at, -1])
        return self.ce_weight * ce + self.feature_weight * loss.regress(i, hidden, feature)

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> DraftState:
        return new_cache(self.dims, 1, self.fc.weight)

    @torch.no_grad()
    def observe(self, state: DraftState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """next_ids [n]: x_{t+1} of the n new positions; features [n, states, H]: what `reads` picks, there."""
        x = self._join(self._embed(next_ids), self._inputs(features.to(self.fc.weight.dtype)))
        hidden = observe_rows([self.layer], self.rotary, state, x)
        return hidden, F.linear(hidden, self.target_rows)

    @torch.no_grad()
    def step(self, state: DraftState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hidden, logits = self._advance(state, token.view(1), h[None], state.chain + 1, None)
        return hidden[0], logits[0]

    @torch.no_grad()
    def expand(
        self, state: DraftState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._advance(state, tokens, h, depth, visible)

    def _advance(
        self, state: DraftState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = self._join(self._embed(tokens), h)
        hidden = draft_rows([self.layer], self.rotary, state, x, depth, visible)
        return hidden, F.linear(hidden, self.target_rows)

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_tokens).to(self.fc.weight.dtype)

    # -- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, batch: DraftBatch) -> float:
        """Multiply-adds counted twice; backward as twice the forward; the frozen head passes a gradient to its input
        and needs none itself; the target's own distribution is a forward only."""
        segments = find_segments(batch.loss_mask, batch.starts)
        d, n = self.dims, batch.n_tokens
        attn = self.layer.self_attn
        kv = attn.k_proj.weight.numel() + attn.v_proj.weight.numel()
        rest = sum(p.numel() for p in self.layer.parameters() if p.dim() == 2) - kv
        enter = self.fc.weight.numel() + kv
        trained: float = n * (enter + (self.fuse.weight.numel() if self.fuse is not None else 0))
        head = 0
        for i in range(self.trained_steps):
            rows = sum(s.rows(i) for s in segments)
            pairs = sum(s.rows(i) * (s.first - s.start + (s.rows(i) + 1) / 2 + i) for s in segments)
            trained += rows * (rest + (enter if i else 0)) + pairs * 2 * d.n_heads * d.head_dim
            head += rows * self.target_rows.numel()
        targets = sum(s.rows(0) for s in segments) * self.target_rows.numel()
        return 6.0 * trained + 4.0 * head + 2.0 * targets

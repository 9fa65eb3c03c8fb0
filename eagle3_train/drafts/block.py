"""A parallel block drafter: all K positions in one pass, then a light Markov correction from one to the next.

In the spirit of P-EAGLE (parallel drafting on EAGLE-3's inputs: a learnt mask embedding and a learnt shared state stand
for the token and the hidden input that later positions do not have yet) and of semi-autoregressive drafters such as
DSpark (a low-rank term of the logits that reads the token before, so that neighbouring guesses agree).

Position i of anchor t: x = proj([RMSNorm(e) ; RMSNorm(h)]), with e = E[x_{t+1}], h = fuse(g_t) at i = 0 and the learnt
pair after it; one decoder layer, in which (t, i) sees (j, 0) for j <= t and (t, 1..i), each rotated at its own
position, as in training-time test; logits = lm_head(norm(out)) + W SiLU(U E[x_{t+1+i}]), the last term from i = 1 on.
Loss: sum_i w^i CE_i.

Differences: one layer, where P-EAGLE stacks several, and joined by a projection, where it widens q, k and v; every
anchor trains all K positions, where it samples depths; the Markov term is a two-layer map of the target's embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train.config import DraftConfig
from eagle3_train.drafts.base import DraftState, TargetPart
from eagle3_train.drafts.batch import DraftBatch, find_segments, plan_rows
from eagle3_train.drafts.decoder import DecoderLayer, Unrolled, draft_rows, new_cache, observe_rows
from eagle3_train.drafts.layer import RMSNorm, Rotary, rope_inverse_frequencies
from eagle3_train.drafts.on_target import OnTarget, Step
from eagle3_train.drafts.vocab import DraftVocab


@dataclass
class BlockState:
    cache: DraftState
    outputs: Tensor  # [K, H], normed, of the block after the last observed position
    chain: int = 0  # drafted tokens since


class Block(OnTarget):
    """The block drafter."""

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__(cfg, target, vocab, n_inputs)
        hidden, rank = self.dims.hidden, cfg.block.rank
        self.attention = cfg.attention
        self.fuse = nn.Linear(n_inputs * hidden, hidden, bias=False)
        self.enorm, self.hnorm = (RMSNorm(hidden, self.dims.eps) for _ in range(2))
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(self.dims)])
        self.norm = RMSNorm(hidden, self.dims.eps)
        self.lm_head = nn.Linear(hidden, len(vocab.ids), bias=False)
        self.markov_in = nn.Linear(hidden, rank, bias=False)
        self.markov_out = nn.Linear(rank, len(vocab.ids), bias=False)
        self.mask_embedding, self.mask_state = (nn.Parameter(torch.randn(hidden)) for _ in range(2))
        self.rotary = Rotary(rope_inverse_frequencies(target.config, self.dims.head_dim))
        self.randomise()
        with torch.no_grad():
            self.markov_out.weight.zero_()
            if cfg.init_lm_head == "target":
                self.lm_head.weight.copy_(self.target_rows)
                self.norm.weight.copy_(self.target_norm)
        if cfg.init_layer == "target":
            self.layer.start_from(target.last_layer)

    @property
    def layer(self) -> DecoderLayer:
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        return layer

    def _first(self, embedded: Tensor, states: Tensor) -> Tensor:
        """x of position 0 [n, H]; states [n, n_inputs, H]."""
        return self.proj(torch.cat((self.enorm(embedded), self.hnorm(self.fuse(states.flatten(1)))), -1))

    def _later(self, dtype: torch.dtype) -> Tensor:
        """x [H] of every later position: their own position tells them apart."""
        return self.proj(torch.cat((self.enorm(self.mask_embedding), self.hnorm(self.mask_state)), -1).to(dtype))

    def _markov(self, embedded: Tensor) -> Tensor:
        """[..., rank] of the token before."""
        return F.silu(self.markov_in(embedded))

    def unroll(self, batch: DraftBatch, steps: int) -> Iterator[Step]:
        layer = self.layer
        attn = layer.self_attn
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), steps, batch.input_ids.device)
        embedded = self.next_embeddings(batch)
        first = self._first(embedded, batch.hidden[:, :-1])
        keys = Unrolled(self.rotary, self.attention, batch, *attn.key_value(layer.input_layernorm(first)))
        later = self._later(first.dtype)[None]
        index = torch.arange(len(plan[0]), device=first.device)
        for i, rows in enumerate(plan):
            x = first[rows.anchors] if i == 0 else later.expand(len(rows), -1)
            inner = layer.input_layernorm(x)
            if rows.keep is not None:
                index = index[rows.keep]
                keys.extend(i, rows, *attn.key_value(inner))
            hidden = self.norm(layer.finish(x, keys.attend(i, rows, attn.query(inner))))
            yield i, rows, torch.cat((hidden, self._markov(embedded[rows.anchors + i])), -1) if i else hidden, index + i

    def head_weight(self, step: int) -> Tensor:
        """Of later positions it is [D, H + rank]: the Markov term is a part of the product."""
        weight = self.lm_head.weight
        return torch.cat((weight, self.markov_out.weight), 1) if step else weight

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> BlockState:
        like = self.proj.weight
        return BlockState(new_cache(self.dims, 1, like), like.new_zeros(self.steps, self.dims.hidden))

    @torch.no_grad()
    def observe(self, state: BlockState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The whole block is computed here. next_ids [n]: x_{t+1} of the new positions; features [n, n_inputs, H]."""
        dtype = self.proj.weight.dtype
        x = self._first(self._embed(next_ids), features.to(dtype))
        outputs = [observe_rows([self.layer], self.rotary, state.cache, x)[None]]
        if self.steps > 1:
            depths = torch.arange(1, self.steps, device=x.device)
            later = self._later(dtype).expand(len(depths), -1)
            visible = torch.ones(len(depths), len(depths), dtype=torch.bool, device=x.device).tril()
            outputs.append(draft_rows([self.layer], self.rotary, state.cache, later, depths, visible))
        state.outputs, state.chain = self.norm(torch.cat(outputs)), 0
        return state.outputs[0], self.lm_head(state.outputs[0])

    @torch.no_grad()
    def step(self, state: BlockState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        state.chain += 1
        hidden, logits = self._correct(state, token.view(1), state.chain)
        return hidden[0], logits[0]

    @torch.no_grad()
    def expand(
        self, state: BlockState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._correct(state, tokens, depth)

    def _correct(self, state: BlockState, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
        hidden = state.outputs[step].expand(len(tokens), -1)
        return hidden, self.lm_head(hidden) + self.markov_out(self._markov(self._embed(tokens)))

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_tokens).to(self.proj.weight.dtype)

    # -- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, batch: DraftBatch) -> float:
        """Multiply-adds counted twice; backward as twice the forward; the target's own distribution, a forward only."""
        segments = find_segments(batch.loss_mask, batch.starts)
        d, attn = self.dims, self.layer.self_attn
        kv = attn.k_proj.weight.numel() + attn.v_proj.weight.numel()
        rest = sum(p.numel() for p in self.layer.parameters() if p.dim() == 2) - kv
        markov = self.markov_in.weight.numel() + self.markov_out.weight.numel()
        trained: float = batch.n_tokens * (self.fuse.weight.numel() + self.proj.weight.numel() + kv)
        for i in range(self.steps):
            rows = sum(s.rows(i) for s in segments)
            pairs = sum(s.rows(i) * (s.first - s.start + (s.rows(i) + 1) / 2 + i) for s in segments)
            trained += rows * (rest + self.lm_head.weight.numel() + (kv + markov if i else 0))
            trained += pairs * 2 * d.n_heads * d.head_dim
        return 6.0 * trained + 2.0 * sum(s.rows(0) for s in segments) * self.target_rows.numel()

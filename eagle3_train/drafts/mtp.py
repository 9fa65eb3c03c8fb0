"""MTP: K sequential multi-token-prediction modules, each one decoder layer that keeps the complete causal chain.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2. Module i at position t reads x_{t+1+i}:
x = proj([RMSNorm(E[x_{t+1+i}]) ; RMSNorm(h^{i-1}_t)]), h^i_t = layer_i over module i's own positions <= t, logits =
head(norm_i(h^i_t)); h^{-1}_t is the target's last state. Loss: sum_i w^i CE_i.

Where x_{t+1} is the last known token, module i has seen the positions before t + 1 - i; drafting step i runs it over
the i positions up to t, whose tokens are the drafted ones.

Differences: modules are trained after the target, which stays frozen, on its distributions; the paper trains both at
once on the text's tokens, and ships one module. The head is the target's, frozen and cut down to the draft vocabulary,
where the paper shares it. The embedding comes first in proj's input, as in the released weights. h^{-1} is the state
before the target's final norm: its own RMSNorm is learnt.
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
from eagle3_train.drafts.decoder import DecoderLayer, causal_layer, causal_pairs, new_cache
from eagle3_train.drafts.layer import Dims, RMSNorm, Rotary, rope_inverse_frequencies
from eagle3_train.drafts.on_target import OnTarget, Step
from eagle3_train.drafts.vocab import DraftVocab


class Module(nn.Module):
    """One prediction module."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.enorm = RMSNorm(dims.hidden, dims.eps)
        self.hnorm = RMSNorm(dims.hidden, dims.eps)
        self.proj = nn.Linear(2 * dims.hidden, dims.hidden, bias=False)
        self.layer = DecoderLayer(dims)
        self.norm = RMSNorm(dims.hidden, dims.eps)

    def enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input; all [..., H]."""
        return self.proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))


@dataclass
class MTPState:
    """Module i has seen the positions [0, length - i): those at which x_{t+1+i} is known text."""

    caches: list[DraftState]
    ids: Tensor  # int64 [length]: x_{t+1}
    edges: list[Tensor]  # [0 or 1, H]: what module i reads at position length - i, its first drafted one
    paths: Tensor  # int64 [m, i]: the drafted tokens that lead to each node of the newest level
    rows: Tensor  # [m, i, H]: what module i made of them
    first: int = 0  # of that level among the nodes expanded since `observe`


class MTP(OnTarget):
    """K modules in sequence, one a drafted position."""

    reads = slice(-1, None)

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__(cfg, target, vocab, n_inputs)
        self.attention = cfg.attention
        self.modules_ = nn.ModuleList(Module(self.dims) for _ in range(cfg.steps))
        self.rotary = Rotary(rope_inverse_frequencies(target.config, self.dims.head_dim))
        self.frozen_parameters += self.target_rows.numel()
        self.randomise()
        with torch.no_grad():
            for i in range(cfg.steps):
                self.module(i).norm.weight.copy_(self.target_norm)
                if cfg.init_layer == "target":
                    self.module(i).layer.start_from(target.last_layer)

    def module(self, i: int) -> Module:
        module = self.modules_[i]
        assert isinstance(module, Module)
        return module

    def unroll(self, batch: DraftBatch, steps: int) -> Iterator[Step]:
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), steps, batch.input_ids.device)
        index = torch.arange(len(plan[0]), device=batch.input_ids.device)
        hidden = batch.hidden[:, -1]
        for i, rows in enumerate(plan):
            module = self.module(i)
            # The last positions of a document borrow tokens of the next one: no anchor sees them.
            embedded = F.embedding(batch.input_ids.roll(-1 - i), self.embed_tokens).to(hidden.dtype)
            hidden = causal_layer(module.layer, self.rotary, self.attention, batch, module.enter(embedded, hidden))
            if rows.keep is not None:
                index = index[rows.keep]
            yield i, rows, module.norm(hidden[rows.anchors]), index + i

    def head_weight(self, step: int) -> Tensor:
        return self.target_rows

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> MTPState:
        like = self.module(0).proj.weight
        nothing = like.new_empty(0, self.dims.hidden)
        ids = torch.empty(0, dtype=torch.int64, device=like.device)
        caches = [new_cache(self.dims, 1, like) for _ in range(self.steps)]
        return MTPState(caches, ids, [nothing] * self.steps, ids, nothing)

    @torch.no_grad()
    def observe(self, state: MTPState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """features [n, 1, H]: the target's last states, before its final norm."""
        state.ids = torch.cat((state.ids, next_ids))
        made = features[:, 0].to(self.module(0).proj.weight.dtype)
        first = made
        for i in range(self.steps):
            if i:
                ready = torch.cat((state.edges[i], made))
                made, state.edges[i] = ready[:-1], ready[-1:]
            cache = state.caches[i]
            at = torch.arange(cache.length, cache.length + len(made), device=made.device)
            made = self._run(i, cache, state.ids[at + i][None], made[None], at)[0]
            if i == 0:
                first = made[-1]
        state.first = 0
        state.paths, state.rows = state.ids.new_empty(1, 0), first.new_empty(1, 0, self.dims.hidden)
        return first, self._logits(0, first)

    @torch.no_grad()
    def step(self, state: MTPState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self._draft(state, token.view(1), token.new_zeros(1))
        return hidden[0], self._logits(state.paths.shape[1], hidden[0])

    @torch.no_grad()
    def expand(self, state: MTPState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        m, before = len(tokens), visible.shape[1] - len(tokens)
        # The parent is the one node of the level before that lies on the path; the first level's is the root.
        parents = visible[:, state.first : before].long().argmax(1) if before else tokens.new_zeros(m)
        state.first = before
        hidden = self._draft(state, tokens, parents)
        return hidden, self._logits(depth, hidden)

    def _draft(self, state: MTPState, tokens: Tensor, parents: Tensor) -> Tensor:
        """The next module over the paths to m nodes, `tokens` [m] their ends; h [m, H] at the last position."""
        state.paths = torch.cat((state.paths[parents], tokens[:, None]), 1)
        m, i = state.paths.shape
        hidden = torch.cat((state.edges[i].expand(m, -1, -1), state.rows[parents]), 1)
        n = hidden.shape[1]  # i, or all positions of a text that is shorter
        at = torch.arange(len(state.ids) - n, len(state.ids), device=tokens.device)
        state.rows = self._run(i, state.caches[i], state.paths[:, -n:], hidden, at, keep=False)
        return state.rows[:, -1]

    def _run(self, i: int, cache: DraftState, ids: Tensor, hidden: Tensor, at: Tensor, keep: bool = True) -> Tensor:
        """Module i over the positions `at` [n] after its cache, of m alternative texts: ids [m, n], hidden [m, n, H].

        keep: the text is known, m = 1: into the cache.
        """
        m, n, _ = hidden.shape
        if n == 0:
            return hidden
        module, end = self.module(i), cache.length + n
        layer = module.layer
        embedded = F.embedding(ids, self.embed_tokens).to(hidden.dtype)
        x = module.enter(embedded, hidden).flatten(0, 1)
        inner = layer.input_layernorm(x)
        k, v = layer.self_attn.key_value(inner)
        positions = at.repeat(m)
        q, k = (self.rotary.rotate(t, positions, end) for t in (layer.self_attn.query(inner), k))
        q, k, v = (t.unflatten(0, (m, n)).transpose(1, 2) for t in (q, k, v))  # [m, heads, n, d]
        old = (t[: cache.length, 0].transpose(0, 1).expand(m, -1, -1, -1) for t in (cache.keys, cache.values))
        keys, values = (torch.cat(pair, 2) for pair in zip(old, (k, v), strict=True))
        causal = torch.ones(n, end, dtype=torch.bool, device=x.device).tril(cache.length)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=causal, enable_gqa=True)
        if keep:
            cache.reserve(end)
            cache.keys[cache.length : end, 0] = k[0].transpose(0, 1)
            cache.values[cache.length : end, 0] = v[0].transpose(0, 1)
            cache.length = end
        return layer.finish(x, attended.transpose(1, 2).flatten(0, 1)).unflatten(0, (m, n))

    def _logits(self, i: int, hidden: Tensor) -> Tensor:
        return F.linear(self.module(i).norm(hidden), self.target_rows)

    # -- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, batch: DraftBatch) -> float:
        """Multiply-adds counted twice; backward as twice the forward; the frozen head passes a gradient to its input
        and needs none itself; the target's own distribution is a forward only."""
        rows = [sum(s.rows(i) for s in find_segments(batch.loss_mask, batch.starts)) for i in range(self.steps)]
        matrices = sum(p.numel() for p in self.parameters() if p.dim() == 2)
        pairs = causal_pairs(batch) * self.steps * 2 * self.dims.n_heads * self.dims.head_dim
        return 6.0 * (batch.n_tokens * matrices + pairs) + (4.0 * sum(rows) + 2.0 * rows[0]) * self.target_rows.numel()

"""EAGLE-3: one decoder layer over fused target states, trained by unrolling its own drafting (training-time test).

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test". The exact
computation is DESIGN section 5 / docs/mathematics.md. Module names are those of the speculators format.
Shape suffixes: N tokens of a batch, R rows (anchors) of a step, H hidden size, D draft vocabulary, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train.config import DraftConfig
from eagle3_train.drafts.attention import attend
from eagle3_train.drafts.base import Draft, DraftState, StepLoss, TargetPart
from eagle3_train.drafts.batch import DraftBatch, StepRows, find_segments, plan_rows
from eagle3_train.drafts.vocab import DraftVocab


@dataclass(frozen=True)
class Dims:
    """Sizes of the layer, taken from the target's configuration."""

    hidden: int
    n_heads: int
    n_kv: int
    head_dim: int
    intermediate: int
    eps: float

    @classmethod
    def of_target(cls, config: dict[str, Any]) -> Dims:
        n_heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            n_heads=n_heads,
            n_kv=config.get("num_key_value_heads") or n_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // n_heads,
            intermediate=config["intermediate_size"],
            eps=config.get("rms_norm_eps", 1e-6),
        )


def rope_inverse_frequencies(config: dict[str, Any], head_dim: int) -> Tensor:
    """[d/2] fp64, of the target's own rotary embedding; scaled kinds come from transformers."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    if parameters.get("rope_type", parameters.get("type", "default")) == "default":
        return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    full = AutoConfig.for_model(**config)
    inverse, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](full, torch.device("cpu"))
    if scaling != 1.0:
        raise ValueError(
            f"rope_type {parameters['rope_type']!r} scales attention by {scaling}: not supported by draft heads"
        )
    return inverse


class Rotary:
    """Cosines and sines by position, [positions, d/2] fp64, grown on demand and kept a copy a device.

    No buffer of the module: a head cast to bf16 must not cast its angles (position 1000 has no bf16 neighbour 1001).
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        self.inverse_frequencies = inverse_frequencies.double()
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Half-split rotary embedding. x [R, heads, d]; positions [R] int64, all below `longest`."""
        cos, sin = (table[positions][:, None].to(x.dtype) for table in self._table(x.device, longest))
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _table(self, device: torch.device, longest: int) -> tuple[Tensor, Tensor]:
        table = self._tables.get(device)
        if table is None or len(table[0]) < longest:
            size = 1 << max(longest - 1, 1023).bit_length()
            angles = torch.arange(size)[:, None] * self.inverse_frequencies
            table = self._tables[device] = (angles.cos().to(device), angles.sin().to(device))
        return table


class RMSNorm(nn.RMSNorm):
    """The weight follows the input's dtype: fp32 masters under bf16 activations take the fused kernel too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """q, k, v of the concatenation [embedding; hidden], 2H wide."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        self.q_proj = nn.Linear(2 * dims.hidden, dims.n_heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * dims.hidden, dims.n_kv * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * dims.hidden, dims.n_kv * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.n_heads * dims.head_dim, dims.hidden, bias=False)

    def query(self, x: Tensor) -> Tensor:
        return self.q_proj(x).unflatten(-1, (self.dims.n_heads, self.dims.head_dim))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = (self.dims.n_kv, self.dims.head_dim)
        return self.k_proj(x).unflatten(-1, shape), self.v_proj(x).unflatten(-1, shape)


class MLP(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.down_proj = nn.Linear(dims.intermediate, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The draft layer. Its parts are called one by one: keys are needed of all tokens, the rest of anchors only."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.hidden_norm = RMSNorm(dims.hidden, dims.eps)
        self.self_attn = Attention(dims)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = MLP(dims)

    def join(self, normed_embedding: Tensor, hidden: Tensor) -> Tensor:
        """[R, 2H], embedding first."""
        return torch.cat((normed_embedding, self.hidden_norm(hidden)), -1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual (un-normed), MLP: the un-normed output that the next step takes in. attended [R, heads, d]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(Draft):
    """The EAGLE-3 draft head."""

    # of the target, never trained
    embed_tokens: Tensor  # [V, H]
    target_norm: Tensor  # [H]
    target_rows: Tensor  # [D, H]: the target's lm_head at the draft vocabulary
    vocab_ids: Tensor  # [D] int64
    in_vocab: Tensor  # [V] bool

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__()
        self.steps = cfg.steps
        self.attention = cfg.attention
        self.vocab = vocab
        self.layer_config = target.config  # what the layer is built like: sizes and rotary embedding
        self.dims = dims = Dims.of_target(target.config)
        self.n_layers, self.hidden_size = n_inputs + 1, dims.hidden
        self.fc = nn.Linear(n_inputs * dims.hidden, dims.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(dims)])
        self.norm = RMSNorm(dims.hidden, dims.eps)
        self.lm_head = nn.Linear(dims.hidden, len(vocab.ids), bias=False)
        ids = torch.from_numpy(vocab.ids)
        frozen = {
            "embed_tokens": target.embed_tokens.float(),
            "target_norm": target.norm_weight.float(),
            "target_rows": target.lm_head[ids].float(),
            "vocab_ids": ids,
            "in_vocab": torch.from_numpy(vocab.t2d),
        }
        for name, tensor in frozen.items():
            self.register_buffer(name, tensor, persistent=False)
        self.rotary = Rotary(rope_inverse_frequencies(target.config, dims.head_dim))
        self.frozen_parameters = self.embed_tokens.numel()
        self._initialise(cfg, target)

    def _initialise(self, cfg: DraftConfig, target: TargetPart) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        with torch.no_grad():
            if cfg.init_lm_head == "target":
                self.lm_head.weight.copy_(self.target_rows)
                self.norm.weight.copy_(self.target_norm)
            if cfg.init_layer == "target":
                self._start_from_target_layer(target.last_layer)

    def _start_from_target_layer(self, weights: dict[str, Tensor]) -> None:
        """The target's last layer, reading the hidden half of its input; `fc` passes the top state through."""
        hidden, layer = self.dims.hidden, self.layer
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        for name, parameter in layer.named_parameters():
            if name == "input_layernorm.weight":
                continue  # of the embedding, which the target's layer does not see
            source = weights["input_layernorm.weight" if name == "hidden_norm.weight" else name]
            if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                parameter.zero_()
                parameter[:, hidden:].copy_(source)
            else:
                parameter.copy_(source)

    @property
    def layer(self) -> Layer:
        layer = self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    # -- training-time test -------------------------------------------------------------------------------------------

    def _unroll(self, batch: DraftBatch) -> Iterator[tuple[int, StepRows, Tensor, Tensor]]:
        """Steps 0..K-1 for all anchors at once: (i, rows, h [R, H] un-normed, target rows [R]).

        A row of step 0 is known by its index; the target distribution of anchor t at step i is that of position
        t + 1 + i, which is row `index + i` of step 0's anchors shifted by one: the targets are computed once.
        """
        layer = self.layer
        attn = layer.self_attn
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), self.steps, batch.input_ids.device)
        # Position t carries the embedding of x_{t+1}. A document's last one borrows its neighbour's: no anchor sees it.
        embedded = layer.input_layernorm(
            F.embedding(batch.input_ids.roll(-1), self.embed_tokens).to(batch.hidden.dtype)
        )
        fused = self.fc(batch.hidden[:, :-1].flatten(1))
        joined = layer.join(embedded, fused)
        starts = torch.tensor(batch.starts, device=joined.device)
        all_positions = torch.arange(batch.n_tokens, device=joined.device) - starts[:-1].repeat_interleave(
            starts.diff()
        )
        k0, v0 = attn.key_value(joined)
        longest = max(b - a for a, b in pairwise(batch.starts))  # of the documents
        k0 = self.rotary.rotate(k0, all_positions, longest)

        index = torch.arange(len(plan[0]), device=joined.device)
        hidden = fused[plan[0].anchors]
        chain_k: list[Tensor] = []
        chain_v: list[Tensor] = []
        for i, rows in enumerate(plan):
            if rows.keep is None:
                x = joined[rows.anchors]
            else:
                index, hidden = index[rows.keep], hidden[rows.keep]
                x = layer.join(embedded[rows.anchors + i], hidden)
            at = rows.positions + i
            if rows.keep is not None:
                k, v = attn.key_value(x)
                chain_k = [*(c[rows.keep] for c in chain_k), self.rotary.rotate(k, at, longest)]
                chain_v = [*(c[rows.keep] for c in chain_v), v]
            empty = k0.new_zeros(0, len(rows), *k0.shape[1:])
            attended = attend(
                self.rotary.rotate(attn.query(x), at, longest),
                k0,
                v0,
                torch.stack(chain_k) if chain_k else empty,
                torch.stack(chain_v) if chain_v else empty,
                rows.segments,
                self.attention,
            )
            hidden = layer.finish(hidden, attended)
            yield i, rows, hidden, index + i

    @torch.no_grad()
    def target_probabilities(self, batch: DraftBatch) -> Tensor:
        """[M, D]: the target's distributions at step 0's anchors + 1, over the draft vocabulary, renormalised."""
        first = plan_rows(find_segments(batch.loss_mask, batch.starts), 1, batch.input_ids.device)[0]
        final = batch.hidden[first.anchors + 1, -1]
        normed = F.rms_norm(final, (self.dims.hidden,), self.target_norm.to(final.dtype), self.dims.eps)
        wide = torch.promote_types(normed.dtype, torch.float32)
        return F.linear(normed, self.target_rows.to(normed.dtype)).to(wide).softmax(-1).to(normed.dtype)

    def kept_targets(self, batch: DraftBatch) -> Tensor:
        known = batch.target_argmax >= 0
        return known & self.in_vocab[batch.target_argmax.clamp(min=0)]

    def forward(self, batch: DraftBatch, loss: StepLoss) -> Tensor:
        targets = self.target_probabilities(batch)
        total = targets.new_zeros((), dtype=torch.promote_types(targets.dtype, torch.float32))
        kept = loss.select(self.kept_targets(batch))
        for i, rows, hidden, target_rows in self._unroll(batch):
            if kept is not None:
                counted = kept[rows.anchors + 1 + i].nonzero().squeeze(-1)
                hidden, target_rows = hidden[counted], target_rows[counted]
            total = total + loss(i, self.norm(hidden), self.lm_head.weight, targets, target_rows)
        return total

    @torch.no_grad()
    def predict(self, batch: DraftBatch) -> Tensor:
        drafted = torch.full((batch.n_tokens, self.steps), -1, dtype=torch.int64, device=batch.input_ids.device)
        for i, rows, hidden, _ in self._unroll(batch):
            best = torch.cat([self.lm_head(part).argmax(-1) for part in self.norm(hidden).split(1024)])
            drafted[rows.anchors, i] = self.target_ids(best)
        return drafted

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> DraftState:
        shape = (256, self.dims.n_kv, self.dims.head_dim)
        return DraftState(self.fc.weight.new_empty(shape), self.fc.weight.new_empty(shape))

    @torch.no_grad()
    def observe(self, state: DraftState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """next_ids [n]: x_{t+1} of the n new positions; features [n, n_inputs, H]: the target's states there."""
        layer = self.layer
        n = len(next_ids)
        state.chain = 0
        fused = self.fc(features.flatten(1).to(self.fc.weight.dtype))
        x = layer.join(layer.input_layernorm(self._embed(next_ids)), fused)
        positions = torch.arange(state.length, state.length + n, device=x.device)
        self._append(state, x, state.length, positions)
        state.length += n
        h, logits = self._attend(state, x[-1:], fused[-1:], positions[-1:], None)
        return h[0], logits[0]

    @torch.no_grad()
    def step(self, state: DraftState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h, logits = self._advance(state, token.view(1), h[None], state.chain + 1, None)
        return h[0], logits[0]

    @torch.no_grad()
    def expand(
        self, state: DraftState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        observed = visible.new_ones(len(visible), state.length)
        return self._advance(state, tokens, h, depth, torch.cat((observed, visible), 1))

    def _advance(
        self, state: DraftState, tokens: Tensor, h: Tensor, depth: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Steps of m drafted tokens, all `depth` positions after the last observed one."""
        layer = self.layer
        x = layer.join(layer.input_layernorm(self._embed(tokens)), h)
        positions = torch.full((len(x),), state.length - 1 + depth, device=x.device)
        self._append(state, x, state.length + state.chain, positions)
        state.chain += len(x)
        return self._attend(state, x, h, positions, mask)

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embed_tokens).to(self.fc.weight.dtype)

    def _append(self, state: DraftState, x: Tensor, slot: int, positions: Tensor) -> None:
        """Keys and values into the slots from `slot` on, rotated at their own positions."""
        end = slot + len(x)
        state.reserve(end)
        k, v = self.layer.self_attn.key_value(x)
        state.keys[slot:end] = self.rotary.rotate(k, positions, end)
        state.values[slot:end] = v

    def _attend(
        self, state: DraftState, x: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [m, 2H], hidden [m, H], mask [m, slots] bool; without one all slots are attended to (a chain's newest)."""
        layer = self.layer
        size = state.length + state.chain
        q = self.rotary.rotate(layer.self_attn.query(x), positions, size)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, state.keys[:size], state.values[:size]))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
        hidden = layer.finish(hidden, attended)
        return hidden, self.lm_head(self.norm(hidden))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.vocab_ids[draft_ids]

    # -- cost ---------------------------------------------------------------------------------------------------------

    def flops(self, batch: DraftBatch) -> float:
        """Multiply-adds counted twice; backward as twice the forward; frozen matrices have a forward only."""
        segments = find_segments(batch.loss_mask, batch.starts)
        d, n = self.dims, batch.n_tokens
        layer = self.layer
        kv = sum(m.weight.numel() for m in (layer.self_attn.k_proj, layer.self_attn.v_proj))
        rest = sum(p.numel() for p in layer.parameters() if p.dim() == 2) - kv
        trained: float = n * (self.fc.weight.numel() + kv)
        for i in range(self.steps):
            rows = sum(s.rows(i) for s in segments)
            pairs = sum(s.rows(i) * (s.first - s.start + (s.rows(i) + 1) / 2 + i) for s in segments)
            trained += (
                rows * (rest + self.lm_head.weight.numel() + (kv if i else 0)) + pairs * 2 * d.n_heads * d.head_dim
            )
        frozen = sum(s.rows(0) for s in segments) * self.target_rows.numel()
        return 6.0 * trained + 2.0 * frozen

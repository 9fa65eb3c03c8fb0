"""Plain decoder layers, as Llama has them, for the heads that are made of such; over a batch and over a cache.

Shape suffixes: N tokens of a batch, R rows, H hidden size, d head dim, m new rows of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train.drafts.attention import attend
from eagle3_train.drafts.base import DraftState
from eagle3_train.drafts.batch import DraftBatch, StepRows
from eagle3_train.drafts.layer import MLP, Attention, Dims, RMSNorm, Rotary


class DecoderLayer(nn.Module):
    """One layer; its parts are called one by one, since keys are needed of more rows than the rest is.

    input_norm: with the norm before attention; EAGLE-1's layer has none.
    """

    def __init__(self, dims: Dims, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps) if input_norm else nn.Identity()
        self.self_attn = Attention(dims, dims.hidden)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = MLP(dims)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual and MLP. x [R, H] un-normed, attended [R, heads, d]."""
        x = x + self.self_attn.o_proj(attended.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """A copy of the target's layer; a norm that this one does not have is left out."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights[name])


class Unrolled:
    """Attention of an unrolled head over one batch: step-0 keys of all tokens, and each anchor's own chain.

    k0, v0 [N, n_kv, d]: of step 0, not rotated. The query of anchor t at step i has position t + i (DESIGN section 5).
    """

    def __init__(self, rotary: Rotary, kind: str, batch: DraftBatch, k0: Tensor, v0: Tensor) -> None:
        self.rotary, self.kind, self.v0 = rotary, kind, v0
        self.longest = batch.longest
        self.k0 = rotary.rotate(k0, batch.every_token.positions, self.longest)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def extend(self, i: int, rows: StepRows, k: Tensor, v: Tensor) -> None:
        """Keys and values [R, n_kv, d] of step i, not rotated; rows that ended leave the chains."""
        k = self.rotary.rotate(k, rows.positions + i, self.longest)
        assert rows.keep is not None
        self._keys = [*(c.index_select(0, rows.keep) for c in self._keys), k]
        self._values = [*(c.index_select(0, rows.keep) for c in self._values), v]

    def attend(self, i: int, rows: StepRows, q: Tensor) -> Tensor:
        """q [R, n_heads, d], not rotated; returns the same shape."""
        empty = self.k0.new_zeros(0, len(rows), *self.k0.shape[1:])
        ck = torch.stack(self._keys) if self._keys else empty
        cv = torch.stack(self._values) if self._values else empty
        q = self.rotary.rotate(q, rows.positions + i, self.longest)
        return attend(q, self.k0, self.v0, ck, cv, rows.segments, self.kind)


def causal_layer(layer: DecoderLayer, rotary: Rotary, kind: str, batch: DraftBatch, x: Tensor) -> Tensor:
    """A layer over all N rows of a batch, each document for itself. x and the result [N, H], un-normed."""
    rows = batch.every_token
    inner = layer.input_layernorm(x)
    k, v = layer.self_attn.key_value(inner)
    q, k = (rotary.rotate(t, rows.positions, batch.longest) for t in (layer.self_attn.query(inner), k))
    none = k.new_zeros(0, *k.shape)
    return layer.finish(x, attend(q, k, v, none, none, rows.segments, kind))


def causal_pairs(batch: DraftBatch) -> float:
    """Pairs of query and key in `causal_layer`."""
    return sum((b - a) * (b - a + 1) / 2 for a, b in pairwise(batch.starts))


# -- decoding ---------------------------------------------------------------------------------------------------------


def new_cache(dims: Dims, n_layers: int, like: Tensor) -> DraftState:
    """Keys and values of `n_layers` layers for one sequence, in the dtype and on the device of `like`."""
    shape = (256, n_layers, dims.n_kv, dims.head_dim)
    return DraftState(like.new_empty(shape), like.new_empty(shape))


def observe_rows(layers: Sequence[DecoderLayer], rotary: Rotary, state: DraftState, x: Tensor) -> Tensor:
    """Append the n rows `x` [n, H] of known text, forget any chain; the output [H] of the last one."""
    n = len(x)
    state.chain = 0
    first, state.length = state.length, state.length + n
    positions = torch.arange(first, state.length, device=x.device)
    causal = torch.ones(n, state.length, dtype=torch.bool, device=x.device).tril(first) if len(layers) > 1 else None
    return _run(layers, rotary, state, x, first, positions, causal, last_only=True)[-1]


def draft_rows(
    layers: Sequence[DecoderLayer],
    rotary: Rotary,
    state: DraftState,
    x: Tensor,
    depth: int | Tensor,
    visible: Tensor | None,
) -> Tensor:
    """Append m drafted rows `x` [m, H], `depth` positions after the last observed one, of each or of all; their outputs
    [m, H].

    visible [m, S + m] bool: the drafted rows that each sees (`Draft.expand`); None: all of them (a chain's newest).
    """
    if visible is not None:
        visible = torch.cat((visible.new_ones(len(x), state.length), visible), 1)
    slot = state.length + state.chain
    state.chain += len(x)
    depths = depth if isinstance(depth, Tensor) else torch.full((len(x),), depth, device=x.device)
    positions = (depths + state.length - 1).expand(len(x))
    return _run(layers, rotary, state, x, slot, positions, visible, last_only=False)


def _run(
    layers: Sequence[DecoderLayer],
    rotary: Rotary,
    state: DraftState,
    x: Tensor,
    slot: int,
    positions: Tensor,
    mask: Tensor | None,
    last_only: bool,
) -> Tensor:
    """Rows into the slots from `slot` on, through all layers. mask [m, slot + m]; with `last_only` the last layer
    computes the last row alone, which sees every slot."""
    end = slot + len(x)
    state.reserve(end)
    for number, layer in enumerate(layers):
        inner = layer.input_layernorm(x)
        k, v = layer.self_attn.key_value(inner)
        state.keys[slot:end, number] = rotary.rotate(k, positions, end)
        state.values[slot:end, number] = v
        if last_only and number == len(layers) - 1:
            x, inner, positions, mask = x[-1:], inner[-1:], positions[-1:], None
        q = rotary.rotate(layer.self_attn.query(inner), positions, end)
        k, v = (t[:end, number].transpose(0, 1)[None] for t in (state.keys, state.values))
        attended = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
        x = layer.finish(x, attended[0].transpose(0, 1))
    return x

"""The parts of a draft layer: sizes, rotary embedding, norms, attention's projections, MLP.

Shape suffixes: R rows, W width of the head, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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

    def resized(self, hidden: int | None, intermediate: int | None) -> Dims:
        """Another width, with the same head dim and as many key heads as divide the heads and are not more than here.

        ValueError where the width is no multiple of the head dim.
        """
        if hidden is None or hidden == self.hidden:
            return Dims(
                self.hidden, self.n_heads, self.n_kv, self.head_dim, intermediate or self.intermediate, self.eps
            )
        if hidden % self.head_dim:
            raise ValueError(
                f"draft.eagle3.hidden_size={hidden} is no multiple of the target's head dim {self.head_dim}"
            )
        n_heads = hidden // self.head_dim
        n_kv = max(n for n in range(1, min(self.n_kv, n_heads) + 1) if n_heads % n == 0)
        scaled = round(self.intermediate * hidden / self.hidden)
        return Dims(hidden, n_heads, n_kv, self.head_dim, intermediate or scaled, self.eps)


def rope_inverse_frequencies(config: dict[str, Any], head_dim: int) -> Tensor:
    """[d/2] fp64, of the target's own rotary embedding; scaled kinds come from transformers."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_type {kind!r} is not one of default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    try:
        inverse, scaling = ROPE_INIT_FUNCTIONS[kind](AutoConfig.for_model(**config), torch.device("cpu"))
    except KeyError as e:  # of the kind's own parameters
        raise ValueError(f"rope_type {kind!r} needs the key {e} in rope_parameters") from e
    if scaling != 1.0:
        raise ValueError(f"rope_type {kind!r} scales attention by {scaling}: not supported by draft heads")
    return inverse


class Rotary:
    """Cosines and sines by position, [positions, d/2], grown on demand and kept a copy a device and dtype.

    No buffer of the module, and computed in fp64: a head cast to bf16 must not cast its angles (position 1000 has no
    bf16 neighbour 1001).
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        self.inverse_frequencies = inverse_frequencies.double()
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Half-split rotary embedding. x [R, heads, d]; positions [R] int64, all below `longest`."""
        cos, sin = (table[positions][:, None] for table in self._table(x, longest))
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _table(self, like: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        table = self._tables.get((like.device, like.dtype))
        if table is None or len(table[0]) < longest:
            size = 1 << max(longest - 1, 1023).bit_length()
            angles = torch.arange(size)[:, None] * self.inverse_frequencies
            table = (angles.cos().to(like), angles.sin().to(like))
            self._tables[like.device, like.dtype] = table
        return table


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., W] over the root of its mean square, times weight [W]; in the dtype of x, whatever the weight's.

    Autocast for CUDA would make it fp32, and all that it is added to, and the products of `lm_head` with it.
    """
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class RMSNorm(nn.RMSNorm):
    """The weight follows the input's dtype: fp32 masters under bf16 activations take the fused kernel too."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """q, k, v of an input of `width`: the head's own, or twice that in the first layer ([embedding; hidden])."""

    def __init__(self, dims: Dims, width: int) -> None:
        super().__init__()
        self.dims = dims
        self.q_proj = nn.Linear(width, dims.n_heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(width, dims.n_kv * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(width, dims.n_kv * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.n_heads * dims.head_dim, dims.hidden, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[R, heads * d] -> [R, heads, d]"""
        return x.unflatten(-1, (-1, self.dims.head_dim))

    def query(self, x: Tensor) -> Tensor:
        return self.split(self.q_proj(x))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.split(self.k_proj(x)), self.split(self.v_proj(x))


class MLP(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.up_proj = nn.Linear(dims.hidden, dims.intermediate, bias=False)
        self.down_proj = nn.Linear(dims.intermediate, dims.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A draft layer. Its parts are called one by one: keys are needed of all tokens, the rest of anchors only.

    The first of a head takes in [embedding; hidden], each normed on its own; deeper ones the hidden state alone.
    """

    def __init__(self, dims: Dims, first: bool, norm_before_residual: bool) -> None:
        super().__init__()
        self.first = first
        self.norm_before_residual = norm_before_residual and first
        self.input_layernorm = RMSNorm(dims.hidden, dims.eps)  # of the embedding in the first layer
        if first:
            self.hidden_norm = RMSNorm(dims.hidden, dims.eps)
        self.self_attn = Attention(dims, 2 * dims.hidden if first else dims.hidden)
        self.post_attention_layernorm = RMSNorm(dims.hidden, dims.eps)
        self.mlp = MLP(dims)

    def norm(self, hidden: Tensor) -> Tensor:
        """The hidden state as attention takes it in, [R, W]."""
        return self.hidden_norm(hidden) if self.first else self.input_layernorm(hidden)

    def finish(self, hidden: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """Residual, MLP: the un-normed output. hidden [R, W], its `norm` [R, W], attended [R, heads, d]."""
        hidden = (normed if self.norm_before_residual else hidden) + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

"""One decoder layer over any set of rows, as slowly as its definition: float64, explicit keys for every query."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from tests.drafts.reference import rms_norm, rope
from tests.drafts.tiny import THETA

EPS, HEADS, KV, DIM = 1e-5, 4, 2, 6  # of TinyTarget


def layer(
    p: Mapping[str, Tensor],
    inputs: Mapping[tuple[int, int], Tensor],
    position: Callable[[tuple[int, int]], int],
    seen: Callable[[tuple[int, int]], Iterable[tuple[int, int]]],
) -> dict[tuple[int, int], Tensor]:
    """p: `input_layernorm.weight`, `self_attn.q_proj.weight`, ...; `seen`: which of these rows each row attends to."""

    def project(name: str, x: Tensor, heads: int) -> Tensor:
        return (p[f"self_attn.{name}.weight"] @ x).view(heads, DIM)

    keys, values, queries = {}, {}, {}
    for row, x in inputs.items():
        inner = rms_norm(x, p["input_layernorm.weight"], EPS)
        keys[row] = rope(project("k_proj", inner, KV), position(row), THETA)
        queries[row] = rope(project("q_proj", inner, HEADS), position(row), THETA)
        values[row] = project("v_proj", inner, KV)
    out = {}
    for row, x in inputs.items():
        heads = []
        for head in range(HEADS):
            kv, rows = head // (HEADS // KV), list(seen(row))
            weights = (torch.stack([queries[row][head] @ keys[s][kv] for s in rows]) / DIM**0.5).softmax(0)
            heads.append(sum(w * values[s][kv] for w, s in zip(weights, rows, strict=True)))
        h = x + p["self_attn.o_proj.weight"] @ torch.cat(heads)
        m = rms_norm(h, p["post_attention_layernorm.weight"], EPS)
        gate, up = p["mlp.gate_proj.weight"] @ m, p["mlp.up_proj.weight"] @ m
        out[row] = h + p["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return out


def part(p: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in p.items() if name.startswith(prefix)}

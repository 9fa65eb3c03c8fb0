"""EAGLE-3's training-time test, as slowly and plainly as its definition: float64, one anchor at a time, an explicit set
of keys for every query. It shares no code with the package but the parameters it reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eagle3_train.drafts import DraftBatch, Eagle3


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """x [heads, d], rotated at `position`; pairs are (j, j + d/2)."""
    d = x.shape[-1]
    j = torch.arange(d // 2, dtype=torch.float64)
    angle = position * theta ** (-2 * j / d)
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def turn_of(mask: np.ndarray) -> list[int]:
    """The number of the assistant turn of each token; -1 outside."""
    turns, current = [], -1
    for i, m in enumerate(mask):
        if m and (i == 0 or not mask[i - 1]):
            current += 1
        turns.append(current if m else -1)
    return turns


class Reference:
    """Loss and per-step outputs of a head on a batch. `theta`: the RoPE base of the target."""

    def __init__(self, head: Eagle3, theta: float) -> None:
        self.head, self.theta = head, theta
        self.p = dict(head.named_parameters())

    def _project(self, name: str, x: Tensor, heads: int) -> Tensor:
        return (self.p[f"layers.0.self_attn.{name}.weight"] @ x).view(heads, self.head.dims.head_dim)

    def steps(self, ids: Tensor, hidden: Tensor, mask: np.ndarray) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """{(t, i): (un-normed h, logits)} of one document, for every anchor with x_{t+1+i} inside the document."""
        d, p, eps = self.head.dims, self.p, self.head.dims.eps
        length = len(ids)
        state = {t: p["fc.weight"] @ hidden[t, :-1].flatten() for t in range(length)}
        keys: dict[tuple[int, int], Tensor] = {}
        values: dict[tuple[int, int], Tensor] = {}
        out: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for i in range(self.head.steps):
            inputs: dict[int, Tensor] = {}
            for t in range(length - 1 - i):
                embedding = self.head.embed_tokens[ids[t + 1 + i]]
                a = rms_norm(embedding, p["layers.0.input_layernorm.weight"], eps)
                b = rms_norm(state[t], p["layers.0.hidden_norm.weight"], eps)
                inputs[t] = torch.cat([a, b])
                keys[t, i] = rope(self._project("k_proj", inputs[t], d.n_kv), t + i, self.theta)
                values[t, i] = self._project("v_proj", inputs[t], d.n_kv)
            for t in inputs:
                q = rope(self._project("q_proj", inputs[t], d.n_heads), t + i, self.theta)
                seen = [(j, 0) for j in range(t + 1)] + [(t, s) for s in range(1, i + 1)]
                heads = []
                for head in range(d.n_heads):
                    kv = head // (d.n_heads // d.n_kv)
                    scores = torch.stack([q[head] @ keys[s][kv] for s in seen]) / d.head_dim**0.5
                    weights = scores.softmax(0)
                    heads.append(sum(w * values[s][kv] for w, s in zip(weights, seen, strict=True)))
                h = state[t] + p["layers.0.self_attn.o_proj.weight"] @ torch.cat(heads)
                m = rms_norm(h, p["layers.0.post_attention_layernorm.weight"], eps)
                gate, up = p["layers.0.mlp.gate_proj.weight"] @ m, p["layers.0.mlp.up_proj.weight"] @ m
                h = h + p["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
                state[t] = h
                out[t, i] = (h, p["lm_head.weight"] @ rms_norm(h, p["norm.weight"], eps))
        return out

    def loss(self, batch: DraftBatch, step_weight: float, drop: bool) -> tuple[Tensor, np.ndarray]:
        """(sum_i w^i CE_i, rows that count by step)."""
        head = self.head
        vocabulary = head.vocab_ids.tolist()
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(head.steps)]
        counts = np.zeros(head.steps, int)
        for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
            ids, hidden = batch.input_ids[start:stop], batch.hidden[start:stop]
            turns = turn_of(batch.loss_mask[start:stop])
            for (t, i), (_, logits) in self.steps(ids, hidden, batch.loss_mask[start:stop]).items():
                needed = turns[t + 1 : t + 3 + i]
                if len(needed) < i + 2 or -1 in needed or len(set(needed)) > 1:
                    continue
                at = t + 1 + i
                if drop and int(batch.target_argmax[start + at]) not in vocabulary:
                    continue
                final = rms_norm(hidden[at, -1], head.target_norm, head.dims.eps)
                p = (head.target_rows @ final).softmax(0)
                sums[i] = sums[i] - (p * logits.log_softmax(0)).sum()
                counts[i] += 1
        parts = [step_weight**i * s / max(int(n), 1) for i, (s, n) in enumerate(zip(sums, counts, strict=True))]
        return torch.stack(parts).sum(), counts

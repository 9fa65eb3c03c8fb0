"""EAGLE-3's training-time test, as slowly and plainly as its definition: float64, one anchor at a time, an explicit set
of keys for every query. It shares no code with the package but the parameters it reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from eagle3_train.config import Eagle3Config
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

    def __init__(self, head: Eagle3, theta: float, options: Eagle3Config | None = None) -> None:
        self.head, self.theta, self.options = head, theta, options or Eagle3Config()
        self.p = dict(head.named_parameters())

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.p[name], self.head.dims.eps)

    def _project(self, name: str, x: Tensor, heads: int) -> Tensor:
        return (self.p[name] @ x).view(heads, self.head.dims.head_dim)

    def _fused(self, states: Tensor) -> Tensor:
        if self.options.fc_norm:
            states = torch.stack([self._norm(f"fc_norm.{n}.weight", x) for n, x in enumerate(states)])
        joined = states.flatten()
        return self.p["fc.weight"] @ (
            self._norm("input_norm.weight", joined) if self.options.norm_before_fc else joined
        )

    def steps(self, ids: Tensor, hidden: Tensor, mask: np.ndarray) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """{(t, i): (what the next step takes in, logits)} of a document, for every anchor with x_{t+1+i} inside it."""
        d, p = self.head.dims, self.p
        length = len(ids)
        state = {t: self._fused(hidden[t, :-1]) for t in range(length)}
        keys: dict[tuple[int, int, int], Tensor] = {}
        values: dict[tuple[int, int, int], Tensor] = {}
        out: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for i in range(self.head.steps):
            alive = range(length - 1 - i)
            for n in range(self.options.layers):
                layer = f"layers.{n}"
                normed, inputs = {}, {}
                for t in alive:
                    normed[t] = self._norm(f"{layer}.{'input_layernorm' if n else 'hidden_norm'}.weight", state[t])
                    inputs[t] = normed[t]
                    if n == 0:
                        embedding = self.head.embed_tokens[ids[t + 1 + i]]
                        if "embed_proj.weight" in p:
                            embedding = p["embed_proj.weight"] @ embedding
                        inputs[t] = torch.cat([self._norm(f"{layer}.input_layernorm.weight", embedding), normed[t]])
                    k = self._project(f"{layer}.self_attn.k_proj.weight", inputs[t], d.n_kv)
                    keys[n, t, i] = rope(k, t + i, self.theta)
                    values[n, t, i] = self._project(f"{layer}.self_attn.v_proj.weight", inputs[t], d.n_kv)
                for t in alive:
                    q = self._project(f"{layer}.self_attn.q_proj.weight", inputs[t], d.n_heads)
                    q = rope(q, t + i, self.theta)
                    seen = [(n, j, 0) for j in range(t + 1)] + [(n, t, s) for s in range(1, i + 1)]
                    heads = []
                    for head in range(d.n_heads):
                        kv = head // (d.n_heads // d.n_kv)
                        scores = torch.stack([q[head] @ keys[s][kv] for s in seen]) / d.head_dim**0.5
                        weights = scores.softmax(0)
                        heads.append(sum(w * values[s][kv] for w, s in zip(weights, seen, strict=True)))
                    residual = normed[t] if n == 0 and self.options.norm_before_residual else state[t]
                    h = residual + p[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(heads)
                    m = self._norm(f"{layer}.post_attention_layernorm.weight", h)
                    gate, up = p[f"{layer}.mlp.gate_proj.weight"] @ m, p[f"{layer}.mlp.up_proj.weight"] @ m
                    state[t] = h + p[f"{layer}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
            for t in alive:
                read = self._norm("norm.weight", state[t])
                if self.options.norm_output:
                    state[t] = read
                if "head_proj.weight" in p:
                    read = p["head_proj.weight"] @ read
                out[t, i] = (state[t], p["lm_head.weight"] @ read)
        return out

    def loss(
        self,
        batch: DraftBatch,
        step_weight: float | list[float],
        drop: bool,
        row_loss: Callable[[Tensor, Tensor], Tensor] = lambda p, z: -(p * z.log_softmax(0)).sum(),
    ) -> tuple[Tensor, np.ndarray]:
        """(sum_i w_i L_i, rows that count by step). row_loss(p [D], logits [D]): soft cross-entropy by default."""
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
                sums[i] = sums[i] + row_loss(p, logits)
                counts[i] += 1
        weights = step_weight if isinstance(step_weight, list) else [step_weight**i for i in range(head.steps)]
        parts = [w * s / max(int(n), 1) for w, s, n in zip(weights, sums, counts, strict=True)]
        return torch.stack(parts).sum(), counts

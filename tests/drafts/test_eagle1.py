"""The EAGLE-1 head against a slow float64 reference: loss, every gradient, drafts; its noise; its initialisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_train.config import Eagle1Config
from eagle3_train.drafts import DraftBatch, Eagle1, supervised_counts
from eagle3_train.train.losses import Objective
from tests.drafts.reference import rms_norm, rope, turn_of
from tests.drafts.tiny import THETA, H, tiny_batch, tiny_draft, tiny_sequence

CPU = torch.device("cpu")


def eagle1(steps: int = 3, **own) -> Eagle1:
    own = {"noise": 0.0} | own
    head = tiny_draft("eagle1", steps, eagle1=Eagle1Config(**own))
    assert isinstance(head, Eagle1)
    return head


class Reference:
    """One anchor at a time, an explicit set of keys for every query. Only parameters are shared with the package."""

    def __init__(self, head: Eagle1) -> None:
        self.head, self.p = head, dict(head.named_parameters())

    def _project(self, name: str, x: Tensor, heads: int) -> Tensor:
        return (self.p[f"layers.0.self_attn.{name}.weight"] @ x).view(heads, 6)

    def feature(self, final: Tensor) -> Tensor:
        return rms_norm(final, self.head.target_norm, 1e-5)

    def steps(self, ids: Tensor, hidden: Tensor, steps: int) -> dict[tuple[int, int], Tensor]:
        """{(t, i): predicted feature of position t + 1 + i} of one document."""
        p, length = self.p, len(ids)
        if "fuse.weight" in p:
            state = {t: p["fuse.weight"] @ hidden[t, :-1].flatten() for t in range(length)}
        else:
            state = {t: self.feature(hidden[t, -1]) for t in range(length)}
        keys: dict[tuple[int, int], Tensor] = {}
        values: dict[tuple[int, int], Tensor] = {}
        out: dict[tuple[int, int], Tensor] = {}
        for i in range(steps):
            inputs: dict[int, Tensor] = {}
            for t in range(length - 1 - i):
                x = p["fc.weight"] @ torch.cat([self.head.embed_tokens[ids[t + 1 + i]], state[t]])
                inputs[t] = x + p["fc.bias"] if "fc.bias" in p else x
                keys[t, i] = rope(self._project("k_proj", inputs[t], 2), t + i, THETA)
                values[t, i] = self._project("v_proj", inputs[t], 2)
            for t, x in inputs.items():
                q = rope(self._project("q_proj", x, 4), t + i, THETA)
                seen = [(j, 0) for j in range(t + 1)] + [(t, s) for s in range(1, i + 1)]
                heads = []
                for head in range(4):
                    scores = torch.stack([q[head] @ keys[s][head // 2] for s in seen]) / 6**0.5
                    heads.append(sum(w * values[s][head // 2] for w, s in zip(scores.softmax(0), seen, strict=True)))
                h = x + p["layers.0.self_attn.o_proj.weight"] @ torch.cat(heads)
                m = rms_norm(h, p["layers.0.post_attention_layernorm.weight"], 1e-5)
                gate, up = p["layers.0.mlp.gate_proj.weight"] @ m, p["layers.0.mlp.up_proj.weight"] @ m
                state[t] = h + p["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
                out[t, i] = state[t]
        return out

    def loss(self, batch: DraftBatch, steps: int, weights: tuple[float, float], drop: bool) -> Tensor:
        """sum_i 0.8^i (a SmoothL1_i + b CE_i), each averaged over the rows that count."""
        head = self.head
        vocabulary = head.vocab_ids.tolist()
        sums = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
        counts = [0] * steps
        for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
            ids, hidden = batch.input_ids[start:stop], batch.hidden[start:stop]
            turns = turn_of(batch.loss_mask[start:stop])
            for (t, i), predicted in self.steps(ids, hidden, steps).items():
                needed = turns[t + 1 : t + 3 + i]
                at = t + 1 + i
                if len(needed) < i + 2 or -1 in needed or len(set(needed)) > 1:
                    continue
                if drop and int(batch.target_argmax[start + at]) not in vocabulary:
                    continue
                true = self.feature(hidden[at, -1])
                gap = (predicted - true).abs()
                smooth = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                ce = -((head.target_rows @ true).softmax(0) * (head.target_rows @ predicted).log_softmax(0)).sum()
                sums[i] = sums[i] + weights[0] * smooth + weights[1] * ce
                counts[i] += 1
        return torch.stack([0.8**i * s / n for i, (s, n) in enumerate(zip(sums, counts, strict=True))]).sum()


@pytest.mark.parametrize(
    ("oov", "own"),
    [
        ("keep", {}),
        ("drop", {}),
        ("drop", {"bias": False, "feature_weight": 0.7, "ce_weight": 0.3}),
        ("drop", {"trained_steps": 3, "feature_weight": 0.0, "ce_weight": 1.0}),
        ("keep", {"trained_steps": 2, "inputs": "fused"}),
    ],
)
def test_loss_and_every_gradient_equal_the_reference(oov: str, own: dict) -> None:
    head, batch = eagle1(**own), tiny_batch()
    weights = (own.get("feature_weight", 1.0), own.get("ce_weight", 0.1))
    expected = Reference(head).loss(batch, own.get("trained_steps", 1), weights, oov == "drop")
    kept = head.kept_targets(batch.target_argmax) if oov == "drop" else None
    counts = supervised_counts(batch.loss_mask, batch.starts, head.steps, kept)
    loss = head(batch, Objective(counts, 0.8, oov, CPU))
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    names = [name for name, _ in head.named_parameters()]
    wanted = torch.autograd.grad(expected, list(head.parameters()))
    for name, grad, other in zip(names, torch.autograd.grad(loss, list(head.parameters())), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert other.abs().max() > 0, name


def test_drafts_are_the_reference_argmax_and_evaluation_shows_all_steps() -> None:
    head, batch = eagle1().eval(), tiny_batch()
    drafted, reference = head.predict(batch), Reference(head)
    seen = 0
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        for (t, i), h in reference.steps(batch.input_ids[start:stop], batch.hidden[start:stop], head.steps).items():
            if drafted[start + t, i] >= 0:
                assert drafted[start + t, i] == head.vocab_ids[(head.target_rows @ h).argmax()]
                seen += 1
    counts = supervised_counts(batch.loss_mask, batch.starts, head.steps)
    assert seen == counts.sum()
    objective = Objective(counts, 0.8, "keep", CPU)
    with torch.no_grad():
        head(batch, objective)
    assert (objective.ce_sums > 0).all()  # in training, the first step alone


def test_noise_is_uniform_falls_with_the_length_and_is_training_alone() -> None:
    head = eagle1(noise=0.3)
    for length in (16, 64):
        batch = tiny_batch([tiny_sequence(length, [(3, length)], 0), tiny_sequence(4 * length, [(3, length)], 1)])
        clean = torch.zeros(batch.n_tokens, H, dtype=torch.float64)
        noise = head._noisy(clean, batch)
        for part, n in ((noise[:length], length), (noise[length:], 4 * length)):
            width = 0.3 * 512 / n
            assert part.abs().max() < width / 2
            assert part.std() == pytest.approx(width / 12**0.5, rel=0.15)
    batch = tiny_batch()
    objective = Objective(np.ones(3), 0.8, "keep", CPU)
    assert head.train()(batch, objective) != head(batch, objective)
    assert torch.equal(head.predict(batch), eagle1(noise=0.0).predict(batch))
    assert head.eval()(batch, objective) == head(batch, objective)

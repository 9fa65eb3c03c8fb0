"""Medusa against a plain float64 reference: loss and every gradient; a new head says what the target itself says."""

from __future__ import annotations

import numpy as np
import torch

from eagle3_train.config import DraftConfig, MedusaConfig
from eagle3_train.drafts import DraftVocab, Medusa, build, supervised_counts
from eagle3_train.train.losses import Objective
from tests.drafts.reference import rms_norm, turn_of
from tests.drafts.tiny import TinyTarget, V, tiny_batch, tiny_draft, tiny_sequences


def medusa(layers: int = 2) -> Medusa:
    head = tiny_draft("medusa", 3, medusa=MedusaConfig(layers))
    assert isinstance(head, Medusa)
    return head


def test_loss_and_every_gradient_equal_the_reference() -> None:
    head, batch = medusa(), tiny_batch()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    p = dict(head.named_parameters())
    sums, counts = [torch.zeros((), dtype=torch.float64) for _ in range(3)], [0] * 3
    for start, sequence in zip(batch.starts, tiny_sequences(), strict=False):
        turns = turn_of(sequence.loss_mask)
        final = [rms_norm(x, head.target_norm, 1e-5) for x in batch.hidden[start : start + len(turns), -1]]
        for t in range(len(turns)):
            for i in range(3):
                needed = turns[t + 1 : t + 3 + i]
                if len(needed) < i + 2 or -1 in needed or len(set(needed)) > 1:
                    continue
                h = final[t]
                for block in range(2):
                    z = p[f"heads.{i}.blocks.{block}.linear.weight"] @ h + p[f"heads.{i}.blocks.{block}.linear.bias"]
                    h = h + z * torch.sigmoid(z)
                target = (head.target_rows @ final[t + 1 + i]).softmax(0)
                sums[i] = sums[i] - (target * (p[f"heads.{i}.lm_head.weight"] @ h).log_softmax(0)).sum()
                counts[i] += 1
    expected = sum(0.8**i * s / n for i, (s, n) in enumerate(zip(sums, counts, strict=True)))
    assert supervised_counts(batch.loss_mask, batch.starts, 3).tolist() == counts
    loss = head(batch, Objective(supervised_counts(batch.loss_mask, batch.starts, 3), 0.8, "keep", torch.device("cpu")))
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    wanted = torch.autograd.grad(expected, list(p.values()))
    for name, grad, other in zip(p, torch.autograd.grad(loss, list(p.values())), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert other.abs().max() > 0, name


def test_a_new_head_says_what_the_target_says() -> None:
    head = build(DraftConfig(kind="medusa", steps=3), TinyTarget(), DraftVocab(np.arange(9), V, 0.5), n_inputs=3)
    assert isinstance(head, Medusa)
    final = torch.linspace(-1, 2, 24)
    _, logits = head.observe(head.new_state(), torch.tensor([1]), final.view(1, 1, -1))
    own = head.target_rows @ rms_norm(final, head.target_norm, 1e-5)
    torch.testing.assert_close(logits, own)

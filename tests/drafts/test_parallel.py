"""MTP and the block drafter against slow float64 references: loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eagle3_train.config import BlockConfig
from eagle3_train.drafts import Draft, supervised_counts
from eagle3_train.train.losses import Objective
from tests.drafts.reference import rms_norm, turn_of
from tests.drafts.slow import EPS, layer, part
from tests.drafts.tiny import tiny_batch, tiny_draft

K = 3
Logits = dict[tuple[int, int], Tensor]  # of (anchor, step)


def mtp_logits(head: Draft, p: dict[str, Tensor], ids: Tensor, hidden: Tensor) -> Logits:
    """Module after module over the whole document, each over the positions whose token exists."""
    out, state = {}, dict(enumerate(hidden[:, -1]))
    for i in range(K):
        own = part(p, f"modules_.{i}.")
        inputs = {}
        for t in range(len(ids) - 1 - i):
            e = rms_norm(head.embed_tokens[ids[t + 1 + i]], own["enorm.weight"], EPS)
            inputs[t, i] = own["proj.weight"] @ torch.cat([e, rms_norm(state[t], own["hnorm.weight"], EPS)])
        made = layer(
            part(own, "layer."), inputs, lambda row: row[0], lambda row: [(j, row[1]) for j in range(row[0] + 1)]
        )
        state = {t: h for (t, _), h in made.items()}
        for (t, _), h in made.items():
            out[t, i] = head.target_rows @ rms_norm(h, own["norm.weight"], EPS)
    return out


def block_logits(head: Draft, p: dict[str, Tensor], ids: Tensor, hidden: Tensor) -> Logits:
    """All positions of all anchors at once; a later one sees of the text only the token before it, by its last term."""

    def enter(e: Tensor, h: Tensor) -> Tensor:
        return p["proj.weight"] @ torch.cat([rms_norm(e, p["enorm.weight"], EPS), rms_norm(h, p["hnorm.weight"], EPS)])

    inputs = {}
    for t in range(len(ids) - 1):
        inputs[t, 0] = enter(head.embed_tokens[ids[t + 1]], p["fuse.weight"] @ hidden[t, :-1].flatten())
        for i in range(1, K):
            inputs[t, i] = enter(p["mask_embedding"], p["mask_state"])
    made = layer(
        part(p, "layers.0."),
        inputs,
        lambda row: row[0] + row[1],
        lambda row: [(j, 0) for j in range(row[0] + 1)] + [(row[0], s) for s in range(1, row[1] + 1)],
    )
    out = {}
    for (t, i), h in made.items():
        out[t, i] = p["lm_head.weight"] @ rms_norm(h, p["norm.weight"], EPS)
        if i and t + 1 + i < len(ids):
            z = p["markov_in.weight"] @ head.embed_tokens[ids[t + 1 + i]]
            out[t, i] = out[t, i] + p["markov_out.weight"] @ (z * torch.sigmoid(z))
    return out


@pytest.mark.parametrize(("kind", "slow"), [("mtp", mtp_logits), ("block", block_logits)])
def test_loss_and_every_gradient_equal_the_reference(kind: str, slow: Callable[..., Logits]) -> None:
    head, batch = tiny_draft(kind, K, block=BlockConfig(rank=5)), tiny_batch()
    p = dict(head.named_parameters())
    with torch.no_grad():
        for parameter in p.values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    counts = supervised_counts(batch.loss_mask, batch.starts, K)
    expected = torch.zeros((), dtype=torch.float64)
    seen = [0] * K
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        ids, hidden, turns = batch.input_ids[start:stop], batch.hidden[start:stop], turn_of(batch.loss_mask[start:stop])
        for (t, i), logits in slow(head, p, ids, hidden).items():
            needed = turns[t + 1 : t + 3 + i]
            if len(needed) < i + 2 or -1 in needed or len(set(needed)) > 1:
                continue
            target = (head.target_rows @ rms_norm(hidden[t + 1 + i, -1], head.target_norm, EPS)).softmax(0)
            expected = expected - 0.8**i / counts[i] * (target * logits.log_softmax(0)).sum()
            seen[i] += 1
    assert seen == counts.tolist()
    loss = head(batch, Objective(counts, 0.8, "keep", torch.device("cpu")))
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    wanted = torch.autograd.grad(expected, list(p.values()))
    for name, grad, other in zip(p, torch.autograd.grad(loss, list(p.values())), wanted, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-7, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        assert other.abs().max() > 0, name

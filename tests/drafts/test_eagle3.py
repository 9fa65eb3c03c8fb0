"""The EAGLE-3 head against a slow float64 reference: values, gradients, drafting steps, initialisations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eagle3_train.config import Eagle3Config
from eagle3_train.drafts import DraftBatch, Eagle3, supervised_counts
from eagle3_train.train.losses import Objective, Validation
from tests.drafts.reference import Reference
from tests.drafts.tiny import THETA, H, TinyTarget, tiny_batch, tiny_head, tiny_sequence, tiny_sequences

CPU = torch.device("cpu")


def objective(counts, oov):
    return Objective(counts, 0.8, oov, CPU)


def counts_of(head, batch, oov):
    kept = head.kept_targets(batch.target_argmax) if oov == "drop" else None
    return supervised_counts(batch.loss_mask, batch.starts, head.steps, kept)


@pytest.mark.parametrize("attention", ["merge", "reference"])
@pytest.mark.parametrize("oov", ["drop", "keep"])
def test_loss_and_every_gradient_equal_the_reference(attention: str, oov: str) -> None:
    head, batch = tiny_head(attention=attention), tiny_batch()
    expected, counts = Reference(head, THETA).loss(batch, 0.8, oov == "drop")
    assert (counts_of(head, batch, oov) == counts).all()
    assert counts[0] > counts[-1] > 0  # the batch reaches the last step, with fewer rows
    expected_grads = torch.autograd.grad(expected, list(head.parameters()))
    loss = head(batch, objective(counts, oov))
    grads = torch.autograd.grad(loss, list(head.parameters()))
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    for (name, _), grad, wanted in zip(head.named_parameters(), grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert wanted.abs().max() > 0, name


# Every option once, and those together that meet in the code.
OPTIONS: dict[str, tuple[Eagle3Config, int]] = {  # and the number of fused layers
    "default": (Eagle3Config(), 3),
    "two layers": (Eagle3Config(layers=2), 3),
    "narrow": (Eagle3Config(hidden_size=12), 3),
    "wide": (Eagle3Config(hidden_size=36, intermediate_size=20, norm_output=True, layers=3), 3),
    "eagle 3.1": (Eagle3Config(fc_norm=True, norm_output=True), 3),
    "norm before fc": (Eagle3Config(norm_before_fc=True, norm_before_residual=True), 3),
    "residual, layers": (Eagle3Config(norm_before_residual=True, layers=2, fc_norm=True), 3),
    "two inputs": (Eagle3Config(), 2),
    "four inputs": (Eagle3Config(fc_norm=True), 4),
}


def variant(name: str, **draft: Any) -> tuple[Eagle3, Reference, DraftBatch]:
    options, n_inputs = OPTIONS[name]
    head = tiny_head(n_inputs=n_inputs, eagle3=options, **draft)
    return head, Reference(head, THETA, options), tiny_batch(tiny_sequences(n_inputs + 1))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_equals_the_reference(name: str, recompute: bool) -> None:
    head, reference, batch = variant(name, recompute=recompute, steps=3)
    expected, counts = reference.loss(batch, 0.8, False)
    loss = head(batch, objective(counts, "keep"))
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    parameters = dict(head.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()))
    for n, grad, wanted in zip(
        parameters, grads, torch.autograd.grad(expected, list(parameters.values())), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}")
        assert wanted.abs().max() > 0, n


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_counts_its_products(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    head, _, batch = variant(name, steps=3)
    counts = counts_of(head, batch, "keep")
    with FlopCounterMode(display=False) as counter:
        head(batch, objective(counts, "keep")).backward()
    # torch does not see the fused attention, which is a part of these tiny products only.
    assert 0.95 < head.flops(batch) / counter.get_total_flops() < 1.2


def test_a_frozen_head_is_left_alone() -> None:
    frozen = tiny_head(eagle3=Eagle3Config(lm_head="frozen"))
    trained, batch = tiny_head(), tiny_batch()
    counts = counts_of(frozen, batch, "drop")
    for head in (frozen, trained):
        head(batch, objective(counts, "drop")).backward()
    assert frozen.lm_head.weight.grad is None
    assert torch.equal(frozen.fc.weight.grad, trained.fc.weight.grad)
    size = frozen.lm_head.weight.numel()
    sizes = frozen.parameter_counts(), trained.parameter_counts()
    assert sizes[1]["trainable"] - sizes[0]["trainable"] == size == sizes[0]["frozen"] - sizes[1]["frozen"]
    assert frozen.flops(batch) < trained.flops(batch)


def test_widths_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="head dim 6"):
        tiny_head(eagle3=Eagle3Config(hidden_size=20))
    with pytest.raises(ValueError, match="init_layer=random"):
        tiny_head(eagle3=Eagle3Config(hidden_size=12), init_layer="target")


@pytest.mark.parametrize("heads", [(4, 4, 6), (6, 2, 10), (3, 1, 8)])
def test_head_shapes(heads: tuple[int, int, int]) -> None:
    target = TinyTarget(*heads)
    head, batch = tiny_head(target=target, steps=3), tiny_batch()
    expected, counts = Reference(head, THETA).loss(batch, 0.8, False)
    torch.testing.assert_close(head(batch, objective(counts, "keep")), expected, rtol=1e-11, atol=0)


def test_documents_do_not_see_each_other() -> None:
    head = tiny_head()
    alone = [tiny_batch([s]) for s in tiny_sequences()]
    together = head.predict(tiny_batch())
    assert torch.equal(together, torch.cat([head.predict(b) for b in alone]))
    counts = counts_of(head, tiny_batch(), "drop")
    parts = sum(head(b, objective(counts, "drop")) for b in alone)
    torch.testing.assert_close(parts, head(tiny_batch(), objective(counts, "drop")), rtol=1e-12, atol=0)


def test_prediction_is_the_reference_argmax() -> None:
    head, batch = tiny_head(), tiny_batch()
    drafted = head.predict(batch)
    reference = Reference(head, THETA)
    seen = 0
    for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
        steps = reference.steps(batch.input_ids[start:stop], batch.hidden[start:stop], batch.loss_mask[start:stop])
        for (t, i), (_, logits) in steps.items():
            if drafted[start + t, i] >= 0:
                assert drafted[start + t, i] == head.vocab_ids[logits.argmax()]
                seen += 1
    assert seen == sum(counts_of(head, batch, "keep"))


@pytest.mark.parametrize("name", OPTIONS)
def test_drafting_steps_equal_training_time_test(name: str) -> None:
    """observe + step on the true tokens give the logits of the reference at every anchor, after any rollback."""
    head, model, _ = variant(name)
    sequence = tiny_sequence(14, [(3, 14)], 9, head.n_layers)
    batch = tiny_batch([sequence])
    reference = model.steps(batch.input_ids, batch.hidden, batch.loss_mask)
    state = head.new_state()
    observed = 0
    for t in (4, 5, 8, 9):  # anchors reached by accepting 0, 2 and 0 drafted tokens
        fresh = range(observed, t + 1)
        h, logits = head.observe(state, batch.input_ids[[s + 1 for s in fresh]], batch.hidden[list(fresh), :-1])
        observed = t + 1
        torch.testing.assert_close(logits, reference[t, 0][1], rtol=1e-9, atol=1e-12)
        for i in range(1, head.steps):
            h, logits = head.step(state, batch.input_ids[t + 1 + i], h)
            torch.testing.assert_close(h, reference[t, i][0], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(logits, reference[t, i][1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_tree_is_drafted_as_its_paths_are(name: str) -> None:
    """expand of two levels at once: every node's logits are those of a chain along its path."""
    head, _, batch = variant(name)
    features, ids = batch.hidden[:5, :-1], batch.input_ids[1:6]
    state = head.new_state()
    root, _ = head.observe(state, ids, features)
    tokens = torch.tensor([3, 8])
    h, first = head.expand(state, tokens, root.expand(2, -1), 1, torch.eye(2, dtype=torch.bool))
    children = torch.tensor([5, 6, 5])
    parents = [0, 0, 1]
    visible = torch.tensor([[1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [0, 1, 0, 0, 1]], dtype=torch.bool)
    _, second = head.expand(state, children, h[parents], 2, visible)
    for node, parent in enumerate(parents):
        chain = head.new_state()
        h, _ = head.observe(chain, ids, features)
        h, logits = head.step(chain, tokens[parent], h)
        torch.testing.assert_close(logits, first[parent], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(head.step(chain, children[node], h)[1], second[node], rtol=1e-9, atol=1e-12)


def test_state_grows_beyond_its_first_capacity() -> None:
    head = tiny_head(steps=2)
    state = head.new_state()
    sequence = tiny_sequence(700, [(1, 700)], 4)
    batch = tiny_batch([sequence])
    whole = head.observe(head.new_state(), batch.input_ids[1:700], batch.hidden[:699, :-1])[1]
    for t in range(0, 699, 233):
        logits = head.observe(state, batch.input_ids[t + 1 : t + 234], batch.hidden[t : t + 233, :-1])[1]
        head.step(state, batch.input_ids[0], torch.zeros(H, dtype=torch.float64))
    torch.testing.assert_close(logits, whole, rtol=1e-10, atol=1e-12)


def test_target_initialised_layer_is_the_targets_last_layer() -> None:
    """With the true top state passed through and no embedding read, step 0 computes the target's own last layer."""
    target = TinyTarget()
    torch.manual_seed(0)
    head = tiny_head(init_layer="target", target=target)
    layer, source = head.layer, target.last_layer
    assert torch.equal(layer.self_attn.q_proj.weight[:, H:].float(), source["self_attn.q_proj.weight"])
    assert not layer.self_attn.k_proj.weight[:, :H].any()
    top = torch.randn(H, dtype=torch.float64)
    inputs = torch.cat([torch.randn(2 * H, dtype=torch.float64), top])
    torch.testing.assert_close(head.fc(inputs), top)
    assert torch.equal(head.lm_head.weight.float(), target.lm_head[head.vocab_ids])
    assert not torch.equal(tiny_head(init_lm_head="random").lm_head.weight, head.lm_head.weight)


def test_validation_reports_divergence_and_agreement() -> None:
    head, batch = tiny_head(), tiny_batch()
    counts = counts_of(head, batch, "keep")
    measured = Validation(counts, 0.8, "keep", CPU)
    with torch.no_grad():
        loss = head(batch, measured)
    ce = measured.ce_sums.numpy() / counts
    kl = ce - measured.entropy_sums.numpy() / counts
    np.testing.assert_allclose(float(loss), sum(0.8**i * c for i, c in enumerate(ce)))
    assert (kl > 0).all()
    assert (measured.agreed.numpy() <= counts).all()


def test_bf16_stays_near_fp64() -> None:
    exact = tiny_head()
    counts = counts_of(exact, tiny_batch(), "keep")
    wanted = exact(tiny_batch(), objective(counts, "keep"))
    head = tiny_head(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(tiny_batch(dtype=torch.bfloat16), objective(counts, "keep"))
    loss.backward()
    assert abs(loss.item() - wanted.item()) < 0.03 * wanted.item()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in head.parameters()
    )


def test_flops_count_gemms() -> None:
    """Against torch's own counter, which cannot see the fused attention; that is small here."""
    from torch.utils.flop_counter import FlopCounterMode

    head, batch = tiny_head(steps=3), tiny_batch()
    counts = counts_of(head, batch, "keep")
    with FlopCounterMode(display=False) as counter:
        head(batch, objective(counts, "keep")).backward()
    assert 0.9 < head.flops(batch) / counter.get_total_flops() < 1.25


def test_a_placeholder_costs_nothing_and_takes_part() -> None:
    """A rank without a share: zero loss, and a (zero) gradient for every parameter, so that collectives match."""
    head, batch = tiny_head(), tiny_batch()
    counts = counts_of(head, batch, "keep")
    loss = head(DraftBatch.collate_or_placeholder([], head, CPU, torch.float64), objective(counts, "keep"))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())

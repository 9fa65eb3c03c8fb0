"""Objectives against float64 autograd on plain probabilities; they share no code with the package."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_train.config import parse_objective
from eagle3_train.train import losses
from eagle3_train.train.losses import Objective

CPU = torch.device("cpu")
R, H, D, M = 23, 8, 11, 17


def cross_entropy(p: Tensor, q: Tensor) -> Tensor:
    return -(p * q.log()).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    return (q * (q / p).log()).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return 1 - torch.minimum(p, q).sum(-1)


def hard(p: Tensor, q: Tensor) -> Tensor:
    return -q[torch.arange(len(q)), p.argmax(-1)].log()


PLAIN = {
    "soft_ce": cross_entropy,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "hard_ce": hard,
    "0.25*tv+2*soft_ce": lambda p, q: 0.25 * total_variation(p, q) + 2 * cross_entropy(p, q),
    "hard_ce+.5*reverse_kl+0.1*tv": lambda p, q: hard(p, q) + 0.5 * reverse_kl(p, q) + 0.1 * total_variation(p, q),
}


def make(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, lm_head, targets, rows: some targets serve several rows, some none."""
    g = torch.Generator().manual_seed(0)
    hidden, head, logits = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((R, H), (D, H), (M, D)))
    rows = torch.randint(M, (R,), generator=g)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_(), logits.softmax(-1).to(dtype), rows


@pytest.mark.parametrize("chunk", [512, 5])  # all rows at once, or five chunks that no step ends on
@pytest.mark.parametrize("objective", PLAIN)
def test_value_and_gradients(objective: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", chunk)
    hidden, head, targets, rows = make()
    by_step, counts, weights = [10, 0, 8, 5], np.array([40, 0, 9, 7]), [1.0, 0.5, 0.3, 0.0]
    q = (hidden @ head.T).softmax(-1)
    values = PLAIN[objective](targets[rows], q).split(by_step)
    expected = sum(w / n * v.sum() for w, n, v in zip(weights, counts, values, strict=True) if n)
    found = Objective(counts, weights, "keep", CPU, objective)
    loss = found.steps(by_step, hidden, head, targets, rows)
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    wanted = torch.autograd.grad(expected, (hidden, head))
    for a, b in zip(torch.autograd.grad(3 * loss, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(a, 3 * b, rtol=1e-9, atol=1e-13)
    ce = [float(v.detach().sum()) for v in cross_entropy(targets[rows], q).split(by_step)]
    np.testing.assert_allclose(found.ce_sums.numpy(), ce, rtol=1e-11)


def test_steps_one_by_one_are_the_steps_together() -> None:
    hidden, head, targets, rows = make()
    counts = np.array([10, 13])
    together = Objective(counts, 0.8, "keep", CPU).steps([10, 13], hidden, head, targets, rows)
    one = Objective(counts, 0.8, "keep", CPU)
    parts = one(0, hidden[:10], head, targets, rows[:10]) + one(1, hidden[10:], head, targets, rows[10:])
    torch.testing.assert_close(parts, together, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(parts, head), torch.autograd.grad(together, head), rtol=1e-10, atol=1e-14
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_is_the_same() -> None:
    hidden, head, targets, rows = make(torch.float32)
    results = []
    for compiled in (False, True):
        loss = Objective(np.array([R]), 1.0, "keep", CPU, compiled=compiled).steps([R], hidden, head, targets, rows)
        results.append((loss, *torch.autograd.grad(loss, (hidden, head))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_probabilities_of_zero_stay_finite() -> None:
    hidden, head, targets, rows = make(torch.float32)
    targets = torch.where(targets < 0.05, 0.0, targets)
    for objective in PLAIN:
        loss = Objective(np.array([R]), 1.0, "keep", CPU, objective).steps([R], hidden, head, targets, rows)
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, head)))


def test_16_bit_products_keep_an_fp32_gradient_of_the_head() -> None:
    hidden, head, targets, rows = make()
    wanted = torch.autograd.grad(
        Objective(np.array([R]), 1.0, "keep", CPU).steps([R], hidden, head, targets, rows), (hidden, head)
    )
    low = hidden.detach().bfloat16().requires_grad_()
    master = head.detach().float().requires_grad_()
    loss = Objective(np.array([R]), 1.0, "keep", CPU).steps([R], low, master, targets.bfloat16(), rows)
    grads = torch.autograd.grad(loss, (low, master))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]
    for a, b in zip(grads, wanted, strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()


def test_a_second_backward_is_refused() -> None:
    hidden, head, targets, rows = make()
    loss = Objective(np.array([R]), 1.0, "keep", CPU).steps([R], hidden, head, targets, rows)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_objectives_are_read() -> None:
    assert parse_objective("soft_ce") == {"soft_ce": 1.0}
    assert parse_objective("0.9*soft_ce + .1*tv") == {"soft_ce": 0.9, "tv": 0.1}
    for wrong in ("kl", "", "tv+tv", "-1*tv", "2*", "nan*tv", "1*2*tv", "soft_ce,tv"):
        with pytest.raises(ValueError, match=r"0\.9\*soft_ce"):
            parse_objective(wrong)
    assert math.isclose(sum(parse_objective("1*tv+2.*hard_ce").values()), 3)

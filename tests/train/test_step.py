"""The same global batch gives the same loss and gradients, however it is split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_train.config import EngineConfig, OptimConfig, TrainConfig
from eagle3_train.drafts import DraftBatch
from eagle3_train.store import Store, token_counts
from eagle3_train.train.distributed import World
from eagle3_train.train.engines import Engine
from eagle3_train.train.losses import Objective
from eagle3_train.train.optim import learning_rate
from eagle3_train.train.setup import build_head
from eagle3_train.train.step import batch_counts, train_step
from tests.train.tiny_store import tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("oov", ["drop", "keep"])
def test_micro_batches_do_not_change_the_update(study: Path, oov: str) -> None:
    cfg = tiny_config(study)
    store = Store.open(cfg.paths.store)
    sequences = list(store.read(range(8)))
    results = {}
    for size in (8, 4, 2, 1):
        head = build_head(cfg, store, CPU, token_counts(store))
        engine = Engine(EngineConfig(), head, OptimConfig(clip_norm=1e9), World(), torch.float32)
        parts = [sequences[i : i + size] for i in range(0, 8, size)]
        result = train_step(engine, [*parts, []], 1e-2, TrainConfig(oov=oov), World())
        results[size] = result, {k: v.clone() for k, v in engine.weights().items()}
    whole, weights = results[8]
    assert whole.rows > 0
    for result, others in results.values():
        assert result.rows == whole.rows
        np.testing.assert_allclose(result.loss, whole.loss, rtol=1e-5)
        np.testing.assert_allclose(result.loss_steps, whole.loss_steps, rtol=1e-5)
        np.testing.assert_allclose(result.grad_norm, whole.grad_norm, rtol=1e-4)
        for name, value in weights.items():
            torch.testing.assert_close(others[name], value, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(whole.loss, sum(0.8**i * c for i, c in enumerate(whole.loss_steps)), rtol=1e-5)


def test_the_divisor_is_the_global_count(study: Path) -> None:
    """A part of the batch under the global counts is not the mean of its own rows: gradients of parts add up."""
    cfg = tiny_config(study)
    store = Store.open(cfg.paths.store)
    head = build_head(cfg, store, CPU, token_counts(store))
    sequences = list(store.read(range(6)))
    counts = batch_counts(sequences, head, "drop")

    def gradient(part):
        loss = head(DraftBatch.collate(part, CPU, torch.float32), Objective(counts, 0.8, "drop", CPU))
        return torch.autograd.grad(loss, head.fc.weight)[0]

    torch.testing.assert_close(
        gradient(sequences[:1]) + gradient(sequences[1:]), gradient(sequences), rtol=1e-4, atol=1e-7
    )


def test_targets_outside_the_draft_vocabulary_and_unknown_ones_are_not_kept(study: Path) -> None:
    cfg = tiny_config(study)
    store = Store.open(cfg.paths.store)
    head = build_head(cfg, store, CPU, token_counts(store))
    inside = head.vocab.ids.tolist()
    outside = next(token for token in range(head.vocab.target_size) if token not in inside)
    assert head.kept_targets(np.array([-1, inside[0], outside, inside[-1]], np.int32)).tolist() == [0, 1, 0, 1]


def test_learning_rate_is_a_fraction_of_each_runs_own_steps() -> None:
    cfg = OptimConfig(lr=1.0, warmup_fraction=0.1, decay="cosine", final_lr_fraction=0.1)
    for total in (10, 100, 1000):
        rates = [learning_rate(cfg, s, total) for s in range(total)]
        peak = int(np.argmax(rates))
        assert peak <= 0.1 * total + 1
        assert rates[-1] == pytest.approx(0.1)
        assert max(rates) <= 1.0
        assert all(a >= b for a, b in zip(rates[peak:], rates[peak + 1 :], strict=False))
    assert learning_rate(OptimConfig(lr=2.0, decay="constant", warmup_fraction=0.0), 500, 1000) == 2.0

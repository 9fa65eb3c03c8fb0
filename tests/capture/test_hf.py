"""The layer convention, the batching and the head: what is stored is what transformers computes, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from eagle3_train.capture.batches import by_length, windows
from eagle3_train.capture.hf import HiddenStates
from eagle3_train.corpus import Row
from eagle3_train.target import load_target

LAYERS = (0, 3, 5, 8)


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> PreTrainedModel:
    return load_target(tiny_target, torch.float32, torch.device("cpu"))


@pytest.fixture
def states(model: PreTrainedModel) -> Iterator[HiddenStates]:
    with HiddenStates(model, LAYERS, torch.float32, logsumexp=True) as states:
        yield states


def rows(*lengths: int) -> list[Row]:
    generator = np.random.default_rng(0)
    return [
        Row(
            f"row {i}",
            "test",
            generator.integers(0, 250, n).astype(np.int32),
            (generator.random(n) < 0.6).astype(np.uint8),
        )
        for i, n in enumerate(lengths)
    ]


def test_layer_k_is_the_stream_entering_layer_k_and_the_last_is_before_the_norm(
    model: PreTrainedModel, states: HiddenStates
) -> None:
    row = rows(17)[0]
    (found,) = states([row])
    with torch.no_grad():
        out = model(torch.from_numpy(row.input_ids.astype(np.int64))[None], output_hidden_states=True)
    assert found.hidden.shape == (17, 4, 32)
    for column, k in enumerate(LAYERS[:-1]):
        expected = out.hidden_states[k][0]
        torch.testing.assert_close(found.hidden[:, column], expected)
        # One layer off would be seen.
        assert not torch.allclose(found.hidden[:, column], out.hidden_states[k + 1][0], rtol=0.05)
    final = found.hidden[:, -1]
    torch.testing.assert_close(model.lm_head(model.model.norm(final)), out.logits[0])
    assert not torch.allclose(final, out.hidden_states[-1][0], rtol=0.05)  # transformers' last one is behind the norm


def test_argmax_and_logsumexp_stand_where_the_next_token_is_supervised(
    model: PreTrainedModel, states: HiddenStates
) -> None:
    batch = rows(30, 5, 12)
    for row, found in zip(batch, states(batch), strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(row.input_ids.astype(np.int64))[None]).logits[0]
        wanted = np.append(row.loss_mask[1:] == 1, False)
        expected = np.where(wanted, logits.argmax(-1).numpy(), -1)
        assert found.target_argmax.tolist() == expected.tolist()
        assert found.target_logsumexp is not None
        np.testing.assert_allclose(found.target_logsumexp[wanted], logits.logsumexp(-1).numpy()[wanted], rtol=1e-5)
        assert np.isnan(found.target_logsumexp[~wanted]).all()


def test_a_row_does_not_depend_on_its_batch(states: HiddenStates) -> None:
    batch = rows(3, 40, 11)
    together, alone = states(batch), [states([r])[0] for r in batch]
    for a, b in zip(together, alone, strict=True):
        assert a.sample_id == b.sample_id
        torch.testing.assert_close(a.hidden, b.hidden, rtol=1e-3, atol=1e-3)
        assert a.target_argmax.tolist() == b.target_argmax.tolist()


def test_hooks_are_gone_afterwards(model: PreTrainedModel) -> None:
    with HiddenStates(model, LAYERS, torch.float32, logsumexp=False):
        pass
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_batches_hold_every_row_once_within_the_limit() -> None:
    lengths = np.random.default_rng(1).integers(1, 512, 200).tolist()
    batches = list(by_length(lengths, 2048))
    assert sorted(i for b in batches for i in b) == list(range(200))
    padded = [len(b) * max(lengths[i] for i in b) for b in batches]
    assert max(padded) <= 2048
    assert sum(lengths) / sum(padded) > 0.9  # little of the work is padding
    assert next(by_length([5000, 1], 2048)) == [0]


def test_windows_are_consecutive_and_bounded() -> None:
    lengths = [100] * 50
    found = list(windows(lengths, 64))  # 8 batches of 64 tokens: 5 rows of 100
    assert [i for w in found for i in w] == list(range(50))
    assert {len(w) for w in found} == {5}
    assert [len(w) for w in windows([10_000, 10, 10], 64)] == [1, 2]

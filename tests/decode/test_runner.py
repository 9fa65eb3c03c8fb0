"""The target runner: features of the right layers, a cache that rolls back exactly, refusals with a reason."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from torch import Tensor

from eagle3_train.decode.cache import GROWTH, RollbackCache, check_rollback
from eagle3_train.decode.loop import ancestors
from eagle3_train.decode.runner import Query, TargetRunner
from tests.heads import LAYER_IDS, VOCAB, tiny_target

close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-3)  # fp32; the states' size is about 100
TEXT = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(3))


def full(model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of a forward without cache: [T, V], [L + 1, T, H]."""
    out = model(input_ids=tokens[None], output_hidden_states=True)
    return out.logits[0], torch.stack(out.hidden_states)[:, 0]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_features_are_the_inputs_of_the_layers(kind: str) -> None:
    model = tiny_target(kind)
    logits, states = full(model, TEXT)
    (out,) = TargetRunner(model, LAYER_IDS).forward([Query(TEXT)])
    close(out.logits, logits)
    close(out.features, states[list(LAYER_IDS)].transpose(0, 1))


def test_the_final_layer_id_is_the_state_before_the_final_norm() -> None:
    model = tiny_target()
    (out,) = TargetRunner(model, (1, 4)).forward([Query(TEXT)])
    close(model.lm_head(model.model.norm(out.features[:, 1])), out.logits)
    assert not torch.allclose(model.lm_head(out.features[:, 1]), out.logits)


def test_forwards_in_pieces_with_rollbacks_equal_one_forward() -> None:
    model = tiny_target()
    logits, states = full(model, TEXT)
    runner = TargetRunner(model, LAYER_IDS)
    got, features = [], []
    wrong = (TEXT + 1) % VOCAB
    for start, end in ((0, 7), (7, 8), (8, 13), (13, 30)):
        drafted = torch.cat((TEXT[start : start + 1], wrong[start:end]))
        runner.forward([Query(drafted)])  # rejected but for its first token
        runner.keep(0, len(drafted), [0])
        runner.keep(0, 1, [])
        (out,) = runner.forward([Query(TEXT[start:end])])
        got.append(out.logits)
        features.append(out.features)
    close(torch.cat(got), logits)
    close(torch.cat(features), states[list(LAYER_IDS)].transpose(0, 1))
    assert runner.cache.lengths == [30]


def test_last_only_and_no_features() -> None:
    model = tiny_target()
    logits, _ = full(model, TEXT)
    (out,) = TargetRunner(model, LAYER_IDS).forward([Query(TEXT)], features=False, last_only=True)
    close(out.logits, logits[-1:])
    assert out.features.numel() == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_tree_is_verified_as_its_branches_and_its_path_is_kept(kind: str) -> None:
    """Nodes: root 0; 1, 2 its children; 3 child of 1; 4, 5 children of 2. Then the path 0-2-5 is kept and continued."""
    model = tiny_target(kind)
    runner = TargetRunner(model, LAYER_IDS)
    runner.forward([Query(TEXT[:10])])
    nodes = TEXT[10:16]
    parents = torch.tensor([-1, -1, 0, 1, 1])
    depths = torch.tensor([0, 1, 1, 2, 2, 2])
    (out,) = runner.forward([Query(nodes, depths, ancestors(parents))])
    for path in ([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]):
        logits, states = full(model, torch.cat((TEXT[:10], nodes[path])))
        close(out.logits[path[-1]], logits[-1])
        close(out.features[path[-1]], states[list(LAYER_IDS), -1])
    runner.keep(0, 6, [0, 2, 5])
    logits, _ = full(model, torch.cat((TEXT[:10], nodes[[0, 2, 5]], TEXT[20:23])))
    close(runner.forward([Query(TEXT[20:23])])[0].logits, logits[-3:])


def test_the_cache_grows_and_keeps_what_it_holds() -> None:
    cache = RollbackCache(2)
    x = torch.randn(1, 2, GROWTH + 40, 4)
    held = 0
    for n in (GROWTH - 1, 3, 38):
        cache.extend(0, [n], x.device)
        for layer in range(2):
            keys, values = cache.update(x[:, :, held : held + n] + layer, -x[:, :, held : held + n], layer)
        held += n
        close(keys, x[:, :, :held] + 1)
        close(values, -x[:, :, :held])
    assert cache.lengths == [GROWTH + 40]
    cache.truncate(0, 5)
    cache.extend(0, [1], x.device)
    assert cache.get_seq_length() == 5, "what the model is told: the tokens before the forward"
    keys, _ = cache.update(x[:, :, :1], x[:, :, :1], 1)
    close(keys, torch.cat((x[:, :, :5] + 1, x[:, :, :1]), 2))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MistralConfig(), "sliding-window"),
        (transformers.Qwen2Config(use_sliding_window=True), "sliding-window"),
        (transformers.Qwen3Config(use_sliding_window=True), "sliding-window"),
        (transformers.Gemma3TextConfig(), "sliding-window"),
        (transformers.MambaConfig(), "LinearAttention"),
        (transformers.T5Config(), "encoder-decoder"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.model_type,
)
def test_targets_that_cannot_be_rolled_back_are_refused(config: transformers.PretrainedConfig, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_rollback(config)


@pytest.mark.parametrize("ids", [(0, 5), (-1, 2), (2, 1), (1, 1)])
def test_wrong_layer_ids_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layer ids"):
        TargetRunner(tiny_target(), ids)

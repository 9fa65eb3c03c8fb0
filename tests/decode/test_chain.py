"""Chain decoding is lossless, and its cycles are what the drafts' correctness says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_train.decode import loop, sampling
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.schedule import Generation
from tests.alone import chain, plain
from tests.heads import LAYER_IDS, OracleHead, RandomHead, prompts, tiny_target

NEW = 40


def generated(model: torch.nn.Module, prompt: Tensor, new: int, stop_ids: list[int]) -> list[int]:
    """The target's own greedy continuation, by transformers."""
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=stop_ids or None,
    )
    return out[0, len(prompt) :].tolist()


def expected_cycles(n_tokens: int, accepts: list[int], steps: int) -> list[int]:
    """Walk the cycles on paper: `accepts[j]`, how many drafts are right when j tokens have been generated."""
    cycles, done = [], 1
    while done < n_tokens:
        accepted = min(accepts[done], steps, n_tokens - done - 1)
        cycles.append(accepted)
        done += accepted + 1
    return cycles


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_greedy_output_is_the_targets_own(kind: str) -> None:
    model = tiny_target(kind)
    runner = TargetRunner(model, LAYER_IDS)
    head = RandomHead(32, steps=3)
    for prompt in prompts(4):
        own = generated(model, prompt, NEW, [])
        assert plain(runner, prompt, NEW, []).tokens == own
        assert chain(runner, head, prompt, NEW, [], 3).tokens == own
        assert len({*own}) > 2 or len(prompt) == 1, "the text is too dull to show an error"


@pytest.mark.parametrize(
    ("kind", "steps"), [("llama", 1), ("llama", 3), ("llama", 5), ("qwen2", 3), ("qwen3", 3), ("gpt_neox", 3)]
)
def test_cycles_follow_from_which_drafts_are_right(kind: str, steps: int) -> None:
    """Every accepted length 0..K happens, tokens stay the target's, and the head sees exactly the text."""
    model, prompt = tiny_target(kind), prompts(5)[4]
    runner = TargetRunner(model, LAYER_IDS)
    own = generated(model, prompt, NEW, [])
    text = torch.cat((prompt, torch.tensor(own)))
    seen: set[int] = set()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        right = torch.rand(len(text), steps, generator=generator) < 0.75
        head = OracleHead(text, lambda t, i: bool(right[t, i]), steps)  # noqa: B023
        out = chain(runner, head, prompt, NEW, [], steps)
        assert out.tokens == own
        # With j tokens generated, the last observed position is the one before the pending token.
        runs = [int(right[len(prompt) + j - 2].long().cumprod(0).sum()) for j in range(NEW)]
        assert out.accepted == expected_cycles(NEW, runs, steps)
        seen |= set(out.accepted)
    assert seen == set(range(steps + 1))


@pytest.mark.parametrize("new", [1, 2, 3, 4])
@pytest.mark.parametrize("prompt_length", [1, 2])
def test_short_generations(new: int, prompt_length: int) -> None:
    """K larger than what is left, and a prompt of one token."""
    model, prompt = tiny_target(), prompts(2)[prompt_length - 1]
    own = generated(model, prompt, new, [])
    text = torch.cat((prompt, torch.tensor(own)))
    out = chain(TargetRunner(model, LAYER_IDS), OracleHead(text, lambda t, i: True, 5), prompt, new, [], 5)
    assert out.tokens == own
    assert out.accepted == ([] if new == 1 else [new - 2])


def test_no_draft_is_made_that_the_generation_has_no_use_for() -> None:
    model, prompt = tiny_target(), prompts(3)[2]
    own = generated(model, prompt, 4, [])
    head = OracleHead(torch.cat((prompt, torch.tensor(own))), lambda t, i: True, 5)
    chain(TargetRunner(model, LAYER_IDS), head, prompt, 4, [], 5)
    assert head.calls == ["observe", "step"]  # 3 tokens after the first: 2 drafts and the bonus token


def test_a_stop_token_inside_an_accepted_chain_ends_the_generation() -> None:
    model, prompt = tiny_target(), prompts(4)[3]
    free = generated(model, prompt, NEW, [])
    for at in (1, 2, 3, 5):
        stop = free[at]
        end = free.index(stop) + 1
        own = generated(model, prompt, NEW, [stop])
        assert own == free[:end]
        text = torch.cat((prompt, torch.tensor(free)))
        out = chain(TargetRunner(model, LAYER_IDS), OracleHead(text, lambda t, i: True, 4), prompt, NEW, [stop], 4)
        assert out.tokens == own
        assert out.accepted == expected_cycles(end, [4] * NEW, 4)
        assert sum(out.accepted) + len(out.accepted) == len(out.tokens) - 1


def test_a_stop_token_at_once() -> None:
    model, prompt = tiny_target(), prompts(4)[3]
    runner = TargetRunner(model, LAYER_IDS)
    first = generated(model, prompt, 1, [])
    expected = Generation(first, [])
    assert chain(runner, RandomHead(32, 2), prompt, NEW, first, 2) == expected
    assert plain(runner, prompt, NEW, first) == expected


def test_the_runner_is_as_new_for_each_prompt() -> None:
    model = tiny_target()
    runner = TargetRunner(model, LAYER_IDS)
    first = chain(runner, RandomHead(32, 3), prompts(6)[5], NEW, [], 3)
    chain(runner, RandomHead(32, 3), prompts(6)[2], NEW, [], 3)
    assert chain(runner, RandomHead(32, 3), prompts(6)[5], NEW, [], 3) == first


@pytest.mark.parametrize("error", [-1, 1])
def test_an_acceptance_off_by_one_is_seen(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above assert fails for a wrong rule."""

    def wrong(choice: Tensor, drafts: Tensor) -> tuple[int, list[int]]:
        accepted, _ = sampling.accept_chosen(choice, drafts)
        accepted = min(max(accepted + error, 0), len(drafts))
        return accepted, [*drafts[:accepted].tolist(), int(choice[accepted])]

    monkeypatch.setattr("eagle3_train.decode.chain.accept_chosen", wrong)
    with pytest.raises(AssertionError):
        test_cycles_follow_from_which_drafts_are_right("llama", 3)


@pytest.mark.parametrize(("length", "new"), [(0, 4), (3, 0), (250, 10)])
def test_impossible_lengths_are_refused(length: int, new: int) -> None:
    with pytest.raises(ValueError, match=f"{length} tokens"):
        plain(TargetRunner(tiny_target(), LAYER_IDS), torch.zeros(length, dtype=torch.int64), new, [])


def test_until_stop_includes_the_stop() -> None:
    assert loop._until_stop([3, 1, 2, 1], frozenset({1})) == [3, 1]
    assert loop._until_stop([3, 2], frozenset({1})) == [3, 2]

"""Several prompts at once give what each gives alone, whatever stands in the slots beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_train.decode.cache import GROWTH
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer, ancestors, decode_plain, decode_speculative
from eagle3_train.decode.runner import Query, TargetRunner
from eagle3_train.decode.sampling import GREEDY, Sampling
from eagle3_train.decode.schedule import Generation, Request
from eagle3_train.decode.static import StaticTree
from eagle3_train.decode.tree import DrawnTree, Tree
from tests.evaluate.tiny import STOPS, prompt, trained_head
from tests.heads import LAYER_IDS, VOCAB, RandomHead, tiny_target

WARM = Sampling(0.8, top_p=0.9)
LENGTHS = (7, 1, 30, 4, 12, 3, 2)  # of the prompts
NEW = (20, 9, 1, 25, 2, 14, 24)  # and of their continuations, at most; some end by a stop token before
WAYS: dict[str, Proposer | Sampling] = {
    "plain": GREEDY,
    "plain, sampled": WARM,
    "chain": Chain(3),
    "chain, sampled": Chain(3, WARM),
    "tree": Tree(3, 3, 8),
    "tree, sampled": Tree(3, 3, 8, WARM),
    "static tree": StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))),
    "drawn tree": DrawnTree(2, 2, 2, WARM),
}


def requests() -> list[Request]:
    """Each with random numbers of its own."""
    return [
        Request(prompt(length, 20 + i), new, torch.Generator().manual_seed(i))
        for i, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True))
    ]


def decoded(runner: TargetRunner, way: Proposer | Sampling, asked: list[Request], head: Any) -> list[Generation]:
    if isinstance(way, Sampling):
        return decode_plain(runner, asked, STOPS, sampling=way)
    return decode_speculative(runner, head, way, asked, STOPS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_batch_gives_what_each_prompt_gives_alone(kind: str, way: str) -> None:
    """Three slots for seven prompts: slots are refilled, and run empty at the end."""
    head = trained_head() if kind == "llama" else RandomHead(32, 3, seed=8)
    one = TargetRunner(tiny_target(kind), LAYER_IDS)
    alone = [decoded(one, WAYS[way], [request], head)[0] for request in requests()]
    several = TargetRunner(tiny_target(kind), LAYER_IDS, slots=3)
    assert decoded(several, WAYS[way], requests(), head) == alone
    assert len({len(out.tokens) for out in alone}) > 4, "all end together: no slot is refilled"
    if not isinstance(WAYS[way], Sampling):
        assert len({a for out in alone for a in out.accepted}) > 1, "all cycles are alike"


class Counting(TargetRunner):
    """Notes how many sequences each forward has."""

    def __init__(self, slots: int) -> None:
        super().__init__(tiny_target(), LAYER_IDS, slots)
        self.sizes: list[int] = []

    def forward(self, queries: Any, **how: Any) -> Any:
        self.sizes.append(len(queries))
        return super().forward(queries, **how)


def test_slots_are_refilled_at_once() -> None:
    runner = Counting(2)
    asked = [Request(prompt(3, i), new) for i, new in enumerate((2, 6, 3, 2))]
    outs = decode_plain(runner, asked, [])
    assert [len(out.tokens) for out in outs] == [2, 6, 3, 2]
    # Prompts 0 and 1; a step ends 0; prompt 2; two steps end it; prompt 3; a step ends it; 1 needs one more.
    assert runner.sizes == [1, 1, 2, 1, 2, 2, 1, 2, 1]
    assert all(out.seconds > 0 for out in outs)


def test_a_request_that_does_not_fit_is_refused_before_any_work() -> None:
    runner = Counting(2)
    with pytest.raises(ValueError, match="250 tokens"):
        decode_plain(runner, [Request(prompt(3, 0), 4), Request(torch.zeros(250, dtype=torch.int64), 10)], [])
    assert runner.sizes == []


def _text(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_forward_of_several_sequences_is_that_of_each(kind: str) -> None:
    """Chains of other lengths and a tree in one forward; then one is removed, and the last one takes its slot."""
    runner, one = (TargetRunner(tiny_target(kind), LAYER_IDS, slots) for slots in (3, 1))
    texts = [_text(length, 40 + length) for length in (9, GROWTH - 2, 4)]  # the buffers grow while others stand in them
    queries = [
        Query(_text(4, 1)),
        Query(_text(3, 2), torch.tensor([0, 1, 1]), ancestors(torch.tensor([-1, -1]))),
        Query(_text(1, 3)),
    ]
    for slot, text in enumerate(texts):
        runner.forward([Query(text)], first=slot)
    outs = runner.forward(queries)
    close = torch.testing.assert_close
    for text, query, out in zip(texts, queries, outs, strict=True):
        one.reset()
        one.forward([Query(text)])
        (expected,) = one.forward([query])
        close(out.logits, expected.logits, rtol=1e-4, atol=1e-3)
        close(out.features, expected.features, rtol=1e-4, atol=1e-3)
    runner.keep(1, 3, [0, 2])
    runner.remove(0)
    assert runner.cache.lengths == [len(texts[2]) + 1, len(texts[1]) + 2]
    outs = runner.forward([Query(_text(2, 5)), Query(_text(3, 6))])
    known = [torch.cat((texts[2], queries[2].tokens)), torch.cat((texts[1], queries[1].tokens[[0, 2]]))]
    for text, more, out in zip(known, (_text(2, 5), _text(3, 6)), outs, strict=True):
        one.reset()
        (expected,) = one.forward([Query(torch.cat((text, more)))])
        close(out.logits, expected.logits[-len(more) :], rtol=1e-4, atol=1e-3)

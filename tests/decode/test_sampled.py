"""Sampled decoding is distributed as the target: chi-square against exact enumeration, and wrong rules fail it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer, Verdict
from eagle3_train.decode.sampling import Sampling, accept_siblings
from eagle3_train.decode.tree import DrawnTree, Tree
from tests.alone import plain, speculative
from tests.tables import PROMPT, TableHead, TableRunner, texts

NEW, RUNS = 4, 1500
WARM = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.8, top_p=0.85, top_k=3)
WAYS: dict[str, tuple[Sampling, Proposer | None]] = {
    "plain": (WARM, None),
    "chain": (WARM, Chain(3, WARM)),
    "chain, filtered": (FILTERED, Chain(3, FILTERED)),
    "chain, greedy draft": (WARM, Chain(3, WARM, greedy_draft=True)),
    "tree": (WARM, Tree(2, 2, 4, WARM)),
    "tree, filtered": (FILTERED, Tree(2, 2, 4, FILTERED)),
    "drawn tree": (WARM, DrawnTree(2, 2, 2, WARM)),
    "drawn tree, filtered": (FILTERED, DrawnTree(2, 1, 3, FILTERED)),
}


def p_value(sampling: Sampling, proposer: Proposer | None, runs: int = RUNS) -> float:
    """Of the outputs' counts under the target's exact distribution over all texts."""
    runner, head = TableRunner(), TableHead()
    generator = torch.Generator().manual_seed(5)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(runs):
        if proposer is None:
            out = plain(runner, PROMPT, NEW, [], sampling=sampling, generator=generator)
        else:
            out = speculative(runner, head, proposer, PROMPT, NEW, [], generator=generator)
        counts[tuple(out.tokens)] += 1
    expected = {text: runs * runner.probability(text, sampling) for text in texts(NEW)}
    assert sum(expected.values()) == pytest.approx(runs, rel=1e-4)
    if any(counts[text] and not expected[text] for text in counts):
        return 0.0
    # Texts too rare for the approximation go together.
    often = [text for text in expected if expected[text] >= 5]
    observed = [counts[text] for text in often]
    means = [expected[text] for text in often]
    rest = runs - sum(means)
    if rest > 1:
        observed, means = [*observed, runs - sum(observed)], [*means, rest]
    return float(stats.chisquare(observed, np.array(means) * sum(observed) / sum(means)).pvalue)


@pytest.mark.parametrize("way", WAYS)
def test_sampled_output_is_distributed_as_the_targets(way: str) -> None:
    assert p_value(*WAYS[way]) > 1e-3


def _leave_p(p: Tensor, q: Tensor) -> Tensor:
    """Wrong: what a rejection leaves is not p itself."""
    return p


def _prefer_children(tokens: list[int], parents: list[int], choice: list[int]) -> Verdict:
    """Wrong: takes the tree's first child of the root whatever the target chose."""
    row = parents.index(-1)
    return Verdict([row], [tokens[row], choice[1 + row]])


@pytest.mark.parametrize(
    ("way", "name", "wrong"),
    [
        ("chain", "sampling.residual", _leave_p),
        ("drawn tree", "sampling.residual", _leave_p),
        ("tree", "tree.follow", _prefer_children),
    ],
)
def test_a_wrong_rule_fails(way: str, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"eagle3_train.decode.{name}", wrong)
    assert p_value(*WAYS[way], runs=RUNS // 2) < 1e-6


def test_siblings_of_probability_zero_are_never_accepted() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 0.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    results = Counter(accept_siblings(p, [0, 1, 2], q, generator) for _ in range(800))
    assert set(results) == {(0, 0), (None, 1), (None, 2)}
    assert stats.binomtest(results[0, 0], 800, 0.5).pvalue > 1e-3


def test_filters_on_paper() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).log()  # probabilities 0.4, 0.3, 0.2, 0.1
    close = torch.testing.assert_close
    close(Sampling(1.0).probs(logits), torch.tensor([0.4, 0.3, 0.2, 0.1]))
    close(Sampling(0.5).probs(logits), torch.tensor([16.0, 9, 4, 1]) / 30)
    close(Sampling(1.0, top_k=2).probs(logits), torch.tensor([4.0, 3, 0, 0]) / 7)
    close(Sampling(1.0, top_p=0.5).probs(logits), torch.tensor([4.0, 3, 0, 0]) / 7)
    close(Sampling(1.0, top_p=0.39).probs(logits), torch.tensor([1.0, 0, 0, 0]))
    close(Sampling(1.0, top_p=0.6, top_k=2).probs(logits[None].flip(1)), torch.tensor([[0, 0, 3, 4.0]]) / 7)


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}])
def test_wrong_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="top_p"):
        Sampling(**wrong)  # type: ignore[arg-type]

"""Tree drafting: which candidates are kept, losslessness, and the head's tree step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_train.config import compose
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposal, ancestors
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.static import StaticTree
from eagle3_train.decode.tree import DrawnTree, Tree, follow, match
from tests.alone import plain, speculative
from tests.drafts.tiny import H, tiny_head
from tests.evaluate.tiny import NEW, STOPS, prompt, trained_head
from tests.heads import LAYER_IDS, RandomHead, tiny_target
from tests.tables import TableHead


def nodes(proposal: Proposal) -> list[tuple[int, ...]]:
    """Each node as its path of tokens."""
    assert proposal.parents is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def slow_tree(head: TableHead, first: int, depth: int, top_k: int, total: int) -> set[tuple[int, ...]]:
    """EAGLE-2's candidates by plain recursion over all paths of the level, best first."""
    scores: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for level in range(depth):
        found: dict[tuple[int, ...], float] = {}
        for path in frontier:
            logp = head.table[min(level, 1), path[-1] if path else first].log_softmax(-1)
            for i in logp.argsort(descending=True)[:top_k].tolist():
                found[*path, int(head.vocab_ids[i])] = scores.get(path, 0.0) + float(logp[i])
        scores |= found
        frontier = sorted(found, key=lambda p: -found[p])[:top_k]
    return set(sorted(scores, key=lambda p: -scores[p])[:total])


@pytest.mark.parametrize(("depth", "top_k", "total"), [(1, 2, 5), (3, 1, 3), (3, 2, 5), (4, 3, 12), (3, 3, 100)])
def test_the_most_confident_candidates_are_kept(depth: int, top_k: int, total: int) -> None:
    for first in range(4):
        head = TableHead(seed=first)
        h, logits = head.observe(None, torch.tensor([first]), torch.zeros(1, 1, 1))
        proposal = Tree(depth, top_k, total).propose(head, None, h, logits)
        paths = nodes(proposal)
        assert set(paths) == slow_tree(head, first, depth, top_k, total)
        assert len(paths) == len(set(paths))
        assert proposal.depths.tolist() == [len(p) - 1 for p in paths]  # type: ignore[union-attr]


def test_paths_are_whole_even_where_all_scores_tie() -> None:
    head = TableHead()
    head.table = torch.full_like(head.table, -1e4)
    head.table[..., 0] = 0  # log-probability 0 at every level: all levels' first candidates tie
    h, logits = head.observe(None, torch.tensor([0]), torch.zeros(1, 1, 1))
    for total in range(1, 9):
        proposal = Tree(4, 2, total).propose(head, None, h, logits)
        parents = proposal.parents.tolist()  # type: ignore[union-attr]
        assert len(parents) == total
        assert all(-1 <= parent < row for row, parent in enumerate(parents))
        kept = set(nodes(proposal))
        assert all(len(path) == 1 or path[:-1] in kept for path in kept)


def test_a_tree_of_one_branch_is_a_chain() -> None:
    runner, head = TargetRunner(tiny_target(), LAYER_IDS), trained_head()
    for seed in range(3):
        start = prompt(3, 50 + seed)
        chain = speculative(runner, head, Chain(3), start, NEW, STOPS)
        assert speculative(runner, head, Tree(3, 1, 3), start, NEW, STOPS) == chain


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_greedy_tree_output_is_the_targets_own(kind: str) -> None:
    runner = TargetRunner(tiny_target(kind), LAYER_IDS)
    head = trained_head() if kind == "llama" else RandomHead(32, 3)
    accepted: list[int] = []
    for i in (0, 2, 4, 6):  # what the head was fitted to
        start = prompt(1 + i, 10 + i)
        for new in (1, 2, 3, NEW):
            own = plain(runner, start, new, STOPS)
            out = speculative(runner, head, Tree(3, 3, 9), start, new, STOPS)
            assert out.tokens == own.tokens
            assert sum(out.accepted) + len(out.accepted) == len(out.tokens) - 1
            accepted += out.accepted
    assert len(set(accepted)) >= (4 if kind == "llama" else 2)


def test_a_branch_accepts_where_the_chain_does_not() -> None:
    runner, head = TargetRunner(tiny_target(), LAYER_IDS), trained_head()
    chain, tree = (
        sum(len(speculative(runner, head, way, prompt(4, s), NEW, STOPS).accepted) for s in range(70, 76))
        for way in (Chain(3), Tree(3, 4, 12))
    )
    assert tree < chain


def test_expand_is_a_step_along_each_path() -> None:
    """Of the real head in float64: nodes of three levels at once equal the chain that leads to each."""
    head = tiny_head()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, 3, H, dtype=torch.float64, generator=generator)
    ids = torch.tensor([4, 1, 7, 2, 9])
    # Levels of 2, 3 and 2 nodes; parents number the expanded nodes in order.
    levels = [([3, 8], [-1, -1]), ([5, 6, 5], [0, 0, 1]), ([1, 2], [3, 4])]
    state = head.new_state()
    root, _ = head.observe(state, ids, features)
    tokens: list[int] = []
    parents: list[int] = []
    outputs: list[tuple[Tensor, Tensor]] = []
    for depth, (new, above) in enumerate(levels, start=1):
        tokens += new
        parents += above
        visible = ancestors(torch.tensor(parents))[1:, 1:][-len(new) :]
        h_in = torch.stack([root if p < 0 else outputs[p][0] for p in above])
        h, logits = head.expand(state, torch.tensor(new), h_in, depth, visible)
        outputs += list(zip(h, logits, strict=True))
    for row in range(len(tokens)):
        path = []
        node = row
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        state = head.new_state()
        h, logits = head.observe(state, ids, features)
        for token in path:
            h, logits = head.step(state, torch.tensor(token), h)
        torch.testing.assert_close(outputs[row], (h, logits))


def test_follow_and_match_on_paper() -> None:
    tokens, parents = [5, 6, 7, 5, 8], [-1, -1, 0, 0, 3]
    assert follow(tokens, parents, [9, 0, 0, 0, 0, 0]) == ([], [9])
    assert follow(tokens, parents, [6, 0, 1, 0, 0, 0]) == ([1], [6, 1])
    assert follow(tokens, parents, [5, 5, 0, 0, 8, 4]) == ([0, 3, 4], [5, 5, 8, 4])
    assert match(tokens, parents, [5, 5, 8, 4]) == [0, 3, 4]
    assert match(tokens, parents, [5, 5]) == [0, 3]
    assert match(tokens, parents, [8]) == []


def test_impossible_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Tree(0, 1, 1)
    with pytest.raises(ValueError, match="temperature"):
        DrawnTree(1, 1, 1, Chain(1).sampling)


def test_a_static_tree_has_the_ranks_that_were_asked_for() -> None:
    """Node by node against steps of a chain along its path."""
    head = TableHead(seed=2)
    h, logits = head.observe(None, torch.tensor([1]), torch.zeros(1, 1, 1))
    choices = ((1,), (0,), (0, 2), (1, 0), (0, 0), (0, 2, 1))
    proposal = StaticTree(choices).propose(head, None, h, logits)
    expected = set()
    for choice in choices:
        path: tuple[int, ...] = ()
        for level, rank in enumerate(choice):
            order = head.table[min(level, 1), path[-1] if path else 1].argsort(descending=True)
            path = (*path, int(head.vocab_ids[order[rank]]))
        expected.add(path)
    assert set(nodes(proposal)) == expected
    assert proposal.depths.tolist() == [len(p) - 1 for p in nodes(proposal)]  # type: ignore[union-attr]


def test_a_static_tree_of_first_ranks_is_a_chain() -> None:
    runner, head = TargetRunner(tiny_target(), LAYER_IDS), trained_head()
    start = prompt(3, 50)
    chain = speculative(runner, head, Chain(3), start, NEW, STOPS)
    assert speculative(runner, head, StaticTree(((0,), (0, 0), (0, 0, 0))), start, NEW, STOPS) == chain


@pytest.mark.parametrize("choices", ["[[]]", "[[0,1]]", "[[0],[0]]", "[[-1]]"])
def test_static_trees_that_are_none_are_refused(choices: str) -> None:
    with pytest.raises(ValueError, match="of a static tree"):
        compose([f"eval.trees=[{{choices: {choices}}}]"])

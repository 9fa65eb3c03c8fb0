"""Static draft trees, Medusa's way: which ranks are tried where is fixed beforehand (Cai et al. 2024, section 2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from eagle3_train.decode.loop import Proposal
from eagle3_train.decode.sampling import GREEDY, Sampling
from eagle3_train.decode.tree import FollowedTree, TreeHead

Path = tuple[int, ...]


@dataclass(frozen=True)
class _Level:
    """The m nodes of one depth, of which the p that have children are expanded."""

    parents: list[int]  # [m], among the expanded nodes of the level above
    ranks: list[int]  # [m]
    expanded: list[int]  # [p], among the m
    visible: list[list[bool]]  # [p, expanded nodes so far]: those on each one's path, itself included


@dataclass(frozen=True)
class StaticTree(FollowedTree):
    """A tree whose nodes are `choices`: each the ranks, 0 the most likely, of the tokens on its path from the root.

    Any head can draft it. A Medusa head's guesses do not depend on the path, so its tree is a set of products of the
    positions' candidates, as in the paper.
    """

    choices: tuple[Path, ...]
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        known = {(), *self.choices}
        assert self.choices, "a tree has a node"
        assert all(path and path[:-1] in known for path in self.choices), "the configuration refuses others"

    @property
    def depth(self) -> int:
        return max(map(len, self.choices))

    @property
    def shape(self) -> str:
        return f"static tree {self.depth}/{len(self.choices)}"

    @cached_property
    def _nodes(self) -> list[Path]:
        """By depth: the order of the proposal."""
        return sorted(self.choices, key=lambda path: (len(path), path))

    @cached_property
    def _parents(self) -> list[int]:
        """Row of each node's parent; -1: the root."""
        rows = {path: row for row, path in enumerate(self._nodes)}
        return [rows.get(path[:-1], -1) for path in self._nodes]

    @cached_property
    def _levels(self) -> list[_Level]:
        inner = {path[:-1] for path in self._nodes}
        above: list[Path] = [()]
        expanded: list[Path] = []
        levels = []
        for depth in range(1, self.depth + 1):
            nodes = [path for path in self._nodes if len(path) == depth]
            kept = [i for i, path in enumerate(nodes) if path in inner]
            parents = [above.index(path[:-1]) for path in nodes]
            above = [nodes[i] for i in kept]
            expanded += above
            visible = [[path[: len(other)] == other for other in expanded] for path in above]
            levels.append(_Level(parents, [path[-1] for path in nodes], kept, visible))
        return levels

    def propose(
        self,
        head: TreeHead,
        state: Any,
        h: Tensor,
        logits: Tensor,
        room: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """All nodes, whatever `room` is left, as `Tree` does."""
        h, logits = h[None], logits[None]
        device = logits.device
        tokens: list[Tensor] = []
        for depth, level in enumerate(self._levels, 1):
            parent = torch.tensor(level.parents, device=device)
            best = logits.topk(1 + max(level.ranks)).indices
            tokens.append(head.target_ids(best[parent, torch.tensor(level.ranks, device=device)]))
            if level.expanded:
                visible = torch.tensor(level.visible, device=device)
                h, logits = head.expand(state, tokens[-1][level.expanded], h[parent[level.expanded]], depth, visible)
        return Proposal(
            torch.cat(tokens),
            depths=torch.tensor([len(path) - 1 for path in self._nodes], device=device),
            parents=torch.tensor(self._parents, device=device),
        )

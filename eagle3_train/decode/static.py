"""Static draft trees, Medusa's way: which ranks are tried where is fixed beforehand (Cai et al. 2024, section 2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.decode.loop import Proposal, Verdict
from eagle3_train.decode.sampling import GREEDY, Sampling, draw
from eagle3_train.decode.tree import TreeHead, follow

Path = tuple[int, ...]


@dataclass(frozen=True)
class StaticTree:
    """A tree whose nodes are `choices`: each the ranks, 0 the most likely, of the tokens on its path from the root.

    Any head can draft it. A Medusa head's guesses do not depend on the path, so its tree is a set of products of the
    positions' candidates, as in the paper. Deterministic given the head's logits: verified as `Tree`.
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
        nodes = sorted(self.choices, key=lambda path: (len(path), path))
        rows = {path: row for row, path in enumerate(nodes)}
        inner = {path[:-1] for path in nodes}
        level: list[Path] = [()]  # the nodes that `h` and `logits` are of
        h, logits = h[None], logits[None]
        tokens: list[Tensor] = []
        expanded: list[Path] = []
        for depth in range(1, self.depth + 1):
            children = [path for path in nodes if len(path) == depth]
            best = logits.topk(1 + max(path[-1] for path in children)).indices
            parent = torch.tensor([level.index(path[:-1]) for path in children], device=best.device)
            rank = torch.tensor([path[-1] for path in children], device=best.device)
            found = head.target_ids(best[parent, rank])
            tokens.append(found)
            kept = [i for i, path in enumerate(children) if path in inner]
            if kept:
                level = [children[i] for i in kept]
                expanded += level
                visible = [[path[: len(other)] == other for other in expanded] for path in level]
                h, logits = head.expand(
                    state, found[kept], h[parent[kept]], depth, torch.tensor(visible, device=best.device)
                )
        device = logits.device
        return Proposal(
            torch.cat(tokens),
            depths=torch.tensor([len(path) - 1 for path in nodes], device=device),
            parents=torch.tensor([rows.get(path[:-1], -1) for path in nodes], device=device),
        )

    def verify(self, proposal: Proposal, logits: Tensor, generator: torch.Generator | None) -> Verdict:
        assert proposal.parents is not None
        choice = draw(logits, self.sampling, generator).tolist()
        return follow(proposal.tokens.tolist(), proposal.parents.tolist(), choice)

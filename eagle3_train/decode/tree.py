"""Tree drafting: several guesses for each next token, all verified in one target forward.

`Tree` is EAGLE-2's dynamic tree (Li et al. 2024): the most confident candidates, deterministic given the head's logits.
`DrawnTree` draws siblings from the head's distribution, for sampling with the drafts' own randomness.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3_train.decode.loop import DraftHead, Proposal, Verdict, widen
from eagle3_train.decode.sampling import GREEDY, Sampling, accept_siblings, draw


class TreeHead(DraftHead, Protocol):
    """What trees need besides: drafting steps of many nodes at once (`drafts.Draft.expand`)."""

    def expand(self, state: Any, tokens: Tensor, h: Tensor, depth: int, visible: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass
class _Frontier:
    """The nodes that are expanded next. m nodes, S expanded nodes before them."""

    rows: Tensor  # int64 [m], among all candidates
    tokens: Tensor  # int64 [m]
    h: Tensor  # [m, H], output of the step that gave them
    scores: Tensor  # float32 [m], cumulative log-probability of the head
    seen: Tensor  # bool [m, S + m]: the expanded nodes on each one's path, itself included


@dataclass
class _Candidates:
    """All drafted nodes, in the order they came up: a parent before its children, siblings in their own order."""

    tokens: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    count: int = 0

    def add(self, tokens: Tensor, parents: Tensor, scores: Tensor, depth: int) -> Tensor:
        """The rows of the new nodes."""
        rows = torch.arange(self.count, self.count + len(tokens), device=tokens.device)
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.scores.append(scores)
        self.depths += [depth] * len(tokens)
        self.count += len(tokens)
        return rows


def _first(candidates: _Candidates, tokens: Tensor, scores: Tensor, h: Tensor, width: int) -> _Frontier:
    """The root's children; the best `width` of them are expanded next."""
    rows = candidates.add(tokens, torch.full_like(tokens, -1), scores, 0)
    best = scores.topk(min(width, len(scores))).indices
    m = len(best)
    seen = torch.eye(m, dtype=torch.bool, device=tokens.device)
    return _Frontier(rows[best], tokens[best], h.expand(m, -1), scores[best], seen)


def _next(
    candidates: _Candidates, old: _Frontier, tokens: Tensor, logp: Tensor, h: Tensor, depth: int, width: int
) -> _Frontier:
    """Children `tokens [m, b]` of the frontier, log-probabilities `logp [m, b]`; the best `width` are expanded next."""
    b = tokens.shape[1]
    tokens, scores = tokens.flatten(), (old.scores[:, None] + logp).flatten()
    rows = candidates.add(tokens, old.rows.repeat_interleave(b), scores, depth)
    best = scores.topk(min(width, len(scores))).indices
    parent = best // b
    own = torch.eye(len(best), dtype=torch.bool, device=tokens.device)
    return _Frontier(rows[best], tokens[best], h[parent], scores[best], torch.cat((old.seen[parent], own), 1))


class FollowedTree:
    """A tree whose candidates are deterministic given the head's logits, so that sampled verification needs no q: the
    target's own draw decides (multi-round rejection of point masses is the same thing)."""

    sampling: Sampling

    def verify(self, proposal: Proposal, logits: Tensor, generator: torch.Generator | None) -> Verdict:
        assert proposal.parents is not None
        choice = draw(logits, self.sampling, generator).tolist()
        return follow(proposal.tokens.tolist(), proposal.parents.tolist(), choice)


@dataclass(frozen=True)
class Tree(FollowedTree):
    """EAGLE-2's dynamic tree.

    From each of the `top_k` most confident nodes of a level the `top_k` most likely tokens are drafted, `depth` levels
    deep. Confidence is the product of the head's probabilities along the path. Of all candidates the `total` most
    confident are verified; a parent is at least as confident as its children and comes first in ties, so paths are
    whole.
    """

    depth: int
    top_k: int
    total: int
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        if min(self.depth, self.top_k, self.total) < 1:
            raise ValueError(f"{self}: depth, top_k and total must be at least 1")

    @property
    def shape(self) -> str:
        return f"tree {self.depth}x{self.top_k}/{self.total}"

    def propose(
        self,
        head: TreeHead,
        state: Any,
        h: Tensor,
        logits: Tensor,
        room: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """`room` has no say: which candidates survive must not depend on where the generation happens to end."""
        candidates = _Candidates()
        tokens, logp = self._best(head, logits)
        frontier = _first(candidates, tokens, logp, h, self.top_k)
        for depth in range(1, self.depth):
            h, logits = head.expand(state, frontier.tokens, frontier.h, depth, frontier.seen)
            tokens, logp = self._best(head, logits)
            frontier = _next(candidates, frontier, tokens, logp, h, depth, self.top_k)
        return prune(candidates, self.total)

    def _best(self, head: TreeHead, logits: Tensor) -> tuple[Tensor, Tensor]:
        best = logits.float().log_softmax(-1).clamp_max(0).topk(min(self.top_k, logits.shape[-1]))
        return head.target_ids(best.indices), best.values


def prune(candidates: _Candidates, total: int) -> Proposal:
    """The `total` candidates of the highest score, in their old order."""
    order = torch.cat(candidates.scores).sort(descending=True, stable=True).indices
    kept = order[:total].sort().values
    parents = torch.cat(candidates.parents)[kept]
    new_row = torch.full((candidates.count + 1,), -1, device=kept.device)  # the last entry serves the root, -1
    new_row[kept] = torch.arange(len(kept), device=kept.device)
    depths = torch.tensor(candidates.depths).to(kept.device, non_blocking=True)[kept]
    return Proposal(torch.cat(candidates.tokens)[kept], depths=depths, parents=new_row[parents])


def follow(tokens: list[int], parents: list[int], choice: list[int]) -> Verdict:
    """Walk a tree from its root along the target's choices: `choice[0]` after the root, `choice[1 + i]` after row i."""
    child = _children(tokens, parents)
    path: list[int] = []
    emitted = [choice[0]]
    while (row := child.get((path[-1] if path else -1, emitted[-1]))) is not None:
        path.append(row)
        emitted.append(choice[1 + row])
    return Verdict(path, emitted)


def _children(tokens: list[int], parents: list[int]) -> dict[tuple[int, int], int]:
    """(parent, token) -> row."""
    return {key: row for row, key in enumerate(zip(parents, tokens, strict=True))}


def match(tokens: list[int], parents: list[int], text: list[int]) -> list[int]:
    """Rows of the tree's longest path that spells a prefix of `text`."""
    child = _children(tokens, parents)
    path: list[int] = []
    for token in text:
        row = child.get((path[-1] if path else -1, token))
        if row is None:
            break
        path.append(row)
    return path


@dataclass(frozen=True)
class DrawnTree:
    """A tree whose siblings are drawn from the head's distribution, without replacement.

    Each of the `width` most probable nodes of a level gets `branch` children, `depth` levels deep, and all are
    verified: branch + (depth - 1) * width * branch nodes. Nothing drawn may be dropped for what it turned out to be:
    the rejection rule needs the distribution each sibling came from. Which nodes are expanded may depend on all tokens
    drawn so far.
    """

    depth: int
    width: int
    branch: int
    sampling: Sampling

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.branch) < 1 or self.sampling.greedy:
            raise ValueError(f"{self}: depth, width and branch must be at least 1, and the temperature above 0")

    @property
    def shape(self) -> str:
        return f"drawn tree {self.depth}x{self.width}x{self.branch}"

    def propose(
        self, head: TreeHead, state: Any, h: Tensor, logits: Tensor, room: int, generator: torch.Generator | None
    ) -> Proposal:
        candidates = _Candidates()
        q = self.sampling.probs(logits)[None]
        tokens, logp = self._draw(head, q, generator)
        frontier = _first(candidates, tokens[0], logp[0], h, self.width)
        rows, nodes = [q], [torch.full((1,), -1, device=q.device)]
        for depth in range(1, min(self.depth, room)):
            nodes.append(frontier.rows)
            h, logits = head.expand(state, frontier.tokens, frontier.h, depth, frontier.seen)
            q = self.sampling.probs(logits)
            rows.append(q)
            tokens, logp = self._draw(head, q, generator)
            frontier = _next(candidates, frontier, tokens, logp, h, depth, self.width)
        return Proposal(
            torch.cat(candidates.tokens),
            torch.cat(rows),
            head.target_ids(torch.arange(q.shape[1], device=q.device)),
            torch.tensor(candidates.depths).to(q.device, non_blocking=True),
            torch.cat(candidates.parents),
            torch.cat(nodes),
        )

    def _draw(self, head: TreeHead, q: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`branch` tokens a row of q [m, D], one after another without replacement, and their log-probabilities."""
        logq = q.log()
        # Gumbel top-k: the order of log q + Gumbel noise is that of drawing one by one (Kool et al. 2019).
        uniform = torch.rand(q.shape, device=q.device, generator=generator).clamp_min(torch.finfo(q.dtype).tiny)
        drawn = (logq - (-uniform.log()).log()).topk(min(self.branch, q.shape[1])).indices
        return head.target_ids(drawn), logq.gather(1, drawn)

    def verify(self, proposal: Proposal, logits: Tensor, generator: torch.Generator | None) -> Verdict:
        assert proposal.parents is not None
        assert proposal.q_nodes is not None
        tokens = proposal.tokens.tolist()
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(proposal.parents.tolist()):
            children.setdefault(parent, []).append(row)
        p, q = self.sampling.probs(logits), widen(proposal, logits.shape[1])
        q_of = {node: i for i, node in enumerate(proposal.q_nodes.tolist())}
        path: list[int] = []
        emitted: list[int] = []
        node = -1
        while node in children:
            siblings = children[node]
            index, token = accept_siblings(p[node + 1], [tokens[r] for r in siblings], q[q_of[node]], generator)
            emitted.append(token)
            if index is None:
                return Verdict(path, emitted)
            node = siblings[index]
            path.append(node)
        emitted.append(int(torch.multinomial(p[node + 1], 1, generator=generator)))
        return Verdict(path, emitted)

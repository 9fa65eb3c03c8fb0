"""Decoding prompts, plainly or speculatively with a draft head; the output is the target's own either way."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eagle3_train.decode.runner import Query, TargetRunner
from eagle3_train.decode.sampling import GREEDY, Sampling, draw
from eagle3_train.decode.schedule import Generation, Request, Steps, run


class DraftHead(Protocol):
    """What decoding needs of a draft head (`drafts.Draft`)."""

    @property
    def reads(self) -> slice: ...
    def new_state(self) -> Any: ...
    def observe(self, state: Any, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]: ...
    def step(self, state: Any, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]: ...
    def target_ids(self, draft_ids: Tensor) -> Tensor: ...


class Proposal(NamedTuple):
    """Drafted tokens to verify in one target forward."""

    tokens: Tensor  # int64 [d]
    q: Tensor | None = None  # float32 [rows, D], what tokens were drawn from, in a chain a row each; None: not drawn
    q_ids: Tensor | None = None  # int64 [D]: target ids of the columns of q
    depths: Tensor | None = None  # int64 [d], for a tree: 0 for a child of the pending token; None: a chain
    parents: Tensor | None = None  # int64 [d], for a tree: row of the parent, -1 the pending token
    q_nodes: Tensor | None = None  # int64 [rows of q], for a drawn tree: the node whose children each row of q gave


def widen(proposal: Proposal, vocab_size: int) -> Tensor:
    """q over the target's vocabulary: [d, V]."""
    assert proposal.q is not None
    assert proposal.q_ids is not None
    return proposal.q.new_zeros(len(proposal.q), vocab_size).index_copy(1, proposal.q_ids, proposal.q)


class Verdict(NamedTuple):
    """What the target made of a proposal."""

    path: list[int]  # rows of the accepted drafts, from the root
    emitted: list[int]  # the accepted tokens and the bonus token


class Proposer(Protocol):
    """A way to draft and to verify: chain or tree."""

    @property
    def depth(self) -> int:
        """Drafts that a cycle can accept at most."""
        ...

    @property
    def shape(self) -> str:
        """Its name in records and tables."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        ...

    def propose(
        self, head: Any, state: Any, h: Tensor, logits: Tensor, room: int, generator: torch.Generator | None
    ) -> Proposal:
        """Draft from the last observed position. The generation has no use for drafts more than `room` tokens deep."""
        ...

    def verify(self, proposal: Proposal, logits: Tensor, generator: torch.Generator | None) -> Verdict:
        """Accept drafts by the target's `logits [d + 1, V]` after the pending token and after each draft."""
        ...


def decode_plain(
    runner: TargetRunner, requests: Sequence[Request], stop_ids: Sequence[int], *, sampling: Sampling = GREEDY
) -> list[Generation]:
    """Autoregressive decoding, one target forward a token: the baseline, over the same runner and cache.

    Args:
        requests: prompts, of which `runner.slots` are decoded at once.
        stop_ids: a generation ends with, and includes, the first of these.

    Raises:
        ValueError: a request does not fit the target.
    """
    start = partial(_plain, runner.device, frozenset(stop_ids), sampling)
    return run(runner, requests, start, features=False)


def decode_speculative(
    runner: TargetRunner, head: DraftHead, proposer: Proposer, requests: Sequence[Request], stop_ids: Sequence[int]
) -> list[Generation]:
    """Lossless speculative decoding: draft, verify in one target forward, keep what was accepted, roll back the rest.

    Arguments as for `decode_plain`. `proposer` says how tokens are drawn, those without a draft too.
    """
    start = partial(_speculative, runner.device, head, proposer, frozenset(stop_ids))
    return run(runner, requests, start, features=True)


def _plain(device: torch.device, stops: frozenset[int], sampling: Sampling, request: Request) -> Steps:
    first = yield Query(request.prompt_ids.to(device, torch.int64))
    token = draw(first.logits, sampling, request.generator)
    out = Generation([int(token)])
    while len(out.tokens) < request.max_new_tokens and out.tokens[-1] not in stops:
        output = yield Query(token)
        token = draw(output.logits, sampling, request.generator)
        out.tokens.append(int(token))
        out.accepted.append(0)
    return out


def _speculative(
    device: torch.device, head: DraftHead, proposer: Proposer, stops: frozenset[int], request: Request
) -> Steps:
    sampling, generator = proposer.sampling, request.generator
    prompt = request.prompt_ids.to(device, torch.int64)
    state = head.new_state()
    first = yield Query(prompt)
    pending = draw(first.logits, sampling, generator)  # [1]
    out = Generation([int(pending)])
    # Position t is observed with the token that follows it: the prompt's last one with the pending token.
    next_ids, features = torch.cat((prompt[1:], pending)), first.features
    kept: list[int] | None = None
    while (left := request.max_new_tokens - len(out.tokens)) > 0 and out.tokens[-1] not in stops:
        if left > 1:
            h, logits = head.observe(state, next_ids, features)
            # A cycle emits its bonus token in any case: of `left` tokens at most left - 1 can be drafts.
            proposal = proposer.propose(head, state, h, logits, left - 1, generator)
        else:
            proposal = Proposal(pending[:0])
        verified = yield _query(pending, proposal, kept)
        if left > 1:
            path, emitted = proposer.verify(proposal, verified.logits, generator)
        else:
            path, emitted = [], draw(verified.logits, sampling, generator).tolist()
        kept = [0, *(row + 1 for row in path)]
        next_ids, rows = (torch.tensor(x).to(device, non_blocking=True) for x in (emitted, kept))
        features = verified.features[rows]
        pending = next_ids[-1:]
        emitted = _until_stop(emitted[:left], stops)
        out.tokens += emitted
        out.accepted.append(len(emitted) - 1)
    return out


def _query(pending: Tensor, proposal: Proposal, kept: list[int] | None) -> Query:
    """The pending token and all drafts."""
    tokens = torch.cat((pending, proposal.tokens))
    if proposal.parents is None:
        return Query(tokens, kept=kept)
    assert proposal.depths is not None
    depths = torch.cat((proposal.depths.new_zeros(1), proposal.depths + 1))
    return Query(tokens, depths, ancestors(proposal.parents), kept)


def ancestors(parents: Tensor) -> Tensor:
    """bool [d + 1, d + 1]: which nodes lie on each node's path from the root, itself included; row 0 is the root.

    parents: int64 [d], each one before its child; -1 the root.
    """
    above = torch.cat((parents.new_zeros(1), parents + 1))
    seen = torch.eye(len(above), dtype=torch.bool, device=parents.device)
    for _ in range(len(above).bit_length()):  # twice as far up each time: without asking the device how deep it is
        seen = seen | seen[above]
        above = above[above]
    return seen


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Tokens up to the first stop token, which is included."""
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens

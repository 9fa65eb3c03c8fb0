"""Decoding one prompt: plainly, or speculatively with a draft head; the output is the target's own either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from eagle3_train.decode.runner import Output, TargetRunner
from eagle3_train.decode.sampling import GREEDY, Sampling, draw


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


@dataclass
class Generation:
    """One generated continuation.

    `tokens`: all of it, the first one from the prompt's forward. `accepted`: for each following target forward (cycle),
    the drafts that it accepted: it emitted that many tokens and one more. Where the generation ends inside a cycle (a
    stop token), only the tokens up to the end count, so sum(accepted) + len(accepted) = len(tokens) - 1 always.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)


@torch.inference_mode()
def decode_plain(
    runner: TargetRunner,
    prompt_ids: Tensor,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    *,
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> Generation:
    """Autoregressive decoding, one target forward a token: the baseline, over the same runner and cache.

    Args:
        prompt_ids: int64 [T], T >= 1.
        max_new_tokens: at most this many tokens, the first one included.
        stop_ids: generation ends with, and includes, the first of these.
    """
    prompt = _start(runner, prompt_ids, max_new_tokens)
    stops = frozenset(stop_ids)
    token = draw(runner.forward(prompt, features=False, last_only=True).logits, sampling, generator)
    out = Generation([int(token)])
    while len(out.tokens) < max_new_tokens and out.tokens[-1] not in stops:
        token = draw(runner.forward(token, features=False).logits, sampling, generator)
        out.tokens.append(int(token))
        out.accepted.append(0)
    return out


@torch.inference_mode()
def decode_speculative(
    runner: TargetRunner,
    head: DraftHead,
    proposer: Proposer,
    prompt_ids: Tensor,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    *,
    generator: torch.Generator | None = None,
) -> Generation:
    """Lossless speculative decoding: draft, verify in one target forward, keep what was accepted, roll back the rest.

    Arguments as for `decode_plain`. `proposer` says how tokens are drawn, those without a draft too.
    """
    sampling = proposer.sampling
    prompt = _start(runner, prompt_ids, max_new_tokens)
    stops = frozenset(stop_ids)
    state = head.new_state()
    first = runner.forward(prompt, last_only=True)
    pending = draw(first.logits, sampling, generator)  # [1]
    out = Generation([int(pending)])
    # Position t is observed with the token that follows it: the prompt's last one with the pending token.
    next_ids, features = torch.cat((prompt[1:], pending)), first.features
    while (left := max_new_tokens - len(out.tokens)) > 0 and out.tokens[-1] not in stops:
        if left > 1:
            h, logits = head.observe(state, next_ids, features)
            # A cycle emits its bonus token in any case: of `left` tokens at most left - 1 can be drafts.
            proposal = proposer.propose(head, state, h, logits, left - 1, generator)
        else:
            proposal = Proposal(pending[:0])
        base = runner.length
        verified = _forward(runner, pending, proposal, base)
        if left > 1:
            path, emitted = proposer.verify(proposal, verified.logits, generator)
        else:
            path, emitted = [], draw(verified.logits, sampling, generator).tolist()
        rows = [0, *(row + 1 for row in path)]
        runner.keep(base, rows)
        next_ids, features = torch.tensor(emitted, device=runner.device), verified.features[rows]
        pending = next_ids[-1:]
        emitted = _until_stop(emitted[:left], stops)
        out.tokens += emitted
        out.accepted.append(len(emitted) - 1)
    return out


def _start(runner: TargetRunner, prompt_ids: Tensor, max_new_tokens: int) -> Tensor:
    """Check what was asked for, and empty the cache. Returns the prompt on the target's device."""
    length = len(prompt_ids)
    if length < 1 or max_new_tokens < 1:
        raise ValueError(f"a prompt of {length} tokens and max_new_tokens={max_new_tokens}: both must be at least 1")
    if runner.max_length is not None and length + max_new_tokens > runner.max_length:
        raise ValueError(
            f"a prompt of {length} tokens and max_new_tokens={max_new_tokens} exceed the target's {runner.max_length} "
            "positions: shorten the task's max_prompt_tokens or new_tokens"
        )
    runner.reset()
    return prompt_ids.to(runner.device, torch.int64)


def _forward(runner: TargetRunner, pending: Tensor, proposal: Proposal, base: int) -> Output:
    """Target forward of the pending token and all drafts."""
    tokens = torch.cat((pending, proposal.tokens))
    if proposal.parents is None:
        return runner.forward(tokens)
    assert proposal.depths is not None
    depths = torch.cat((proposal.depths.new_zeros(1), proposal.depths + 1))
    return runner.forward(tokens, positions=base + depths, visible=ancestors(proposal.parents))


def ancestors(parents: Tensor) -> Tensor:
    """bool [d + 1, d + 1]: which nodes lie on each node's path from the root, itself included; row 0 is the root.

    parents: int64 [d], each one before its child; -1 the root.
    """
    n = len(parents) + 1
    seen = torch.eye(n, dtype=torch.bool)
    for child, parent in enumerate(parents.tolist()):
        seen[child + 1] |= seen[parent + 1]
    return seen.to(parents.device)


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Tokens up to the first stop token, which is included."""
    for i, token in enumerate(tokens):
        if token in stops:
            return tokens[: i + 1]
    return tokens

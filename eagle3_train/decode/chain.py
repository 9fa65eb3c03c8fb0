"""Chain drafting: K tokens one after another, verified in one target forward of K + 1 tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.decode.loop import DraftHead, Proposal, Verdict, widen
from eagle3_train.decode.sampling import GREEDY, Sampling, accept_chosen, accept_drawn, draw
from eagle3_train.device import arg_max


@dataclass(frozen=True)
class Chain:
    """A chain of at most `steps` drafted tokens.

    With greedy `sampling` tokens are verified against the target's most likely ones. Otherwise by rejection sampling,
    and the draft is drawn from the head's distribution under the same temperature and filters, or, with `greedy_draft`,
    is its most likely token.
    """

    steps: int
    sampling: Sampling = GREEDY
    greedy_draft: bool = False

    @property
    def depth(self) -> int:
        return self.steps

    @property
    def shape(self) -> str:
        return "chain"

    def propose(
        self, head: DraftHead, state: Any, h: Tensor, logits: Tensor, room: int, generator: torch.Generator | None
    ) -> Proposal:
        length = min(self.steps, room)
        drawn = not (self.sampling.greedy or self.greedy_draft)
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        for i in range(length):
            if i:
                h, logits = head.step(state, tokens[-1], h)
            if drawn:
                distributions.append(self.sampling.probs(logits))
                choice = torch.multinomial(distributions[-1], 1, generator=generator)[0]
            else:
                choice = arg_max(logits)
            tokens.append(head.target_ids(choice))
        if not drawn:
            return Proposal(torch.stack(tokens))
        q = torch.stack(distributions)
        return Proposal(torch.stack(tokens), q, head.target_ids(torch.arange(q.shape[1], device=q.device)))

    def verify(self, proposal: Proposal, logits: Tensor, generator: torch.Generator | None) -> Verdict:
        if proposal.q is None:
            accepted, emitted = accept_chosen(draw(logits, self.sampling, generator), proposal.tokens)
        else:
            p = self.sampling.probs(logits)
            accepted, emitted = accept_drawn(p, proposal.tokens, widen(proposal, p.shape[1]), generator)
        return Verdict(list(range(accepted)), emitted)

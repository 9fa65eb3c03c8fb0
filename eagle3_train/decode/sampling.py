"""From logits to tokens: temperature, top-k, top-p; and the acceptance rules that keep decoding lossless."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy. Filters act on the tempered distribution: top-k, then top-p."""

    temperature: float = 0.0
    top_p: float = 1.0  # the fewest tokens whose probabilities sum to at least this; 1: all
    top_k: int = 0  # 0: all

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"{self}: temperature >= 0, 0 < top_p <= 1 and top_k >= 0 are needed")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """Distribution to draw from, float32 like `logits [..., V]`. Not for greedy sampling."""
        assert not self.greedy
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        p = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = p.sort(-1, descending=True)
            # A token stays while the mass before it has not reached top_p: the first one always does.
            cut = ordered.cumsum(-1) - ordered >= self.top_p
            p = p.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), 0)
            p = p / p.sum(-1, keepdim=True)
        return p


GREEDY = Sampling()


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One token a row of `logits [..., V]`: int64 [...]."""
    if sampling.greedy:
        return logits.argmax(-1)
    p = sampling.probs(logits)
    return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(p.shape[:-1])


def accept_greedy(choice: Tensor, drafts: Tensor) -> tuple[int, list[int]]:
    """Greedy chain verification: keep drafted tokens while they are the target's own choice.

    Args:
        choice: int64 [d + 1], the target's most likely token after the pending token and after each draft.
        drafts: int64 [d].

    Returns:
        Accepted drafts a, and the a + 1 tokens that the cycle emits: the target's own choices, the bonus token last.
    """
    tokens = choice.tolist()  # the cycle's only wait for the device
    accepted = 0
    for drafted, token in zip(drafts.tolist(), tokens, strict=False):
        if drafted != token:
            break
        accepted += 1
    return accepted, tokens[: accepted + 1]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected draft from q leaves of p: max(p - q, 0), [V], not normalised."""
    rest = (p - q).clamp_min(0)
    # p = q up to rounding: a rejection has probability zero, up to rounding, and any choice is as good.
    return rest if bool(rest.any()) else p


def accept_sampled(
    p: Tensor, drafts: Tensor, q: Tensor | None, generator: torch.Generator | None
) -> tuple[int, list[int]]:
    """Rejection sampling of a chain (Leviathan et al. 2023, Chen et al. 2023): what it emits is distributed as p.

    Draft x is accepted with probability min(1, p(x) / q(x)); at the first rejection the token is drawn from the
    residual max(p - q, 0), after the last acceptance from p.

    Args:
        p: float32 [d + 1, V], the target's distribution after the pending token and after each draft.
        drafts: int64 [d].
        q: float32 [d, V], what the drafts were drawn from; None: the drafts are deterministic (q is a point mass).

    Returns:
        As `accept_greedy`.
    """
    d = len(drafts)
    column = drafts[:, None]
    q_drafted = q.gather(1, column)[:, 0] if q is not None else 1.0
    # The comparison is strict, so that p(x) = 0 is never accepted.
    kept = torch.rand(d, device=p.device, generator=generator) * q_drafted < p[:d].gather(1, column)[:, 0]
    accepted = int(kept.long().cumprod(0).sum())
    rest = p[accepted]
    if accepted < d:
        point = torch.zeros_like(rest).index_fill(0, drafts[accepted], 1)
        rest = residual(rest, q[accepted] if q is not None else point)
    bonus = torch.multinomial(rest, 1, generator=generator)
    return accepted, torch.cat((drafts[:accepted], bonus)).tolist()

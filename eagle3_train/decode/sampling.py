"""From logits to tokens: temperature, top-k, top-p; and the acceptance rules that keep decoding lossless."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_train.device import arg_max


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
        return arg_max(logits)
    p = sampling.probs(logits)
    return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(p.shape[:-1])


def accept_chosen(choice: Tensor, drafts: Tensor) -> tuple[int, list[int]]:
    """Verification of a deterministic chain: keep drafted tokens while they are what the target chose.

    With greedy choices this is greedy decoding. With sampled ones it is rejection sampling of a point mass, and as
    lossless: draft x is kept with probability p(x), and any other token comes out with its own probability.

    Args:
        choice: int64 [d + 1], the target's choice after the pending token and after each draft.
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
    """What a rejected draft from q leaves of p: max(p - q, 0), normalised, [V]."""
    rest = (p - q).clamp_min(0)
    total = rest.sum()
    # p = q up to rounding: a rejection has probability zero, up to rounding, and any choice is as good.
    return rest / total if bool(total > 0) else p


def accept_drawn(p: Tensor, drafts: Tensor, q: Tensor, generator: torch.Generator | None) -> tuple[int, list[int]]:
    """Rejection sampling of a drawn chain (Leviathan et al. 2023, Chen et al. 2023): what it emits is distributed as p.

    Draft x is accepted with probability min(1, p(x) / q(x)); at the first rejection the token is drawn from the
    residual max(p - q, 0), after the last acceptance from p.

    Args:
        p: float32 [d + 1, V], the target's distribution after the pending token and after each draft.
        drafts: int64 [d].
        q: float32 [d, V], what the drafts were drawn from.

    Returns:
        As `accept_chosen`.
    """
    d = len(drafts)
    column = drafts[:, None]
    # The comparison is strict, so that p(x) = 0 is never accepted.
    uniform = torch.rand(d, device=p.device, generator=generator)
    kept = uniform * q.gather(1, column)[:, 0] < p[:d].gather(1, column)[:, 0]
    accepted = int(kept.long().cumprod(0).sum())
    rest = p[accepted] if accepted == d else residual(p[accepted], q[accepted])
    bonus = torch.multinomial(rest, 1, generator=generator)
    return accepted, torch.cat((drafts[:accepted], bonus)).tolist()


def accept_siblings(
    p: Tensor, drafts: list[int], q: Tensor, generator: torch.Generator | None
) -> tuple[int | None, int]:
    """Multi-round rejection sampling of siblings drawn one after another, without replacement (Jeon et al. 2024).

    Round j accepts x_j with probability min(1, p_j(x_j) / q_j(x_j)). A rejection leaves p_{j+1} = max(p_j - q_j, 0)
    and, as x_j will not be drawn again, q_{j+1} = q_j without x_j, both normalised.

    Args:
        p: float32 [V], the target's distribution after the parent.
        drafts: the siblings, distinct, in the order they were drawn. Where filters leave q fewer tokens than there are
            siblings, the last ones have q = 0: they were never drawn, and are never accepted.
        q: float32 [V], what the first was drawn from.

    Returns:
        The accepted sibling's index or None, and the token: that sibling's, or one drawn from what is left of p.
    """
    for j, x in enumerate(drafts):
        if q[x] == 0:
            break
        if float(torch.rand((), device=p.device, generator=generator)) * float(q[x]) < float(p[x]):
            return j, x
        p = residual(p, q)
        q = q.index_fill(0, torch.tensor(x, device=q.device), 0)
        q = q / q.sum().clamp_min(torch.finfo(q.dtype).tiny)
    return None, int(torch.multinomial(p, 1, generator=generator))

"""A target and a head that are tables over a small vocabulary, so that every distribution can be enumerated exactly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_train.decode.runner import Output, Query
from eagle3_train.decode.sampling import Sampling

VOCAB = 4
PROMPT = torch.tensor([1, 3])


class TableRunner:
    """`decode.TargetRunner` of a second-order Markov chain: logits after (..., a, b) are `table[a, b]`."""

    max_length = None
    device = torch.device("cpu")

    def __init__(self, seed: int = 0, slots: int = 1) -> None:
        self.table = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.slots = slots
        self.texts: list[list[int]] = []  # of the sequences in flight

    def reset(self) -> None:
        self.texts = []

    def remove(self, slot: int) -> None:
        last = self.texts.pop()
        self.texts[slot : slot + 1] = [last] if slot < len(self.texts) else []

    def keep(self, slot: int, n: int, rows: Sequence[int]) -> None:
        text = self.texts[slot]
        self.texts[slot] = text[: len(text) - n] + [text[len(text) - n + r] for r in rows]

    def forward(
        self, queries: Sequence[Query], *, first: int = 0, features: bool = True, last_only: bool = False
    ) -> list[Output]:
        if first == len(self.texts):
            self.texts.append([])
        assert len(self.texts) <= self.slots
        return [self._run(self.texts[first + b], query, last_only) for b, query in enumerate(queries)]

    def _run(self, text: list[int], query: Query, last_only: bool) -> Output:
        new = query.tokens.tolist()
        pairs = []
        for i in range(len(new)):
            path = range(i + 1) if query.visible is None else query.visible[i].nonzero()[:, 0].tolist()
            assert query.depths is None or int(query.depths[i]) == len(path) - 1
            pairs.append([0, *text, *(new[j] for j in path)][-2:])
        text += new
        logits = self.table[[a for a, _ in pairs], [b for _, b in pairs]]
        return Output(logits[-1:] if last_only else logits, torch.zeros(len(new), 1, 1))

    def probability(self, text: tuple[int, ...], sampling: Sampling) -> float:
        """Of `text` after the prompt."""
        tokens = [*PROMPT.tolist(), *text]
        p = sampling.probs(self.table)
        return float(np.prod([p[a, b, c] for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False)]))


class TableHead:
    """Its logits depend on the last token and on whether it is step 0; it cannot draft token 1."""

    vocab_ids = torch.tensor([0, 2, 3])

    def __init__(self, seed: int = 1) -> None:
        self.table = 1.5 * torch.randn(2, VOCAB, 3, generator=torch.Generator().manual_seed(seed))

    def new_state(self) -> None:
        return None

    def observe(self, state: Any, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), self.table[0, next_ids[-1]]

    def step(self, state: Any, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.table[1, token]

    def expand(self, state: Any, tokens: Tensor, h: Tensor, depth: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        return h, self.table[1, tokens]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.vocab_ids[draft_ids]

    def q(self, step: int, last: int, sampling: Sampling) -> Tensor:
        """[VOCAB]: its distribution over the target's vocabulary."""
        return torch.zeros(VOCAB).index_copy(0, self.vocab_ids, sampling.probs(self.table[min(step, 1), last]))


def texts(length: int) -> list[tuple[int, ...]]:
    """Every text of that length."""
    return list(product(range(VOCAB), repeat=length))

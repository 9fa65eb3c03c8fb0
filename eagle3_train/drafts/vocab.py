"""The draft vocabulary: the target tokens that a draft head can propose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DraftVocab:
    """`ids` [D] int64, ascending: draft index -> target token id. `coverage`: share of supervised tokens inside it."""

    ids: np.ndarray
    target_size: int
    coverage: float

    @classmethod
    def from_counts(cls, counts: np.ndarray, size: int) -> DraftVocab:
        """The `size` most frequent supervised tokens; ties and unseen tokens by ascending id.

        counts: [V] int, supervised tokens of the whole store: counted once at the largest scale and held fixed across
        a study, so that scales differ by their data alone.
        """
        if size > len(counts):
            raise ValueError(
                f"draft.vocab_size={size} exceeds the target's vocabulary of {len(counts)} tokens: lower it"
            )
        if counts.sum() == 0:
            raise ValueError(
                "the store holds no supervised token, so there is nothing to count a draft vocabulary from"
            )
        order = np.argsort(-counts, kind="stable")[:size]
        ids = np.sort(order).astype(np.int64)
        return cls(ids, len(counts), float(counts[ids].sum() / counts.sum()))

    @property
    def d2t(self) -> np.ndarray:
        """[D] int64 offsets of the speculators format: target id = i + d2t[i]."""
        return self.ids - np.arange(len(self.ids))

    @property
    def t2d(self) -> np.ndarray:
        """[V] bool: whether a target token is in the draft vocabulary."""
        mask = np.zeros(self.target_size, bool)
        mask[self.ids] = True
        return mask

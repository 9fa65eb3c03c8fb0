"""Rows to forward passes. A function of the lengths alone: which worker runs a shard changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

WINDOW_BATCHES = 8  # rows that are sorted by length together, in batches: bounds the states held in memory
MIN_FILL = 0.85  # a sequence shorter than this share of its batch's longest starts a new batch ...
FULL_ENOUGH = 0.25  # ... once the batch has this share of `batch_tokens`: GEMMs of fewer rows are slower than padding


def windows(lengths: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Consecutive rows of about `WINDOW_BATCHES` full batches."""
    start = tokens = 0
    for i, length in enumerate(lengths):
        if tokens and tokens + length > WINDOW_BATCHES * batch_tokens:
            yield range(start, i)
            start, tokens = i, 0
        tokens += length
    if start < len(lengths):
        yield range(start, len(lengths))


def by_length(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Batches of rows (numbers into `lengths`), longest first; padded to its longest, a batch has at most
    `batch_tokens` tokens, or is one sequence that alone has more."""
    batch: list[int] = []
    for i in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        if batch:
            longest = lengths[batch[0]]
            padded = len(batch) * longest
            short = lengths[i] < MIN_FILL * longest and padded >= FULL_ENOUGH * batch_tokens
            if short or padded + longest > batch_tokens:
                yield batch
                batch = []
        batch.append(i)
    if batch:
        yield batch

"""Sequences laid end to end, and which rows of them a draft head computes at each training-time-test step.

`N` is the number of tokens of all documents; padding, where it is asked for, is documents without supervised tokens.
Shape suffixes: N tokens, R rows (anchors) of a step, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class SequenceLike(Protocol):
    """What a batch needs of a sequence; `store.Sequence` is one."""

    @property
    def input_ids(self) -> np.ndarray: ...  # [T] int32
    @property
    def loss_mask(self) -> np.ndarray: ...  # [T] uint8
    @property
    def hidden(self) -> Tensor: ...  # [T, L, H]
    @property
    def target_argmax(self) -> np.ndarray: ...  # [T] int32, -1: not computed


PAD_TO = 64  # padded sequences are a multiple of this long: few shapes


@dataclass(frozen=True)
class _Filler:
    """A document that trains nothing."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    hidden: Tensor
    target_argmax: np.ndarray

    @classmethod
    def of(cls, n_tokens: int, n_layers: int, hidden_size: int) -> _Filler:
        zeros = np.zeros(n_tokens, np.int32)
        hidden = torch.zeros(n_tokens, n_layers, hidden_size)
        return cls(zeros, zeros.astype(np.uint8), hidden, np.full(n_tokens, -1, np.int32))


@dataclass(frozen=True)
class DraftBatch:
    """Documents end to end. `starts` holds their offsets: 0 first, N last."""

    input_ids: Tensor  # [N] int64
    hidden: Tensor  # [N, L, H] compute dtype; the last layer is the target's final pre-norm state
    # On the host, since they decide shapes: a device would have to be waited for.
    target_argmax: np.ndarray  # [N] int32: the target's most likely x_{t+1}; -1 where not computed
    loss_mask: np.ndarray  # [N] bool
    starts: list[int]

    @property
    def n_tokens(self) -> int:
        return self.starts[-1]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(b - a for a, b in pairwise(self.starts))

    @cached_property
    def every_token(self) -> StepRows:
        """All tokens as rows of step 0, in the order of the batch."""
        anchors = np.arange(self.n_tokens)
        positions = anchors - np.repeat(self.starts[:-1], np.diff(self.starts))
        device, segments = self.input_ids.device, [(a, a, b - a) for a, b in pairwise(self.starts)]
        return StepRows(to_device(anchors, device), to_device(positions, device), None, segments)

    @classmethod
    def collate(
        cls, sequences: Iterable[SequenceLike], device: torch.device, dtype: torch.dtype, padded: bool = False
    ) -> DraftBatch:
        """Lay sequences end to end; at least one. `padded`: each filled up to the longest, rounded up to `PAD_TO`.

        What fills is a document of its own without a supervised token, so that no head needs to know of padding.
        """
        items = list(sequences)
        assert items, "see collate_or_placeholder"
        if padded:
            width = -(-max(len(s.input_ids) for s in items) // PAD_TO) * PAD_TO
            fill = [_Filler.of(width - len(s.input_ids), *s.hidden.shape[1:]) for s in items]
            pairs = zip(items, fill, strict=True)
            items = [document for pair in pairs for document in pair if len(document.input_ids)]
        starts = [0]
        for s in items:
            starts.append(starts[-1] + len(s.input_ids))

        return cls(
            input_ids=to_device(np.concatenate([s.input_ids for s in items]), device),
            # One by one: each from where it was read to, which is memory that a GPU copies from by itself (`Loader`).
            hidden=torch.cat([s.hidden.to(device, dtype, non_blocking=True) for s in items]),
            target_argmax=np.concatenate([s.target_argmax for s in items]),
            loss_mask=np.concatenate([s.loss_mask for s in items]).astype(bool),
            starts=starts,
        )

    @classmethod
    def collate_or_placeholder(
        cls,
        sequences: Iterable[SequenceLike],
        head: Any,
        device: torch.device,
        dtype: torch.dtype,
        padded: bool = False,
    ) -> DraftBatch:
        """`collate`, or where there are none one token with nothing supervised: what a rank without a share of a small
        global batch computes, so that all ranks take part in every collective. Its loss and its gradients are zero.

        head: the draft head, for its `n_layers` and `hidden_size`.
        """
        items = list(sequences) or [_Filler.of(1, head.n_layers, head.hidden_size)]
        return cls.collate(items, device, dtype, padded)


@dataclass(frozen=True)
class Segment:
    """The anchors `[first, end)` of one assistant turn at step 0, in the document that starts at `start`."""

    start: int
    first: int
    end: int

    def rows(self, step: int) -> int:
        """Anchors that are still supervised at `step`: each step needs one more true token of the turn."""
        return max(self.end - step - self.first, 0)


@dataclass(frozen=True)
class StepRows:
    """The anchors of one step, flat over all segments."""

    anchors: Tensor  # [R] int64: positions t in the batch
    positions: Tensor  # [R] int64: t's position in its document
    keep: Tensor | None  # [R] int64: which rows of the step before these are; None at step 0
    segments: list[tuple[int, int, int]]  # (document start, first anchor, rows), empty segments left out

    def __len__(self) -> int:
        return len(self.anchors)

    def where(self, kept: np.ndarray, ahead: int) -> Tensor:
        """[r] int64, which of the rows have `kept` [N] bool `ahead` tokens after their anchor."""
        spans = [kept[first + ahead : first + ahead + n] for _, first, n in self.segments]
        return to_device(np.flatnonzero(np.concatenate(spans)) if spans else np.zeros(0), self.anchors.device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Whole numbers as int64; without waiting for what the device still has to do."""
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)


def find_segments(loss_mask: np.ndarray, starts: list[int]) -> list[Segment]:
    """Segments of anchors, from the runs of supervised tokens (DESIGN section 5).

    A run `[a, b)` of supervised tokens is one assistant turn. Anchor t at step i needs x_{t+1} .. x_{t+2+i} all inside
    it, so step 0 has the anchors `a-1 <= t < b-2` (never before the document's start).
    """
    segments = []
    for start, stop in pairwise(starts):
        mask = np.concatenate(([0], loss_mask[start:stop].astype(np.int8), [0]))
        edges = np.flatnonzero(np.diff(mask)) + start
        for a, b in edges.reshape(-1, 2).tolist():
            segment = Segment(start, max(a - 1, start), b - 2)
            if segment.rows(0) > 0:
                segments.append(segment)
    return segments


def plan_rows(segments: list[Segment], steps: int, device: torch.device) -> list[StepRows]:
    """Rows of steps 0..K-1. Rows of step i are a subset of those of step i-1, so later steps cost less."""
    plan: list[StepRows] = []
    for i in range(steps):
        anchors, positions, keep, parts = [], [], [], []
        offset = 0
        for s in segments:
            n = s.rows(i)
            if n:
                at = np.arange(s.first, s.first + n)
                anchors.append(at)
                positions.append(at - s.start)
                keep.append(np.arange(offset, offset + n))
                parts.append((s.start, s.first, n))
            offset += s.rows(i - 1) if i else 0

        def flat(arrays: list[np.ndarray]) -> Tensor:
            return to_device(np.concatenate(arrays) if arrays else np.zeros(0), device)

        plan.append(StepRows(flat(anchors), flat(positions), flat(keep) if i else None, parts))
    return plan


def supervised_counts(
    loss_mask: np.ndarray, starts: list[int], steps: int, kept: np.ndarray | None = None
) -> np.ndarray:
    """Rows that count in the loss at each step, `[K]` int64; known from the masks alone, before any forward pass.

    `kept` ([N] bool) marks the positions whose target distribution may supervise (`oov: drop`).
    """
    counts = np.zeros(steps, np.int64)
    for s in find_segments(loss_mask, starts):
        for i in range(steps):
            n = s.rows(i)
            # The distribution that supervises anchor t at step i is the target's at t + 1 + i.
            first = s.first + 1 + i
            counts[i] += n if kept is None else int(np.count_nonzero(kept[first : first + n]))
    return counts

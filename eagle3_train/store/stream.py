"""The arithmetic of a rolling store: which shards are on disk when, and the least room that lets every run end.

A *use* is a shard in a pass over the store, numbered `pass * n_shards + shard`; epoch e of a run reads in pass e. A
*mark* is the first use that a run still needs. What the workers may have on disk follows from the marks alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .plan import BatchPlan

Marks = Mapping[str, int]  # run -> its mark
Ranges = list[tuple[int, int]]  # of shards: [first, behind the last)


def within(shard: int, ranges: Ranges) -> bool:
    return any(first <= shard < behind for first, behind in ranges)


def shards_of(rows: np.ndarray, n_rows: int, n_shards: int) -> np.ndarray:
    """The shard that holds each row: the inverse of `shard_rows`."""
    return ((rows + 1) * n_shards - 1) // n_rows


class Course:
    """The uses that one plan needs, in its order: window after window, pass after pass."""

    def __init__(self, plan: BatchPlan, n_rows: int, n_shards: int) -> None:
        """`n_rows`, `n_shards`: of the whole store."""
        rows, window = len(plan.lengths), plan.window or len(plan.lengths)
        starts = np.arange(0, rows, window)
        self._plan, self._n_shards = plan, n_shards
        self._ends = np.cumsum(np.add.reduceat(plan.lengths, starts, dtype=np.int64))  # tokens, of the windows
        self._first = shards_of(starts, n_rows, n_shards)  # shard of each window's first row
        self._last = shards_of(np.minimum(starts + window, rows) - 1, n_rows, n_shards)
        self.shards = int(self._last[-1]) + 1  # that hold the plan's rows
        epoch, within = divmod(plan.total_tokens - 1, plan.epoch_tokens)
        self.end = epoch * n_shards + int(self._last[np.searchsorted(self._ends, within, side="right")]) + 1

    def mark(self, step: int) -> int:
        """First use that batch `step` or a later one needs; `end` behind the last."""
        if step >= len(self._plan):
            return self.end
        epoch, within = divmod(step * self._plan.batch_tokens, self._plan.epoch_tokens)
        return epoch * self._n_shards + int(self._first[np.searchsorted(self._ends, within, side="right")])

    def mark_when_waiting(self, use: int) -> int:
        """The lowest mark of a run that waits for `use`, or for the next one that it needs: it has saved a checkpoint
        whenever its mark moved. `end` where it needs no more."""
        epoch, shard = divmod(use, self._n_shards)
        if shard >= self.shards:
            epoch, shard = epoch + 1, 0
        if epoch * self._n_shards + shard >= self.end:
            return self.end
        window = int(np.searchsorted(self._last, shard, side="left"))  # the first that has rows of the shard
        before = epoch * self._plan.epoch_tokens + (int(self._ends[window - 1]) if window else 0)
        return self.mark(before // self._plan.batch_tokens)

    def held(self, mark: int, use: int) -> Ranges:
        """Shards of the uses from `mark` to `use`."""
        use = min(use, self.end - 1)
        if mark > use:
            return []
        (first_pass, first), (last_pass, last) = divmod(mark, self._n_shards), divmod(use, self._n_shards)
        behind = min(last + 1, self.shards)
        if first_pass == last_pass:
            return [(first, behind)]
        return [(first, self.shards), (0, self.shards if last_pass - first_pass > 1 else behind)]

    def held_later(self, mark: int, use: int) -> Ranges:
        """Shards that are captured by `use` and needed in a pass behind the first."""
        last_pass = (self.end - 1) // self._n_shards
        if last_pass == 0 or mark >= self.end:
            return []
        mark_pass, shard = divmod(mark, self._n_shards)
        return [(shard if mark_pass == last_pass else 0, min(self.shards, use + 1))]

    def needs(self, use: int) -> bool:
        return use < self.end and use % self._n_shards < self.shards


@dataclass(frozen=True)
class Stream:
    """All runs that share the passes over a store.

    `shard_bytes`: of each shard, at most. `kept_bytes`: of a smaller copy of each, which later passes read; None: they
    read the shards, captured again.
    """

    courses: Mapping[str, Course]
    shard_bytes: np.ndarray
    kept_bytes: np.ndarray | None = None

    @property
    def n_shards(self) -> int:
        return len(self.shard_bytes)

    @property
    def end(self) -> int:
        """Uses of all passes."""
        return max((course.end for course in self.courses.values()), default=0)

    def captured(self) -> int:
        """Uses that are captured where nothing is still there from the pass before."""
        uses = range(self.end if self.kept_bytes is None else min(self.end, self.n_shards))
        return sum(any(course.needs(use) for course in self.courses.values()) for use in uses)

    def on_disk(self, marks: Marks, use: int) -> tuple[Ranges, Ranges]:
        """Shards, and kept copies, that are there when the workers have got to `use`: disjoint ranges, ascending."""
        through = use if self.kept_bytes is None else min(use, self.n_shards - 1)
        held = [part for name, course in self.courses.items() for part in course.held(marks[name], through)]
        if self.kept_bytes is None:
            return _union(held), []
        later = [part for name, course in self.courses.items() for part in course.held_later(marks[name], use)]
        return _union(held), _union(later)

    def bytes_on_disk(self, marks: Marks, use: int) -> int:
        shards, kept = self.on_disk(marks, use)
        total = sum(int(self.shard_bytes[a:b].sum()) for a, b in shards)
        return total + sum(int(self.kept_bytes[a:b].sum()) for a, b in kept if self.kept_bytes is not None)

    def reach(self, marks: Marks, cap: int) -> int:
        """The last use that fits in `cap` bytes with all that the runs still need before it; -1: none."""
        low, high = min(marks.values(), default=self.end) - 1, self.end - 1
        while low < high:  # what is on disk grows with the use
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes_on_disk(marks, middle) <= cap else (low, middle - 1)
        return low

    def order(self, marks: Marks, use: int) -> Iterator[int]:
        """Shards that the runs need from their marks to `use`, each once, in the order in which they need them."""
        seen: set[int] = set()
        for number in range(min(marks.values(), default=self.end), use + 1):
            shard = number % self.n_shards
            if shard not in seen and any(marks[n] <= number and c.needs(number) for n, c in self.courses.items()):
                seen.add(shard)
                yield shard

    def least_cap(self) -> int:
        """Bytes with which every run gets to its end: the most that is on disk when all runs wait for one more use.

        A run that waits holds what it needs from the mark of the step for which it waits; that is the most it can hold.
        """
        least = 0
        for use in range(self.end):
            if any(course.needs(use) for course in self.courses.values()):
                marks = {name: course.mark_when_waiting(use) for name, course in self.courses.items()}
                least = max(least, self.bytes_on_disk(marks, use))
        return least


def _union(parts: Ranges) -> Ranges:
    merged: Ranges = []
    for first, behind in sorted(part for part in parts if part[0] < part[1]):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(behind, merged[-1][1]))
        else:
            merged.append((first, behind))
    return merged

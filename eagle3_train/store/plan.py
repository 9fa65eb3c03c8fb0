"""The batch plan: which rows make which step, on which rank. A pure function of the index; nothing is stored."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

BLOCK_ROWS = 64  # neighbours in the store that stay near each other in an epoch
WINDOW_ROWS = 4096  # rows shuffled together: whole blocks, drawn at random
CACHED_WINDOWS = 8


class BatchPlan:
    """Global batches counted in tokens, the same for every world size.

    The epochs are one endless stream of sequences. A ruler with a mark every `batch_tokens` tokens lies along it, and a
    sequence belongs to the batch in which its last token falls. So a batch holds `batch_tokens` on average and differs
    from it by less than one sequence, `epochs` epochs are exactly ceil(epochs * tokens / batch_tokens) steps, every
    sequence comes exactly once an epoch, and any step is found directly. A batch may hold the end of one epoch and the
    beginning of the next: otherwise each epoch would end in a small batch, whose tokens would weigh more than others.

    Order of an epoch: a pure function of (fingerprint, seed, epoch, number of rows). Blocks of neighbouring rows are
    permuted, then the rows are shuffled within windows of blocks: a store too large for memory is read in runs, and a
    store of one window (4,096 rows) is shuffled as a whole. The stored order is random already. Only what a step needs
    is computed, so a plan over 100 million sequences starts at once.

    `lengths`: tokens of the first n rows of the store (a prefix is a nested subset), [n] ints. `window`: shuffle within
    windows of so many neighbouring rows, which follow each other as they are stored, as a rolling store needs it.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        fingerprint: str,
        seed: int,
        batch_tokens: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        window: int | None = None,
    ) -> None:
        if (epochs is None) == (steps is None):
            raise ValueError("a batch plan takes either epochs or steps (train.regime)")
        if len(lengths) == 0 or np.min(lengths) < 1:
            raise ValueError("a batch plan needs at least one sequence, each of at least one token")
        if (longest := int(np.max(lengths))) > batch_tokens:
            raise ValueError(
                f"train.batch_tokens={batch_tokens} is below the longest sequence ({longest} tokens): raise it, "
                "or lower corpus.max_length and prepare again"
            )
        self.lengths = np.asarray(lengths)
        self.fingerprint, self.seed, self.batch_tokens, self.window = fingerprint, seed, batch_tokens, window
        self.epoch_tokens = int(self.lengths.sum(dtype=np.int64))
        if epochs is not None:
            self.total_tokens = epochs * self.epoch_tokens
            self.steps = -(-self.total_tokens // batch_tokens)
        else:
            assert steps is not None
            self.steps = steps
            self.total_tokens = steps * batch_tokens  # the last batch ends before it, as every batch does
        if self.steps < 1:
            raise ValueError(f"epochs={epochs}, steps={steps}: at least one is needed")
        self._block_rows = window or BLOCK_ROWS
        self._window_blocks = 1 if window else WINDOW_ROWS // BLOCK_ROWS
        starts = np.arange(0, len(self.lengths), self._block_rows)
        self._block_tokens = np.add.reduceat(self.lengths, starts, dtype=np.int64)
        # Bounded caches that threads may share: a loader and the training loop ask for the same steps.
        self._epoch = lru_cache(maxsize=2)(self._compute_epoch)
        self._window = lru_cache(maxsize=CACHED_WINDOWS)(self._compute_window)
        self._shares = lru_cache(maxsize=4)(self._compute_shares)

    def __len__(self) -> int:
        return self.steps

    def batch(self, step: int) -> np.ndarray:
        """Rows of global batch `step`, int64, in the order of the stream."""
        return np.concatenate([rows for _, rows in self._parts(step)])

    def batch_epochs(self, step: int) -> np.ndarray:
        """Epoch of each row of `batch(step)`, int64."""
        return np.concatenate([np.full(len(rows), epoch) for epoch, rows in self._parts(step)])

    def _parts(self, step: int) -> Iterator[tuple[int, np.ndarray]]:
        """The batch in pieces of one epoch each: epoch, rows."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of a plan of {self.steps} steps")
        begin = step * self.batch_tokens
        end = min(begin + self.batch_tokens, self.total_tokens)
        for epoch in range(begin // self.epoch_tokens, (end - 1) // self.epoch_tokens + 1):
            start = epoch * self.epoch_tokens
            lo, hi = begin - start, end - start
            ends = self._epoch(epoch).window_ends
            # Rows whose last token falls in (lo, hi]: from the first window that ends behind lo, to the first that ends
            # at or behind hi.
            first = int(np.searchsorted(ends, lo, side="right"))
            last = min(int(np.searchsorted(ends, hi, side="left")), len(ends) - 1)
            for number in range(first, last + 1):
                window = self._window(epoch, number)
                a, b = np.searchsorted(window.ends, (lo, hi), side="right")
                yield epoch, window.rows[a:b]

    def rank_rows(self, step: int, rank: int, world: int) -> np.ndarray:
        """This rank's share of the batch, in the order of the batch; over all ranks they are the batch.

        Loads (tokens) differ by at most one sequence. A rank is empty only where the batch has fewer rows than ranks.
        """
        rows, shares = self._shares(step, world)
        return rows[shares[rank]]

    def rank_epochs(self, step: int, rank: int, world: int) -> np.ndarray:
        """Epoch of each of `rank_rows`."""
        return self.batch_epochs(step)[self._shares(step, world)[1][rank]]

    def micro_batches(
        self, step: int, rank: int, world: int, micro_tokens: int | None, padded: bool = False
    ) -> list[np.ndarray]:
        """The rank's share in forward passes of at most `micro_tokens` tokens (a longer sequence goes alone).

        `padded`: of like lengths, and counted as if each were as long as the longest of its pass.

        Every rank gets the same number of them, since sharded engines communicate in each: a rank that would need fewer
        splits some. One is empty only where the rank has fewer rows than another needs passes. None: one pass.
        """
        mine = self.rank_rows(step, rank, world)
        if micro_tokens is None:
            return [mine]
        rows, shares = self._shares(step, world)
        cut = _by_length if padded else _first_fit
        packed = [cut(self.lengths[rows[share]], micro_tokens) for share in shares]
        count = max(len(p) for p in packed)
        return [mine[b] for b in _split_up(packed[rank], self.lengths[mine], count)]

    def tokens_before(self, step: int) -> int:
        """Tokens in all batches before `step`, 0 <= step <= len(plan)."""
        mark = min(step * self.batch_tokens, self.total_tokens)
        epoch, lo = divmod(mark, self.epoch_tokens)
        if lo == 0:
            return mark
        ends = self._epoch(epoch).window_ends
        number = int(np.searchsorted(ends, lo, side="right"))
        window = self._window(epoch, number)
        done = int(np.searchsorted(window.ends, lo, side="right"))
        before = window.ends[done - 1] if done else (ends[number - 1] if number else 0)
        return epoch * self.epoch_tokens + int(before)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps when `step` steps are done: JSON values."""
        tokens = self.tokens_before(step)
        return {**self._identity, "step": step, "tokens": tokens, "epoch": tokens // self.epoch_tokens}

    def resume(self, state: dict[str, Any]) -> int:
        """The step at which training goes on. ValueError where the state is of another sequence of batches."""
        differences = [f"{k}: {state.get(k)!r}, now {v!r}" for k, v in self._identity.items() if state.get(k) != v]
        if differences:
            raise ValueError(
                f"the checkpoint was trained on another sequence of batches ({'; '.join(differences)}): restore that "
                "configuration and store, or start anew in an empty run folder"
            )
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"the checkpoint is at step {step!r}: it is damaged; delete its folder")
        if step > self.steps:
            raise ValueError(f"the checkpoint is at step {step}, beyond the {self.steps} steps of this run")
        if state.get("tokens") != self.tokens_before(step):
            raise ValueError(
                f"the checkpoint of step {step} has seen {state.get('tokens')} tokens where its plan has "
                f"{self.tokens_before(step)}: it is damaged; delete its folder"
            )
        return step

    @property
    def _identity(self) -> dict[str, Any]:
        """What the sequence of batches depends on."""
        return {
            "fingerprint": self.fingerprint,
            "rows": len(self.lengths),
            "epoch_tokens": self.epoch_tokens,
            "seed": self.seed,
            "batch_tokens": self.batch_tokens,
            "window": self.window,
        }

    def _compute_epoch(self, epoch: int) -> _Epoch:
        blocks = np.arange(len(self._block_tokens))
        if self.window is None:
            blocks = _shuffled(blocks, self._key(epoch, "blocks"))
        cumulative = np.cumsum(self._block_tokens[blocks])
        per_window = self._window_blocks
        last_blocks = np.minimum(np.arange(per_window, len(blocks) + per_window, per_window), len(blocks)) - 1
        return _Epoch(blocks, cumulative[last_blocks])

    def _compute_window(self, epoch: int, number: int) -> _Window:
        order = self._epoch(epoch)
        blocks = order.blocks[number * self._window_blocks : (number + 1) * self._window_blocks]
        rows = (np.sort(blocks)[:, None] * self._block_rows + np.arange(self._block_rows)).ravel()
        rows = _shuffled(rows[rows < len(self.lengths)], self._key(epoch, "rows"))
        before = order.window_ends[number - 1] if number else 0
        return _Window(rows, before + np.cumsum(self.lengths[rows], dtype=np.int64))

    def _compute_shares(self, step: int, world: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Rows of the batch, and each rank's positions among them."""
        rows = self.batch(step)
        return rows, _spread(self.lengths[rows], world)

    def _key(self, epoch: int, purpose: str) -> int:
        text = f"{self.fingerprint}:{self.seed}:{epoch}:{purpose}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


@dataclass(frozen=True)
class _Epoch:
    blocks: np.ndarray  # [blocks] in this epoch's order
    window_ends: np.ndarray  # [windows] tokens of the epoch up to the end of each window


@dataclass(frozen=True)
class _Window:
    rows: np.ndarray  # [rows] in this epoch's order
    ends: np.ndarray  # [rows] tokens of the epoch up to the end of each row


def prefix_for_tokens(lengths: np.ndarray, tokens: int) -> int:
    """Rows of the shortest prefix that holds at least `tokens` tokens: a nested subset counted in tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    if not len(ends) or ends[-1] < tokens:
        raise ValueError(f"the store holds {ends[-1] if len(ends) else 0} tokens, fewer than the {tokens} asked for")
    return int(np.searchsorted(ends, tokens, side="left")) + 1


def rows_of(lengths: np.ndarray, reading: Mapping[str, Any]) -> int:
    """Rows of a store of these lengths that a run reads: so many, or as few as hold so many tokens."""
    return reading["rows"] if reading["tokens"] is None else prefix_for_tokens(lengths, reading["tokens"])


def plan_of(lengths: np.ndarray, fingerprint: str, reading: Mapping[str, Any]) -> BatchPlan:
    """The plan of a run: `lengths` of all rows of the store, `reading` as `Config.reading`, the arguments of
    `BatchPlan` with `rows` or `tokens`."""
    arguments = {name: value for name, value in reading.items() if name not in ("rows", "tokens")}
    return BatchPlan(lengths[: rows_of(lengths, reading)], fingerprint, **arguments)


def _shuffled(values: np.ndarray, key: int) -> np.ndarray:
    """`values` (distinct ints) sorted by a keyed hash (splitmix64): the same on every machine and numpy version."""
    x = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values[np.argsort(x ^ (x >> np.uint64(31)), kind="stable")]


def _spread(lengths: np.ndarray, n: int) -> list[np.ndarray]:
    """Positions in n bins of nearly equal tokens: the longest first, each into the bin that holds least (LPT)."""
    bins: list[list[int]] = [[] for _ in range(n)]
    heap = [(0, b) for b in range(n)]
    for position in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        load, b = heap[0]
        bins[b].append(position)
        heapq.heapreplace(heap, (load + int(lengths[position]), b))
    return [np.array(sorted(b), np.int64) for b in bins]


def _first_fit(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Positions in few bins of at most `capacity` tokens: the longest first, each into the first bin with room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for position in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[position])
        b = next((b for b, left in enumerate(room) if left >= length), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(capacity)
        bins[b].append(position)
        room[b] -= length
    return [np.array(sorted(b), np.int64) for b in bins]


def _by_length(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Positions in bins of neighbours by length, the longest first; each bin's size times its longest fits."""
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    bins, first = [], 0
    while first < len(order):
        size = max(capacity // int(lengths[order[first]]), 1)
        bins.append(np.sort(order[first : first + size]))
        first += size
    return bins


def _split_up(bins: list[np.ndarray], lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Split the heaviest bins until there are `count`; empty ones where nothing is left to split."""
    bins = list(bins)
    while len(bins) < count:
        heaviest = max(range(len(bins)), key=lambda b: (len(bins[b]) > 1, lengths[bins[b]].sum()), default=None)
        if heaviest is None or len(bins[heaviest]) < 2:
            bins.append(np.empty(0, np.int64))
            continue
        whole = bins[heaviest]
        bins[heaviest : heaviest + 1] = [whole[part] for part in _spread(lengths[whole], 2)]
    return bins

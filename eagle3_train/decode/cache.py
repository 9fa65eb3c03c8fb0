"""KV cache of the target for several sequences, each of which can be rolled back without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

GROWTH = 256  # tokens: room is allocated in multiples of this


@dataclass
class _Place:
    """Where a forward writes; one object, shared by all layers."""

    slots: slice = field(default_factory=lambda: slice(0, 0))
    past: int = 0  # tokens of the longest of its sequences before it
    end: int = 0  # tokens of the longest one behind it
    rows: Tensor | None = None  # int64 [m, 1], the slots; None: one sequence alone
    columns: Tensor | None = None  # int64 [m, n], where each new token goes


class RollbackLayer(DynamicLayer):
    """Keys and values of one layer, `[slots, heads, room, head_dim]`: a slot a sequence, with room to grow.

    The stock layer concatenates, so each forward copies the whole cache; here a forward writes its own tokens alone,
    and rolling back moves an end mark.
    """

    def __init__(self, slots: int, place: _Place) -> None:
        super().__init__()
        self._slots, self._place = slots, place
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        at = self._place
        if not self._buffers or at.end > self._buffers[0].shape[-2]:
            self._buffers = [self._grown(i, x, at.end) for i, x in enumerate((key_states, value_states))]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            if at.columns is None:
                buffer[at.slots, :, at.past : at.end] = new
            else:
                buffer[at.rows, :, at.columns] = new.transpose(1, 2)
        self.is_initialized = True
        self.keys, self.values = (buffer[at.slots, :, : at.end] for buffer in self._buffers)
        return self.keys, self.values

    def _grown(self, i: int, like: Tensor, end: int) -> Tensor:
        _, heads, _, width = like.shape
        # Zeros: what a mask hides is multiplied by 0, and must not be what memory happened to hold, such as NaN.
        buffer = like.new_zeros(self._slots, heads, -(-end // GROWTH) * GROWTH, width)
        if self._buffers:
            buffer[:, :, : self._buffers[i].shape[-2]] = self._buffers[i]
        return buffer

    def gather(self, slot: int, start: int, rows: Tensor) -> None:
        """After token `start` of a sequence place its tokens `start + rows`, in that order."""
        for buffer in self._buffers:
            buffer[slot, :, start : start + len(rows)] = buffer[slot].index_select(-2, start + rows)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Of one sequence, to another slot."""
        for buffer in self._buffers:
            buffer[slot, :, :length] = buffer[source, :, :length]

    def get_seq_length(self) -> int:
        return self._place.past


class RollbackCache(Cache):
    """KV cache through all layers of at most `slots` sequences, which stand in the first slots without a gap.

    `lengths`: tokens of each sequence.
    """

    def __init__(self, n_layers: int, slots: int = 1) -> None:
        self.lengths: list[int] = []
        self._place = _Place()
        self._layers = [RollbackLayer(slots, self._place) for _ in range(n_layers)]
        super().__init__(layers=list(self._layers))

    def extend(self, first: int, counts: Sequence[int], device: torch.device) -> None:
        """Make place for the forward that follows: `counts` more tokens of the sequences in slots first, first + 1, ...

        The slot behind the last sequence starts a new one. Several sequences write max(counts) tokens each: what is
        more than a sequence's count lies beyond its end, where its next tokens overwrite it.
        """
        if first == len(self.lengths):
            self.lengths.append(0)
        m, n = len(counts), max(counts)
        past = self.lengths[first : first + m]
        at = self._place
        at.slots, at.past, at.end, at.rows, at.columns = slice(first, first + m), max(past), max(past) + n, None, None
        if m > 1:
            at.rows = torch.arange(first, first + m, device=device)[:, None]
            at.columns = torch.tensor(past).to(device, non_blocking=True)[:, None] + torch.arange(n, device=device)
        for b, count in enumerate(counts):
            self.lengths[first + b] += count

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence."""
        assert 0 <= length <= self.lengths[slot], f"cannot cut a sequence of {self.lengths[slot]} tokens to {length}"
        self.lengths[slot] = length

    def gather(self, slot: int, start: int, rows: Tensor) -> None:
        """After token `start` of a sequence keep only its tokens `start + rows`, `rows` int64 ascending on the cache's
        device (an accepted path of a tree)."""
        for layer in self._layers:
            layer.gather(slot, start, rows)
        self.truncate(slot, start + len(rows))

    def remove(self, slot: int) -> None:
        """Forget a sequence; the last one takes its slot."""
        length = self.lengths.pop()
        if slot < len(self.lengths):
            for layer in self._layers:
                layer.copy(len(self.lengths), slot, length)
            self.lengths[slot] = length


def check_rollback(config: PretrainedConfig) -> None:
    """Raise ValueError, with the reason, where a target's cache cannot be rolled back to an earlier token."""
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"target of type {name!r} is an encoder-decoder: only decoder-only targets can be decoded")
    for i, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            kind = "sliding-window" if getattr(layer, "is_sliding", False) else type(layer).__name__
            raise ValueError(
                f"target of type {name!r}: the cache of layer {i} is {kind}, and tokens that were rejected cannot be "
                "taken back from it. Set eval.decode=false (replay needs no target), or take one with full attention"
            )

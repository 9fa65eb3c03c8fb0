"""KV cache of the target that can be rolled back without a copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

GROWTH = 256  # tokens: room is allocated in multiples of this


class RollbackLayer(DynamicLayer):
    """Keys and values of one layer, `[1, heads, length, head_dim]`, as views of buffers with room to grow.

    The stock layer concatenates, so each forward copies the whole cache; here a forward writes its own tokens alone,
    and rolling back moves the end mark.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        if not self._buffers or end > self._buffers[0].shape[-2]:
            self._buffers = [self._grown(i, x, end) for i, x in enumerate((key_states, value_states))]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., self.length : end, :] = new
        self.is_initialized = True
        return self.truncate(end)

    def _grown(self, i: int, like: Tensor, end: int) -> Tensor:
        room = -(-end // GROWTH) * GROWTH
        buffer = like.new_empty(*like.shape[:-2], room, like.shape[-1])
        if self._buffers:
            buffer[..., : self.length, :] = self._buffers[i][..., : self.length, :]
        return buffer

    def truncate(self, length: int) -> tuple[Tensor, Tensor]:
        """Forget all but the first `length` tokens; returns what is left of keys and values."""
        self.length = length
        keys, values = (buffer[..., :length, :] for buffer in self._buffers)
        self.keys, self.values = keys, values
        return keys, values

    def gather(self, start: int, rows: Tensor) -> None:
        """After token `start` keep only the tokens `start + rows`, in that order (an accepted path of a tree)."""
        for buffer in self._buffers:
            buffer[..., start : start + len(rows), :] = buffer.index_select(-2, start + rows)
        self.truncate(start + len(rows))

    def get_seq_length(self) -> int:
        return self.length


class RollbackCache(Cache):
    """KV cache of one sequence through all layers."""

    def __init__(self, n_layers: int) -> None:
        self._layers = [RollbackLayer() for _ in range(n_layers)]
        super().__init__(layers=list(self._layers))

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._layers[0].length

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        assert 0 <= length <= self.length, f"cannot cut a cache of {self.length} tokens to {length}"
        if length < self.length:
            for layer in self._layers:
                layer.truncate(length)

    def gather(self, start: int, rows: Tensor) -> None:
        """After token `start` keep only the tokens `start + rows`, `rows` int64 ascending on the cache's device."""
        for layer in self._layers:
            layer.gather(start, rows)


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

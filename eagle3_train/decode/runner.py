"""The target model as decoding sees it: forward of a few tokens over a KV cache that can be rolled back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle3_train.decode.cache import RollbackCache, check_rollback
from eagle3_train.target import cache_argument


class Output(NamedTuple):
    """What one target forward of n tokens gives."""

    logits: Tensor  # [n, V], or [1, V] of the last token alone; the model's dtype
    features: Tensor  # [n, n_in, H]: the states entering the input layers, ascending; [n, 0] where not asked for


class TargetRunner:
    """A transformers causal LM with one sequence in its cache.

    Args:
        model: any decoder-only model with full attention in every layer, in the dtype and on the device it runs in.
        layer_ids: input layers of the draft head; id k is the residual stream entering decoder layer k, and
            id n_layers the pre-norm output of the last layer (docs/store.md).

    Raises:
        ValueError: the model cannot be decoded speculatively, or a layer id is not one of its layers.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        check_rollback(model.config)
        self.model = model.eval()
        self.device = model.device
        text_config = model.config.get_text_config(decoder=True)
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        self.cache = RollbackCache(text_config.num_hidden_layers)
        self._entries = _layer_entries(model, layer_ids)
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_argument = cache_argument(model)
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    def reset(self) -> None:
        """Forget everything: the next forward starts a sequence."""
        self.cache.truncate(0)

    def keep(self, base: int, rows: Sequence[int]) -> None:
        """Of the tokens after the first `base`, keep only those numbered `rows` (ascending), and roll back the rest."""
        if list(rows) == list(range(len(rows))):
            self.cache.truncate(base + len(rows))
        else:
            self.cache.gather(base, torch.tensor(rows, device=self.device))

    def forward(
        self,
        tokens: Tensor,
        *,
        features: bool = True,
        last_only: bool = False,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Output:
        """Append n tokens to the cache and run them.

        Args:
            tokens: int64 [n].
            features: also collect the draft head's inputs.
            last_only: logits of the last token alone.
            positions: int64 [n], for a tree; by default they follow the cache.
            visible: bool [n, n], for a tree: which of the new tokens each new token attends to, itself included.
                All cached tokens are visible to all.
        """
        arguments: dict[str, Any] = {self._cache_argument: self.cache, "use_cache": True, "return_dict": True}
        if last_only:
            arguments |= self._last_only
        if positions is not None:
            arguments["position_ids"] = positions[None]
        if visible is not None:
            arguments["attention_mask"] = self._mask(visible)
        taken: list[Tensor] = []
        hooks = [_tap(module, taken) for module in self._entries] if features else []
        try:
            logits = self.model(input_ids=tokens[None], **arguments).logits[0]
        finally:
            for hook in hooks:
                hook.remove()
        return Output(
            logits[-1:] if last_only else logits,
            torch.stack(taken, dim=1) if taken else logits.new_empty(len(tokens), 0),
        )

    def _mask(self, visible: Tensor) -> Tensor:
        """Additive attention mask [1, 1, n, cached + n] in the model's dtype."""
        n, past = len(visible), self.length
        dtype = self.model.dtype
        mask = torch.zeros(1, 1, n, past + n, dtype=dtype, device=self.device)
        mask[..., past:].masked_fill_(~visible, torch.finfo(dtype).min)
        return mask


def _tap(module: nn.Module, taken: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    """Append the module's input [n, H] to `taken` at each call."""

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        taken.append(hidden[0])

    return module.register_forward_pre_hook(keep, with_kwargs=True)


def _layer_entries(model: PreTrainedModel, layer_ids: Sequence[int]) -> list[nn.Module]:
    """The modules whose inputs are the states of `layer_ids`: decoder layers, and the final norm for id n_layers."""
    n_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    children = list(model.get_decoder().children())
    stacks = [i for i, m in enumerate(children) if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    if len(stacks) != 1 or stacks[0] + 1 >= len(children):
        raise ValueError(
            f"target of type {model.config.model_type!r}: its {n_layers} decoder layers were not found in "
            f"{type(model.get_decoder()).__name__}; its architecture is not supported for decoding"
        )
    # The final norm is what follows the layers in every decoder that has one stack of them.
    entries = [*children[stacks[0]], children[stacks[0] + 1]]
    wrong = [k for k in layer_ids if not 0 <= k <= n_layers]
    if wrong or list(layer_ids) != sorted(set(layer_ids)):
        raise ValueError(
            f"layer ids {list(layer_ids)} of a target of {n_layers} layers: ascending, within 0..{n_layers}"
        )
    return [entries[k] for k in layer_ids]

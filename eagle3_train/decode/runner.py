"""The target model as decoding sees it: forwards of a few sequences over a KV cache that can be rolled back."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from eagle3_train.decode.cache import RollbackCache, check_rollback
from eagle3_train.target import cache_argument


class Query(NamedTuple):
    """Tokens that a sequence wants to be run next.

    A chain follows the sequence's tokens in the cache, causally. In a tree each token has a depth, counted from the
    sequence's end, and attends to all cached tokens of its sequence and to those new ones that are visible to it.
    """

    tokens: Tensor  # int64 [n]
    depths: Tensor | None = None  # int64 [n], of a tree
    visible: Tensor | None = None  # bool [n, n], of a tree: which new tokens each one sees, itself included
    kept: Sequence[int] | None = None  # of the sequence's last query, the tokens that stay, ascending; None: all


class Output(NamedTuple):
    """What a target forward gives one sequence of n tokens."""

    logits: Tensor  # [n, V], or [1, V] of the last token alone; the model's dtype
    features: Tensor  # [n, n_in, H]: the states entering the input layers, ascending; [n, 0] where not asked for


class TargetRunner:
    """A transformers causal LM with a few sequences in its cache, which stand in the first slots without a gap.

    Args:
        model: any decoder-only model with full attention in every layer, in the dtype and on the device it runs in.
        layer_ids: input layers of the draft head; id k is the residual stream entering decoder layer k, and
            id n_layers the pre-norm output of the last layer (docs/store.md).
        slots: sequences at once, at most.

    Raises:
        ValueError: the model cannot be decoded speculatively, or a layer id is not one of its layers.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int], slots: int = 1) -> None:
        check_rollback(model.config)
        self.model = model.eval()
        self.device = model.device
        self.slots = slots
        text_config = model.config.get_text_config(decoder=True)
        self.max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        self.cache = RollbackCache(text_config.num_hidden_layers, slots)
        self._entries = _layer_entries(model, layer_ids)
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_argument = cache_argument(model)
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def reset(self) -> None:
        """Forget all sequences: the next forward starts one."""
        self.cache.lengths.clear()

    def remove(self, slot: int) -> None:
        """Forget a sequence; the last one takes its slot."""
        self.cache.remove(slot)

    def keep(self, slot: int, n: int, rows: Sequence[int]) -> None:
        """Of a sequence's last `n` tokens keep only those numbered `rows` (ascending), and roll back the rest."""
        start = self.cache.lengths[slot] - n
        if list(rows) == list(range(len(rows))):
            self.cache.truncate(slot, start + len(rows))
        else:
            self.cache.gather(slot, start, torch.tensor(rows, device=self.device))

    def forward(
        self, queries: Sequence[Query], *, first: int = 0, features: bool = True, last_only: bool = False
    ) -> list[Output]:
        """Append tokens to sequences and run them, all in one forward.

        Args:
            queries: of the sequences in slots first, first + 1, ...; the slot behind the last sequence starts one.
                `kept` has no say here.
            features: also collect the draft head's inputs.
            last_only: logits of the last token alone; of one sequence alone.
        """
        assert len(queries) == 1 or not last_only
        counts = [len(query.tokens) for query in queries]
        past = [*self.cache.lengths, 0][first : first + len(queries)]
        arguments: dict[str, Any] = {self._cache_argument: self.cache, "use_cache": True, "return_dict": True}
        if last_only:
            arguments |= self._last_only
        if len(queries) > 1 or queries[0].depths is not None:  # a chain alone needs no mask: the model's own is causal
            arguments |= self._places(queries, past)
        self.cache.extend(first, counts, self.device)
        taken: list[Tensor] = []
        hooks = [_tap(module, taken) for module in self._entries] if features else []
        try:
            ids = pad_sequence([query.tokens for query in queries], batch_first=True)
            logits = self.model(input_ids=ids, **arguments).logits
        finally:
            for hook in hooks:
                hook.remove()
        states = torch.stack(taken, dim=2) if taken else logits.new_empty(*ids.shape, 0)
        if last_only:
            logits = logits[:, -1:]
        return [Output(logits[b, :n], states[b, :n]) for b, n in enumerate(counts)]

    def _places(self, queries: Sequence[Query], past: list[int]) -> dict[str, Tensor]:
        """`position_ids [m, n]`, and the additive `attention_mask [m, 1, n, longest past + n]` in the model's dtype.

        Padding stands behind a query's tokens, so that none of them sees it; its own position is the last token's.
        """
        lengths = torch.tensor(past).to(self.device, non_blocking=True)[:, None]
        counts = torch.tensor([len(query.tokens) for query in queries]).to(self.device, non_blocking=True)[:, None]
        n = max(len(query.tokens) for query in queries)
        new = torch.arange(n, device=self.device)
        positions = lengths + new.minimum(counts - 1)
        columns = torch.arange(max(past) + n, device=self.device)
        seen = columns <= (lengths + new)[..., None]
        for b, query in enumerate(queries):
            if query.depths is not None:
                assert query.visible is not None
                end = len(query.tokens)
                positions[b, :end] = past[b] + query.depths
                positions[b, end:] = past[b]
                seen[b, :end, past[b] : past[b] + end] = query.visible
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        return {"position_ids": positions, "attention_mask": mask[:, None]}


def _tap(module: nn.Module, taken: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    """Append the module's input [m, n, H] to `taken` at each call."""

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        taken.append(hidden)

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

"""Hidden states of a target in transformers, by hooks: only the asked layers are ever kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from eagle3_train.corpus import Row
from eagle3_train.store import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 24  # elements of [positions, vocabulary] in memory at a time


def decoder_of(model: PreTrainedModel) -> Any:
    """The decoder stack of a causal language model: what has `embed_tokens`, `layers` and the final `norm`.

    Raises:
        ValueError: the model keeps them elsewhere.
    """
    decoder = model.get_decoder()
    missing = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(decoder, name)]
    if missing:
        raise ValueError(
            f"target {type(model).__name__}: its decoder has no {', '.join(missing)}; it cannot be captured"
        )
    return decoder


class HiddenStates:
    """Context manager over a target with hooks on it. Calling it runs a batch of rows.

    Layer id k is the residual stream entering decoder layer k; id n_layers is what the final norm is given, that is the
    pre-norm output of the last layer (transformers' own `hidden_states[n_layers]` is behind the norm).
    """

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...], dtype: torch.dtype, logsumexp: bool) -> None:
        self.model, self.layer_ids, self.dtype, self.logsumexp = model, layer_ids, dtype, logsumexp
        self.decoder = decoder_of(model)
        self.device = self.decoder.embed_tokens.weight.device
        self._seen: dict[int, torch.Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> HiddenStates:
        layers = self.decoder.layers
        for k in self.layer_ids:
            module = self.decoder.norm if k == len(layers) else layers[k]
            self._hooks.append(module.register_forward_pre_hook(self._keep(k), with_kwargs=True))
        return self

    def _keep(self, k: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._seen[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._seen.clear()

    @torch.inference_mode()
    def __call__(self, rows: list[Row]) -> list[Sequence]:
        """Sequences of `rows`, in the same order; hidden states [T, len(layer_ids), H] on the CPU."""
        lengths = [len(r.input_ids) for r in rows]
        # Padding stands on the right, where causal attention never looks from a real token: no mask is needed, and
        # without one SDPA takes its fused causal kernel. What comes out at the padding is not read.
        ids_BT = pad_sequence([torch.from_numpy(r.input_ids.astype(np.int64)) for r in rows], batch_first=True)
        normed_BTH = self.decoder(input_ids=ids_BT.to(self.device), use_cache=False).last_hidden_state
        hidden_BTLH = torch.stack([self._seen[k].to(self.dtype) for k in self.layer_ids], 2).cpu()
        self._seen.clear()
        argmax_BT, logsumexp_BT = self._head(normed_BTH, rows)
        return [
            Sequence(
                sample_id=r.sample_id,
                source=r.source,
                input_ids=r.input_ids,
                loss_mask=r.loss_mask,
                hidden=hidden_BTLH[b, :n],
                target_argmax=argmax_BT[b, :n],
                target_logsumexp=logsumexp_BT[b, :n] if self.logsumexp else None,
            )
            for b, (r, n) in enumerate(zip(rows, lengths, strict=True))
        ]

    def _head(self, normed_BTH: torch.Tensor, rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        """argmax [B, T] int32, log-sum-exp [B, T] float32 where the next token is supervised; -1 and NaN elsewhere."""
        shape = normed_BTH.shape[:2]
        wanted = np.zeros(shape, bool)
        for b, row in enumerate(rows):
            wanted[b, : len(row.loss_mask) - 1] = row.loss_mask[1:] == 1
        argmax, logsumexp = np.full(shape, -1, np.int32), np.full(shape, np.nan, np.float32)
        states_NH = normed_BTH[torch.from_numpy(wanted).to(self.device)]
        head: Any = self.model.get_output_embeddings()
        cap = getattr(self.decoder.config, "final_logit_softcapping", None)
        top, norm = [], []
        for chunk in states_NH.split(max(1, LOGITS_AT_ONCE // head.weight.shape[0])):
            logits_NV = head(chunk)
            top.append(logits_NV.argmax(-1))
            if self.logsumexp:
                capped = logits_NV.float() if cap is None else cap * torch.tanh(logits_NV.float() / cap)
                norm.append(capped.logsumexp(-1))
        if top:
            argmax[wanted] = torch.cat(top).cpu().numpy()
        if norm:
            logsumexp[wanted] = torch.cat(norm).cpu().numpy()
        return argmax, logsumexp

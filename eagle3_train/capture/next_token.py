"""What the target predicts next, where that is supervised: arg max and log-sum-exp over its whole vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

from eagle3_train.device import arg_max

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 1 << 24  # elements of [positions, vocabulary] in memory at a time


def wanted(loss_mask: np.ndarray) -> np.ndarray:
    """[T] bool: positions whose next token is supervised."""
    return np.append(loss_mask[1:] == 1, False)


class NextToken:
    """The target's head on states behind the final norm."""

    def __init__(self, model: PreTrainedModel, logsumexp: bool) -> None:
        self.head: Any = model.get_output_embeddings()
        self.cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        self.logsumexp = logsumexp

    @torch.inference_mode()
    def __call__(self, normed_NH: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
        """argmax [N] int32, log-sum-exp [N] float32 or None where it is not asked for."""
        top, norm = [normed_NH.new_empty(0, dtype=torch.int64)], [normed_NH.new_empty(0, dtype=torch.float32)]
        for chunk in normed_NH.split(max(1, LOGITS_AT_ONCE // self.head.weight.shape[0])) if len(normed_NH) else ():
            logits_NV = self.head(chunk)
            top.append(arg_max(logits_NV))
            if self.logsumexp:
                capped = logits_NV.float() if self.cap is None else self.cap * torch.tanh(logits_NV.float() / self.cap)
                norm.append(capped.logsumexp(-1))
        argmax = torch.cat([t.cpu() for t in top]).to(torch.int32).numpy()
        return argmax, torch.cat([t.cpu() for t in norm]).numpy() if self.logsumexp else None


class Columns(TypedDict):
    """Two columns of a store's row."""

    target_argmax: np.ndarray  # [T] int32
    target_logsumexp: np.ndarray | None  # [T] float32


def columns(loss_mask: np.ndarray, argmax: np.ndarray, logsumexp: np.ndarray | None) -> Columns:
    """Columns of a store's row from the values at its `wanted` positions: -1 and NaN elsewhere."""
    at = wanted(loss_mask)
    target_argmax = np.full(len(at), -1, np.int32)
    target_argmax[at] = argmax
    if logsumexp is None:
        return {"target_argmax": target_argmax, "target_logsumexp": None}
    target_logsumexp = np.full(len(at), np.nan, np.float32)
    target_logsumexp[at] = logsumexp
    return {"target_argmax": target_argmax, "target_logsumexp": target_logsumexp}

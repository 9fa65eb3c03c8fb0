"""Why two greedy outputs of one prompt differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3_train.decode.runner import Query, TargetRunner


@torch.inference_mode()
def first_gap(runner: TargetRunner, prompt_ids: Tensor, a: list[int], b: list[int]) -> dict[str, Any]:
    """Where `a` and `b`, generated from `prompt_ids [T]`, part.

    Returns:
        `first_difference`, the index of the first generated token that differs, and `logit_gap`, how far apart the
        target's logits of the two tokens are there: a tie, if no more than rounding. None where one output is the
        other's beginning, which no tie explains.
    """
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return {"first_difference": min(len(a), len(b)), "logit_gap": None}
    runner.reset()
    text = torch.cat((prompt_ids, prompt_ids.new_tensor(a[:at])))
    logits = runner.forward([Query(text)], features=False, last_only=True)[0].logits[0]
    return {"first_difference": at, "logit_gap": abs(float(logits[a[at]] - logits[b[at]]))}

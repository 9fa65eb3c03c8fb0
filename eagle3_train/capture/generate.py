"""The target's own greedy continuation of prompts: the transcripts that acceptance is measured on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eagle3_train.corpus import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def continue_greedily(
    model: PreTrainedModel, prompts: list[Row], new_tokens: int, stop_ids: list[int], step: Callable[[int], None]
) -> list[Row]:
    """Each prompt with at most `new_tokens` more tokens, the stop token included; loss_mask covers the new ones.

    `step(n)` is called after each decoding step with the number of sequences that it extended.
    """
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Progress(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: object) -> torch.BoolTensor:
            step(len(input_ids))
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]

    longest = max(len(p.input_ids) for p in prompts)
    ids = torch.full((len(prompts), longest), stop_ids[0])  # left padding: what it holds is masked
    mask = torch.zeros_like(ids)
    for b, prompt in enumerate(prompts):
        ids[b, longest - len(prompt.input_ids) :] = torch.from_numpy(prompt.input_ids.astype(np.int64))
        mask[b, longest - len(prompt.input_ids) :] = 1
    # Every rule that would bend the arg max is switched off: a model's own defaults may hold a repetition penalty.
    greedy = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=new_tokens,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
    )
    own, model.generation_config = model.generation_config, greedy
    try:
        out: Any = model.generate(  # type: ignore[operator]
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=greedy,
            stopping_criteria=StoppingCriteriaList([Progress()]),
        )
    finally:
        model.generation_config = own
    return [_transcript(p, new, stop_ids) for p, new in zip(prompts, out[:, longest:].cpu().numpy(), strict=True)]


def _transcript(prompt: Row, generated: np.ndarray, stop_ids: list[int]) -> Row:
    """Prompt and what was generated for it: up to the first stop token, behind which the batch's padding stands."""
    stops = np.flatnonzero(np.isin(generated, stop_ids))
    new = generated[: stops[0] + 1] if len(stops) else generated
    ids = np.concatenate([prompt.input_ids, new]).astype(np.int32)
    mask = np.concatenate([np.zeros(len(prompt.input_ids), np.uint8), np.ones(len(new), np.uint8)])
    return Row(prompt.sample_id, prompt.source, ids, mask)

"""The target's own continuations of prompts, in transformers: greedy, or sampled with random numbers of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eagle3_train.config import TaskConfig
from eagle3_train.corpus import Row

from .ends import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sampling:
    """temperature 0: greedy. Filters act on the tempered distribution: the `top_k` likeliest tokens (0: all), of these
    the smallest set that holds `top_p` of their probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0

    @classmethod
    def of_task(cls, task: TaskConfig, seed: int) -> Sampling:
        """How the target continues a task's prompts."""
        return cls(task.temperature, task.top_p, seed, task.top_k)

    def seed_of(self, name: str) -> int:
        """Seed of one continuation: it depends on no batch, no worker and no interruption. 63 bits."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}:{name}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, eq=False)
class Prompt:
    """What is continued by at most `new_tokens` tokens; `name` is what its random numbers are drawn for."""

    name: str
    input_ids: np.ndarray  # [T] int32
    new_tokens: int


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: list[Prompt],
    stop_ids: list[int],
    sampling: Sampling,
    step: Callable[[int], None],
) -> list[np.ndarray]:
    """The new tokens of each prompt, [n] int32, the stop token included.

    `step(n)` is called after each decoding step with the number of sequences that it extended.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

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
    # Sampling is a rule of ours that leaves one token: transformers' own draws one stream for the whole batch.
    plain = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max(p.new_tokens for p in prompts),
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
    )
    rules = [_Nucleus(sampling, [p.name for p in prompts])] if sampling.temperature > 0 else []
    device = input_device(model)
    own, model.generation_config = model.generation_config, plain
    try:
        out: Any = model.generate(  # type: ignore[operator]
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=plain,
            logits_processor=LogitsProcessorList(rules),
            stopping_criteria=StoppingCriteriaList([Progress()]),
        )
    finally:
        model.generation_config = own
    generated = out[:, longest:].cpu().numpy().astype(np.int32)
    return [until_stop(new[: p.new_tokens], stop_ids) for p, new in zip(prompts, generated, strict=True)]


class _Nucleus:
    """Temperature and nucleus sampling (Holtzman et al. 2020) by the inverse of the cumulative distribution: one
    uniform number a row and step, from the row's own stream."""

    def __init__(self, sampling: Sampling, names: list[str]) -> None:
        self.sampling = sampling
        self.streams = [torch.Generator().manual_seed(sampling.seed_of(name)) for name in names]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        p_BV, token_BV = torch.softmax(scores.float() / self.sampling.temperature, -1).sort(-1, descending=True)
        if 0 < self.sampling.top_k < p_BV.shape[1]:
            p_BV[:, self.sampling.top_k :] = 0
            p_BV /= p_BV.sum(-1, keepdim=True)
        before_BV = p_BV.cumsum(-1) - p_BV
        p_BV = p_BV.where(before_BV < self.sampling.top_p, 0.0)
        total_BV = p_BV.cumsum(-1)
        u_B1 = torch.stack([torch.rand(1, generator=g) for g in self.streams]).to(total_BV.device)
        chosen_B1 = (total_BV <= u_B1 * total_BV[:, -1:]).sum(-1, keepdim=True).clamp_max(p_BV.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token_BV.gather(1, chosen_B1), 0.0)


def until_stop(generated: np.ndarray, stop_ids: list[int]) -> np.ndarray:
    """Up to the first stop token, behind which a batch's padding stands."""
    stops = np.flatnonzero(np.isin(generated, stop_ids))
    return generated[: stops[0] + 1] if len(stops) else generated


def transcript(prompt: Row, new: np.ndarray) -> Row:
    """A prompt and what was generated for it; loss_mask covers the new tokens."""
    ids = np.concatenate([prompt.input_ids, new]).astype(np.int32)
    mask = np.concatenate([np.zeros(len(prompt.input_ids), np.uint8), np.ones(len(new), np.uint8)])
    return Row(prompt.sample_id, prompt.source, ids, mask)

"""Replay of transcripts that the target sampled: expected cycles, exactly, again without the target.

A draft drawn from q is accepted with probability min(1, p / q), so that token x comes out as an accepted draft with
probability min(q(x), p(x)), and at all with p(x). Given that the transcript continues with x, the draft was therefore
accepted with probability min(1, q(x) / p(x)), at each position for itself; a deterministic draft, exactly when it is x.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_train.decode.sampling import Sampling
from eagle3_train.drafts import DraftBatch, StepLoss
from eagle3_train.evaluate.transcripts import Transcript
from eagle3_train.store import TargetPart


class StepwiseHead(Protocol):
    """What sampled replay needs of a draft head (`drafts.Draft`): its training forward shows each step's rows."""

    steps: int

    def __call__(self, batch: DraftBatch, loss: StepLoss) -> Tensor: ...
    def target_ids(self, draft_ids: Tensor) -> Tensor: ...


@dataclass
class _Steps(StepLoss):
    """An objective that keeps what each step shows: normed hidden rows [R, H], head, each's step-0 row [R]."""

    rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def select(self, kept: np.ndarray) -> None:
        return None

    def __call__(self, step: int, hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor) -> Tensor:
        self.rows.append((hidden, lm_head, target_rows - step))
        return hidden.new_zeros(())

    def regress(self, step: int, hidden: Tensor, features: Tensor) -> Tensor:
        return hidden.new_zeros(())


def acceptance(
    head: StepwiseHead, part: TargetPart, transcript: Transcript, sampling: Sampling, device: torch.device
) -> np.ndarray:
    """Probability, given the transcript, that a draft of each anchor is accepted: float64 [n - 1, K].

    Anchors are the last position of the prompt and the following ones whose draft has a transcript token to be compared
    with; n generated tokens. Drafts are drawn from the head under `sampling`, the transcript's own.
    """
    batch = DraftBatch.collate([transcript.sequence], device, torch.float32)
    n = len(transcript.sequence.input_ids) - transcript.prompt_length
    kept = _Steps()
    with torch.inference_mode():
        head(batch, kept)
        p = _target_probs(part, batch, transcript, sampling)
        out = p.new_zeros(n - 1, head.steps)
        for i, (hidden, lm_head, anchors) in enumerate(kept.rows):
            # Row r of step 0 is the prompt's last position + r: a transcript is one assistant turn.
            tokens = batch.input_ids[transcript.prompt_length + 1 + i + anchors]
            q = sampling.probs(F.linear(hidden, lm_head))
            ids = head.target_ids(torch.arange(q.shape[1], device=device))
            q_token = (q * (ids == tokens[:, None])).sum(1)
            out[anchors, i] = (q_token / p[anchors + i]).clamp_max(1)
    return out.double().cpu().numpy()


def _target_probs(part: TargetPart, batch: DraftBatch, transcript: Transcript, sampling: Sampling) -> Tensor:
    """[n - 1]: the target's probability of each generated token after the first, under `sampling`."""
    first = transcript.prompt_length
    device = batch.hidden.device
    final = batch.hidden[first:-1, -1]
    weight = part.norm_weight.to(device, torch.float32)
    normed = F.rms_norm(final, weight.shape, weight, part.config.get("rms_norm_eps", 1e-6))
    logits = F.linear(normed, part.lm_head.to(device, torch.float32))
    return sampling.probs(logits).gather(1, batch.input_ids[first + 1 :, None])[:, 0]


def expected_counts(accept: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Expected cycles of one transcript, and at each position those that compare a draft and those that accept it.

    accept: [n - 1, K] of `acceptance`, row r the cycle that starts after r tokens beyond the first.

    Returns:
        (forwards, drafted [K], accepted [K]), counted as in `Record.of_cycles`: where `accept` is 0 or 1 everywhere
        they are its numbers.
    """
    tokens, steps = accept.shape
    drafted, accepted = np.zeros(steps), np.zeros(steps)
    visits = np.zeros(tokens + 1)  # probability that a cycle starts here; the last one: that the end is reached
    visits[0] = 1
    for r in range(tokens):
        limit = min(steps, tokens - r - 1)
        reach = np.concatenate(([1.0], np.cumprod(accept[r, :limit])))  # [a]: the first a drafts accepted
        drafted[:limit] += visits[r] * reach[:-1]
        accepted[:limit] += visits[r] * reach[1:]
        visits[r + 1 : r + 2 + limit] += visits[r] * (reach - np.append(reach[1:], 0))
    return float(visits[:-1].sum()), drafted, accepted

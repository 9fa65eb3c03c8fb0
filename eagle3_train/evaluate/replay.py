"""Replay: what decoding would do on transcripts that the target itself generated, without the target.

A greedy draft is accepted exactly when it equals the transcript's token, and the draft of an anchor does not depend on
how decoding came there. So one teacher-forced pass gives the accepted length of every anchor, and walking from anchor
to anchor (accepted + 1 tokens on) gives decoding's cycles: those of `decode.decode_chain`, in the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eagle3_train.config import TaskConfig
from eagle3_train.console import progress_bar
from eagle3_train.drafts import DraftBatch
from eagle3_train.evaluate.records import Record
from eagle3_train.evaluate.summary import result_keys
from eagle3_train.evaluate.transcripts import Transcript, open_transcripts


class Predictor(Protocol):
    """What replay needs of a draft head (`drafts.Draft`)."""

    steps: int

    def predict(self, batch: DraftBatch) -> Tensor: ...


def replay_tasks(
    head: Predictor,
    transcripts_dir: str,
    tasks: Sequence[TaskConfig],
    device: torch.device,
    bootstrap: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    batch_tokens: int = 8192,
    show: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """Replay all transcripts of `tasks` (`<transcripts_dir>/<task>`, each a store).

    Args:
        dtype: compute dtype; fp32, on fp32 transcripts, makes replay equal decoding in fp32.
        batch_tokens: transcripts are predicted together up to so many tokens, prompts included.
        show: with a progress bar.

    Returns:
        Records, and the keys that they give the result: alpha, alpha_lo, alpha_hi [K], alpha_by_task, tau_replay.
    """
    records = []
    for task in tasks:
        transcripts = open_transcripts(transcripts_dir, task.name)
        with progress_bar(f"replay {task.name}", len(transcripts), "prompts", show=show) as bar:
            for transcript, accepted in replay(head, transcripts.read(), device, dtype, batch_tokens):
                fields = {"task": task.name, "method": "replay", "temperature": 0.0, "prompt": transcript.prompt_id}
                records.append(Record.of_cycles(accepted, head.steps, **fields))
                bar.update(1)
    return records, result_keys(records, bootstrap, seed)


def replay(
    head: Predictor, transcripts: Iterable[Transcript], device: torch.device, dtype: torch.dtype, batch_tokens: int
) -> Iterator[tuple[Transcript, list[int]]]:
    """Each transcript with the accepted drafts of its cycles."""
    for group in _batches(transcripts, batch_tokens):
        batch = DraftBatch.collate([t.sequence for t in group], device, dtype)
        with torch.inference_mode():
            runs = accepted_runs(head.predict(batch), batch.input_ids).cpu().numpy()
        for transcript, start, stop in zip(group, batch.starts[:-1], batch.starts[1:], strict=True):
            yield transcript, walk(runs[start:stop], transcript.prompt_length)


def accepted_runs(drafted: Tensor, input_ids: Tensor) -> Tensor:
    """How many drafts of each anchor in a row are right: int64 [N] of `drafted [N, K]` and the tokens [N].

    Near a document's end the drafts are -1, which no token equals.
    """
    n, steps = drafted.shape
    padded = torch.cat((input_ids, input_ids.new_full((steps + 1,), -2)))
    following = padded.unfold(0, steps, 1)[2 : n + 2]  # [t, i]: x_{t+2+i}
    return (drafted == following).long().cumprod(1).sum(1)


def walk(runs: np.ndarray, prompt_length: int) -> list[int]:
    """Accepted drafts of each cycle, from `runs [T]` of one transcript.

    The prompt's forward gives the first generated token, so the first anchor is the prompt's last position. With r
    tokens left, r - 1 can be drafts: the cycle's bonus token is one of them.
    """
    cycles = []
    last = len(runs) - 2  # the anchor whose next token is the transcript's last
    anchor = prompt_length - 1
    while anchor < last:
        accepted = min(int(runs[anchor]), last - anchor - 1)
        cycles.append(accepted)
        anchor += accepted + 1
    return cycles


def _batches(transcripts: Iterable[Transcript], batch_tokens: int) -> Iterator[list[Transcript]]:
    """Consecutive transcripts up to `batch_tokens` tokens together; a longer one alone."""
    group: list[Transcript] = []
    size = 0
    for transcript in transcripts:
        length = len(transcript.sequence.input_ids)
        if group and size + length > batch_tokens:
            yield group
            group, size = [], 0
        group.append(transcript)
        size += length
    if group:
        yield group

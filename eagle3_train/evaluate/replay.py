"""Replay: what decoding would do on transcripts that the target itself generated, without the target.

A greedy draft is accepted exactly when it equals the transcript's token, and the draft of an anchor does not depend on
how decoding came there. So one teacher-forced pass gives the accepted length of every anchor, and walking from anchor
to anchor (accepted + 1 tokens on) gives the cycles of `decode.decode_speculative`, in the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_train.config import TaskConfig
from eagle3_train.console import progress_bar
from eagle3_train.decode.static import StaticTree
from eagle3_train.decode.tree import Tree, TreeHead, match
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.evaluate.records import Record
from eagle3_train.evaluate.sampled import acceptance, expected_counts
from eagle3_train.evaluate.summary import result_keys
from eagle3_train.evaluate.transcripts import Transcript, Transcripts, open_transcripts
from eagle3_train.store import read_target_part


def replay_tasks(
    head: Draft,
    transcripts_dir: str,
    tasks: Sequence[TaskConfig],
    device: torch.device,
    bootstrap: int,
    seed: int,
    *,
    tree: Tree | StaticTree | None = None,
    target_store: str | None = None,
    batch_tokens: int = 8192,
    show: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """Replay all transcripts of `tasks` (`<transcripts_dir>/<task>`, each a store), greedy or sampled as they are.

    All is computed in fp32: on fp32 transcripts replay then equals decoding in fp32.

    Args:
        head: on `device`, in fp32.
        tree: draft this tree instead of a chain.
        target_store: a store of the same target, whose final norm and head chains of sampled transcripts need.
        batch_tokens: transcripts are predicted together up to so many tokens, prompts included.
        show: with a progress bar.

    Returns:
        Records, and the keys that chains give the result: alpha, alpha_lo, alpha_hi [K], alpha_by_task, tau_replay.

    Raises:
        ValueError: transcripts are missing or not transcripts, or cannot be replayed as asked.
    """
    records = []
    for task in tasks:
        transcripts = open_transcripts(transcripts_dir, task.name)
        fields = {"task": task.name, "method": "replay", "temperature": transcripts.sampling.temperature}
        with progress_bar(f"replay {task.name}", len(transcripts), "prompts", show=show) as bar:
            for record in _replayed(head, transcripts, device, tree, target_store, batch_tokens, fields):
                records.append(record)
                bar.update(1)
    return records, result_keys(records, bootstrap, seed)


def _replayed(
    head: Draft,
    transcripts: Transcripts,
    device: torch.device,
    tree: Tree | StaticTree | None,
    target_store: str | None,
    batch_tokens: int,
    fields: dict[str, Any],
) -> Iterator[Record]:
    """One record a transcript, by the way that fits."""
    sampling = transcripts.sampling
    if tree is not None:
        # A tree's candidates are deterministic: whether the target chose greedily or by chance, its choice decides.
        for t in transcripts.read():
            cycles = replay_tree(head, tree, t, device)
            yield Record.of_cycles(cycles, tree.depth, prompt=t.prompt_id, shape=tree.shape, **fields)
    elif sampling.greedy:
        for t, cycles in replay(head, transcripts.read(), device, batch_tokens):
            yield Record.of_cycles(cycles, head.steps, prompt=t.prompt_id, **fields)
    else:
        if target_store is None:
            raise ValueError("sampled transcripts need the target's final norm and head: give target_store")
        part = read_target_part(target_store, transcripts.store.spec)
        for t in transcripts.read():
            accept = acceptance(head, part, t, sampling, device)
            forwards, drafted, accepted = expected_counts(accept)
            yield Record(
                tokens=len(accept),
                forwards=forwards,
                drafted=drafted.tolist(),
                accepted=accepted.tolist(),
                prompt=t.prompt_id,
                **fields,
            )


def replay(
    head: Draft, transcripts: Iterable[Transcript], device: torch.device, batch_tokens: int
) -> Iterator[tuple[Transcript, list[int]]]:
    """Each transcript with the accepted drafts of its cycles, chains drafted greedily."""
    for group in _batches(transcripts, batch_tokens):
        batch = DraftBatch.collate([t.sequence for t in group], device, torch.float32)
        with torch.inference_mode():
            runs = accepted_runs(head.predict(batch), batch.input_ids).cpu().numpy()
        for transcript, start, stop in zip(group, batch.starts[:-1], batch.starts[1:], strict=True):
            yield transcript, walk(runs[start:stop], transcript.prompt_length)


@torch.inference_mode()
def replay_tree(head: TreeHead, tree: Tree | StaticTree, transcript: Transcript, device: torch.device) -> list[int]:
    """Accepted drafts of each cycle of one transcript: each visited anchor's tree, followed along the transcript."""
    ids = torch.from_numpy(transcript.sequence.input_ids.astype(np.int64))
    features = transcript.sequence.hidden[:, head.reads].float().to(device)
    text = ids.tolist()
    ids = ids.to(device)
    state = head.new_state()
    cycles = []
    observed, anchor, last = 0, transcript.prompt_length - 1, len(text) - 2
    while anchor < last:
        h, logits = head.observe(state, ids[observed + 1 : anchor + 2], features[observed : anchor + 1])
        observed = anchor + 1
        proposal = tree.propose(head, state, h, logits)
        assert proposal.parents is not None
        matched = match(proposal.tokens.tolist(), proposal.parents.tolist(), text[anchor + 2 :])
        cycles.append(min(len(matched), last - anchor - 1))
        anchor += cycles[-1] + 1
    return cycles


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

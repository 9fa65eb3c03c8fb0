"""Real decoding of evaluation prompts, plain and drafted, side by side: acceptance, losslessness, wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle3_train.config import TaskConfig
from eagle3_train.console import progress_bar, say
from eagle3_train.decode.loop import DraftHead, Generation, Proposer, decode_plain, decode_speculative
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.evaluate.difference import first_gap
from eagle3_train.evaluate.records import Record
from eagle3_train.evaluate.summary import result_keys
from eagle3_train.evaluate.transcripts import open_transcripts

WARM_UP_TOKENS = 8
# fp32 logits of one position differ by rounding between a forward of 1 and of K + 1 tokens. A larger gap is an error.
TIE = 1e-2


def decode_tasks(
    head: DraftHead,
    model: PreTrainedModel,
    transcripts_dir: str,
    tasks: Sequence[TaskConfig],
    prompts: int,
    proposer: Proposer,
    stop_ids: Sequence[int],
    bootstrap: int,
    seed: int,
    *,
    show: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """Decode the first `prompts` prompts of each task, to its `new_tokens`, plainly and with drafts (chain or tree).

    The two run one after the other on each prompt, in this process, over the same runner, cache, dtype and threads, and
    take turns in going first; an untimed round warms both up. Sampled outputs differ in length and content, so with
    sampling only the drafted run is made, seeded by `seed` and the prompt's number.

    Args:
        head: on the model's device.
        model: the target, in the dtype to decode in.

    Returns:
        Records, and the keys that greedy chains give the result: tau_decode, speedup, decode_setup.

    Raises:
        ValueError: the target cannot be decoded, or a prompt does not fit it.
        RuntimeError: in fp32, a greedy output differs from plain decoding's and no tie explains it.
    """
    records = []
    for task in tasks:
        transcripts = open_transcripts(transcripts_dir, task.name)
        runner = TargetRunner(model, transcripts.layer_ids[head.reads])
        total = min(prompts, len(transcripts))
        fields = {
            "task": task.name,
            "method": "decode",
            "temperature": proposer.sampling.temperature,
            "shape": proposer.shape,
        }
        with progress_bar(f"decode {task.name}, {proposer.shape}", total, "prompts", show=show) as bar:
            for i, transcript in enumerate(transcripts.read(total)):
                prompt_ids = torch.from_numpy(transcript.prompt_ids.astype("int64")).to(runner.device)
                plain = partial(decode_plain, runner, prompt_ids, stop_ids=stop_ids)
                drafted = partial(decode_speculative, runner, head, proposer, prompt_ids, stop_ids=stop_ids)
                if i == 0:
                    for way in (plain, drafted):
                        way(max_new_tokens=min(WARM_UP_TOKENS, task.new_tokens))
                if proposer.sampling.greedy:
                    ways = [drafted, plain] if i % 2 else [plain, drafted]
                    timed = {way: _timed(way, task.new_tokens) for way in ways}
                    (own, plain_seconds), (out, seconds) = timed[plain], timed[drafted]
                    more = compare(runner, prompt_ids, own.tokens, out.tokens, transcript.prompt_id)
                    more["plain_seconds"] = plain_seconds
                else:
                    generator = torch.Generator(runner.device).manual_seed((seed << 32) + i)
                    out, seconds = _timed(partial(drafted, generator=generator), task.new_tokens)
                    more = {}
                more |= {"prompt": transcript.prompt_id, "seconds": seconds}
                records.append(Record.of_cycles(out.accepted, proposer.depth, **fields, **more))
                bar.update(1)
    setup = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "threads": torch.get_num_threads(),
    }
    return records, result_keys(records, bootstrap, seed) | {"decode_setup": setup}


def _timed(way: Callable[..., Generation], new_tokens: int) -> tuple[Generation, float]:
    """What it generated, and the seconds it took."""
    start = time.perf_counter()
    out = way(max_new_tokens=new_tokens)  # ends with token ids on the host, so nothing is left in flight
    return out, time.perf_counter() - start


def compare(
    runner: TargetRunner, prompt_ids: Tensor, own: list[int], drafted: list[int], prompt_id: str
) -> dict[str, Any]:
    """`lossless`, and where the outputs differ the first index at which they do and the target's logit gap there.

    Batched and single-token forwards round differently, so that a tie between two tokens can fall either way: it is
    recorded and said. In fp32 no other difference is possible, and one that is no tie raises RuntimeError.
    """
    if own == drafted:
        return {"lossless": True}
    found = first_gap(runner, prompt_ids, own, drafted)
    at, gap = found["first_difference"], found["logit_gap"]
    if gap is None or (runner.model.dtype == torch.float32 and gap > TIE):
        raise RuntimeError(
            f"prompt {prompt_id!r}: at generated token {at} speculative decoding gave {drafted[at : at + 1]}, the "
            f"target alone {own[at : at + 1]}, with logits {gap} apart: decoding is not lossless, this is a bug"
        )
    say(f"prompt {prompt_id!r}: outputs differ from generated token {at} on, by a tie (logits {gap:.2g} apart)")
    return {"lossless": False} | found

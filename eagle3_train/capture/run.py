"""The step `capture`: the corpus through the target into the stores. Any number of workers, no coordinator."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3_train.config import Config
from eagle3_train.console import Bar, duration, progress_bar, say
from eagle3_train.corpus import Row, read_rows
from eagle3_train.device import DTYPES, resolve_device, tune_allocator
from eagle3_train.store import Sequence, ShardWriter, finalize, missing_shards
from eagle3_train.target import load_target, load_tokenizer, prepare_target, stop_ids

from .batches import by_length, windows
from .generate import continue_greedily
from .hf import HiddenStates
from .plan import MAY_DIFFER, Job, plan, require_disk
from .target_part import has_target, write_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG = "capture.jsonl"  # in the study's folder: a line a captured shard
PROBE_TOKENS = 512


def capture(cfg: Config, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Fill the stores of a study (docs/capture.md): training, validation, and a transcript store a task.

    Worker `rank` of `world` captures every world-th missing shard; whoever finishes a store's last one writes its
    manifest. What is there already is never redone, so an interrupted capture continues.

    Returns {store: {"tokens", "seconds", "tokens_per_s", "mismatched", "compared"}} over all runs so far; `mismatched` of
    the `compared` positions of a transcript have another arg max in the teacher-forced pass than the token generated.

    Raises:
        ValueError: no corpus, a store of another spec, a disk too small, states that are not finite.
    """
    device = resolve_device(cfg.device)
    target = prepare_target(cfg.target, cfg.paths.target)
    jobs = plan(cfg, target, device)
    units = [(job, shard) for job in jobs for shard in job.missing]
    todo = units[rank::world]
    _announce(cfg, jobs, rank)
    log = Path(cfg.paths.study) / LOG
    if not cfg.dry_run:
        tune_allocator()
        _run(cfg, target, device, todo, jobs[0].compute_dtype, log, rank)
        for job in jobs:
            if (job.missing or not job.finished) and not missing_shards(job.path, job.spec.n_shards):
                finalize(job.path, job.spec, MAY_DIFFER)
    return _summary(log)


def _announce(cfg: Config, jobs: list[Job], rank: int) -> None:
    """Say what will be written, and refuse before any work when the disk is too small for it."""
    needed = sum(job.missing_bytes for job in jobs)
    free = require_disk(cfg.paths.store, needed)
    if rank != 0:
        return
    for job in jobs:
        done = job.spec.n_shards - len(job.missing)
        state = f" ({done} of {job.spec.n_shards} shards are there)" if done else ""
        at_most = "at most " if job.task else ""
        say(
            f"capture {job.name}: {job.spec.n_rows:,} sequences, {at_most}{job.lengths.sum():,} tokens, "
            f"{job.spec.estimate_bytes(int(job.lengths.sum())) / 1e6:,.1f} MB as {job.spec.dtype}{state}"
        )
    if needed:
        say(f"capture: {needed / 1e6:,.1f} MB to write" + (f", {free / 1e9:,.1f} GB free" if free is not None else ""))


def _run(
    cfg: Config,
    target: Path,
    device: torch.device,
    todo: list[tuple[Job, int]],
    train_dtype: torch.dtype,
    log: Path,
    rank: int,
) -> None:
    """Capture `todo`. The target is loaded once a compute dtype, and not at all where nothing is left."""
    groups: dict[torch.dtype, list[tuple[Job, int]]] = defaultdict(list)
    for job, shard in todo:
        groups[job.compute_dtype].append((job, shard))
    if rank == 0 and not has_target(cfg.paths.store):
        groups.setdefault(train_dtype, [])
    for dtype, units in groups.items():
        model = load_target(target, dtype, device, cfg.target.trust_remote_code)
        rate = _probe(model, cfg.capture.batch_tokens)
        tokens = sum(int(job.lengths[job.rows(s).start : job.rows(s).stop].sum()) for job, s in units)
        if rank == 0:
            say(f"capture: {tokens:,} tokens at {rate:,.0f} tokens/s, about {duration(tokens / rate)}")
            if dtype == train_dtype and not has_target(cfg.paths.store):
                write_target(cfg.paths.store, target, model)
        with progress_bar("capturing", tokens, "tokens", show=rank == 0) as bar:
            for job, shard in units:
                _shard(cfg, target, model, job, shard, bar, log)


@torch.inference_mode()
def _probe(model: PreTrainedModel, batch_tokens: int) -> float:
    """Tokens a second of the forward pass, measured on noise: one pass to warm up, one to time."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, min(batch_tokens, PROBE_TOKENS)), device=model.device)
    for _ in range(2):
        started = time.monotonic()
        model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.sum().item()
    return ids.numel() / (time.monotonic() - started)


def _shard(cfg: Config, target: Path, model: PreTrainedModel, job: Job, shard: int, bar: Bar, log: Path) -> None:
    """Capture one shard and log it."""
    started = time.monotonic()
    rows = list(read_rows(job.rows_file, job.rows(shard)))
    bar.update(0, note=job.name)
    if job.task is not None:
        rows = _transcripts(cfg, target, model, job, rows)
        bar.update(int(job.lengths[job.rows(shard).start : job.rows(shard).stop].sum()) - sum(map(_length, rows)))
    tokens = mismatched = compared = 0
    with (
        ShardWriter(job.path, shard, job.spec) as writer,
        HiddenStates(model, job.spec.layer_ids, DTYPES[job.spec.dtype], job.spec.logsumexp) as states,
    ):
        for sequence in _sequences(states, rows, cfg.capture.batch_tokens, bar):
            writer.add(sequence)
            tokens += sequence.n_tokens
            if job.task is not None:
                known = sequence.target_argmax[:-1] >= 0
                compared += int(known.sum())
                mismatched += int((sequence.target_argmax[:-1] != sequence.input_ids[1:])[known].sum())
    line = {"store": job.name, "shard": shard, "tokens": tokens, "seconds": round(time.monotonic() - started, 3)}
    with open(log, "a", encoding="utf-8") as f:
        f.write(json.dumps(line | {"mismatched": mismatched, "compared": compared}) + "\n")


def _length(row: Row) -> int:
    return len(row.input_ids)


def _transcripts(cfg: Config, target: Path, model: PreTrainedModel, job: Job, prompts: list[Row]) -> list[Row]:
    assert job.task is not None
    tokenizer = load_tokenizer(target, cfg.target.chat_template, cfg.target.trust_remote_code)
    with progress_bar(f"generating {job.task.name}", len(prompts) * job.task.new_tokens, "tokens") as bar:
        return continue_greedily(model, prompts, job.task.new_tokens, stop_ids(target, tokenizer), bar.update)


def _sequences(states: HiddenStates, rows: list[Row], batch_tokens: int, bar: Bar) -> Iterator[Sequence]:
    """Sequences of `rows`, in order, though computed in batches of like lengths."""
    lengths = [_length(r) for r in rows]
    for window in windows(lengths, batch_tokens):
        found: dict[int, Sequence] = {}
        for batch in by_length([lengths[i] for i in window], batch_tokens):
            numbers = [window[i] for i in batch]
            found |= dict(zip(numbers, states([rows[i] for i in numbers]), strict=True))
            bar.update(sum(lengths[i] for i in numbers))
        yield from (found[i] for i in window)


def _summary(log: Path) -> dict[str, Any]:
    """Totals of the log by store; the last line of a shard counts."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    shards = {(line["store"], line["shard"]): line for line in lines}
    totals: dict[str, dict[str, Any]] = {}
    for line in shards.values():
        total = totals.setdefault(line["store"], dict.fromkeys(("tokens", "seconds", "mismatched", "compared"), 0))
        for key in total:
            total[key] += line[key]
    for total in totals.values():
        total["tokens_per_s"] = total["tokens"] / max(total["seconds"], 1e-9)
    return totals

"""The step `capture`: the corpus through the target into the stores. Any number of workers, no coordinator."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3_train.config import Config, TaskConfig
from eagle3_train.console import Bar, duration, progress_bar, say
from eagle3_train.corpus import Row, Template, read_rows
from eagle3_train.device import DTYPES, resolve_device, tune_allocator
from eagle3_train.files import append_line
from eagle3_train.store import Sequence, ShardWriter, finalize, missing_shards, write_origin
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

    Returns {store: {"tokens", "seconds", "tokens_per_s", "mismatched", "compared"}} over all runs so far. At
    `mismatched` of the `compared` positions of transcripts the teacher-forced arg max is not the token generated.

    Raises:
        ValueError: no corpus, a store of another spec, a disk too small, states that are not finite.
    """
    device = resolve_device(cfg.device)
    target = prepare_target(cfg.target, cfg.paths.target)
    jobs = plan(cfg, target, device)
    _announce(cfg, jobs, show=rank == 0)
    worker = Worker(cfg, target, device, rank)
    if not cfg.dry_run:
        write_origin(cfg.paths.store, cfg.data_identity)
        units = [(job, shard) for job in jobs for shard in job.missing]
        worker.run(units[rank::world], jobs[0].compute_dtype)
        for job in jobs:
            if (job.missing or not job.finished) and not missing_shards(job.path, job.spec.n_shards):
                finalize(job.path, job.spec, MAY_DIFFER)
    return _summary(worker.log)


def _announce(cfg: Config, jobs: list[Job], show: bool) -> None:
    """Say what will be written, and refuse before any work when the disk is too small for it."""
    needed = sum(job.missing_bytes for job in jobs)
    free = require_disk(cfg.paths.store, needed)
    for job in jobs if show else []:
        done = job.spec.n_shards - len(job.missing)
        state = f" ({done} of {job.spec.n_shards} shards are there)" if done else ""
        at_most = "at most " if job.task else ""
        say(
            f"capture {job.name}: {job.spec.n_rows:,} sequences, {at_most}{job.lengths.sum():,} tokens, "
            f"{job.spec.estimate_bytes(int(job.lengths.sum())) / 1e6:,.1f} MB as {job.spec.dtype}{state}"
        )
    if needed and show:
        say(f"capture: {needed / 1e6:,.1f} MB to write" + (f", {free / 1e9:,.1f} GB free" if free is not None else ""))


@dataclass(frozen=True)
class Worker:
    """One process of a capture. It knows nothing of the others: the shards it is given are its own."""

    cfg: Config
    target: Path
    device: torch.device
    rank: int

    @property
    def log(self) -> Path:
        return Path(self.cfg.paths.study) / LOG

    def run(self, units: list[tuple[Job, int]], train_dtype: torch.dtype) -> None:
        """Capture `units` (job, shard). The target is loaded once a compute dtype, not at all if nothing is left."""
        tune_allocator()
        groups: dict[torch.dtype, list[tuple[Job, int]]] = defaultdict(list)
        for job, shard in units:
            groups[job.compute_dtype].append((job, shard))
        write_ends = self.rank == 0 and not has_target(self.cfg.paths.store)
        if write_ends:
            groups.setdefault(train_dtype, [])
        for dtype, mine in groups.items():
            model = load_target(self.target, dtype, self.device, self.cfg.target.trust_remote_code)
            if write_ends and dtype == train_dtype:
                write_target(self.cfg.paths.store, self.target, model)
            tokens = sum(job.tokens(shard) for job, shard in mine)
            generated = sum(job.generated(shard) for job, shard in mine)
            if self.rank == 0 and mine:
                rate = _probe(model, self.cfg.capture.batch_tokens)
                more = f", and the time to generate {generated:,} tokens" if generated else ""
                say(f"capture: {tokens:,} tokens at {rate:,.0f} tokens/s, about {duration(tokens / rate)}{more}")
            show = self.rank == 0 and bool(mine)
            with progress_bar("capturing", tokens + generated, "tokens", show=show) as bar:
                for job, shard in mine:
                    self.shard(model, job, shard, bar)

    def shard(self, model: PreTrainedModel, job: Job, shard: int, bar: Bar) -> None:
        """Capture one shard and log it."""
        started = time.monotonic()
        bar.update(0, note=job.name)
        rows = list(read_rows(job.rows_file, job.rows(shard)))
        if job.task is not None:
            expected = bar.units + job.tokens(shard) + job.generated(shard)
            rows = self._transcripts(model, job.task, rows, bar)
            # A transcript may end before its limit: what was announced for it counts as done.
            bar.update(expected - bar.units - sum(len(r.input_ids) for r in rows))
        tokens = mismatched = compared = 0
        with (
            ShardWriter(job.path, shard, job.spec) as writer,
            HiddenStates(model, job.spec.layer_ids, DTYPES[job.spec.dtype], job.spec.logsumexp) as states,
        ):
            for sequence in _sequences(states, rows, self.cfg.capture.batch_tokens, bar):
                writer.add(sequence)
                tokens += sequence.n_tokens
                if job.task is not None:
                    known = sequence.target_argmax[:-1] >= 0
                    compared += int(known.sum())
                    mismatched += int((sequence.target_argmax[:-1] != sequence.input_ids[1:])[known].sum())
        line = {"store": job.name, "shard": shard, "tokens": tokens, "seconds": round(time.monotonic() - started, 3)}
        append_line(self.log, json.dumps(line | {"mismatched": mismatched, "compared": compared}))

    def _transcripts(self, model: PreTrainedModel, task: TaskConfig, prompts: list[Row], bar: Bar) -> list[Row]:
        target = self.cfg.target
        tokenizer = load_tokenizer(self.target, target.chat_template, target.trust_remote_code)
        ends = Template(tokenizer, stop_ids(self.target, tokenizer), target.chat_template_args).ends
        return continue_greedily(model, prompts, task.new_tokens, sorted(ends), bar.update)


@torch.inference_mode()
def _probe(model: PreTrainedModel, batch_tokens: int) -> float:
    """Tokens a second of the forward pass, measured on noise: one pass to warm up, one to time."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, min(batch_tokens, PROBE_TOKENS)), device=model.device)
    for _ in range(2):
        started = time.monotonic()
        model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.sum().item()
    return ids.numel() / (time.monotonic() - started)


def _sequences(states: HiddenStates, rows: list[Row], batch_tokens: int, bar: Bar) -> Iterator[Sequence]:
    """Sequences of `rows`, in order, though computed in batches of like lengths."""
    lengths = [len(r.input_ids) for r in rows]
    for window in windows(lengths, batch_tokens):
        found: dict[int, Sequence] = {}
        for batch in by_length([lengths[i] for i in window], batch_tokens):
            numbers = [window[i] for i in batch]
            found |= dict(zip(numbers, states([rows[i] for i in numbers]), strict=True))
            bar.update(sum(lengths[i] for i in numbers))
        yield from (found[i] for i in window)


def _summary(log: Path) -> dict[str, Any]:
    """Totals of the log by store; the last line of a shard counts. A line that a killed writer cut counts nothing."""
    lines = []
    for text in log.read_text(encoding="utf-8").splitlines() if log.is_file() else []:
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    shards = {(line["store"], line["shard"]): line for line in lines}
    totals: dict[str, dict[str, Any]] = {}
    for line in shards.values():
        total = totals.setdefault(line["store"], dict.fromkeys(("tokens", "seconds", "mismatched", "compared"), 0))
        for key in total:
            total[key] += line[key]
    for total in totals.values():
        total["tokens_per_s"] = total["tokens"] / max(total["seconds"], 1e-9)
    return totals

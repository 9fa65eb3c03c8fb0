"""The step `capture`: the corpus through the target into the stores. Any number of workers, no coordinator."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle3_train.config import Config
from eagle3_train.console import Bar, duration, progress_bar, say
from eagle3_train.device import resolve_device, tune_allocator
from eagle3_train.files import append_line, json_lines
from eagle3_train.store import (
    MAY_DIFFER,
    ShardWriter,
    StoreSpec,
    claim,
    expect_claim,
    expect_origin,
    finalize,
    holds_target_part,
    is_rolling,
    missing_shards,
    write_origin,
)
from eagle3_train.store.folder import Folder
from eagle3_train.target import prepare_target, text_config

from .backend import Backend, open_backend
from .ends import target_bytes, write_target
from .passes import announce_rolling, refuse_while_captured
from .plan import Job, plan, require_disk, state_of

LOG = "capture.jsonl"  # in paths.data: a line a captured shard


def capture(cfg: Config, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Fill the stores of a study (docs/capture.md): training, validation, and a transcript store a task.

    Worker `rank` of `world` captures every world-th shard, if it is missing; whoever finishes a store's last one writes
    its manifest. What is there already is never redone, so an interrupted capture continues.

    Returns {store: {"tokens", "seconds", "tokens_per_s", "mismatched", "compared"}} over all runs so far. At
    `mismatched` of the `compared` positions of transcripts the teacher-forced arg max is not the token generated.

    Raises:
        ValueError: no corpus, a store of another spec or that a capture of another one claims, a disk too small, states
            that are not finite.
    """
    device = resolve_device(cfg.device)
    target = prepare_target(cfg.target, cfg.paths.target)
    jobs = plan(cfg, target, device)
    train = jobs[0]
    if train.begun:
        expect_origin(train.path, train.origin)
    room = 0
    if cfg.rolls and not train.finished:  # its shards come while it is read (`roll`)
        jobs = jobs[1:]
        if rank == 0:  # which reads the whole corpus for it
            room = announce_rolling(cfg, train, write=not cfg.dry_run)
    elif is_rolling(train.path):
        refuse_while_captured(Folder(train.path))  # they would delete what is captured
    if not holds_target_part(train.path, train.spec):
        room += target_bytes(text_config(target), train.compute_dtype)
    _announce(cfg, jobs, room, show=rank == 0)
    worker = Worker(cfg, target, device, rank, world)
    if not cfg.dry_run:
        with ExitStack() as claims:  # before anything is written, and so before the first forward pass
            stores = [train, *(job for job in jobs if job is not train)]
            for job in stores:
                if job.missing:
                    claims.enter_context(claim(job.path, job.spec, partial(state_of, job.path, job.spec)))
            for job in stores:
                write_origin(job.path, job.origin, keep=job.begun)
            # By number among all shards, missing or not: workers that start at different times share without a gap.
            units = [(job, shard) for job in jobs for shard in range(job.spec.n_shards)][rank::world]
            worker.run([(job, shard) for job, shard in units if shard in job.missing], train.spec)
            for job in jobs:
                if (job.missing or not job.finished) and not missing_shards(job.path, job.spec.n_shards):
                    finalize(job.path, job.spec, MAY_DIFFER)
    return _summary(worker.log)


def _announce(cfg: Config, jobs: list[Job], room: int, show: bool) -> None:
    """Say what will be written, and refuse before any work when the disk is too small for it and `room` bytes more."""
    needed = sum(job.missing_bytes for job in jobs) + room
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
    world: int = 1

    @property
    def log(self) -> Path:
        return Path(self.cfg.paths.data) / LOG

    def run(self, units: list[tuple[Job, int]], train: StoreSpec) -> None:
        """Capture `units` (job, shard). The target is loaded once a compute dtype, not at all if nothing is left.
        `train`: of the training store."""
        tune_allocator()
        self.log.parent.mkdir(parents=True, exist_ok=True)  # the corpus and the store may lie elsewhere
        if self.rank == 0 and not holds_target_part(self.cfg.paths.store, train):
            write_target(self.cfg.paths.store, train, self.target, self.cfg.target)
        share = f" (worker 1 of {self.world}, its share)" if self.world > 1 else ""
        groups: dict[torch.dtype, list[tuple[Job, int]]] = defaultdict(list)
        for job, shard in units:
            groups[job.compute_dtype].append((job, shard))
        for dtype, mine in groups.items():
            tokens = sum(job.tokens(shard) for job, shard in mine)
            generated = sum(job.generated(shard) for job, shard in mine)
            with open_backend(self.cfg, self.target, dtype, self.device, [job for job, _ in mine]) as backend:
                if self.rank == 0:
                    rate = backend.rate()
                    more = f", and the time to generate {generated:,} tokens" if generated else ""
                    expected = f"{tokens:,} tokens at {rate:,.0f} tokens/s, about {duration(tokens / rate)}"
                    say(f"capture{share}: {expected}{more}")
                with progress_bar(f"capturing{share}", tokens + generated, "tokens", show=self.rank == 0) as bar:
                    for job, shard in mine:
                        self.shard(backend, job, shard, bar)

    def shard(
        self,
        backend: Backend,
        job: Job,
        shard: int,
        bar: Bar,
        stores: Sequence[tuple[str, StoreSpec]] | None = None,
    ) -> None:
        """Capture one shard and log it. `stores`: where it is written, and how; None: as the job says."""
        expect_claim(job.path, job.spec)
        started = time.monotonic()
        bar.update(0, note=job.name)
        expected = bar.units + job.tokens(shard) + job.generated(shard)
        rows = job.read(shard)
        tokens = mismatched = compared = 0
        with ExitStack() as stack:
            writers = [
                stack.enter_context(ShardWriter(path, shard, spec)) for path, spec in stores or [(job.path, job.spec)]
            ]
            for sequence in backend.sequences(job, rows, bar.update):
                for writer in writers:
                    writer.add(sequence)
                tokens += sequence.n_tokens
                if job.task is not None:
                    known = sequence.target_argmax[:-1] >= 0
                    compared += int(known.sum())
                    mismatched += int((sequence.target_argmax[:-1] != sequence.input_ids[1:])[known].sum())
        bar.update(expected - bar.units)  # a transcript may end before its limit: what was announced counts as done
        line = {"store": job.name, "shard": shard, "tokens": tokens, "seconds": round(time.monotonic() - started, 3)}
        append_line(self.log, json.dumps(line | {"mismatched": mismatched, "compared": compared}))


def _summary(log: Path) -> dict[str, Any]:
    """Totals of the log by store; the last line of a shard counts. A line that a killed writer cut counts nothing."""
    lines = json_lines(log.read_text(encoding="utf-8").splitlines() if log.is_file() else [])
    shards = {(line["store"], line["shard"]): line for line in lines}
    totals: dict[str, dict[str, Any]] = {}
    for line in shards.values():
        total = totals.setdefault(line["store"], dict.fromkeys(("tokens", "seconds", "mismatched", "compared"), 0))
        for key in total:
            total[key] += line[key]
    for total in totals.values():
        total["tokens_per_s"] = total["tokens"] / max(total["seconds"], 1e-9)
    return totals

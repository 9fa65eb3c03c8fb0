"""What runs the target. A backend turns rows into sequences; plan, shards, resume and manifest know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from eagle3_train.config import Config, TargetConfig
from eagle3_train.corpus import Row, Template
from eagle3_train.store import Sequence
from eagle3_train.target import load_tokenizer, stop_ids

from .generate import Prompt, Sampling
from .plan import Job

Progress = Callable[[int], None]


class Backend(AbstractContextManager["Backend"], Protocol):
    """The target, loaded in one compute dtype."""

    def rate(self) -> float:
        """Tokens a second of the forward pass, measured on noise."""

    def sequences(self, job: Job, rows: list[Row], progress: Progress) -> Iterator[Sequence]:
        """Sequences of `rows`, in order; of a task, of each prompt with the target's own continuation.

        `progress(n)` is told of tokens, generated and captured.
        """


def open_backend(cfg: Config, folder: Path, dtype: torch.dtype, device: torch.device, jobs: list[Job]) -> Backend:
    """The backend of `capture.backend` with the target in `folder`, for the stores of `jobs`.

    Raises:
        ValueError: it is not installed.
    """
    if cfg.capture.backend == "vllm":
        from .vllm import VllmBackend

        return VllmBackend(cfg, folder, dtype, device, jobs)
    from .hf import HfBackend

    return HfBackend(cfg, folder, dtype, device)


def stop_tokens(cfg: TargetConfig, folder: Path) -> list[int]:
    """Token ids that end the target's turn: its own, and the one that its chat template writes."""
    tokenizer = load_tokenizer(folder, cfg.chat_template, cfg.trust_remote_code)
    return sorted(Template(tokenizer, stop_ids(folder, tokenizer), cfg.chat_template_args).ends)


class Generator(AbstractContextManager["Generator"], Protocol):
    """The target as a writer of text."""

    def generate(self, prompts: list[Prompt], sampling: Sampling, progress: Progress) -> list[list[int]]:
        """The new tokens of each prompt, the stop token included if there is one."""

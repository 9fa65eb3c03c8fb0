"""What runs the target. A backend turns rows into sequences; plan, shards, resume and manifest know nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from eagle3_train.config import Config, TargetConfig
from eagle3_train.corpus import Row, Template
from eagle3_train.device import resolve_device, resolve_dtype
from eagle3_train.store import Sequence
from eagle3_train.target import load_tokenizer, prepare_target, stop_ids

from .generate import Prompt, Sampling
from .plan import Job

if TYPE_CHECKING:
    from .hf import HfBackend
    from .vllm import VllmWriter

Progress = Callable[[int], None]
PROBE_TOKENS = 512  # of the first pass, and of the longest sequence of any
PROBE_S, PROBE_PASSES = 5.0, 8  # at most, after the second pass


class Backend(AbstractContextManager["Backend"], Protocol):
    """The target, loaded in one compute dtype."""

    def rate(self) -> float:
        """Tokens a second of the forward pass, measured on noise (`probe`)."""

    def sequences(self, job: Job, rows: list[Row], progress: Progress) -> Iterator[Sequence]:
        """Sequences of `rows`, in order; of a task, of each prompt with the target's own continuation.

        `progress(n)` is told of tokens, generated and captured.
        """


def probe(run: Callable[[int, int], object], longest: int, batch_tokens: int) -> float:
    """Tokens a second of the best of a few passes, `run(sequences, tokens of each)`: the first small and cold, each
    twice as large up to `batch_tokens`, as long as there is time. Whatever else the machine does makes a pass slower,
    never faster, so the best is nearest to the rate of the capture."""
    length = min(longest, batch_tokens, PROBE_TOKENS)
    sequences, best, started = 1, 0.0, time.monotonic()
    for number in range(PROBE_PASSES):
        begun = time.monotonic()
        run(sequences, length)
        now = time.monotonic()
        best = max(best, sequences * length / max(now - begun, 1e-9))
        sequences = max(1, min(2 * sequences, batch_tokens // length))
        if number and now - started + sequences * length / best > PROBE_S:
            break
    return best


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


@contextmanager
def open_writer(cfg: Config) -> Iterator[Callable[[list[tuple[str, np.ndarray, int]], Progress], list[list[int]]]]:
    """The target as a writer of text, for `corpus.regenerate`: (name, input ids, new tokens at most) of prompts, and a
    callback that is told of new tokens, to the new tokens of each, the stop token included if there is one."""
    device = resolve_device(cfg.device)
    folder = prepare_target(cfg.target, cfg.paths.target)
    dtype = resolve_dtype(cfg.capture.compute_dtype, device)
    asked = cfg.regenerate
    sampling = Sampling(asked.temperature, asked.top_p, asked.seed)
    target: HfBackend | VllmWriter
    if cfg.capture.backend == "vllm":
        from .vllm import VllmWriter

        target = VllmWriter(cfg, folder, dtype, device)
    else:
        from .hf import HfBackend

        target = HfBackend(cfg, folder, dtype, device)
    with target:
        yield lambda prompts, progress: target.generate([Prompt(*p) for p in prompts], sampling, progress)

"""Rates of a run between two lines of its log."""

from __future__ import annotations

import torch

from eagle3_train.device import peak_rss_mb
from eagle3_train.train.step import StepResult


class Meter:
    """Tokens and FLOPs over the time that steps and waiting for their data took: evaluation does not count.

    peak_tflops: of one process's device, for MFU; None: unknown, then there is none.
    """

    def __init__(self, world_size: int, peak_tflops: float | None) -> None:
        self._peak = peak_tflops * 1e12 * world_size if peak_tflops else None
        self._reset()

    def _reset(self) -> None:
        self._tokens, self._flops, self._step_s, self._wait_s = 0, 0.0, 0.0, 0.0

    def add(self, result: StepResult, step_s: float, wait_s: float) -> None:
        self._tokens += result.tokens
        self._flops += result.flops
        self._step_s += step_s
        self._wait_s += wait_s

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / max(self._step_s + self._wait_s, 1e-9)

    def read(self) -> dict[str, float]:
        """Of all ranks together, since the last call; memory: of this process."""
        seconds = max(self._step_s + self._wait_s, 1e-9)
        rates = {
            "tokens_per_s": self.tokens_per_s,
            "tflops": self._flops / seconds / 1e12,
            "data_wait": self._wait_s / seconds,
            "peak_rss_mb": peak_rss_mb(),
        }
        if self._peak:
            rates["mfu"] = self._flops / seconds / self._peak
        if torch.cuda.is_initialized():
            rates["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 1e6
        self._reset()
        return rates

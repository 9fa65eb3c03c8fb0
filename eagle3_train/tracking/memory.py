"""Metrics kept in memory, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_train.tracking.base import scalars


class MemoryTracker:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.final: dict[str, Any] = {}
        self.closed = False

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        assert not self.closed, "logged after close()"
        self.rows.append({"step": step, **scalars(metrics)})

    def summary(self, values: Mapping[str, Any]) -> None:
        self.final.update(values)

    def close(self) -> None:
        self.closed = True

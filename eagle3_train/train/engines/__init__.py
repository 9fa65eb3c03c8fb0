"""Engines: how one training step is spread over processes and devices."""

from __future__ import annotations

from eagle3_train.train.engines.base import Engine
from eagle3_train.train.engines.ddp import DDP

ENGINES: dict[str, type[Engine]] = {"single": Engine, "ddp": DDP}

__all__ = ["ENGINES", "Engine"]

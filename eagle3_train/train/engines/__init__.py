"""Engines: how one training step is spread over processes and devices."""

from __future__ import annotations

from eagle3_train.train.engines.base import Engine
from eagle3_train.train.engines.ddp import DDP
from eagle3_train.train.engines.fsdp2 import FSDP2

ENGINES: dict[str, type[Engine]] = {"single": Engine, "ddp": DDP, "fsdp2": FSDP2, "hsdp": FSDP2}

__all__ = ["ENGINES", "Engine"]

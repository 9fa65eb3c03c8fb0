"""Engines: how one training step is spread over processes and devices."""

from __future__ import annotations

import torch

from eagle3_train.config import EngineConfig, OptimConfig
from eagle3_train.drafts import Draft
from eagle3_train.train.distributed import World
from eagle3_train.train.engines.accelerate import Accelerate
from eagle3_train.train.engines.base import Engine
from eagle3_train.train.engines.ddp import DDP
from eagle3_train.train.engines.deepspeed import DeepSpeed
from eagle3_train.train.engines.fsdp2 import FSDP2, mesh_shape

ENGINES: dict[str, type[Engine]] = {
    "single": Engine,
    "ddp": DDP,
    "fsdp2": FSDP2,
    "hsdp": FSDP2,
    "deepspeed": DeepSpeed,
    "accelerate": Accelerate,
}


def check_engine(cfg: EngineConfig, world: World) -> None:
    """ValueError where hsdp's groups do not fit the processes: before the store is opened."""
    if cfg.kind == "hsdp" and world.size > 1:  # one alone is told by the engine that it needs several
        mesh_shape(cfg, world)


def make_engine(cfg: EngineConfig, head: Draft, optim: OptimConfig, world: World, dtype: torch.dtype) -> Engine:
    """The engine that `cfg.kind` asks for. ValueError where the processes do not fit it."""
    kind = cfg.kind if cfg.kind != "auto" else "single" if world.size == 1 else "ddp"
    return ENGINES[kind](cfg, head, optim, world, dtype)


__all__ = ["ENGINES", "Engine", "check_engine", "make_engine"]

"""Through Hugging Face Accelerate: it prepares, runs backward and clips, as its launcher's environment says.

`accelerate launch` chooses by environment variables between plain data parallel and FSDP. On CPUs Accelerate takes the
former whatever was chosen, and says nothing: here that is an error.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from torch import Tensor

from eagle3_train.config import EngineConfig, OptimConfig
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.train.distributed import World
from eagle3_train.train.engines.base import Engine
from eagle3_train.train.losses import Objective
from eagle3_train.train.optim import make_optimizer

PRECISION = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Accelerate(Engine):
    def __init__(self, cfg: EngineConfig, head: Draft, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.take(cfg, head, optim, world, dtype)
        self.needs_several()
        asked = _asked()
        if asked not in ("DDP", "FSDP"):
            way_out = "use engine=deepspeed" if asked == "DEEPSPEED" else "use engine=fsdp2"
            raise ValueError(f"engine=accelerate: `accelerate launch` asks for {asked}: {way_out}")
        from accelerate import Accelerator, DistributedDataParallelKwargs

        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            mixed_precision=PRECISION[dtype],
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        )
        self.module, prepared = self.accelerator.prepare(head, make_optimizer(optim, head.parameters()))
        self.optimizer = prepared.optimizer
        self._check(asked)
        # A rank's loss is its share of the global sum already; DDP and FSDP average over ranks: take that back.
        self.gradient_factor = float(world.size)

    def _check(self, asked: str) -> None:
        """ValueError where Accelerate did not do what its environment asks for."""
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
        from torch.nn.parallel import DistributedDataParallel

        kinds: dict[str, tuple[type, ...]] = {
            "DDP": (DistributedDataParallel,),
            "FSDP": (FSDPModule, FullyShardedDataParallel),
        }
        got = next((name for name, types in kinds.items() if isinstance(self.module, types)), "no distribution")
        if got != asked or self.accelerator.num_processes != self.world.size:
            raise ValueError(
                f"engine=accelerate: asked for {asked} on {self.world.size} processes, Accelerate gave {got} on "
                f"{self.accelerator.num_processes}"
                + (" (it shards on GPUs only: use engine=fsdp2)" if self.device.type == "cpu" else "")
            )
        half = self.accelerator.mixed_precision
        if half != PRECISION[self.dtype]:
            raise ValueError(
                f"engine=accelerate computes in mixed precision {half!r}, train.compute_dtype asks for "
                f"{PRECISION[self.dtype]!r}: leave --mixed_precision out"
            )

    def loss(self, batch: DraftBatch, objective: Objective) -> Tensor:
        return self.module(batch, objective)  # prepared: it sets its own autocast

    def backward(self, batch: DraftBatch, objective: Objective, last: bool) -> Tensor:
        with nullcontext() if last else self.accelerator.no_sync(self.module):
            loss = self.loss(batch, objective)
            self.accelerator.backward(loss * self.gradient_factor)
        return loss.detach()

    def clip(self) -> float:
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.optim.clip_norm)
        assert norm is not None
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _asked() -> str:
    """What `accelerate launch` put into the environment: DDP where nothing else is said."""
    for name in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG", "FSDP"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            return name
    return "DDP"

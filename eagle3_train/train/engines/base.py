"""What the loop asks of an engine. It knows nothing of draft heads; the loop knows nothing of parallelism."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from eagle3_train.config import EngineConfig, OptimConfig
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.train.distributed import World
from eagle3_train.train.losses import Objective
from eagle3_train.train.optim import make_optimizer

OptimizerState = dict[str, dict[str, Any]]  # parameter name -> {"step", "exp_avg", "exp_avg_sq"} -> tensor

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SHARDED = StateDictOptions(cpu_offload=True)


def outline_of(head: Draft) -> Draft:
    """The head without its weights: what knows its parameters and FLOPs, whatever becomes of the head."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in head.parameters()}
    return copy.deepcopy(head, empty | {id(buffer): buffer for buffer in head.buffers()})


class Engine:
    """One process, one device: the engine `single`, and the base of the others."""

    def __init__(self, cfg: EngineConfig, head: Draft, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.take(cfg, head, optim, world, dtype)
        self.module = self.wrap(head)
        self.optimizer = make_optimizer(optim, self.module.parameters())

    def take(self, cfg: EngineConfig, head: Draft, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        """Note what is given, and of the head what an engine that shards it makes unreadable: its sizes."""
        self.cfg, self.head, self.optim, self.world, self.dtype = cfg, head, optim, world, dtype
        self.device = next(head.parameters()).device
        self.shapes = {name: t.shape for name, t in head.state_dict().items()}
        self.outline = outline_of(head)
        self.gradient_factor = 1.0

    def wrap(self, head: Draft) -> nn.Module:
        if self.world.size > 1:
            raise ValueError(f"engine=single was started on {self.world.size} processes: use engine=ddp")
        return head

    def needs_several(self) -> None:
        """ValueError where an engine that divides the work is alone."""
        if self.world.size == 1:
            raise ValueError(
                f"engine={self.cfg.kind} needs several processes, and this is one: torchrun --nproc-per-node 2 -m "
                f"eagle3_train.train engine={self.cfg.kind} ..., or engine=single"
            )

    def loss(self, batch: DraftBatch, objective: Objective) -> Tensor:
        """Forward pass: this rank's part of the global loss. All ranks call it equally often."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.module(batch, objective)

    def backward(self, batch: DraftBatch, objective: Objective, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; gradients add up until `step`. `last`: of this step.

        Returns this rank's part of the global loss, detached.
        """
        loss = self.loss(batch, objective)
        (loss * self.gradient_factor).backward()
        return loss.detach()

    def step(self, lr: float) -> float:
        """Clip by the global norm, update, clear the gradients. Returns the norm before clipping, on all ranks.

        Where that is not finite the update is dropped: weights and optimizer state stay as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = self.clip()
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def clip(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.optim.clip_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def weights(self) -> dict[str, Tensor]:
        """Full fp32 weights on the host of rank 0, name -> tensor, perhaps the live ones; other ranks may get none.
        A collective."""
        weights: dict[str, Any] = get_model_state_dict(self.module, options=FULL)
        return weights

    def state(self) -> OptimizerState:
        """Optimizer state on the host, by parameter name, sharded (DTensor) where the engine shards it, perhaps the
        live tensors. All engines name it alike, so it loads under any engine and world size. A collective."""
        return self._optimizer_part("state")

    def load(self, weights: dict[str, Tensor], state: OptimizerState) -> None:
        """Inverse of `weights` (every rank has read them all) and `state` (as this engine shards it). A collective."""
        set_model_state_dict(self.module, dict(weights), options=FULL)
        parts: dict[str, Any] = {"state": state, "param_groups": self._optimizer_part("param_groups")}
        set_optimizer_state_dict(self.module, self.optimizer, parts, options=SHARDED)

    def _optimizer_part(self, part: str) -> Any:
        return get_optimizer_state_dict(self.module, self.optimizer, options=SHARDED)[part]

"""What the loop asks of an engine. It knows nothing of draft heads; the loop knows nothing of parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eagle3_train.config import OptimConfig
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.train.distributed import World
from eagle3_train.train.losses import Objective
from eagle3_train.train.optim import make_optimizer


class Engine:
    """One process, one device: the engine `single`, and the base of the others."""

    def __init__(self, head: Draft, optim: OptimConfig, world: World, dtype: torch.dtype) -> None:
        self.head, self.optim, self.world, self.dtype = head, optim, world, dtype
        self.device = next(head.parameters()).device
        self.gradient_factor = 1.0
        self.module = self.wrap(head)
        self.optimizer = make_optimizer(optim, self.module.parameters())

    def wrap(self, head: Draft) -> nn.Module:
        if self.world.size > 1:
            raise ValueError(f"engine=single was started on {self.world.size} processes: use engine=ddp")
        return head

    def backward(self, batch: DraftBatch, objective: Objective, last: bool) -> Tensor:
        """Forward and backward of one micro-batch; gradients add up until `step`. `last`: of this step.

        Returns this rank's part of the global loss, detached.
        """
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.module(batch, objective)
        (loss * self.gradient_factor).backward()
        return loss.detach()

    def step(self, lr: float) -> float:
        """Clip by the global norm, update, clear the gradients. Returns the norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.optim.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def weights(self) -> dict[str, Tensor]:
        """Full fp32 weights on the host."""
        return {name: p.detach().cpu() for name, p in self.head.named_parameters()}

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "rng": torch.get_rng_state()}

    def load(self, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.head.load_state_dict(weights, strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])

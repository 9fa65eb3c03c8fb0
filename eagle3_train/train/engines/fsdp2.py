"""Sharded data parallel through torch's `fully_shard` (FSDP2): fp32 masters over all ranks, compute in bf16 or fp32.

`hsdp` shards within groups of `engine.shard_size` ranks (a node) and replicates across groups, by a 2-D device mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from eagle3_train.config import EngineConfig
from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.train.distributed import World
from eagle3_train.train.engines.base import Engine
from eagle3_train.train.losses import Objective


def mesh_shape(cfg: EngineConfig, world: World) -> tuple[int, ...]:
    """(ranks,) for fsdp2; (groups, ranks a group) for hsdp. ValueError where the ranks do not divide."""
    if cfg.kind == "fsdp2":
        return (world.size,)
    if not cfg.shard_size or world.size % cfg.shard_size or not 1 < cfg.shard_size < world.size:
        raise ValueError(
            f"engine=hsdp with engine.shard_size={cfg.shard_size} on {world.size} processes: shard_size must be a "
            "proper divisor of their number (the ranks of a node); otherwise use engine=fsdp2 or engine=ddp"
        )
    return (world.size // cfg.shard_size, cfg.shard_size)


class FSDP2(Engine):
    def wrap(self, head: Draft) -> nn.Module:
        self.needs_several()
        # A rank's loss is its share of the global sum already; FSDP averages over ranks: take that back.
        self.gradient_factor = float(self.world.size)
        shape = mesh_shape(self.cfg, self.world)
        mesh = init_device_mesh(
            self.device.type, shape, mesh_dim_names=("shard",) if len(shape) == 1 else ("replicate", "shard")
        )
        half = self.dtype if self.dtype != torch.float32 else None
        # One unit: a draft head is one or a few layers, whose parts are called one by one.
        fully_shard(head, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32))
        register_fsdp_forward_method(head, "predict")
        if not all(isinstance(p, DTensor) for p in head.parameters()):
            raise RuntimeError(
                "fully_shard left parameters unsharded: this torch does not do what engine=fsdp2 asks for"
            )
        return head

    def backward(self, batch: DraftBatch, objective: Objective, last: bool) -> Tensor:
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(last)
        return super().backward(batch, objective, last)

    def loss(self, batch: DraftBatch, objective: Objective) -> Tensor:
        return self.module(batch, objective)  # the mixed-precision policy casts, not autocast

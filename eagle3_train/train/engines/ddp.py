"""Data parallel through torch's DistributedDataParallel: gloo on CPU, NCCL on GPUs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eagle3_train.drafts import Draft, DraftBatch
from eagle3_train.train.engines.base import Engine
from eagle3_train.train.losses import Objective


class DDP(Engine):
    def wrap(self, head: Draft) -> nn.Module:
        self.needs_several()
        # A rank's loss is its share of the global sum already; DDP averages over ranks: take that back.
        self.gradient_factor = float(self.world.size)
        devices = [self.device.index] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            # torch 2.13 deprecates the option; what it offers instead sends the frozen embedding from rank to rank.
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            return DistributedDataParallel(
                head, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def backward(self, batch: DraftBatch, objective: Objective, last: bool) -> Tensor:
        assert isinstance(self.module, DistributedDataParallel)
        with nullcontext() if last else self.module.no_sync():
            return super().backward(batch, objective, last)

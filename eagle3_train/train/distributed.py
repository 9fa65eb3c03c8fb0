"""Processes of one job: who am I, how many are we, sums over all of us."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among those that torchrun (or any launcher that sets RANK and WORLD_SIZE) started."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Elementwise sum over all processes, fp64 or int64, through host memory: small vectors only."""
        if self.size == 1:
            return values
        tensor = torch.from_numpy(values.copy())
        dist.all_reduce(tensor)
        return tensor.numpy()

    def barrier(self) -> None:
        """Wait for all; through host memory, so that no GPU is touched."""
        self.sum(np.zeros(1))


@contextmanager
def world_from_environment(device: torch.device) -> Iterator[World]:
    """Join the process group that the launcher's environment describes; leave it at the end."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Host tensors travel over gloo on GPU jobs too: counts and decisions never wait for a stream.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()

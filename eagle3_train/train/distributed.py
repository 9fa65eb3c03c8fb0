"""Processes of one job: who am I, how many are we, sums over all of us."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

T = TypeVar("T")


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

    def gather(self, value: T) -> list[T]:
        """Everyone's value, by rank, on every rank: small ones only, now and then."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all; through host memory, so that no GPU is touched."""
        self.sum(np.zeros(1))


@contextmanager
def world_from_environment(device: torch.device, timeout_minutes: float) -> Iterator[World]:
    """Join the process group that the launcher's environment describes; leave it at the end.

    A rank that dies closes its connections, which ends the others at once on gloo, and its launcher ends them all; the
    timeout is for one that hangs.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Host tensors travel over gloo on GPU jobs too: counts and decisions never wait for a stream.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    except Exception as e:
        _tell_torchrun(e)
        raise
    finally:
        dist.destroy_process_group()


def _tell_torchrun(error: Exception) -> None:
    """Leave the error where torchrun looks for it: its summary then shows the one that came first, with its rank. What
    the user got wrong has been said in a line, to which a traceback adds nothing."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not isinstance(error, ValueError):
        get_error_handler().record_exception(error)

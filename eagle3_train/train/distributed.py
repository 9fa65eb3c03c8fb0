"""Processes of one job: who am I, how many are we, sums over all of us."""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

T = TypeVar("T")
HOST = torch.device("cpu")
BEAT_S = 10.0  # between words of rank 0 to those that wait for it
LAST_WORD_S = 5.0  # a rank that others have left lives on: the launcher sees first who was the first to end
LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote (worker|process)")  # of gloo and NCCL


@dataclass(frozen=True)
class World:
    """This process among those that torchrun (or any launcher that sets RANK and WORLD_SIZE) started."""

    rank: int = 0
    size: int = 1
    beat_s: float = BEAT_S

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

    def on_main(self, action: Callable[[], T]) -> T:
        """What `action` gives on rank 0, which alone runs it, on every rank. A collective; `action` holds none.

        What the ranks must agree on, where each might see another state of a shared file system; and what takes long:
        the others wait as long as it takes, and no time limit of a collective ends them. What it raises is raised on
        every rank. Its value is pickled: small ones only.
        """
        if self.size == 1:
            return action()
        if not self.is_main:
            return self._hear_of_main()
        over = threading.Event()
        beat = threading.Thread(target=self._keep_waiting, args=(over,), name="beat", daemon=True)
        beat.start()
        value: Any = None
        error: Exception | None = None
        try:
            value = action()
        except Exception as e:
            error = e
        finally:
            over.set()
            beat.join()
        dist.broadcast(torch.ones(1, dtype=torch.int8), 0)
        dist.broadcast_object_list([value, _portable(error)], 0, device=HOST)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _keep_waiting(self, over: threading.Event) -> None:
        with suppress(RuntimeError):  # a rank is gone: the next collective says so, in the main thread
            while not over.wait(self.beat_s):
                dist.broadcast(torch.zeros(1, dtype=torch.int8), 0)

    def _hear_of_main(self) -> Any:
        is_over = torch.zeros(1, dtype=torch.int8)
        while not is_over:
            dist.broadcast(is_over, 0)
        heard: list[Any] = [None, None]
        dist.broadcast_object_list(heard, 0, device=HOST)
        value, error = heard
        if error is not None:
            raise error
        return value

    def share(self, tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """The fp32 host tensors of rank 0, on every rank; `tensors` of the others are not looked at. A collective."""
        if self.size == 1:
            return dict(tensors)
        shared = {n: tensors[n] if self.is_main else torch.empty(shape) for n, shape in sorted(shapes.items())}
        for tensor in shared.values():
            dist.broadcast(tensor, 0)
        return shared

    def barrier(self) -> None:
        """Wait for all; through host memory, so that no GPU is touched."""
        self.sum(np.zeros(1))


@contextmanager
def world_from_environment(device: torch.device, timeout_minutes: float) -> Iterator[World]:
    """Join the process group that the launcher's environment describes; leave it at the end.

    A rank that dies closes its connections, which ends the others on gloo, and its launcher ends them all; the timeout
    is for one that hangs.
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
    is_left = False
    try:
        yield World(dist.get_rank(), dist.get_world_size(), min(BEAT_S, 60 * timeout_minutes / 4))
    except Exception as e:
        is_left = isinstance(e, RuntimeError) and LOST.search(str(e)) is not None
        if not is_left:
            _tell_torchrun(e)
        raise
    finally:
        dist.destroy_process_group()
        if is_left:
            time.sleep(LAST_WORD_S)


def _portable(error: Exception | None) -> Exception | None:
    """An exception that another process can raise."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of a class that takes other arguments than it keeps
        return RuntimeError(f"on rank 0: {type(error).__name__}: {error}")
    return error


def _tell_torchrun(error: Exception) -> None:
    """Leave the error where torchrun looks for it: its summary then shows the one that came first, with its rank. What
    the user got wrong has been said in a line, to which a traceback adds nothing."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ and not isinstance(error, ValueError):
        get_error_handler().record_exception(error)

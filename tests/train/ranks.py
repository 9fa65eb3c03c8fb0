"""Several ranks of a training run as forked processes: what torchrun starts, without importing torch in each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
# What the server forks has run no autograd, which would not survive a fork.
_CONTEXT.set_forkserver_preload(["tests.train.preload"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start_ranks(size: int, work: Callable[..., Any], log: Path, *args: Any) -> list[ForkServerProcess]:
    """Start `work(*args)` on `size` ranks that find each other; what they print goes to `log`.<rank>."""
    port = free_port()
    processes = []
    for rank in range(size):
        env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        process = _CONTEXT.Process(target=_rank, args=(env, work, f"{log}.{rank}", args), daemon=True)
        process.start()
        processes.append(process)
    return processes


def run_ranks(size: int, work: Callable[..., Any], log: Path, *args: Any, code: int = 0) -> list[str]:
    """Run them to their end; every one must exit with `code`. Returns what each printed."""
    processes = start_ranks(size, work, log, *args)
    for process in processes:
        process.join(300)
        process.kill()
    logs = [Path(f"{log}.{rank}").read_text() for rank in range(size)]
    assert [process.exitcode for process in processes] == [code] * size, "\n".join(text[-3000:] for text in logs)
    return logs


def _rank(env: dict[str, Any], work: Callable[..., Any], log: str, args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in env.items()}
    with open(log, "ab", buffering=0) as f:
        os.dup2(f.fileno(), sys.stdout.fileno())
        os.dup2(f.fileno(), sys.stderr.fileno())
    import torch

    torch.set_num_threads(1)
    work(*args)


def train_tiny(folder: Path, keys: dict[str, Any]) -> None:
    from eagle3_train.train import train
    from tests.train.tiny_store import tiny_config

    train(tiny_config(folder, **keys))


def train_with_signal(folder: Path, keys: dict[str, Any], step: int, number: int, rank: int | None = None) -> None:
    """Train, and send this process a signal as step `step` (from 0, of this attempt) begins; on one rank, or on all."""
    import eagle3_train.train.loop as loop

    real, calls = loop.train_step, []

    def counted(*args: Any) -> Any:
        if len(calls) == step and rank in (None, int(os.environ["RANK"])):
            os.kill(os.getpid(), number)
        calls.append(1)
        return real(*args)

    loop.train_step = counted
    train_tiny(folder, keys)


def train_and_die(folder: Path, keys: dict[str, Any], step: int) -> None:
    train_with_signal(folder, keys, step, signal.SIGKILL)

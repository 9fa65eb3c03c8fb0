"""Several ranks of a training run as forked processes: what torchrun starts, without importing torch in each."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from eagle3_train.train import train
from tests.train.tiny_store import tiny_config

_CONTEXT = multiprocessing.get_context("forkserver")
# The server imports this module once; what it forks has run no autograd, which would not survive a fork.
_CONTEXT.set_forkserver_preload([__name__])


def start_ranks(size: int, work: Callable[..., Any], log: Path, *args: Any) -> list[ForkServerProcess]:
    """Start `work(*args)` on `size` ranks that find each other; what they print goes to `log`.<rank>."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for rank in range(size):
        env = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
        process = _CONTEXT.Process(target=_rank, args=(env, work, f"{log}.{rank}", args))
        process.start()
        processes.append(process)
    return processes


def run_ranks(size: int, work: Callable[..., Any], log: Path, *args: Any, code: int = 0) -> None:
    """Run them to their end; every one must exit with `code`."""
    processes = start_ranks(size, work, log, *args)
    for process in processes:
        process.join(300)
    codes = [process.exitcode for process in processes]
    if codes != [code] * size:
        for process in processes:
            process.kill()
        logs = [Path(f"{log}.{rank}").read_text()[-3000:] for rank in range(size)]
        raise AssertionError(f"exit codes {codes}\n" + "\n".join(logs))


def train_tiny(folder: Path, keys: dict[str, Any]) -> None:
    train(tiny_config(folder, **keys))


def _rank(env: dict[str, Any], work: Callable[..., Any], log: str, args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in env.items()}
    with open(log, "ab", buffering=0) as f:
        os.dup2(f.fileno(), sys.stdout.fileno())
        os.dup2(f.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    work(*args)

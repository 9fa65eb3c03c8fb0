"""Ranks on a file system that shows them different things, rank 0 for all, and what the others do meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train.exits import REQUEUE
from eagle3_train.store import Store, token_counts
from eagle3_train.store.reader import _Shard
from eagle3_train.train.distributed import World, world_from_environment
from eagle3_train.train.setup import build_head
from eagle3_train.train.validate import open_validation
from tests.train.conftest import NewOutputs
from tests.train.ranks import run_ranks, train_tiny, train_with_signal
from tests.train.results import losses, record
from tests.train.tiny_store import tiny_config

CPU = torch.device("cpu")


def see_nothing_in(hidden: Path) -> None:
    """As a node whose NFS client has looked into a folder before there was anything, and believes that still: listings
    and questions are answered from memory; a file that is opened by name is there."""

    def stale(name: str, answer: Any) -> None:
        real = getattr(Path, name)

        def asked(path: Path, *args: Any, **kwargs: Any) -> Any:
            return answer if path.is_relative_to(hidden) else real(path, *args, **kwargs)

        setattr(Path, name, asked)

    for name, answer in (("glob", []), ("exists", False), ("is_file", False)):
        stale(name, answer)


def train_with_an_old_view(folder: Path, keys: dict[str, Any]) -> None:
    """What rank 1 sees of the point is of before the first attempt, and it reads nothing that rank 0 can read."""
    import eagle3_train.train.checkpoint as checkpoint
    import eagle3_train.train.loop as loop

    if os.environ["RANK"] == "1":
        see_nothing_in(tiny_config(folder, **keys).point_dir)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("rank 1 reads what rank 0 reads for all")

        checkpoint.load_file = checkpoint.file_digest = loop.token_counts = refuse
        Store.require_whole = refuse
    train_tiny(folder, keys)


@pytest.mark.distributed
def test_ranks_that_see_the_folder_as_it_was_go_with_rank_0(outputs: NewOutputs) -> None:
    whole, cut = outputs("whole"), outputs("cut")
    keys = {"engine": "ddp", "train__epochs": 1}
    run_ranks(2, train_tiny, whole / "log", whole, keys)
    run_ranks(2, train_with_signal, cut / "log", cut, keys, 2, signal.SIGTERM, code=REQUEUE)
    logs = run_ranks(2, train_with_an_old_view, cut / "log", cut, keys)
    assert "continuing at step 3" in logs[0]
    assert losses(cut) == losses(whole)
    assert record(cut)["steps"] == 6
    logs = run_ranks(2, train_with_an_old_view, cut / "log", cut, keys)
    assert "trained already" in logs[0]


def test_the_masks_of_the_validation_store_are_looked_at_without_its_states(
    outputs: NewOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(outputs("masks"))
    store = Store.open(cfg.paths.store)
    head = build_head(cfg, store, CPU, token_counts(store))

    def refuse(*args: Any) -> None:
        raise AssertionError("states are read")

    monkeypatch.setattr(_Shard, "read_hidden", refuse)
    assert len(open_validation(cfg, head, store.spec, World())) == 6


class Odd(ValueError):
    """Takes other arguments than it keeps, and so does not travel."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"{name} is {number}")


def asked_of_rank_0() -> None:
    rank = int(os.environ["RANK"])
    with world_from_environment(CPU, timeout_minutes=0.1) as world:

        def slow() -> int:
            assert rank == 0
            time.sleep(10)  # longer than a collective may take
            return 7

        assert world.on_main(slow) == 7
        for error, words in ((ValueError("your mistake"), "your mistake"), (Odd("x", 3), "x is 3")):
            try:
                world.on_main(lambda error=error: (_ for _ in ()).throw(error))
            except (ValueError, RuntimeError) as e:
                print(f"{type(e).__name__}: {words in str(e)}")
        print(world.on_main(lambda: "goes on"))


@pytest.mark.distributed
def test_what_rank_0_does_alone_may_take_long_and_fails_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, asked_of_rank_0, tmp_path / "log")
    assert first.splitlines() == ["ValueError: True", "Odd: True", "goes on"]
    assert second.splitlines() == ["ValueError: True", "RuntimeError: True", "goes on"]


def leave_rank_1() -> None:
    with world_from_environment(CPU, timeout_minutes=1) as world:
        if world.is_main:
            raise ValueError("the log is damaged")
        try:
            world.barrier()
        finally:
            print(f"{time.time():.1f}")


@pytest.mark.distributed
def test_a_rank_that_others_have_left_lets_them_be_seen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    run_ranks(2, leave_rank_1, tmp_path / "log", code=1)
    left = float((tmp_path / "log.1").read_text().splitlines()[0])
    assert time.time() - left > 4
    assert not error_file.exists()  # neither the mistake nor its consequence is torchrun's to show


def test_a_rank_takes_its_gpu_or_is_told_that_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3_train.device import resolve_device

    def shown(gpus: int) -> Callable[[], int]:
        return lambda: gpus

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", shown(8))
    assert resolve_device("auto") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", shown(1))
    with pytest.raises(ValueError, match="sees 1 GPUs"):
        resolve_device("auto")

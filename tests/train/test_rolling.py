"""Capture and train at the same time on a tiny target: the finished store's weights, within the cap, under fire."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rolling import peak
from eagle3_train import config
from eagle3_train.config import Config
from eagle3_train.store import Rolling, RollingStore, Store, is_rolling
from eagle3_train.store.folder import Folder
from tests.capture.test_capture import study, write_chats
from tests.train.ranks import run_ranks
from tests.train.results import losses, newest, same

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.train.preload", "eagle3_train.capture.hf", "tests.capture.test_capture"])
TRAINING = (
    "corpus.sequences=48", "data.base_sequences=48", "capture.shards=24", "data.window=6", "draft.steps=2",
    "draft.vocab_size=100", "train.batch_tokens=160", "corpus.max_length=128", "train.epochs=2", "train.log_every=1",
    "train.checkpoint_every=null", "eval.tasks=[]", "store.row_group_mib=1", "capture.batch_tokens=1024",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Config:
    """A study with a finished store, and a point that is trained on it."""
    from eagle3_train.capture import capture
    from eagle3_train.corpus import prepare
    from eagle3_train.train import train

    folder = tmp_path_factory.mktemp("whole")
    write_chats(folder / "chats.json", 120)
    cfg = study(folder, tiny_target, *TRAINING)
    torch.set_num_threads(1)
    prepare(cfg)
    capture(cfg)
    train(cfg)
    return cfg


def rolling(whole: Config, folder: Path, *overrides: str, spare: float = 1.0) -> Config:
    """The same, with a rolling store that nobody has captured yet, and the least cap with which it ends."""
    from eagle3_train.capture import capture
    from eagle3_train.capture.passes import expected_runs, make_stream

    shared = (f"paths.corpus={whole.paths.corpus}", "store.mode=rolling", "store.cap_gib=1")
    cfg = study(folder, Path(whole.target.model), *TRAINING, *shared, *overrides)
    capture(cfg)
    assert is_rolling(cfg.paths.store)
    facts, finished = Rolling.read(Folder(cfg.paths.store)), Store.open(whole.paths.store)
    assert facts.fingerprint == finished.fingerprint
    least = make_stream(cfg, facts, finished.index.n_tokens, expected_runs(cfg)).least_cap()
    cfg.store.cap_gib = spare * least / 2**30
    config.save(cfg, resolved(cfg))
    return cfg


def resolved(cfg: Config) -> Path:
    return Path(cfg.paths.study) / "resolved.yaml"


def roll_resolved(path: Path, rank: int, world: int) -> None:
    from eagle3_train.capture import roll

    torch.set_num_threads(1)
    roll(config.load(path), rank, world)


def train_resolved(path: Path) -> None:
    from eagle3_train.train import train

    torch.set_num_threads(1)
    train(config.load(path))


def start(work: Callable[..., None], *args: Any) -> Any:
    process = PROCESSES.Process(target=work, args=args, daemon=True)
    process.start()
    return process


def start_workers(cfg: Config, world: int = 1) -> list[Any]:
    return [start(roll_resolved, resolved(cfg), rank, world) for rank in range(world)]


def end_well(processes: list[Any]) -> None:
    for process in processes:
        process.join(90)
        assert process.exitcode == 0


@contextmanager
def watched(cfg: Config) -> Iterator[list[int]]:
    """Bytes of the training states on disk, unfinished files too, looked at all the time; never above the cap."""
    with peak(Path(cfg.paths.store), every_s=0.002) as seen:
        yield seen
    assert cfg.store.cap_gib
    assert 0 < max(seen) <= cfg.store.cap_gib * 2**30


def weights(cfg: Config) -> dict[str, torch.Tensor]:
    return newest(cfg.point_dir).weights()


def assert_nothing_is_left(cfg: Config) -> None:
    assert not list(Path(cfg.paths.store).glob("*shard-*"))


@pytest.mark.parametrize("world", [1, 2])
def test_the_weights_are_those_of_the_finished_store_and_the_cap_holds(
    whole: Config, tmp_path: Path, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3_train.train import train

    cfg = rolling(whole, tmp_path)
    assert cfg.point_name == whole.point_name
    tell = RollingStore.saved

    def saved(store: RollingStore, step: int) -> None:
        assert newest(cfg.point_dir).step == step  # a shard goes for a checkpoint that is on disk
        tell(store, step)

    monkeypatch.setattr(RollingStore, "saved", saved)
    with watched(cfg) as seen:
        workers = start_workers(cfg, world)
        train(cfg)
        end_well(workers)
    assert same(weights(cfg), weights(whole))
    assert losses(cfg.point_dir) == losses(whole.point_dir)
    assert max(seen) < Store.open(whole.paths.store).manifest.bytes / 2
    assert_nothing_is_left(cfg)


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_of_several_ranks_too(whole: Config, tmp_path: Path, engine: str) -> None:
    target = Path(whole.target.model)
    there = (f"engine={engine}", f"paths.corpus={whole.paths.corpus}", f"paths.store={whole.paths.store}")
    finished = study(tmp_path / "finished", target, *TRAINING, *there)
    config.save(finished, resolved(finished))
    run_ranks(2, train_resolved, tmp_path / "finished" / "log", resolved(finished))
    cfg = rolling(whole, tmp_path, f"engine={engine}")
    with watched(cfg):
        workers = start_workers(cfg)
        run_ranks(2, train_resolved, tmp_path / "log", resolved(cfg))
        end_well(workers)
    assert same(weights(cfg), weights(finished))


def test_killed_at_twenty_random_moments_both_sides_go_on_and_the_weights_are_the_same(
    whole: Config, tmp_path: Path
) -> None:
    """Trainer and two workers are killed -9, one or all at a time, and started again as a launcher does."""
    cfg = rolling(whole, tmp_path, "train.epochs=6")
    moments, kills = random.Random(1), 0
    starts = {"trainer": (train_resolved, resolved(cfg))}
    starts |= {f"worker {rank}": (roll_resolved, resolved(cfg), rank, 2) for rank in range(2)}
    with watched(cfg):
        running = {name: start(*how) for name, how in starts.items()}
        deadline = time.monotonic() + 240
        while running["trainer"].exitcode != 0:
            assert time.monotonic() < deadline, {name: process.exitcode for name, process in running.items()}
            running["trainer"].join(moments.uniform(0.05, 2.0))
            if kills < 20:
                for name in moments.sample(sorted(running), moments.choice([1, 1, 1, 3])):
                    running[name].kill()
                    running[name].join()
                    kills += running[name].exitcode == -signal.SIGKILL
            for name, process in running.items():
                if process.exitcode not in (None, 0):
                    assert process.exitcode == -signal.SIGKILL
                    running[name] = start(*starts[name])
        for rank in range(2):
            if running[f"worker {rank}"].exitcode is None:
                end_well([running[f"worker {rank}"]])
    assert kills >= 20
    undisturbed = study(
        tmp_path / "undisturbed", Path(whole.target.model), *TRAINING, "train.epochs=6",
        f"paths.corpus={whole.paths.corpus}", f"paths.store={whole.paths.store}",
    )  # fmt: skip
    from eagle3_train.train import train

    train(undisturbed)
    assert same(weights(cfg), weights(undisturbed))
    assert_nothing_is_left(cfg)

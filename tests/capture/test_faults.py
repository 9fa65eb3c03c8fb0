"""`eagle3 capture` itself, by two workers that are killed again and again: what it leaves is the undisturbed store."""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import time
from pathlib import Path

from eagle3_train import config
from eagle3_train.capture import capture
from eagle3_train.config import Config
from eagle3_train.corpus import prepare
from eagle3_train.store import Store

from .test_capture import files, study, write_chats

# A fork of a process that has imported everything and run nothing: a worker starts in a moment.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__, "eagle3_train.capture.hf", "transformers.models.llama.modeling_llama"])
KILLS = 20


def work(resolved: Path, rank: int) -> None:
    capture(config.load(resolved), rank, world=2)


def workers(cfg: Config) -> list[multiprocessing.process.BaseProcess]:
    resolved = Path(cfg.paths.study) / "config.yaml"
    config.save(cfg, resolved)
    started = [PROCESSES.Process(target=work, args=(resolved, rank)) for rank in range(2)]
    for worker in started:
        worker.start()
    return started


def test_killed_at_twenty_random_moments_the_finished_store_is_the_undisturbed_one(
    tmp_path: Path, tiny_target: Path
) -> None:
    write_chats(tmp_path / "chats.json")
    shards = "capture.shards=10"
    cfg = study(tmp_path, tiny_target, shards)
    prepare(cfg)
    began = time.monotonic()
    for worker in workers(cfg):
        worker.join()
        assert worker.exitcode == 0
    whole = time.monotonic() - began
    expected = files(cfg.paths.store)
    killed = study(tmp_path, tiny_target, "study.name=killed", f"paths.corpus={cfg.paths.corpus}", shards)
    moments, kills, partial = random.Random(0), 0, 0
    while kills < KILLS:
        started = workers(killed)
        started[0].join(moments.uniform(0, whole))
        for worker in started:
            worker.kill()
            worker.join()
            kills += worker.exitcode == -signal.SIGKILL
        there = {name: data for name, data in files(killed.paths.store).items() if not name.endswith(".tmp")}
        assert all(data == expected[name] for name, data in there.items())
        partial += 0 < len(there) < len(expected)
        if len(there) == len(expected) and kills < KILLS:  # finished under fire: from the start again
            shutil.rmtree(killed.paths.store)
    assert partial > 3
    for worker in workers(killed):
        worker.join()
        assert worker.exitcode == 0
    assert files(killed.paths.store) == expected
    assert Store.open(killed.paths.store).verify() == []

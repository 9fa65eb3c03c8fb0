"""The loader: the plan's batches in order, errors where they belong, no thread and no memory left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from eagle3_train.store import BatchPlan, Loader, Store, shard_name
from eagle3_train.store import loader as loader_module
from eagle3_train.store.reader import _Shard

from .helpers import make_store


def make_plan(store: Store, **changes: object) -> BatchPlan:
    values = {"seed": 0, "batch_tokens": 400, "epochs": 3, **changes}
    return BatchPlan(store.index.n_tokens, store.fingerprint, **values)  # type: ignore[arg-type]


def loader_threads() -> int:
    return sum(t.name.startswith("store-") for t in threading.enumerate())


@pytest.mark.parametrize("readers", [1, 3])
def test_ranks_together_read_the_plans_batches_from_any_step(tmp_path: Path, readers: int) -> None:
    store = make_store(tmp_path)
    plan = make_plan(store)
    ids = store.index.sample_id.to_pylist()
    expected = [sorted(ids[row] for row in plan.batch(step)) for step in range(len(plan))]
    for world, start in ((1, 0), (2, 0), (3, 5), (4, len(plan))):
        found: list[list[str]] = [[] for _ in range(len(plan) - start)]
        for rank in range(world):
            with Loader(store, plan, rank, world, start, readers=readers) as loader:
                for step, sequences in loader:
                    rows = plan.rank_rows(step, rank, world)
                    assert [s.sample_id for s in sequences] == [ids[row] for row in rows]
                    found[step - start] += [s.sample_id for s in sequences]
        assert [sorted(f) for f in found] == expected[start:]
    assert loader_threads() == 0


def test_an_error_in_the_thread_reaches_the_consumer(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (tmp_path / shard_name(2, 4)).unlink()
    with pytest.raises(ValueError, match=r"shard-00002.* is missing"), Loader(store, make_plan(store)) as loader:
        for _ in loader:
            pass
    assert loader_threads() == 0
    with pytest.raises(StopIteration):
        next(loader)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_closing_early_ends_the_thread(tmp_path: Path, taken: int) -> None:
    store = make_store(tmp_path)
    loader = Loader(store, make_plan(store), prefetch=1)
    for _ in range(taken):
        next(loader)
    assert loader_threads() >= 1  # readers besides, once they had work
    loader.close()
    assert loader_threads() == 0
    assert loader.waited_s >= 0
    loader.close()


def test_a_plan_of_another_size_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    plan = BatchPlan(np.full(24, 5), store.fingerprint, 0, 100, epochs=1)
    with pytest.raises(ValueError, match="24 rows and the store holds 23"):
        Loader(store, plan)


READ_TEN_EPOCHS = """
import resource, sys
import torch
from eagle3_train.store import BatchPlan, Loader, Store
torch.set_num_threads(1)
store = Store.open(sys.argv[1])
plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 256, epochs=10)
def rss_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
for row in (0, 1): store[row]
peaks, before = [], rss_mib()
with Loader(store, plan) as loader:
    for step, sequences in loader:
        epoch = plan.state(step)["epoch"]
        peaks += [0.0] * (epoch + 1 - len(peaks))
        peaks[epoch] = max(peaks[epoch], rss_mib() - before)
print(store.manifest.bytes / 2**20, *peaks)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_small_while_a_large_store_is_read_ten_times(tmp_path: Path) -> None:
    make_store(tmp_path, max_tokens=200, hidden_size=512, n_rows=1200, n_shards=4, row_group_mib=8)
    run = subprocess.run(
        [sys.executable, "-c", READ_TEN_EPOCHS, str(tmp_path)], check=True, capture_output=True, text=True
    )
    size, *peaks = map(float, run.stdout.split())
    assert len(peaks) == 10
    # A batch of 256 tokens is 1 MiB; five are alive at most, and the allocator keeps some that were freed.
    cap = 45.0  # MiB above what the process has before it reads
    assert size > 10 * cap
    assert max(peaks) < cap
    assert max(peaks[5:]) < max(peaks[:5]) * 1.2 + 5


@pytest.mark.parametrize(("number", "times"), [(errno.EIO, 2), (errno.EIO, 9), (errno.ENOENT, 1)])
def test_a_server_that_is_away_for_a_moment_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, times: int
) -> None:
    monkeypatch.setattr(loader_module, "AGAIN_S", (0.01, 0.01, 0.01))
    store = make_store(tmp_path)
    plan = make_plan(store)
    with Loader(store, plan) as loader:
        expected = [[s.sample_id for s in sequences] for _, sequences in loader]
    real, failed, opened = _Shard.read_hidden, [], []

    def flaky(shard: _Shard, offset: int, into: memoryview) -> None:
        if len(failed) < times:
            failed.append(shard)
            raise OSError(number, os.strerror(number))
        opened.append(shard)
        real(shard, offset, into)

    monkeypatch.setattr(_Shard, "read_hidden", flaky)
    with Loader(store, plan, readers=1) as loader:
        if times == 2:
            assert [[s.sample_id for s in sequences] for _, sequences in loader] == expected
            assert not {id(shard) for shard in failed} & {id(shard) for shard in opened}  # handles may be stale
            assert "again in" in capsys.readouterr().out
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                next(loader)
            assert len(failed) == (4 if number == errno.EIO else 1)

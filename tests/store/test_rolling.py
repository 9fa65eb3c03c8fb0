"""A store whose shards come and go: what a reader sees, keeps open, and says; locally and over S3."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_train.store import (
    BatchPlan,
    Loader,
    RollingStore,
    ShardWriter,
    Store,
    inside,
    is_rolling,
    shard_name,
    shard_rows,
    token_counts,
)
from eagle3_train.store import rolling as rolling_module
from eagle3_train.store import signs as signs_module
from eagle3_train.store.folder import Folder
from eagle3_train.store.rolling import KEPT, kept_spec
from eagle3_train.store.signs import READERS, WORKERS, Sign, Watch, read_signs

from .helpers import WORKER_FACTS, announce, make_sequence, make_spec, make_store, of_worker, write_shard


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "disk" else request.getfixturevalue("uri")


def steps(store: Store, plan: BatchPlan) -> list[list[Any]]:
    with Loader(store, plan) as loader:
        return [sequences for _, sequences in loader]


def test_what_is_announced_is_what_the_finished_store_says(tmp_path: Path) -> None:
    spec = make_spec()
    announce(tmp_path / "rolling", spec)
    whole, store = make_store(tmp_path / "whole"), RollingStore.open(tmp_path / "rolling")
    assert store.fingerprint == whole.fingerprint
    assert len(store) == len(whole)
    assert (store.index.n_supervised == whole.index.n_supervised).all()
    assert (token_counts(store) == token_counts(whole)).all()
    assert is_rolling(tmp_path / "rolling")
    assert not is_rolling(tmp_path / "whole")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"dtype": "fp8"}, {"dtype": "fp32", "logsumexp": True}, {"hidden_size": 4, "n_rows": 400, "n_shards": 1},
        {"hidden_size": 256, "n_rows": 60, "n_shards": 2, "row_group_mib": 1},
    ],
)  # fmt: skip
def test_no_shard_is_larger_than_announced(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = make_spec(**changes)
    rolling = announce(tmp_path, spec)
    for shard, most in enumerate(rolling.shard_bytes):
        write_shard(tmp_path, spec, shard)
        assert (tmp_path / shard_name(shard, spec.n_shards)).stat().st_size <= most


def test_what_is_announced_is_no_waste_of_room(tmp_path: Path) -> None:
    spec = make_spec(hidden_size=4096, n_rows=500, n_shards=2)
    rolling = announce(tmp_path, spec)
    assert sum(rolling.shard_bytes) < 1.01 * spec.estimate_bytes(rolling.tokens)


def test_a_reader_waits_for_shards_and_gets_what_the_finished_store_gives(place: str, tmp_path: Path) -> None:
    spec, whole = make_spec(), make_store(tmp_path / "whole")
    announce(place, spec)
    store = RollingStore.open(place)
    plan = BatchPlan(whole.index.n_tokens, whole.fingerprint, 0, 400, epochs=1, window=6)
    store.follow("run", plan, 0, "", is_main=True)

    def capture() -> None:
        for shard in range(spec.n_shards):
            time.sleep(0.2)
            write_shard(place, spec, shard)

    worker = threading.Thread(target=capture)
    worker.start()
    found = steps(store, plan)
    worker.join()
    for ours, theirs in zip(found, steps(whole, plan), strict=True):
        assert [s.sample_id for s in ours] == [s.sample_id for s in theirs]
        assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(ours, theirs, strict=True))
    sign = read_signs(store.folder, READERS)["run"]
    assert (sign["mark"], sign["ended"]) == (0, False)
    store.saved(len(plan) - 1)
    assert read_signs(store.folder, READERS)["run"]["mark"] == 3
    store.finished("run", "")
    assert read_signs(store.folder, READERS)["run"]["ended"]


def test_what_is_behind_a_checkpoint_is_not_kept_open(tmp_path: Path) -> None:
    """A deleted file takes room on the disk as long as somebody has it open."""
    spec = make_spec()
    announce(tmp_path, spec)
    store = RollingStore.open(tmp_path)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 300, epochs=2, window=6)
    store.follow("run", plan, 0, "", is_main=False)
    for shard in range(spec.n_shards):
        write_shard(tmp_path, spec, shard)

    def open_shards() -> set[str]:
        found = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
        return {path.name[:11] for path in found if path.parent == tmp_path and path.name.startswith("shard")}

    saved = 0
    for step in range(len(plan)):
        if store.needs_checkpoint(saved, step):
            saved = step
            store.release(step)
            assert all(int(name[6:]) >= store._course.mark(step) % 4 for name in open_shards())  # type: ignore[union-attr]
        store.read_step(plan, step, 0, 1, None, lambda: False)
    assert saved
    assert open_shards()


def test_later_epochs_read_the_fp8_copies(tmp_path: Path) -> None:
    spec = make_spec(dtype="fp32")
    announce(tmp_path, spec)
    store = RollingStore.open(tmp_path, keeps_fp8=True)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 500, epochs=2)
    store.follow("run", plan, 0, "", is_main=False)
    for shard in range(spec.n_shards):
        write_shard(tmp_path, spec, shard)
        write_shard(inside(tmp_path, KEPT), kept_spec(spec), shard)
    seen: dict[str, list[torch.Tensor]] = {}
    for sequences in steps(store, plan):
        for s in sequences:
            assert s.hidden.dtype == torch.float32
            seen.setdefault(s.sample_id, []).append(s.hidden)
    for row in range(spec.n_rows):
        made = make_sequence(spec, row)
        first, second = seen[made.sample_id]
        assert torch.equal(first, made.hidden)
        assert not torch.equal(second, made.hidden)
        assert (second - made.hidden).norm() < 0.05 * made.hidden.norm()


def test_closing_ends_the_waiting(tmp_path: Path) -> None:
    announce(tmp_path, make_spec())
    store = RollingStore.open(tmp_path)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 400, epochs=1)
    store.follow("run", plan, 0, "", is_main=False)
    loader = Loader(store, plan)
    time.sleep(0.1)
    loader.close()
    assert not any(t.name == "store-loader" for t in threading.enumerate())


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes as fractions of a second."""
    for module, name, value in (
        (signs_module, "SILENT_S", 0.3), (signs_module, "BEAT_S", 0.05), (signs_module, "REPEAT_S", 0.4),
        (rolling_module, "LOOK_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def wait_for_shards(path: Path, limit_s: float) -> None:
    store = RollingStore.open(path, limit_minutes=limit_s / 60)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 400, epochs=1)
    store.follow("run", plan, 0, "", is_main=True)
    steps(store, plan)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (None, "capture worker 0 has not shown up"),
        ({"doing": "capturing shard 7"}, "has given no sign of life for 1s; its last: capturing shard 7"),
    ],
)
def test_a_side_that_is_silent_is_named_and_given_up_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker: dict[str, Any] | None, words: str
) -> None:
    announce(tmp_path, make_spec())
    if worker:
        sign = of_worker(host="h", pid=5, runs=["run"], **worker)
        Folder(tmp_path).child(WORKERS).write("0.json", json.dumps(sign).encode())
    with pytest.raises(TimeoutError, match=f"waiting for shard . for 1s: .*{words}.*eagle3 roll"):
        wait_for_shards(tmp_path, 0.9)
    assert "waiting for shard" in capsys.readouterr().out  # long before


@pytest.mark.usefixtures("hurried")
def test_a_run_for_which_nobody_captures_is_told_so(tmp_path: Path) -> None:
    announce(tmp_path, make_spec())
    sign = Sign(Folder(tmp_path), WORKERS, "0", **WORKER_FACTS | {"runs": ["x8-s0"]})
    try:
        with pytest.raises(ValueError, match=r"is captured for x8-s0, and not for run: .*eagle3 roll with the same"):
            wait_for_shards(tmp_path, 60)
        sign.say(runs=["x8-s0", "run"])
        # One that has ended meanwhile says nothing of who is served.
        threading.Timer(0.5, lambda: sign.close(ended=True, runs=[])).start()
        with pytest.raises(TimeoutError):
            wait_for_shards(tmp_path, 0.9)
    finally:
        sign.close(ended=True)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("session", "owner", "is_told"), [("", "a study", True), ("1-b", "1-b", True), ("1-b", "0-a", False)]
)
def test_a_worker_that_has_ended_is_named_at_once_with_how_to_start_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    session: str,
    owner: str,
    is_told: bool,
) -> None:
    """But for one of an earlier session, in whose place another is about to come."""
    monkeypatch.setattr(signs_module, "SILENT_S", 1e9)
    monkeypatch.setattr(signs_module, "REPEAT_S", 1e9)
    spec = make_spec()
    announce(tmp_path, spec)
    sign = of_worker(ended=True, doing="ended by KeyError", owner=owner)
    Folder(tmp_path).child(WORKERS).write("0.json", json.dumps(sign).encode())
    store = RollingStore.open(tmp_path)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 400, epochs=1)
    store.follow("run", plan, 0, session, is_main=True)
    threading.Timer(0.3, lambda: [write_shard(tmp_path, spec, shard) for shard in range(spec.n_shards)]).start()
    steps(store, plan)  # goes on when one captures
    said = " ".join(capsys.readouterr().out.split())
    words = (
        "capture worker 0 (process 1 on elsewhere) has ended, its last: ended by KeyError. Start the workers (eagle3"
    )
    assert (said.count(words) == 1) if is_told else (said == "")


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("session", "owner", "failed"), [("1-b", "1-b", True), ("1-b", "1-b", False), ("1-b", "0-a", True), ("", "x", True)]
)
def test_a_worker_that_has_failed_ends_the_waiting_of_its_session(
    tmp_path: Path, session: str, owner: str, failed: bool
) -> None:
    """One that a signal has ended is started again by its launcher, one of another session has a successor, and by hand
    anyone may start one."""
    announce(tmp_path, make_spec())
    sign = of_worker(ended=True, failed=failed, doing="ended: KeyError", owner=owner)
    Folder(tmp_path).child(WORKERS).write("0.json", json.dumps(sign).encode())
    store = RollingStore.open(tmp_path, 0.9 / 60)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 400, epochs=1)
    store.follow("run", plan, 0, session, is_main=True)
    ends = session == owner and failed
    words = r"a capture worker \(process 1 on elsewhere\) has failed, its last: ended: KeyError\. Start the workers"
    with pytest.raises(ValueError if ends else TimeoutError, match=words if ends else "waiting for shard"):
        steps(store, plan)


def test_a_shard_that_is_long_in_coming_is_asked_for_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own; a thousand ranks ask so."""
    announce(tmp_path, make_spec())
    store = RollingStore.open(tmp_path)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 400, epochs=1)
    store.follow("run", plan, 0, "", is_main=False)
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(rolling_module, "time", clock)
    with pytest.raises(rolling_module.Cancelled):
        store.read_step(plan, 0, 0, 1, None, lambda: sum(slept) > 60)
    assert max(slept[:5]) <= 0.1
    assert len(slept) < 120


def test_a_mark_that_cannot_be_written_now_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce(tmp_path, make_spec())
    store = RollingStore.open(tmp_path)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 400, epochs=1)
    store.follow("run", plan, 0, "", is_main=True)
    real = Folder.write

    def away(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Folder, "write", away)
    store.saved(len(plan))
    monkeypatch.setattr(Folder, "write", real)
    store.finished("run", "")  # as the next beat would
    assert read_signs(Folder(tmp_path), READERS)["run"]["mark"] > 0


@pytest.mark.usefixtures("hurried")
def test_one_that_lives_and_does_not_move_is_named_and_not_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch("run", 0.5, "remedy")
    sign = Sign(Folder(tmp_path), READERS, "slow", doing="at step 3", ended=False, session="", mark=0, step=3)
    watch.begin()
    until = time.monotonic() + 1.2
    while time.monotonic() < until:
        watch.look(read_signs(Folder(tmp_path), READERS), ["slow"], "waiting for room")
        time.sleep(0.05)
    sign.close()
    assert f"run slow (process {os.getpid()} on" in (out := capsys.readouterr().out)
    assert "is at step 3" in out.replace("\n", " ")


@pytest.mark.parametrize("name", ["index.parquet", "token-counts.json"])
def test_what_is_known_and_damaged_is_named_with_what_writes_it_anew(tmp_path: Path, name: str) -> None:
    announce(tmp_path, make_spec())
    for text in ("", '{"fingerprint": "of another"}', None):
        (tmp_path / name).write_text(text) if text is not None else (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} is missing or damaged: delete rolling\.json .* eagle3 capture"):
            RollingStore.open(tmp_path)
    (tmp_path / "rolling.json").unlink()
    announce(tmp_path, make_spec())
    RollingStore.open(tmp_path)


def test_a_cut_shard_is_named_with_what_repairs_it(tmp_path: Path) -> None:
    spec = make_spec()
    announce(tmp_path, spec)
    write_shard(tmp_path, spec, 1)
    os.truncate(tmp_path / shard_name(1, spec.n_shards), 1000)
    with pytest.raises(ValueError, match=r"shard-00001.* While eagle3 roll runs, it is enough to delete it"):
        RollingStore.open(tmp_path)._try_open(1)


def test_a_shard_of_other_rows_is_refused(tmp_path: Path) -> None:
    spec = make_spec()
    announce(tmp_path, spec)
    with ShardWriter(tmp_path, 1, spec) as writer:
        for row in shard_rows(spec.n_rows, spec.n_shards, 2):
            writer.add(make_sequence(spec, row))
            if writer.rows == writer.expected_rows:
                break
    with pytest.raises(ValueError, match=r"shard-00001.*does not hold the rows that were announced"):
        RollingStore.open(tmp_path)._try_open(1)

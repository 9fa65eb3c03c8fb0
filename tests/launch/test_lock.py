"""The lock: one holder at a time, crashes included, with nothing but files that processes create and touch."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import lock as lock_module
from launch.lock import Lock, holder_of

cancel_module = importlib.import_module("launch.cancel")  # the package has a function of that name


def python(code: str, *args: object) -> subprocess.Popen[str]:
    """A process of its own that runs `code` with `launch` importable."""
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


HOLD = """
    import sys, time
    from pathlib import Path
    from launch.lock import Lock
    Lock(Path(sys.argv[1])).acquire()
    print("held", flush=True)
    time.sleep(60)
"""


def hold_elsewhere(folder: Path) -> subprocess.Popen[str]:
    process = python(HOLD, folder)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert first.try_acquire()
    assert not second.try_acquire()
    holder = holder_of(tmp_path)
    assert holder
    assert holder.pid == os.getpid()
    first.release()
    assert holder_of(tmp_path) is None
    assert second.try_acquire()
    second.release()


def test_a_killed_holder_is_replaced_at_once(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    lock = Lock(tmp_path)
    assert not lock.try_acquire()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert holder_of(tmp_path) is None
    assert lock.try_acquire()
    lock.release()


def test_a_process_that_got_the_pid_of_a_dead_holder_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "_started", lambda pid: "1")  # same pid, another start: an earlier process
        assert Lock(tmp_path).try_acquire()
    assert Lock(tmp_path).try_acquire()


def test_a_holder_of_another_machine_is_replaced_only_when_it_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Lock(tmp_path, stale_after=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "_place", lambda: "another machine")
        there = Lock(tmp_path, stale_after=0.5)
        assert there.try_acquire()
    for _ in range(10):  # longer than stale_after: it is alive, so it keeps the lock
        assert not here.try_acquire()
        time.sleep(0.1)
    assert not there.lost.is_set()
    there._stop.set()  # it hangs: no more signs of life, and it does not release
    there._beat.join()  # type: ignore[union-attr]
    took = time.monotonic()
    while not here.try_acquire():
        time.sleep(0.05)
    assert time.monotonic() - took > 0.5
    # It comes to life again: it learns that it lost the lock, and its release does no harm.
    assert not there.lost.is_set()
    assert there.is_lost()  # whoever asks looks, before a thread does
    there.lost.clear()
    there._stop.clear()
    there._keep_alive()
    assert there.lost.is_set()
    there.release()
    assert not Lock(tmp_path, stale_after=60).try_acquire()
    here.release()


def test_clocks_of_machines_need_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_place", lambda: "another machine")
    there = Lock(tmp_path)
    assert there.try_acquire()
    monkeypatch.undo()
    (file,) = tmp_path.iterdir()
    os.utime(file, (0, 0))  # a server whose clock is decades behind
    assert not Lock(tmp_path).try_acquire()
    there.release()


def test_a_creator_that_died_before_writing_its_name_blocks_nobody_for_ever(tmp_path: Path) -> None:
    (tmp_path / "000001").touch()
    lock = Lock(tmp_path, stale_after=0.2)
    assert not lock.try_acquire()
    time.sleep(0.3)
    assert lock.try_acquire()
    lock.release()


def test_an_abandoned_lock_has_one_heir(tmp_path: Path) -> None:
    process = hold_elsewhere(tmp_path)
    process.kill()
    process.wait()
    heirs = [Lock(tmp_path) for _ in range(16)]
    barrier, won = threading.Barrier(len(heirs)), []

    def claim(lock: Lock) -> None:
        barrier.wait()
        won.append(lock.try_acquire())

    threads = [threading.Thread(target=claim, args=[lock]) for lock in heirs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(won) == 1


def test_a_slow_observer_of_an_old_generation_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, slow, real = Lock(tmp_path), Lock(tmp_path), Lock(tmp_path), lock_module._highest
    assert first.try_acquire()
    first.release()
    assert second.try_acquire()  # number 3; 1 and 2 are gone
    looks = [real, lambda folder: 0]  # it looked first when the folder was empty, and comes back only now
    monkeypatch.setattr(lock_module, "_highest", lambda folder: looks.pop()(folder))
    assert not slow.try_acquire()
    monkeypatch.undo()
    assert holder_of(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["000003"]
    second.release()


COUNT = """
    import sys, os, time, random
    from pathlib import Path
    from launch.lock import Lock
    folder, inside = Path(sys.argv[1]), Path(sys.argv[2])
    for _ in range(15):
        lock = Lock(folder)
        lock.acquire(poll=0.001)
        os.mkdir(inside)  # fails where another process is inside
        time.sleep(random.random() / 200)
        os.rmdir(inside)
        lock.release()
"""


def test_processes_exclude_each_other(tmp_path: Path) -> None:
    processes = [python(COUNT, tmp_path / "lock", tmp_path / "inside") for _ in range(4)]
    assert [p.wait() for p in processes] == [0] * 4
    assert len(list((tmp_path / "lock").iterdir())) == 1  # old generations are cleared away


def test_a_file_system_that_is_away_for_a_moment_costs_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = os.utime, []

    def flaky(path: Path) -> None:
        asked.append(path)
        if len(asked) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        real(path)

    monkeypatch.setattr(lock_module.os, "utime", flaky)
    lock = Lock(tmp_path, stale_after=0.9)
    assert lock.try_acquire()
    while len(asked) < 3:  # it goes on giving signs of life
        assert lock._beat
        assert lock._beat.is_alive()
        time.sleep(0.02)
    assert not lock.lost.is_set()
    lock.release()


def test_waiting_for_a_lock_has_an_end_where_it_is_given_one(tmp_path: Path) -> None:
    first, second = Lock(tmp_path), Lock(tmp_path)
    assert first.acquire()
    assert not second.acquire(poll=0.01, patience=0.05)
    first.release()
    assert second.acquire(poll=0.01, patience=0.05)
    second.release()


def test_a_word_that_cannot_be_read_now_cancels_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_module, "LOOK_EVERY_S", 0.0)
    cfg = SimpleNamespace(paths=SimpleNamespace(study=tmp_path))
    cancelled = cancel_module.Cancellation(cfg)  # type: ignore[arg-type]
    with monkeypatch.context() as m:
        m.setattr(Path, "read_text", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        assert cancelled() == ""
    cancel_module.cancel(tmp_path)
    assert cancelled() == "cancelled"

"""A lock in a folder that survives a crash of its holder and needs no help from the file system beyond O_EXCL.

The lock is a row of numbered files, its *generations*: `000001`, `000002`, ... The highest one says whether the lock is
free or who holds it. To take a free or an abandoned lock is to create the next number with O_EXCL, so exactly one taker
wins; to release it is to create the next number, saying "free". Numbers are never used twice: a slow observer of an old
generation cannot take anything by mistake. Older files are removed, the highest never.

The holder touches its file every few seconds. It counts as gone when its process is dead (seen from the same machine)
or when its file has not changed for `stale_after` seconds of the *observer's* clock, so clocks need not agree. `fcntl`
locks are not used: on network file systems they are often local, or held for ever by a machine that went down.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

STALE_AFTER_S = 90.0  # above the 60 s for which an NFS client may show old file times


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. `place` tells machines, boots and process namespaces apart; `started` tells processes apart
    that got the same pid one after the other."""

    host: str
    place: str
    pid: int
    started: str

    @property
    def is_dead(self) -> bool:
        """Known to be dead. False also where it cannot be known from here."""
        return self.place == _place() and _started(self.pid) != self.started


class Lock:
    """`with Lock(folder):` waits; `try_acquire` does not. One process may hold it, through one object."""

    def __init__(self, folder: Path, stale_after: float = STALE_AFTER_S) -> None:
        self.folder, self.stale_after = folder, stale_after
        self.lost = threading.Event()  # set where another process took the lock because we seemed gone
        self._generation = 0  # ours, while we hold the lock
        self._seen: tuple[int, int] = (0, 0)  # generation and mtime_ns at the last look, unchanged since:
        self._seen_since = 0.0
        self._looked = 0.0
        self._stop = threading.Event()
        self._beat: threading.Thread | None = None

    def try_acquire(self) -> bool:
        """Take the lock if it is free or abandoned. To find an abandoned one of another machine takes repeated calls
        over more than `stale_after` seconds."""
        assert not self._generation, "held already"
        self.folder.mkdir(parents=True, exist_ok=True)
        last = _highest(self.folder)
        if last and not self._is_takeable(last):
            return False
        mine = last + 1
        if not _create(self._path(mine), holder=True):
            return False
        if _highest(self.folder) != mine:  # we looked at an old generation: its successor is gone already
            self._path(mine).unlink(missing_ok=True)
            return False
        self._generation = mine
        self.lost.clear()
        self._looked = time.monotonic()
        self._stop.clear()
        for old in _generations(self.folder):
            if old < mine:
                self._path(old).unlink(missing_ok=True)
        self._beat = threading.Thread(target=self._keep_alive, daemon=True)
        self._beat.start()
        return True

    def is_lost(self) -> bool:
        """Whether another process has taken the lock that we hold. It looks where the last look is long ago: whoever
        was stopped, as by SIGSTOP or with its machine, learns it here before a thread would tell."""
        if not self.lost.is_set() and time.monotonic() - self._looked > self.stale_after / 3:
            with suppress(OSError):  # it cannot be known now: asked again with the next step
                self._look()
        return self.lost.is_set()

    def acquire(self, poll: float = 1.0, patience: float = math.inf) -> bool:
        """Wait for the lock; False where it is still another's after `patience` seconds."""
        deadline = time.monotonic() + patience
        while not self.try_acquire():
            time.sleep(poll)
            if time.monotonic() > deadline:
                return False
        return True

    def release(self) -> None:
        """Give the lock back. Nothing happens where another process has taken it over."""
        assert self._generation, "not held"
        assert self._beat
        self._stop.set()
        self._beat.join()
        if _create(self._path(self._generation + 1), holder=False):
            self._path(self._generation).unlink(missing_ok=True)
        self._generation, self._beat = 0, None

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _path(self, generation: int) -> Path:
        return self.folder / f"{generation:06d}"

    def _is_takeable(self, generation: int) -> bool:
        path = self._path(generation)
        try:
            changed = path.stat().st_mtime_ns
            text = path.read_text()
        except FileNotFoundError:  # removed since we looked: look again later
            return False
        if text == "free":
            return True
        holder = _parse(text)
        if holder and holder.is_dead:
            return True
        if self._seen != (generation, changed):
            self._seen, self._seen_since = (generation, changed), time.monotonic()
        return time.monotonic() - self._seen_since > self.stale_after

    def _keep_alive(self) -> None:
        while not self._stop.wait(self.stale_after / 9):
            with suppress(OSError):  # a server that is away for a moment: the next sign of life may come through
                self._look()
            if self.lost.is_set():
                return

    def _look(self) -> None:
        """Give a sign of life, and see whether the lock is still ours."""
        try:
            os.utime(self._path(self._generation))
            taken = _highest(self.folder) != self._generation
        except FileNotFoundError:
            taken = True
        self._looked = time.monotonic()
        if taken:
            self.lost.set()


def holder_of(folder: Path, stale_after: float = STALE_AFTER_S) -> Holder | None:
    """Who holds the lock now, from one look; for display. The age of a foreign holder's file is judged by our clock."""
    last = _highest(folder)
    path = folder / f"{last:06d}"
    try:
        age, text = time.time() - path.stat().st_mtime, path.read_text()
    except FileNotFoundError:
        return None
    holder = _parse(text)
    return None if holder is None or holder.is_dead or age > stale_after else holder


def _create(path: Path, holder: bool) -> bool:
    """Create a generation; False where it exists."""
    me = Holder(socket.gethostname(), _place(), os.getpid(), _started(os.getpid()))
    text = json.dumps(asdict(me)) if holder else "free"
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
    return True


def _parse(text: str) -> Holder | None:
    """None for "free", and for a file that its creator has not filled yet (or never will: then its age decides)."""
    try:
        return Holder(**json.loads(text))
    except (json.JSONDecodeError, TypeError):
        return None


def _generations(folder: Path) -> list[int]:
    return [int(p.name) for p in folder.glob("[0-9]" * 6)]


def _highest(folder: Path) -> int:
    return max(_generations(folder), default=0)


def _place() -> str:
    """Identity of the set of processes whose pids mean something here: machine, boot, pid namespace."""
    parts = [socket.gethostname()]
    try:
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:
        parts.append("no-proc")  # elsewhere than on Linux: the host name alone
    return "/".join(parts)


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; "" where it does not exist (or is a zombie), "?" where the
    system does not tell."""
    try:
        # The name, field 2, may hold spaces and brackets: what follows its last bracket is regular.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    except ProcessLookupError:
        return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "?"

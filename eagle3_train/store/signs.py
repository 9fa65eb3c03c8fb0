"""What the two sides of a rolling store tell each other: small files, each written whole by one process, read by all.

    readers/<run>.json    a training run: its mark (see `stream`), whether it has ended, what it does
    workers/<number>.json a capture worker: what it does, how long it has captured and waited

Nothing else is needed of a file system or an object store than that a file is written whole. No times are compared: a
process counts as silent where its file has not changed for a while by the *observer's* clock.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from eagle3_train.console import duration, say

from .folder import Folder

BEAT_S = 5.0  # between signs of life
SILENT_S = 40.0  # without one, a process is named; with BEAT_S and a look now and then, within a minute
REPEAT_S = 50.0  # the same for one that lives and does not move
READERS, WORKERS = "readers", "workers"
# What each side's file says, and in which JSON type: one with less is damaged.
COMMON: dict[str, Any] = {"host": str, "pid": int, "generation": int, "beat": int, "doing": str, "ended": bool}
KEYS: dict[str, dict[str, Any]] = {
    READERS: {**COMMON, "session": str, "mark": int, "step": int},
    WORKERS: {**COMMON, "owner": str, "world": int, "runs": list, "claim": int | None},
}


class Sign:
    """A process's own file, written anew every few seconds by a thread, and at once by `say`.

    Facts change by `note`. `close` writes a last time and ends the thread; a sign that is never closed ends with its
    process, which is how others notice. The file of a process that has taken the name is left as it is.
    """

    def __init__(self, folder: Folder, kind: str, name: str, **facts: Any) -> None:
        self._folder, self._kind, self._name = folder, kind, name
        self._generation = 1 + self._newest_generation()
        who = {"host": socket.gethostname(), "pid": os.getpid(), "generation": self._generation}
        self._facts: dict[str, Any] = {**who, "beat": 0, **facts}
        self._changing = threading.Lock()  # of the facts: several threads of a run have something to say
        self._writing, self._ended = threading.Lock(), threading.Event()
        self.say()
        self._thread = threading.Thread(target=self._beat, name="sign-of-life", daemon=True)
        self._thread.start()

    def note(self, **facts: Any) -> None:
        """To be said with the next beat."""
        with self._changing:
            self._facts.update(facts)

    def say(self, **facts: Any) -> None:
        with self._writing:
            with self._changing:
                self._facts.update(facts, beat=self._facts["beat"] + 1)
                text = json.dumps(self._facts)
            if self.is_replaced():
                return
            self._folder.child(self._kind).write(f"{self._name}.json", text.encode())

    def close(self, **facts: Any) -> None:
        self._ended.set()
        self._thread.join()
        self.say(**facts)

    def is_replaced(self) -> bool:
        """Whether a later process has the name now: this one had seemed dead."""
        return self._newest_generation() > self._generation

    def _newest_generation(self) -> int:
        """Of the processes that have had the name, one after the other; 0 where none is known."""
        with suppress(_Damaged):
            there = _read(self._folder, self._kind, self._name)
            return there["generation"] if there else 0
        return 0

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):  # a full disk, a server that is away: the next one may come through
                self.say()


def read_sign(folder: Folder, kind: str, name: str) -> dict[str, Any] | None:
    """What the file of `name` says; None where there is none.

    Raises:
        ValueError: it is damaged, and its process, if it lives, does not write it anew.
    """
    for _ in range(3):
        with suppress(_Damaged):
            return _read(folder, kind, name)
        time.sleep(BEAT_S)
    where = folder.child(kind).show(f"{name}.json")
    raise ValueError(
        f"{where} is damaged: delete it; the process that it is of writes it anew when it is started again"
    )


def read_signs(folder: Folder, kind: str) -> dict[str, dict[str, Any]]:
    """Name -> what its file says, of all that can be read."""
    found = {}
    for file in folder.child(kind).sizes():
        if file.endswith(".json") and not file.startswith("."):
            name = file.removesuffix(".json")
            with suppress(_Damaged):
                if (sign := _read(folder, kind, name)) is not None:
                    found[name] = sign
    return found


class _Damaged(Exception):
    pass


def _read(folder: Folder, kind: str, name: str) -> dict[str, Any] | None:
    try:
        sign = json.loads(folder.child(kind).read(f"{name}.json"))
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise _Damaged from e
    except OSError as e:
        if e.errno == errno.ESTALE:  # NFS: replaced while it was read
            raise _Damaged from e
        raise
    if not isinstance(sign, dict) or not all(k in sign and isinstance(sign[k], t) for k, t in KEYS[kind].items()):
        raise _Damaged
    return sign


def living(folder: Folder, kind: str, names: Sequence[str]) -> list[str]:
    """Those of `names` whose processes live. A dead one of this machine is known at once; for others it takes a while,
    in which a living one gives a sign."""
    first = read_signs(folder, kind)
    unknown = {name: first[name]["beat"] for name in names if name in first and not _is_dead(first[name])}
    deadline = time.monotonic() + 3 * BEAT_S
    found: set[str] = set()
    while unknown.keys() - found and time.monotonic() < deadline:
        time.sleep(BEAT_S / 10)
        now = read_signs(folder, kind)
        found = {name for name, beat in unknown.items() if name in now and now[name]["beat"] != beat}
    return sorted(found)


def _is_dead(sign: Mapping[str, Any]) -> bool:
    """Known to be dead: ended by its own word, or no process of this machine."""
    if sign["ended"]:
        return True
    if sign["host"] != socket.gethostname():
        return False
    try:
        os.kill(sign["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@dataclass
class Watch:
    """Looks at the signs of the other side while this one waits for it; names who is silent, and gives up in the end.

    `noun`: what they are called. `limit_s`: seconds of silence of those without whom it does not go on.
    """

    noun: str
    limit_s: float
    remedy: str  # what to do about one that is silent
    quiet: bool = False  # of several ranks, one prints
    _seen: dict[str, tuple[Any, float]] = field(default_factory=dict)  # beat, and when it was first seen
    _named: set[str] = field(default_factory=set)
    _since: float = 0.0
    _said: float = 0.0

    def begin(self) -> None:
        """The waiting begins."""
        self._since = self._said = time.monotonic()
        self._named = set()

    def look(
        self, signs: Mapping[str, Mapping[str, Any]], needed: Sequence[str], what: str, gone: Collection[str] = ()
    ) -> None:
        """Once in a while during the waiting. TimeoutError where one of `needed` has been silent for too long.

        gone: those of `needed` that have ended by their own word, and are named at once.
        """
        now = time.monotonic()
        for name in needed:
            beat = signs[name]["beat"] if name in signs else None
            if name not in self._seen or self._seen[name][0] != beat:
                self._seen[name] = (beat, now)
        silent = {name: now - max(self._seen[name][1], self._since) for name in needed}
        silent = {name: seconds for name, seconds in silent.items() if seconds > SILENT_S}
        to_name = {*silent, *gone}
        if to_name <= self._named and now - self._said < REPEAT_S:
            return
        lines = [self._describe(name, signs.get(name), silent.get(name), name in gone) for name in needed]
        text = f"{what} for {duration(now - self._since)}: {'; '.join(lines)}"
        if silent and max(silent.values()) > self.limit_s:
            raise TimeoutError(f"{text}. {self.remedy}")
        self._named, self._said = self._named | to_name, now
        if not self.quiet:
            say(f"{text}. {self.remedy}" if gone else text)

    def describe_failed(self, sign: Mapping[str, Any]) -> str:
        return f"a {self.noun} (process {sign['pid']} on {sign['host']}) has failed, its last: {sign['doing']}"

    def _describe(self, name: str, sign: Mapping[str, Any] | None, silent_s: float | None, is_gone: bool) -> str:
        if sign is None:
            return f"{self.noun} {name} has not shown up"
        who = f"{self.noun} {name} (process {sign['pid']} on {sign['host']})"
        if is_gone:
            return f"{who} has ended, its last: {sign['doing']}"
        if silent_s is not None:
            return f"{who} has given no sign of life for {duration(silent_s)}; its last: {sign['doing']}"
        return f"{who} is {sign['doing']}"

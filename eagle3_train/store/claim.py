"""Whose a store is, from before its first shard on: the first capture writes down its spec, every other compares.

On a disk the file is created by one step that fails where it is there already, and captures that run hold a lock on it,
by which a later one knows whether they live. An object store has neither: see `claim`.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from eagle3_train.files import parse_object

from .folder import Folder
from .schema import MAY_DIFFER, StoreSpec

NAME = "claim.json"
SETTLE_S = 1.0  # in an object store: until what was written at the same time can be read by all
PATIENCE_S = 2.0  # with a lock that another one holds for a moment while it takes a dead claim over


@contextmanager
def claim(path: str | Path, spec: StoreSpec, expect_free: Callable[[], object]) -> Iterator[None]:
    """Hold the store at `path` for captures of `spec`, which share it, while the block runs; the file stays behind.

    The claim of captures that have all ended, killed or not, is taken over, unless `expect_free` raises: it looks
    whether they have left anything of another spec. Where locks do not tell who lives (an object store, some network
    disks) it is refused, and the message says what to delete. In an object store the later of two that claim within
    `SETTLE_S` wins; one that loses only then is stopped by `expect_claim`, before its next shard.

    Raises:
        ValueError: another spec has the store, or the file is damaged.
    """
    folder = Folder(path)
    if not folder.is_local:
        if _create(folder, spec):
            time.sleep(SETTLE_S)
        expect_claim(path, spec)
        yield
        return
    with _hold(folder, spec, expect_free):
        yield


def expect_claim(path: str | Path, spec: StoreSpec) -> None:
    """ValueError where the store at `path` is claimed for another spec: one small read. A store that an earlier version
    began has no claim, which is none for another."""
    folder = Folder(path)
    with suppress(FileNotFoundError):
        if differences := _differences(folder, folder.read(NAME), spec):
            raise ValueError(_refusal(folder, differences, is_alive=False))


def _create(folder: Folder, spec: StoreSpec) -> bool:
    """Whether there was none."""
    if NAME in folder.sizes():
        return False
    try:
        folder.write(NAME, (json.dumps(spec.to_json(), indent=1, sort_keys=True) + "\n").encode(), exclusive=True)
    except FileExistsError:
        return False
    return True


def _hold(folder: Folder, spec: StoreSpec, expect_free: Callable[[], object]) -> ExitStack:
    """What keeps the claim's file open, and locked, until it is closed."""
    path, deadline = folder.path(NAME), time.monotonic() + PATIENCE_S
    while True:
        _create(folder, spec)
        with ExitStack() as opened:
            try:
                file = opened.enter_context(open(path, "rb"))
            except FileNotFoundError:  # taken over just now
                continue
            differences = _differences(folder, file.read(), spec)
            got = _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if differences else fcntl.LOCK_SH)
            if _is_at(file, path):
                if not differences:
                    return opened.pop_all()
                if got:
                    expect_free()
                    os.unlink(path)
                elif got is None or time.monotonic() > deadline:
                    raise ValueError(_refusal(folder, differences, is_alive=got is False))
        time.sleep(PATIENCE_S / 20)


def _lock(file: BinaryIO, how: int) -> bool | None:
    """Whether it was got; None: this file system has no locks."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(file: BinaryIO, path: str) -> bool:
    """Whether the open file is the one that has the name now."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def _differences(folder: Folder, data: bytes, spec: StoreSpec) -> list[str]:
    """Between what a claim says and `spec`."""
    where, way_out = folder.show(NAME), "delete it and run eagle3 capture again, which writes it"
    value = parse_object(data, where, way_out)
    try:
        return StoreSpec.from_json(value, where).differences(spec, MAY_DIFFER)
    except (KeyError, TypeError) as e:
        raise ValueError(f"{where} is damaged ({e!r}): {way_out}") from e


def _refusal(folder: Folder, differences: list[str], is_alive: bool) -> str:
    dead = "" if is_alive else f". If no capture of that configuration runs any more, delete {folder.show(NAME)}"
    return (
        f"another capture writes into {folder.uri}, with another configuration ({'; '.join(differences)}). Take "
        f"another folder for this one, with paths.store=FOLDER (or study.name=NAME), or that configuration{dead}"
    )

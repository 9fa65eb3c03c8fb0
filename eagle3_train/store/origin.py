"""The configuration that a store was captured under, beside it: training compares its own before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3_train.files import parse_object

from .folder import Folder
from .reader import Store

NAME = "origin.json"


def write_origin(path: str | Path, identity: dict[str, Any]) -> None:
    """Keep what the rows of the store at `path` depend on, key by key (`Config.data_identity`)."""
    Folder(path).write(NAME, (json.dumps(identity, indent=1, sort_keys=True) + "\n").encode())


def read_origin(store: Store) -> dict[str, Any]:
    """What `write_origin` wrote; nothing of a store that came without it. ValueError where it is damaged."""
    if NAME not in store.folder.sizes():
        return {}
    remedy = "run eagle3 capture again, which writes it and captures nothing twice"
    return parse_object(store.folder.read(NAME), store.folder.show(NAME), remedy)


def expect_origin(store: Store, identity: dict[str, Any]) -> None:
    """ValueError that names each key in which `identity` differs from what the store was captured under.

    A store that came without the file (captured elsewhere) is checked by its manifest alone.
    """
    found = read_origin(store)
    if not found:
        return
    wanted = json.loads(json.dumps(identity))
    differences = [f"{k}={found.get(k)!r}, now {wanted.get(k)!r}" for k in wanted if found.get(k) != wanted.get(k)]
    if differences:
        raise ValueError(
            f"store {store.folder.uri} was captured with {'; '.join(differences)}: restore these values, or run eagle3 "
            "prepare and eagle3 capture with the new ones into another folder (paths.store, or study.name)"
        )

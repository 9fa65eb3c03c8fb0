"""The configuration that a store was captured under, beside it: training compares its own before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3_train.config import differences
from eagle3_train.files import parse_object

from .folder import Folder

NAME = "origin.json"


def write_origin(path: str | Path, identity: dict[str, Any], keep: bool = False) -> None:
    """Write down what the rows of the store at `path` depend on, key by key (`Config.data_identity`); `keep`: where
    there is such a file, it stays."""
    folder = Folder(path)
    if not keep or NAME not in folder.sizes():
        folder.write(NAME, (json.dumps(identity, indent=1, sort_keys=True) + "\n").encode())


def read_origin(folder: Folder) -> dict[str, Any]:
    """What `write_origin` wrote; nothing of a store that came without it. ValueError where it is damaged."""
    if NAME not in folder.sizes():
        return {}
    remedy = "run eagle3 capture again, which writes it and captures nothing twice"
    return parse_object(folder.read(NAME), folder.show(NAME), remedy)


def expect_origin(path: str | Path, identity: dict[str, Any]) -> None:
    """ValueError that names each key in which `identity` differs from what the store at `path` was captured under.

    A store that came without the file (captured elsewhere) is checked by its manifest alone.
    """
    folder = Folder(path)
    found = read_origin(folder)
    if found and (changed := differences(found, identity)):
        raise ValueError(
            f"store {folder.uri} was captured with {'; '.join(changed.values())}: restore these values, or run eagle3 "
            "prepare and eagle3 capture with the new ones into another folder (paths.store, or study.name)"
        )

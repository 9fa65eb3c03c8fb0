"""Which rows the stores of a study were captured from, so that a corpus that no longer fits them is named in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle3_train.config import Config
from eagle3_train.corpus import in_words
from eagle3_train.store import StoreSpec, inside, read_origin, shard_number, spec_at
from eagle3_train.store.folder import Folder
from eagle3_train.store.writer import read_spec


def captured_rows(cfg: Config) -> dict[str, tuple[str, str]]:
    """Of each part of the corpus that was captured, wholly or not: its store, and the content of its rows (of the
    corpus's report)."""
    places = {"train": cfg.paths.store, "validation": inside(cfg.paths.store, "validation")}
    places |= {f"tasks/{t.name}": inside(cfg.paths.store, f"transcripts/{t.name}") for t in cfg.eval.tasks}
    specs = {part: (path, _spec(path)) for part, path in places.items()}
    return {part: (path, spec.config["rows"]) for part, (path, spec) in specs.items() if spec and "rows" in spec.config}


def expect_same_rows(cfg: Config, path: str, wanted: StoreSpec) -> None:
    """ValueError where the store at `path`, one of the study's, was captured from other rows than the corpus holds."""
    found = _spec(path)
    if found is None or found.config.get("rows") in (None, wanted.config["rows"]):
        return
    since = in_words(*_keys_then_and_now(cfg))
    raise ValueError(
        f"the store {path} was captured from other rows than the corpus {cfg.paths.corpus} holds now"
        f"{f' (since then: {since})' if since else ''}: corpus keys and evaluation tasks decide which rows are trained "
        "on. Restore them and run `eagle3 prepare`; or keep this store and capture another one with study.name=NAME "
        f"(or paths.store=FOLDER); or remove it: rm -r {path}"
    )


def _spec(path: str) -> StoreSpec | None:
    """Of a store in any state; None where nothing was captured."""
    try:
        return spec_at(path)
    except ValueError:  # no manifest: nothing is there, or not all of it
        folder = Folder(path)
        shard = next((name for name in sorted(folder.sizes()) if shard_number(name) is not None), None)
        return read_spec(folder, shard) if shard else None


def _keys_then_and_now(cfg: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is known of the configuration that the training store was captured under, and the same of this one."""
    then = read_origin(Folder(cfg.paths.store))
    now: dict[str, Any] = json.loads(json.dumps(cfg.data_identity)) if then else {}
    tasks = Path(cfg.paths.store) / "transcripts"
    if tasks.is_dir():  # of an object store they are not listed
        then |= {f"eval.tasks.{folder.name}": None for folder in tasks.iterdir() if folder.is_dir()}
        now |= {f"eval.tasks.{task.name}": None for task in cfg.eval.tasks}
    return then, now

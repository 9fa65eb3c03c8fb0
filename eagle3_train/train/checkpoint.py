"""Checkpoints: a folder a step, written aside and renamed, so that a folder with the final name is whole."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_train.files import read_json, temporary_path, write_json

_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """`head.safetensors` (fp32 weights), `engine.pt` (optimizer and RNG state), `state.json` (step, data position)."""

    path: Path

    @property
    def step(self) -> int:
        match = _NAME.fullmatch(self.path.name)
        assert match
        return int(match[1])

    @property
    def state(self) -> dict[str, Any]:
        return read_json(self.path / "state.json")

    def weights(self) -> dict[str, Tensor]:
        with self._named():
            return load_file(self.path / "head.safetensors")

    def engine_state(self) -> dict[str, Any]:
        with self._named():
            return torch.load(self.path / "engine.pt", map_location="cpu", weights_only=True)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever a damaged file makes its reader raise, as an error that names the checkpoint and the way out."""
        try:
            yield
        except Exception as e:
            raise ValueError(
                f"checkpoint {self.path} is damaged ({type(e).__name__}: {e}): delete that folder, and train.json "
                "beside checkpoints/ if it is there; training continues from the checkpoint before it"
            ) from e


def newest(folder: Path) -> Checkpoint | None:
    """The whole checkpoint of the latest step. Half-written ones have other names and are not seen."""
    found = [p for p in folder.glob("step-*") if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return Checkpoint(max(found)) if found else None


def save(
    folder: Path, weights: dict[str, Tensor], engine_state: dict[str, Any], state: dict[str, Any], keep_last: int
) -> Checkpoint:
    """Write the checkpoint of `state["step"]` and drop all but the last `keep_last`."""
    final = folder / f"step-{state['step']:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    save_file({k: v.contiguous() for k, v in weights.items()}, temporary / "head.safetensors")
    torch.save(engine_state, temporary / "engine.pt")
    write_json(temporary / "state.json", state)
    for path in (temporary / "head.safetensors", temporary / "engine.pt", temporary):
        _sync(path)
    if final.exists():  # of an earlier attempt, at the same step: the same content
        shutil.rmtree(final)
    temporary.rename(final)
    _sync(folder)
    for old in sorted(p for p in folder.glob("step-*") if _NAME.fullmatch(p.name))[:-keep_last]:
        shutil.rmtree(old)
    return Checkpoint(final)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What a run left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_train.train import checkpoint


def point(folder: Path) -> Path:
    """The point's folder, of an outputs folder with one point or of its own."""
    found = [p.parent for p in folder.glob("tiny/*/config.yaml")]
    return found[0] if found else folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (point(folder) / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder) if "loss" in row]


def record(folder: Path) -> dict[str, Any]:
    return json.loads((point(folder) / "train.json").read_text())


def newest(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.newest(point(folder) / "checkpoints")
    assert found
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """To the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

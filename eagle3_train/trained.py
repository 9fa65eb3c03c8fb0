"""What a point's folder says of its training, from names and one small file. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from eagle3_train.config import Config, digest
from eagle3_train.files import read_object

RECORD = "train.json"
CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-(\d{8})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder of checkpoints, ascending. Half-written ones have other names."""
    return sorted(int(m[1]) for p in folder.glob("step-*") if (m := _NAME.fullmatch(p.name)))


def is_trained(cfg: Config) -> bool:
    """Whether training would find nothing to do: the record of this very point, with the weights of its last step. What
    checkpoints that were removed held is trained anew; a head that has nothing to train has none.

    ValueError where the record is damaged.
    """
    try:
        found = read_object(cfg.point_dir / RECORD)
    except FileNotFoundError:
        return False
    last = max(checkpoint_steps(cfg.point_dir / CHECKPOINTS), default=0)
    return (found.get("train_identity"), found.get("steps")) == (digest(cfg.point_identity), last)

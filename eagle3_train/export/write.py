"""Write a draft head as a folder that engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle3_train.drafts import Eagle3
from eagle3_train.export.card import model_card
from eagle3_train.export.layout import HeadSource, configuration, format_of, tensors
from eagle3_train.files import new_folder, write_json, write_text
from eagle3_train.tensors import save_tensors

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"


def export_head(
    source: HeadSource, folder: Path, format: str, dtype: torch.dtype, result: dict[str, Any] | None = None
) -> Path:
    """Write `folder` whole: config.json, model.safetensors, README.md. One that an earlier export wrote is replaced.

    Args:
        format: speculators | eagle | medusa | auto (docs/export.md).
        dtype: of the weights.
        result: the point's `train.json` or `result.json`, for the model card.

    Raises:
        ValueError: the format does not fit the head, or `folder` holds something else than an exported head.
    """
    format = format_of(source.head, format)
    if format == "eagle" and isinstance(source.head, Eagle3) and len(source.head.layers) > 1:
        raise ValueError(
            f"export.format=eagle has a place for one layer, the head has {len(source.head.layers)}: use "
            "export.format=speculators"
        )
    if folder.exists() and not _is_head(folder):
        raise ValueError(f"export.path={folder} is there and is no exported head: give another path, or remove it")
    config = configuration(source, format, dtype)
    with new_folder(folder) as aside:
        save_tensors(tensors(source, format, dtype), aside / WEIGHTS, {"format": "pt"})
        write_json(aside / CONFIG, config)
        write_text(aside / CARD, model_card(source, format, dtype, result or {}))
    return folder


def _is_head(folder: Path) -> bool:
    """Whether it holds what an export writes, and nothing else."""
    if not folder.is_dir() or {p.name for p in folder.iterdir()} != {WEIGHTS, CONFIG, CARD}:
        return False
    return "written by | eagle3-train" in (folder / CARD).read_text(encoding="utf-8")

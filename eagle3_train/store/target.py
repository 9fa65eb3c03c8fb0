"""What training needs of the target model, beside the states: `<store>/target/`, in safetensors. No transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from .folder import Folder

CONFIG, TENSORS = "config.json", "target.safetensors"
REQUIRED = ("embed_tokens", "norm_weight")
LAST_LAYER = "last_layer."


@dataclass(frozen=True, eq=False)
class TargetPart:
    """The target's two ends. Ht: its hidden size, V: its vocabulary."""

    config: dict[str, Any]  # as in the model folder's config.json
    embed_tokens: torch.Tensor  # [V, Ht]
    norm_weight: torch.Tensor  # [Ht], of the final norm
    lm_head: torch.Tensor  # [V, Ht]; the same tensor as `embed_tokens` where the target ties them
    last_layer: dict[str, torch.Tensor] = field(default_factory=dict)  # of the last decoder layer, by its own names


def write_target_part(
    path: str | Path,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    tokenizer_files: dict[str, bytes] | None = None,
) -> None:
    """Write `<path>/target/`. `tensors`: embed_tokens, norm_weight, lm_head (absent or the same tensor where the target
    ties them: it is stored once), and `last_layer.NAME` for the last decoder layer's. `tokenizer_files`: name ->
    content, so that a store alone says what its token ids spell."""
    if missing := [name for name in REQUIRED if name not in tensors]:
        raise ValueError(f"target part without {', '.join(missing)}")
    unknown = [n for n in tensors if n not in (*REQUIRED, "lm_head") and not n.startswith(LAST_LAYER)]
    if unknown:
        raise ValueError(
            f"target part: {', '.join(unknown)} is neither embed_tokens, norm_weight, lm_head nor last_layer.*"
        )
    kept = dict(tensors)
    if "lm_head" in kept and kept["lm_head"].data_ptr() == kept["embed_tokens"].data_ptr():
        del kept["lm_head"]
    folder = Folder(path).child("target")
    folder.write(TENSORS, safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in kept.items()}))
    for name, content in (tokenizer_files or {}).items():
        folder.write(name, content)
    folder.write(CONFIG, (json.dumps(config, indent=1, sort_keys=True) + "\n").encode())


def read_target_part(path: str | Path) -> TargetPart:
    """Read `<path>/target/`; ValueError where it is not there."""
    folder = Folder(path).child("target")
    try:
        config, data = json.loads(folder.read(CONFIG)), folder.read(TENSORS)
    except FileNotFoundError as e:
        raise ValueError(f"{folder.uri} is not complete: run eagle3 capture, which writes it before the shards") from e
    tensors = safetensors.torch.load(data)
    last = {n.removeprefix(LAST_LAYER): t for n, t in tensors.items() if n.startswith(LAST_LAYER)}
    embed = tensors["embed_tokens"]
    return TargetPart(config, embed, tensors["norm_weight"], tensors.get("lm_head", embed), last)

"""What training needs of the target model, beside the states: `<store>/target/`, in safetensors. No transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError

from eagle3_train.files import parse_object

from .folder import Folder
from .schema import StoreSpec

CONFIG, TENSORS = "config.json", "target.safetensors"
IDENTITY = "identity.json"  # of which target it is, in which dtype, and the checksum of the tensors
OF_A_TARGET = ("target_hash", "tokenizer_hash")  # the same in all stores of a target
# With these two: the same in every part of one capture. The tensors have its `compute_dtype`.
OF_A_CAPTURE = (*OF_A_TARGET, "chat_template_hash", "compute_dtype")
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
    spec: StoreSpec,
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    tokenizer_files: dict[str, bytes] | None = None,
) -> None:
    """Write `<path>/target/` of the store of `spec`, over what is there.

    `tensors`: embed_tokens, norm_weight, lm_head (absent or the same tensor where the target ties them: it is stored
    once), and `last_layer.NAME` for the last decoder layer's. `tokenizer_files`: name -> content, so that a store alone
    says what its token ids spell.
    """
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
    data = safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in kept.items()})
    identity = {name: getattr(spec, name) for name in OF_A_CAPTURE} | {"checksum": xxhash.xxh3_128_hexdigest(data)}
    if CONFIG in folder.sizes():
        folder.remove(CONFIG)  # of another target as a rule: until the new one is there, the folder is not complete
    folder.write(TENSORS, data)
    for name, content in (tokenizer_files or {}).items():
        folder.write(name, content)
    for name, value in ((IDENTITY, identity), (CONFIG, config)):
        folder.write(name, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def holds_target_part(path: str | Path, spec: StoreSpec) -> bool:
    """Whether `<path>/target/` is complete and says that it is of the capture of `spec`."""
    folder = Folder(path).child("target")
    if not {CONFIG, IDENTITY} <= folder.sizes().keys():
        return False
    found = _read_object(folder, IDENTITY)
    return all(found.get(name) == getattr(spec, name) for name in OF_A_CAPTURE)


def read_target_part(path: str | Path, spec: StoreSpec) -> TargetPart:
    """Read `<path>/target/`, for a store of `spec`. ValueError where it is not there, damaged, or of another target.

    One that an earlier version wrote does not say of which target it is; it is taken as it is.
    """
    folder = Folder(path).child("target")
    try:
        config, data = _read_object(folder, CONFIG), folder.read(TENSORS)
    except FileNotFoundError as e:
        raise ValueError(f"{folder.uri} is not complete: run eagle3 capture, which writes it before the shards") from e
    if IDENTITY in folder.sizes():
        identity = _read_object(folder, IDENTITY)
        if differences := [name for name in OF_A_TARGET if identity.get(name) != getattr(spec, name)]:
            raise ValueError(
                f"{folder.uri} is of another target than the states ({', '.join(differences)}): {_remedy(folder)}"
            )
        if identity.get("checksum") != xxhash.xxh3_128_hexdigest(data):
            raise ValueError(f"{folder.show(TENSORS)} is damaged (its checksum is another): {_remedy(folder)}")
    try:
        tensors = safetensors.torch.load(data)
        embed, norm = (tensors[name] for name in REQUIRED)
    except (SafetensorError, KeyError) as e:
        raise ValueError(f"{folder.show(TENSORS)} is damaged ({e!r}): {_remedy(folder)}") from e
    head = tensors.get("lm_head", embed)
    sizes = (spec.vocab_size, spec.hidden_size)
    if not embed.shape == head.shape == sizes or norm.shape != sizes[1:]:
        raise ValueError(
            f"{folder.show(TENSORS)} has embed_tokens {list(embed.shape)}, lm_head {list(head.shape)} and norm_weight "
            f"{list(norm.shape)}, the store is of [V, H]={list(sizes)}: {_remedy(folder)}"
        )
    last = {n.removeprefix(LAST_LAYER): t for n, t in tensors.items() if n.startswith(LAST_LAYER)}
    return TargetPart(config, embed, norm, head, last)


def _read_object(folder: Folder, name: str) -> dict[str, Any]:
    return parse_object(folder.read(name), folder.show(name), _remedy(folder))


def _remedy(folder: Folder) -> str:
    return f"remove {folder.uri} (rm -r {folder.uri}) and run eagle3 capture again, which writes it alone"

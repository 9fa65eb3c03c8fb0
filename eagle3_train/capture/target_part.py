"""The `target/` folder of a store: what training needs of the target, so that it never loads the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train.files import read_json
from eagle3_train.store import write_target_part
from eagle3_train.store.folder import Folder
from eagle3_train.store.target import CONFIG

from .hf import decoder_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_target(store: str, folder: Path, model: PreTrainedModel) -> None:
    """Write `<store>/target/` from the loaded model: both ends and the last layer, in the model's own dtype."""
    decoder = decoder_of(model)
    head: Any = model.get_output_embeddings()
    tensors = {
        "embed_tokens": decoder.embed_tokens.weight,
        "norm_weight": decoder.norm.weight,
        "lm_head": head.weight,
        **{f"last_layer.{name}": tensor for name, tensor in decoder.layers[-1].state_dict().items()},
    }
    write_target_part(store, tensors, read_json(folder / "config.json"))


def has_target(store: str) -> bool:
    """Whether `<store>/target/` is complete: its configuration is written last."""
    return CONFIG in Folder(f"{store}/target").sizes()

"""The target's two ends: what training needs of it, and what turns captured states into predictions."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3_train.config import TargetConfig
from eagle3_train.device import DTYPES
from eagle3_train.store import StoreSpec, write_target_part
from eagle3_train.target import load_target, read_config, tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_of(model: PreTrainedModel) -> Any:
    """The decoder stack of a causal language model: what has `embed_tokens`, `layers` and the final `norm`.

    Raises:
        ValueError: the model keeps them elsewhere.
    """
    decoder = model.get_decoder()
    missing = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(decoder, name)]
    if missing:
        raise ValueError(
            f"target {type(model).__name__}: its decoder has no {', '.join(missing)}; it cannot be captured"
        )
    return decoder


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the token ids are wanted."""
    device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment, union-attr]
    return torch.device("cpu") if device.type == "meta" else device  # on disk: accelerate moves what it is given


def load_ends(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The target without all but its last decoder layer: embeddings, that layer, final norm and head, on the CPU.

    It cannot be run as a whole; a target of any size is read by it in the memory of its ends.
    """
    from accelerate.hooks import remove_hook_from_module
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    decoder = decoder_of(outline)
    left = {id(layer) for layer in decoder.layers[:-1]}
    places: dict[str, str] = {}

    def place(module: torch.nn.Module, name: str) -> None:
        inside = any(id(m) in left for m in module.modules())
        if id(module) in left or not inside:
            places[name] = "disk" if id(module) in left else "cpu"
            return
        for child_name, child in module.named_children():
            place(child, f"{name}.{child_name}".lstrip("."))

    place(outline, "")
    with tempfile.TemporaryDirectory() as offload:  # stays empty for safetensors, which are read where they lie
        model = load_target(folder, dtype, torch.device("cpu"), trust_remote_code, places, offload_folder=offload)
    remove_hook_from_module(model, recurse=True)  # which would fetch the other layers, and pin the ends where they are
    return model


def write_target(store: str, spec: StoreSpec, folder: Path, cfg: TargetConfig) -> None:
    """Write `<store>/target/` of the training store of `spec`: configuration, tokenizer, both ends and the last layer,
    in the dtype of the capture's forward pass."""
    model = load_ends(folder, DTYPES[spec.compute_dtype], cfg.trust_remote_code)
    decoder = decoder_of(model)
    head: Any = model.get_output_embeddings()
    tensors = {
        "embed_tokens": decoder.embed_tokens.weight,
        "norm_weight": decoder.norm.weight,
        "lm_head": head.weight,
        **{f"last_layer.{name}": tensor for name, tensor in decoder.layers[-1].state_dict().items()},
    }
    tokenizer = tokenizer_files(folder, cfg.chat_template)
    write_target_part(store, spec, tensors, read_config(folder), tokenizer)


def target_bytes(target: dict[str, Any], dtype: torch.dtype) -> int:
    """What `<store>/target/` takes of a Llama-like target with this text configuration: embedding, head, last layer."""
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    intermediate = target.get("intermediate_size") or 4 * hidden
    return int(dtype.itemsize * hidden * (2 * vocabulary + 4 * hidden + 3 * intermediate))

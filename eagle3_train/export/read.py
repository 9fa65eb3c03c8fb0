"""Read published EAGLE-3 heads: both formats, whatever their age. Nothing about them is assumed silently."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_train.config import Eagle3Config
from eagle3_train.export.layout import EMBEDDING, LM_HEAD, rope_parameters
from eagle3_train.files import read_object
from eagle3_train.tensors import is_finite

MAPS = ("d2t", "t2d")
FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings")
COUNTS = (
    "hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Keys that change what a layer computes. A head that sets one is another head than ours.
UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "attention_bias": bool,
    "mlp_bias": bool,
    "hidden_act": lambda v: v != "silu",
}


@dataclass(frozen=True, eq=False)
class Published:
    """A head from disk, in our names. H: its hidden size, D its vocabulary, V the target's."""

    folder: Path
    options: Eagle3Config  # what the file says of the kinds that EAGLE-3 heads differ in
    layer: dict[str, Any]  # sizes and rotary embedding of its layer, keys as in a Llama configuration
    layer_ids: tuple[int, ...] | None  # of its inputs, in the convention of docs/store.md; None: the file does not say
    n_inputs: int
    weights: dict[str, Tensor]  # parameters, without embedding and maps; `lm_head.weight` may be missing: the target's
    embed_tokens: Tensor | None  # [>= V, H]; None: the target's
    d2t: Tensor | None  # int64 [D]: target id = index + d2t; None: the vocabularies are one

    def vocab_ids(self, target_size: int) -> np.ndarray:
        """Target ids of the draft vocabulary, int64 [D]. ValueError where they do not fit a target of `target_size`."""
        size = len(self.weights[LM_HEAD]) if LM_HEAD in self.weights else target_size
        if self.d2t is None:
            if size != target_size:
                raise ValueError(
                    f"{self.folder}: lm_head has {size} rows, the target's vocabulary {target_size}, and no d2t maps "
                    "one to the other: the file is not whole, or of another target"
                )
            return np.arange(size)
        ids = np.arange(len(self.d2t)) + self.d2t.numpy().astype(np.int64)
        if len(ids) != size:
            raise ValueError(f"{self.folder}: d2t maps {len(ids)} tokens, lm_head has {size} rows: the file is damaged")
        if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= target_size:
            raise ValueError(
                f"{self.folder}: d2t leads to target ids {ids.min()}..{ids.max()}, {len(np.unique(ids))} of {len(ids)} "
                f"different; the target has {target_size}: the head is of another target, or d2t holds ids where "
                "offsets belong"
            )
        return ids

    def embedding(self, target: Tensor) -> Tensor:
        """[V, H]: the head's own embedding, without rows beyond the target's vocabulary, or the target's."""
        own = self.embed_tokens
        if own is None:
            return target
        width = self.options.hidden_size or target.shape[1]
        if len(own) < len(target) or own.shape[1] != width:
            raise ValueError(
                f"{self.folder}: embed_tokens is {list(own.shape)}, the target has {len(target)} tokens and the head a "
                f"width of {width}: the head is of another target"
            )
        return own[: len(target)]


def read_published(path: str | Path) -> Published:
    """Read a head's folder (or hub id, which is downloaded).

    Raises:
        ValueError: no such folder, no EAGLE-3 head, tensors missing or unknown, or a kind that is not supported.
    """
    folder = _folder(path)
    config = _config(folder)
    layer = _part(folder, config, "transformer_layer_config") or config
    _expect_values(folder, layer | config)
    for key, unsupported in UNSUPPORTED.items():
        value = config.get(key, layer.get(key))
        if value is not None and unsupported(value):
            raise ValueError(f"{folder}: {key}={value!r} is not supported by our EAGLE-3 head")
    if layer is not config and "norm_before_residual" not in config:
        raise ValueError(
            f"{folder}: config.json does not say norm_before_residual, and its readers disagree (vLLM takes true, the "
            "speculators library false): add the key as the head was trained"
        )
    if layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise ValueError(f"{folder}: a head of model_type {layer['model_type']!r}, and only Llama layers are supported")
    if "hidden_size" not in layer:
        raise ValueError(f"{folder}: config.json names no hidden_size, so it describes no head")
    found = _tensors(folder)
    maps = {name: found.pop(name, None) for name in MAPS}
    _expect_weights(folder, found)
    _expect_maps(folder, maps["d2t"], maps["t2d"])
    embedding = found.pop(EMBEDDING, None)
    if LM_HEAD not in found and config.get("tie_word_embeddings", layer.get("tie_word_embeddings")):
        if embedding is None:
            raise ValueError(f"{folder}: lm_head is tied to embed_tokens, and the file holds neither")
        found[LM_HEAD] = embedding
    if "fc.weight" not in found:
        raise ValueError(f"{folder}: no tensor fc.weight, so it is no EAGLE-3 head")
    hidden, width = found["fc.weight"].shape
    target_hidden = config.get("target_hidden_size") or layer["hidden_size"]
    if width % target_hidden or hidden != layer["hidden_size"]:
        raise ValueError(
            f"{folder}: fc.weight is {[hidden, width]}, which does not fit hidden_size={layer['hidden_size']} and "
            f"target_hidden_size={target_hidden}"
        )
    if embedding is None and hidden != target_hidden:
        raise ValueError(f"{folder}: a head {hidden} wide of a target {target_hidden} wide needs its own embed_tokens")
    ids = _layer_ids(folder, config)
    if ids is not None and len(ids) != width // target_hidden:
        raise ValueError(f"{folder}: {len(ids)} layer ids, but fc.weight takes {width // target_hidden} states")
    norms: dict[str, Any] = {name: bool(config.get(name, layer.get(name))) for name in NORMS}
    return Published(
        folder=folder,
        options=Eagle3Config(
            hidden_size=hidden if hidden != target_hidden else None,
            intermediate_size=layer.get("intermediate_size"),
            layers=layer.get("num_hidden_layers", 1),
            **norms,
        ),
        layer=_sizes(layer),
        layer_ids=ids,
        n_inputs=width // target_hidden,
        weights=found,
        embed_tokens=embedding,
        d2t=maps["d2t"],
    )


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists():
        raise ValueError(f"draft.init_from={path}: holds no config.json, so it is no published head")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.bin"]))
    except (OSError, ValueError) as e:
        raise ValueError(
            f"draft.init_from={path} is neither a local folder nor a hub model that could be fetched "
            f"({type(e).__name__}). Without network, download it elsewhere and give its folder"
        ) from e


def _config(folder: Path) -> dict[str, Any]:
    config = read_object(folder / "config.json", "fetch the head again")
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ValueError(f"{folder}: a {kind!r} head; only EAGLE-3 heads can be imported")
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Of all safetensors files, or of PyTorch's own format, which the first published heads have."""
    files = [p for kind in ("safetensors", "bin") for p in sorted(folder.glob(f"*.{kind}")) if p.is_file()]
    out: dict[str, Tensor] = {}
    for file in files:
        if file.suffix != files[0].suffix:
            break  # the same weights a second time, in the older format
        for name, tensor in _read(file).items():
            if _our_name(name) in out:
                raise ValueError(f"{file}: {name} is there twice, under two names or in two files: remove one")
            out[_our_name(name)] = tensor
    if not out:
        raise ValueError(f"{folder} holds no weights (*.safetensors or *.bin)")
    return out


def _read(file: Path) -> dict[str, Tensor]:
    """What a damaged or foreign file makes its reader raise is of many kinds: all are named as one."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as e:
        reason = next(iter(str(e).splitlines()), "")
        raise ValueError(f"{file} is damaged, or no file of weights ({type(e).__name__}: {reason})") from e
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"{file} holds something else than tensors by name: it is no file of a head's weights")
    return found


def _part(folder: Path, config: dict[str, Any], key: str) -> dict[str, Any] | None:
    """An object inside the configuration; None where there is none."""
    part = config.get(key)
    if key in config and not isinstance(part, dict) and (part is not None or key == "transformer_layer_config"):
        raise ValueError(f"{folder}: config.json has {key}={part!r}, which is no object of keys and values")
    return part


def _expect_values(folder: Path, config: dict[str, Any]) -> None:
    """Each key that is there and not null has a value of its kind: nothing is guessed of a text or a zero."""

    def expect(config: dict[str, Any], key: str, fits: Callable[[Any], bool], kind: str) -> None:
        if (value := config.get(key)) is not None and not fits(value):
            raise ValueError(f"{folder}: config.json has {key}={value!r} where {kind} is expected")

    for key in (*NORMS, *FLAGS):
        expect(config, key, lambda v: isinstance(v, bool), "true or false")
    for key in COUNTS:
        expect(config, key, lambda v: type(v) is int and v > 0, "a number of at least 1")
    ropes = [p for key in ("rope_parameters", "rope_scaling") if (p := _part(folder, config, key))]
    for part in (config, *ropes):
        for key in ("rms_norm_eps", "rope_theta"):
            expect(part, key, lambda v: type(v) in (int, float) and 0 < v < float("inf"), "a positive number")


def _expect_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{folder}: {name} is {tensor.dtype}: quantised heads are not supported")
        if not is_finite(tensor):
            raise ValueError(f"{folder}: {name} holds values that are no finite numbers: the file is damaged")
        if name in ("fc.weight", EMBEDDING, LM_HEAD) and tensor.ndim != 2:
            raise ValueError(f"{folder}: {name} is {list(tensor.shape)}, where a matrix is expected")


def _expect_maps(folder: Path, d2t: Tensor | None, t2d: Tensor | None) -> None:
    """ValueError where a map is none, or the two contradict each other."""
    for name, map in (("d2t", d2t), ("t2d", t2d)):
        if map is not None and (map.ndim != 1 or map.is_floating_point() or map.is_complex()):
            raise ValueError(
                f"{folder}: {name} is {map.dtype} of shape {list(map.shape)}, where a list of integers is expected"
            )
    if d2t is None or t2d is None:
        return
    ids = torch.arange(len(d2t)) + d2t.long()
    if not torch.equal(ids.sort().values, t2d.nonzero().flatten()):
        raise ValueError(
            f"{folder}: d2t and t2d say different draft vocabularies: the file is damaged, or d2t holds ids where "
            "offsets belong"
        )


def _our_name(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def _layer_ids(folder: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    """In our convention. Inside `eagle_config` a state is counted by the layer it leaves, one less."""
    less = 0
    if not (ids := config.get(LAYER_IDS)):
        ids, less = (_part(folder, config, "eagle_config") or {}).get(LAYER_IDS), 1
    if not ids:
        return None
    fit = isinstance(ids, list) and all(type(k) is int and k + less >= 0 for k in ids)
    if not fit or ids != sorted(set(ids)):
        raise ValueError(f"{folder}: {LAYER_IDS}={ids!r} must be different layers in ascending order")
    return tuple(k + less for k in ids)


def _sizes(layer: dict[str, Any]) -> dict[str, Any]:
    """What our head takes of a layer's configuration, in the keys of transformers 5."""
    keys = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    own = {key: layer[key] for key in keys if layer.get(key) is not None}
    return own | {"rope_parameters": rope_parameters(layer), "rope_scaling": None}

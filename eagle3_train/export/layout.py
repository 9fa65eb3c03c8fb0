"""What a published EAGLE-3 head consists of: names of its tensors and keys of its configuration, in both formats.

`speculators` (read by vLLM, written by the library of that name): the layer's own configuration nested in the head's.
`eagle` (read by SGLang and by vLLM): one flat Llama configuration. DESIGN section 8; docs/export.md says why each key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.drafts import Eagle3

FORMATS = ("speculators", "eagle")
SPECULATORS_VERSION = "0.9.0"  # the release whose reader these files were checked with
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
FIRST_LAYER = {"speculators": "layers.0.", "eagle": "midlayer."}


@dataclass(frozen=True)
class HeadSource:
    """A draft head, and what must be said of it for an engine to run it."""

    head: Eagle3
    target: dict[str, Any]  # the target's config.json
    target_name: str  # hub id, or path, that an engine finds the target by
    layer_ids: tuple[int, ...]  # the head's inputs, ascending, in the convention of docs/store.md

    @property
    def vocab_size(self) -> int:
        """V, of the target: with its padding, if it has any."""
        return len(self.head.embed_tokens)

    @property
    def target_dtype(self) -> torch.dtype:
        """What the target's weights are in; bf16 where its configuration does not say."""
        name = self.target.get("dtype") or self.target.get("torch_dtype") or text_part(self.target).get("dtype")
        return getattr(torch, name or "bfloat16")

    @property
    def whole_vocabulary(self) -> bool:
        """Whether draft and target vocabulary are one, index by index: then no map is written (vLLM has no place for
        one, and refuses a head that brings it)."""
        return len(self.head.vocab.ids) == self.vocab_size


def tensors(source: HeadSource, format: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU. `embed_tokens` is written although engines could share the target's: the
    speculators library reads a file without it as zeros."""
    weights = engine_weights(source.head)
    out = {_renamed(name, format): t.detach().to("cpu", dtype).contiguous() for name, t in weights.items()}
    if not source.whole_vocabulary:
        out["d2t"] = torch.from_numpy(source.head.vocab.d2t.astype("int64"))
        out["t2d"] = torch.from_numpy(source.head.vocab.t2d)
    return out


@torch.no_grad()
def engine_weights(head: Eagle3) -> dict[str, Tensor]:
    """The head's parameters and its embedding. No engine knows the projections that a head of another width has around
    the target's embedding and rows: they are multiplied in."""
    weights = {**head.state_dict(), EMBEDDING: head.embed_tokens}
    if head.embed_proj is not None:
        weights[EMBEDDING] = head.embed_tokens @ weights.pop("embed_proj.weight").T
    if head.head_proj is not None:
        weights[LM_HEAD] = weights[LM_HEAD] @ weights.pop("head_proj.weight")
    return weights


def _renamed(name: str, format: str) -> str:
    return FIRST_LAYER[format] + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def configuration(source: HeadSource, format: str, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json`. Every key that vLLM reads is written: where one is missing it takes a default that halves
    acceptance (`norm_before_residual`) or a number of inputs that does not fit `fc`."""
    head = source.head
    flags = {
        "norm_before_residual": head.layer.norm_before_residual,
        "norm_before_fc": head.input_norm is not None,
        "fc_norm": head.fc_norm is not None,
        "norm_output": head.norm_output,
    }
    sizes = {
        "draft_vocab_size": len(head.vocab.ids),
        "target_hidden_size": head.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(source.layer_ids),
    }
    layer = layer_configuration(source, dtype)
    if format == "eagle":
        # SGLang counts a state by the layer that it leaves, one less than by the layer that it enters. vLLM looks at
        # the key at the top first, and counts as we do.
        eagle = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [k - 1 for k in source.layer_ids],
            "norm_before_fc": flags["norm_before_fc"],
        }
        return layer | {"architectures": ["LlamaForCausalLMEagle3"]} | flags | sizes | {"eagle_config": eagle}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "dtype": layer["dtype"],
        **flags,
        **sizes,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": head.steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": source.target_name,
                "architectures": source.target.get("architectures") or [],
            },
        },
        "transformer_layer_config": layer,
    }


def layer_configuration(source: HeadSource, dtype: torch.dtype) -> dict[str, Any]:
    """The draft layer as a Llama configuration, with the vocabulary and the positions of the target."""
    dims = source.head.dims
    rope = rope_parameters(source.head.layer_config)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": len(source.head.layers),
        "num_attention_heads": dims.n_heads,
        "num_key_value_heads": dims.n_kv,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": dims.eps,
        "vocab_size": source.vocab_size,
        "max_position_embeddings": text_part(source.target)["max_position_embeddings"],
        # Engines before and after transformers 5 look in different places.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_aux_hidden_states": len(source.layer_ids),
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and what a scaled kind needs, however a configuration of any age writes them."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.pop("type", None)
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return given | {"rope_type": given.get("rope_type", kind or "default"), "rope_theta": theta}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a `config.json`: multi-modal models keep it inside."""
    return config.get("text_config", config)

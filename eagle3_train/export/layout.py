"""What a published head consists of: names of its tensors and keys of its configuration. EAGLE-3 has two formats.

`speculators` (read by vLLM, written by the library of that name): the layer's own configuration nested in the head's.
`eagle` (read by SGLang and by vLLM): one flat Llama configuration. DESIGN section 8; docs/export.md says why each key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.drafts import Draft, Eagle1, Eagle3, Medusa

Head = Eagle3 | Eagle1 | Medusa
FORMATS: dict[type[Draft], tuple[str, ...]] = {  # the first is what `auto` means
    Eagle3: ("speculators", "eagle"),
    Eagle1: ("eagle",),
    Medusa: ("medusa",),
}
SPECULATORS_VERSION = "0.9.0"  # the release whose reader these files were checked with
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
FIRST_LAYER = {"speculators": "layers.0.", "eagle": "midlayer."}


@dataclass(frozen=True)
class HeadSource:
    """A draft head, and what must be said of it for an engine to run it."""

    head: Head
    target: dict[str, Any]  # the target's config.json
    target_name: str  # hub id, or path, that an engine finds the target by
    layer_ids: tuple[int, ...]  # the head's inputs, ascending, in the convention of docs/store.md
    converted_from: str | None = None  # what the folder `target_name` was made of, where it was made here

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


def format_of(head: Draft, asked: str) -> str:
    """The format that `asked` (`auto` or a name) means for a head. ValueError where it holds no such head."""
    known = FORMATS.get(type(head), ())
    if not known:
        raise ValueError(f"draft.kind={head.kind}: no engine has a format for it, so it cannot be exported")
    if asked != "auto" and asked not in known:
        raise ValueError(f"export.format={asked} holds no heads of draft.kind={head.kind}: use {' or '.join(known)}")
    return known[0] if asked == "auto" else asked


def tensors(source: HeadSource, format: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU. `embed_tokens` of an EAGLE-3 head is written although engines could share
    the target's: the speculators library reads a file without it as zeros."""
    weights = engine_weights(source.head)
    out = {_renamed(name, format, source.head): t.detach().to("cpu", dtype).contiguous() for name, t in weights.items()}
    if isinstance(source.head, Eagle3) and not source.whole_vocabulary:
        out["d2t"] = torch.from_numpy(source.head.vocab.d2t.astype("int64"))
        out["t2d"] = torch.from_numpy(source.head.vocab.t2d)
    return out


@torch.no_grad()
def engine_weights(head: Head) -> dict[str, Tensor]:
    """The head's parameters, and EAGLE-3's embedding. No engine knows the projections that a head of another width has
    around the target's embedding and rows: they are multiplied in."""
    if isinstance(head, Eagle1):
        return head.state_dict()
    if isinstance(head, Medusa):
        return dict(_medusa_weights(head))
    weights = {**head.state_dict(), EMBEDDING: head.embed_tokens}
    if head.embed_proj is not None:
        weights[EMBEDDING] = head.embed_tokens @ weights.pop("embed_proj.weight").T
    if head.head_proj is not None:
        weights[LM_HEAD] = weights[LM_HEAD] @ weights.pop("head_proj.weight")
    return weights


def _medusa_weights(head: Medusa) -> Iterator[tuple[str, Tensor]]:
    """vLLM has all residual blocks in one list and all output heads in another."""
    for name, tensor in head.state_dict().items():
        _, number, part, *rest = name.split(".")  # heads.0.blocks.0.linear.weight, heads.0.lm_head.weight
        if part == "lm_head":
            yield f"lm_heads.{number}.weight", tensor
        else:
            yield f"blocks.{number}.layers.{rest[0]}.{rest[-1]}", tensor


def _renamed(name: str, format: str, head: Head) -> str:
    """EAGLE-3's first layer has a name of its own in each format."""
    first = isinstance(head, Eagle3) and name.startswith("layers.0.")
    return FIRST_LAYER[format] + name.removeprefix("layers.0.") if first else name


def configuration(source: HeadSource, format: str, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json`. Every key that vLLM reads is written: where one is missing it takes a default that halves
    acceptance (`norm_before_residual`) or a number of inputs that does not fit `fc`.

    Raises:
        ValueError: a head of a kind that engines know, with an option that they do not.
    """
    head = source.head
    if isinstance(head, Medusa):
        return _medusa_configuration(source, head, dtype)
    if isinstance(head, Eagle1):
        return _eagle1_configuration(source, head, dtype)
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
    layer = layer_configuration(source, head, dtype) | {"num_aux_hidden_states": len(source.layer_ids)}
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


def _eagle1_configuration(source: HeadSource, head: Eagle1, dtype: torch.dtype) -> dict[str, Any]:
    """A Llama of one layer; that it is a draft head, the engine is told on its command line. It drafts from the
    target's whole vocabulary, through the target's own head."""
    if head.fc.bias is not None:
        raise ValueError("vLLM's EAGLE-1 has no bias at `fc`, this head has one: train with draft.eagle1.bias=false")
    if head.fuse is not None:
        raise ValueError(
            "draft.eagle1.inputs=fused: vLLM's EAGLE-1 reads the top state alone, so it cannot be exported"
        )
    return layer_configuration(source, head, dtype)


def _medusa_configuration(source: HeadSource, head: Medusa, dtype: torch.dtype) -> dict[str, Any]:
    if not source.whole_vocabulary:
        raise ValueError(
            f"a Medusa head with a draft vocabulary of {len(head.vocab.ids)} tokens: vLLM's has one output head a "
            f"position over the whole vocabulary. Train with draft.vocab_size={source.vocab_size}"
        )
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": head.hidden_size,
        "vocab_size": source.vocab_size,
        "truncated_vocab_size": source.vocab_size,
        "num_heads": head.steps,
        "num_hidden_layers": len(head.head(0).blocks),
        "medusa_fc_bias": True,
        "dtype": str(dtype).removeprefix("torch."),
    }


def layer_configuration(source: HeadSource, head: Eagle3 | Eagle1, dtype: torch.dtype) -> dict[str, Any]:
    """The draft layer as a Llama configuration, with the vocabulary and the positions of the target."""
    dims = head.dims
    rope = rope_parameters(head.layer_config)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": len(head.layers),
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

"""Small random targets and batches."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_train.config import DraftConfig, HFConfig
from eagle3_train.drafts import Draft, DraftBatch, DraftVocab, Eagle3, build

V, H = 29, 24
THETA = 1234.0


@dataclass
class TinySequence:
    input_ids: np.ndarray
    loss_mask: np.ndarray
    hidden: Tensor
    target_argmax: np.ndarray


@dataclass
class TinyTarget:
    """Satisfies drafts.TargetPart."""

    n_heads: int = 4
    n_kv: int = 2
    head_dim: int = 6
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        self.config = {
            "hidden_size": H, "num_attention_heads": self.n_heads, "num_key_value_heads": self.n_kv, "vocab_size": V,
            "head_dim": self.head_dim, "intermediate_size": 40, "rms_norm_eps": 1e-5, "num_hidden_layers": 1,
            "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        }  # fmt: skip
        self.embed_tokens = torch.randn(V, H, generator=g)
        self.lm_head = torch.randn(V, H, generator=g)
        self.norm_weight = 1 + 0.1 * torch.randn(H, generator=g)
        width = self.n_heads * self.head_dim
        shapes = {
            "input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,),
            "self_attn.q_proj.weight": (width, H), "self_attn.k_proj.weight": (self.n_kv * self.head_dim, H),
            "self_attn.v_proj.weight": (self.n_kv * self.head_dim, H), "self_attn.o_proj.weight": (H, width),
            "mlp.gate_proj.weight": (40, H), "mlp.up_proj.weight": (40, H), "mlp.down_proj.weight": (H, 40),
        }  # fmt: skip
        self.last_layer = {name: torch.randn(*shape, generator=g) for name, shape in shapes.items()}


def tiny_head(
    steps: int = 4,
    dtype: torch.dtype = torch.float64,
    target: TinyTarget | None = None,
    n_inputs: int = 3,
    **draft: Any,
) -> Eagle3:
    """An EAGLE-3 head."""
    head = tiny_draft("eagle3", steps, dtype, target, n_inputs, **draft)
    assert isinstance(head, Eagle3)
    return head


@cache
def tiny_model(vocab: int = V) -> str:
    """Folder of a random Llama without tokenizer, for draft=hf."""
    import transformers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, bos_token_id=1, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_draft(
    kind: str,
    steps: int = 4,
    dtype: torch.dtype = torch.float64,
    target: TinyTarget | None = None,
    n_inputs: int = 3,
    **draft: Any,
) -> Draft:
    """A head of a kind with all its norms off 1, so that a norm left out is seen, and nothing left that starts at 0."""
    torch.manual_seed(3)
    vocab = DraftVocab(np.array([0, 2, 3, 5, 8, 9, 11, 14, 17, 18, 20, 21, 26]), V, 0.5)
    if kind == "hf":
        draft["hf"] = HFConfig(tiny_model())
    draft = {"init_layer": "random"} | draft  # from the target, half of EAGLE-3's q, k and v would be zero
    head = build(DraftConfig(kind=kind, steps=steps, **draft), target or TinyTarget(), vocab, n_inputs)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name or kind != "eagle3":
                parameter.add_(0.2 * torch.randn_like(parameter))
    return head.to(dtype)


def tiny_sequence(length: int, turns: list[tuple[int, int]], seed: int, n_layers: int = 4) -> TinySequence:
    rng = np.random.default_rng(seed)
    mask = np.zeros(length, np.uint8)
    for a, b in turns:
        mask[a:b] = 1
    return TinySequence(
        rng.integers(0, V, length).astype(np.int32),
        mask,
        torch.from_numpy(rng.normal(size=(length, n_layers, H))),
        rng.integers(0, V, length).astype(np.int32),
    )


def tiny_sequences(n_layers: int = 4) -> list[TinySequence]:
    """Odd lengths; several turns, some too short for later steps or for any; turns at the very start and end."""
    return [
        tiny_sequence(13, [(4, 11)], 0, n_layers),
        tiny_sequence(17, [(2, 4), (6, 7), (9, 17)], 1, n_layers),
        tiny_sequence(5, [], 2, n_layers),
        tiny_sequence(9, [(0, 5), (7, 9)], 3, n_layers),
    ]


def tiny_batch(sequences: list[TinySequence] | None = None, dtype: torch.dtype = torch.float64) -> DraftBatch:
    return DraftBatch.collate(sequences or tiny_sequences(), torch.device("cpu"), dtype)

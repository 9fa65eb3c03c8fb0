"""What every contender of `train_step.py` computes: sizes, tensors, threads and allocator. Needs torch and numpy alone,
since it runs in the peers' environment too.
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Dims:
    """A target model's sizes; the draft layer has the same."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int


DIMS = {
    "smollm2": Dims(576, 9, 3, 64, 1536, 49152, 8192),  # SmolLM2-135M, the embedded default
    "8b": Dims(4096, 32, 8, 128, 14336, 16384, 4096),  # the layer of an 8B Llama, over a slice of its vocabulary
}


@dataclass(frozen=True)
class Workload:
    """One global batch: `sequences` of `length` tokens, of which `supervised` are the assistant's, in two turns."""

    dims: str
    steps: int  # K
    sequences: int
    length: int
    supervised: float  # 0.76 in the quick-start's training conversations
    dtype: str
    threads: int
    device: str = "cpu"

    @property
    def sizes(self) -> Dims:
        return DIMS[self.dims]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def turns(self) -> list[tuple[int, int]]:
        """Assistant turns of each sequence: the user speaks before each."""
        half = self.length // 2
        user = round(half * (1 - self.supervised))
        return [(user, half), (half + user, self.length)]

    def draft_ids(self) -> np.ndarray:
        """[D] ascending target ids of the draft vocabulary."""
        return np.sort(np.random.default_rng(1).choice(self.sizes.vocab, self.sizes.draft_vocab, replace=False))


@dataclass(frozen=True)
class Tensors:
    input_ids: Tensor  # [B, T] int64; all tokens lie in the draft vocabulary, so that nobody drops a row
    loss_mask: Tensor  # [B, T] bool: the assistant's tokens
    features: Tensor  # [B, T, 3H]
    final: Tensor  # [B, T, H]: the target's last state, before its final norm
    embed: Tensor  # [V, H]
    head: Tensor  # [V, H]: the target's lm_head


def make(work: Workload) -> Tensors:
    d, dtype = work.sizes, work.torch_dtype
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    shape = (work.sequences, work.length)
    ids = torch.from_numpy(work.draft_ids())
    mask = torch.zeros(shape, dtype=torch.bool)
    for a, b in work.turns():
        mask[:, a:b] = True
    return Tensors(
        input_ids=ids[torch.randint(len(ids), shape, generator=g)],
        loss_mask=mask,
        features=normal(*shape, 3 * d.hidden),
        final=normal(*shape, d.hidden),
        embed=normal(d.vocab, d.hidden) * d.hidden**-0.5,
        head=normal(d.vocab, d.hidden) * d.hidden**-0.5,
    )


def same_conditions(threads: int) -> None:
    """The same threads and the same allocator for every contender: large freed blocks stay in the process."""
    torch.set_num_threads(threads)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def gemm_rate(work: Workload, seconds: float = 1.0) -> float:
    """FLOP/s of the best of a few plain matrix products of the step's own sizes, in this process, device and dtype."""
    d, rows, best = work.sizes, work.tokens, 0.0
    for n, k in ((d.intermediate, d.hidden), (d.draft_vocab, d.hidden)):
        a, b = (torch.randn(m, k).to(work.device, work.torch_dtype) for m in (rows, n))
        out = a @ b.T
        end = time.perf_counter() + seconds / 2
        while (began := time.perf_counter()) < end:
            torch.mm(a, b.T, out=out)
            if work.device == "cuda":
                torch.cuda.synchronize()
            best = max(best, 2 * rows * n * k / (time.perf_counter() - began))
    return best


def llama_config(d: Dims) -> dict[str, object]:
    """The draft layer as a transformers LlamaConfig, for the peers."""
    return {
        "vocab_size": d.vocab, "hidden_size": d.hidden, "intermediate_size": d.intermediate, "head_dim": d.head_dim,
        "num_attention_heads": d.heads, "num_key_value_heads": d.kv_heads, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "pad_token_id": None,
    }  # fmt: skip


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every contender: torch's fused AdamW, the fastest that there is."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.95), fused=True)

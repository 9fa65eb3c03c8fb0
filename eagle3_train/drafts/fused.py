"""The device's fused attention over step-0 keys, with the log-sum-exp that merging needs, and its backward for any
output and log-sum-exp.

CPU: the flash kernel of scaled_dot_product_attention, a call a piece of a segment. CUDA: FlashAttention 2 over all
segments at once (a segment's queries are the last of its keys, which is what its causal mask means).
The CUDA half has run on a pretended device alone, with another kernel (tests/pretended.py); `benchmarks/gpu_check.sh`
compares it with the explicit mask on a real one.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

Segments = list[tuple[int, int, int]]  # (document start, first anchor, rows)
_aten = torch.ops.aten


def has_kernel(q: Tensor) -> bool:
    """Whether the device has a kernel for `q` [R, n_heads, d]: FlashAttention 2 takes 16-bit numbers, head dims in
    steps of 8 up to 256, and GPUs from Ampere on."""
    if not q.is_cuda:
        return q.device.type == "cpu"
    is_fit = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return is_fit and torch.cuda.get_device_capability(q.device) >= (8, 0)


def check(q: Tensor) -> None:
    """ValueError where the device has no kernel for `q` [R, n_heads, d]."""
    if not has_kernel(q):
        raise ValueError(
            f"draft.attention=merge has no kernel for {q.dtype} and head dim {q.shape[-1]} on {q.device.type}: a GPU "
            "from Ampere on takes 16-bit numbers and head dims that 8 divides, up to 256. Use draft.attention=auto"
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output like q [R, n_heads, d], log-sum-exp [R, n_heads] fp32 at least, and what `backward` needs besides."""
    if q.is_cuda and segments:
        return _forward_cuda(q, k, v, segments, scale)
    n_kv = k.shape[1]
    group = q.shape[1] // n_kv
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    row = 0
    for start, first, n in _pieces(segments, group):
        rows, span = slice(row, row + n), slice(start, first + n)
        o, part = _aten._scaled_dot_product_flash_attention_for_cpu(
            _fold(q[rows], n_kv), _heads_first(k[span]), _heads_first(v[span]), 0.0, False,
            attn_mask=_causal_mask(first - start, n, group, q.dtype), scale=scale,
        )  # fmt: skip
        out[rows] = _unfold(o, n)
        lse[rows] = _unfold(part[..., None], n)[..., 0]
        row += n
    return out, lse, ()


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
    state: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for the gradient `grad` of an output `out` that these keys share with others under `lse`."""
    if q.is_cuda and segments:
        return _backward_cuda(grad, q, k, v, out, lse, segments, scale, state)
    n_kv = k.shape[1]
    group = q.shape[1] // n_kv
    dq = torch.empty_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)  # several pieces read the same keys
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    row = 0
    for start, first, n in _pieces(segments, group):
        rows, span = slice(row, row + n), slice(start, first + n)
        gq, gk, gv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _fold(grad[rows], n_kv), _fold(q[rows], n_kv), _heads_first(k[span]), _heads_first(v[span]),
            _fold(out[rows], n_kv), _fold(lse[rows, :, None], n_kv)[..., 0], 0.0, False,
            attn_mask=_causal_mask(first - start, n, group, q.dtype), scale=scale,
        )  # fmt: skip
        dq[rows] = _unfold(gq, n)
        dk[span] += gk[0].transpose(0, 1)
        dv[span] += gv[0].transpose(0, 1)
        row += n
    return dq, dk.to(k.dtype), dv.to(v.dtype)


# The CPU's kernel computes all keys for every query, seen or not, so a long segment goes in pieces; it works on blocks
# of more queries where it gets many. The query heads of a key head count as queries: their keys are loaded once.
_PIECE_ROWS, _PIECE_QUERIES = 128, 384


def _pieces(segments: Segments, group: int) -> Segments:
    """The same rows in pieces of about _PIECE_ROWS, or more where that makes few queries."""
    size = max(_PIECE_ROWS, _PIECE_QUERIES // group)
    pieces = []
    for start, first, n in segments:
        borders = torch.linspace(0, n, max(round(n / size), 1) + 1).round().int().tolist()
        pieces += [(start, first + a, b - a) for a, b in pairwise(borders)]
    return pieces


# By dtype and group: how many keys the first row sees, and the mask.
_masks: dict[tuple[torch.dtype, int], tuple[int, Tensor]] = {}


def _causal_mask(before: int, n: int, group: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [n * group, before + n] of n rows, of which the first sees `before` keys and its own.

    A view of one mask whose rows see ever more keys, so that none is built in the loop.
    """
    seen, mask = _masks.get((dtype, group), (0, torch.empty(0, 0)))
    if seen < before or len(mask) < n * group:
        wanted = max(seen, before), max(len(mask) // group, n)
        seen, rows = (1 << max(x - 1, 127).bit_length() for x in wanted)
        mask = torch.full((rows, seen + rows), float("-inf"), dtype=dtype).triu(seen + 1).repeat_interleave(group, 0)
        _masks[dtype, group] = seen, mask
    return mask[: n * group, seen - before : seen + n]


def _fold(x: Tensor, n_kv: int) -> Tensor:
    """[n, n_heads, d] -> [1, n_kv, n * group, d]: the layout of the CPU's kernel, a key head's queries together."""
    return x.unflatten(1, (n_kv, -1)).transpose(0, 1).flatten(1, 2)[None]


def _unfold(x: Tensor, n: int) -> Tensor:
    """[1, n_kv, n * group, d] -> [n, n_heads, d]"""
    return x[0].unflatten(1, (n, -1)).transpose(0, 1).flatten(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    """[T, h, d] -> [1, h, T, d], a view."""
    return x.transpose(0, 1)[None]


# -- CUDA -------------------------------------------------------------------------------------------------------------


def _spans(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Which keys each segment reads, end to end [S]; offsets of queries and keys, [segments + 1] int32; the longest."""
    rows = [n for _, _, n in segments]
    lengths = [first + n - start for start, first, n in segments]
    keys = np.concatenate([np.arange(start, first + n) for start, first, n in segments])
    offsets = (np.cumsum([0, *x], dtype=np.int32) for x in (rows, lengths))
    read, q_offsets, k_offsets = (torch.from_numpy(x).to(device, non_blocking=True) for x in (keys, *offsets))
    return read, q_offsets, k_offsets, max(rows), max(lengths)


def _forward_cuda(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    keys, q_offsets, k_offsets, longest_q, longest_k = _spans(segments, q.device)
    out, lse, *random, _ = _aten._flash_attention_forward(
        q, k[keys], v[keys], q_offsets, k_offsets, longest_q, longest_k, 0.0, True, False, scale=scale
    )
    return out, lse.T.contiguous(), tuple(random)


def _backward_cuda(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
    state: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    keys, q_offsets, k_offsets, longest_q, longest_k = _spans(segments, q.device)
    dq, dk, dv = _aten._flash_attention_backward(
        grad, q, k[keys], v[keys], out, lse.T.contiguous(), q_offsets, k_offsets, longest_q, longest_k, 0.0, True,
        *state, scale=scale,
    )  # fmt: skip
    # Several segments may read the same keys: summed in fp32.
    dk, dv = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, keys, g.float()).to(x.dtype)
        for x, g in ((k, dk), (v, dv))
    )
    return dq, dk, dv

"""The device's fused attention over step-0 keys, with the log-sum-exp that merging needs, and its backward for any
output and log-sum-exp.

CPU: the flash kernel of scaled_dot_product_attention, a call a segment. CUDA: FlashAttention 2 over all segments at
once (16 bit, head dims up to 256; a segment's queries are the last of its keys, which is what its causal mask means).
The CUDA half has not been run yet: `benchmarks/gpu_check.sh` compares it with the explicit mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

Segments = list[tuple[int, int, int]]  # (document start, first anchor, rows)
_aten = torch.ops.aten


def check(q: Tensor) -> None:
    """ValueError where the device has no kernel for `q` [R, n_heads, d]."""
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"draft.attention=merge runs on CPUs and CUDA, not on {q.device.type}: use flex or reference")
    if q.is_cuda and (q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] > 256):
        raise ValueError(
            f"draft.attention=merge on CUDA needs 16-bit numbers and head dims up to 256, not {q.dtype} and "
            f"{q.shape[-1]}: use draft.attention=flex"
        )


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Output like q [R, n_heads, d], log-sum-exp [R, n_heads] fp32 at least, and what `backward` needs besides."""
    if q.is_cuda and segments:
        return _forward_cuda(q, k, v, segments, scale)
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    row = 0
    for start, first, n in segments:
        mask = _causal_mask(first - start + n, q.dtype)[first - start : first - start + n, : first - start + n]
        keys, values = (_heads_first(x[start : first + n].repeat_interleave(group, 1)) for x in (k, v))
        o, part = _aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q[row : row + n]), keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        out[row : row + n] = o[0].transpose(0, 1)
        lse[row : row + n] = part[0].T
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
    n_kv, d = k.shape[1:]
    group = q.shape[1] // n_kv
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    row = 0
    for start, first, n in segments:
        rows, span = slice(row, row + n), slice(start, first + n)
        mask = _causal_mask(first - start + n, q.dtype)[first - start : first - start + n, : first - start + n]
        keys, values = (_heads_first(x[span].repeat_interleave(group, 1)) for x in (k, v))
        gq, gk, gv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad[rows]), _heads_first(q[rows]), keys, values, _heads_first(out[rows]),
            lse[rows].T[None].contiguous(), 0.0, False, attn_mask=mask, scale=scale,
        )  # fmt: skip
        dq[rows] = gq[0].transpose(0, 1)
        dk[span] += gk[0].transpose(0, 1).reshape(-1, n_kv, group, d).sum(2)
        dv[span] += gv[0].transpose(0, 1).reshape(-1, n_kv, group, d).sum(2)
        row += n
    return dq, dk, dv


_masks: dict[tuple[torch.dtype, int], Tensor] = {}


def _causal_mask(size: int, dtype: torch.dtype) -> Tensor:
    """Additive causal mask of at least `size`; segments use views of it, so that none is built in the loop."""
    rounded = 1 << max(size - 1, 1).bit_length()
    if (dtype, rounded) not in _masks:
        _masks[dtype, rounded] = torch.full((rounded, rounded), float("-inf"), dtype=dtype).triu(1)
    return _masks[dtype, rounded]


def _heads_first(x: Tensor) -> Tensor:
    """[T, h, d] -> [1, h, T, d], a view: the layout of the CPU's kernel."""
    return x.transpose(0, 1)[None]


# -- CUDA -------------------------------------------------------------------------------------------------------------


def _spans(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Which keys each segment reads, end to end [S]; offsets of queries and keys, [segments + 1] int32; the longest."""
    rows = torch.tensor([n for _, _, n in segments])
    lengths = torch.tensor([first + n - start for start, first, n in segments])
    keys = torch.cat([torch.arange(start, first + n) for start, first, n in segments])
    q_offsets, k_offsets = (
        torch.nn.functional.pad(x.cumsum(0), (1, 0)).to(device, torch.int32) for x in (rows, lengths)
    )
    return keys.to(device), q_offsets, k_offsets, int(rows.max()), int(lengths.max())


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

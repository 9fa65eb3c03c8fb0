"""Attention of training-time test (DESIGN section 5).

The query of anchor t at step i sees the step-0 keys j <= t of its document and the i keys (t, 1..i) of its own chain,
nothing else.

Implementations of the same function:

- `merge`: the device's fused kernel over the step-0 keys, i dot products a row over the own chain, merged through the
  log-sum-exp. Its exact backward for the step-0 part is the ordinary flash backward called with the *merged* output
  and the *merged* log-sum-exp (the identity that ring attention uses: P = exp(s - L) and dS = P (dP - rowsum(dO * O))
  hold for any subset of the keys); the own-chain part is elementwise. Nothing of size [rows, keys] is ever kept.
- `flex`: FlexAttention over step-0 keys and own chains under one block mask. torch has no backward of it for CPUs.
- `reference`: the explicit mask and a plain softmax, quadratic in memory: the definition. `pieces`: the same a piece of
  a segment at a time, in bounded memory where no gradient is asked for; what `auto` predicts with in fp32 on a GPU.

Shapes: q [R, n_heads, d]; k0, v0 [N, n_kv, d] (step-0 keys of all tokens); ck, cv [C, R, n_kv, d] (own chain, C = i
keys a row); segments (document start, first anchor, rows), whose rows lie end to end in q. Returns [R, n_heads, d].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from eagle3_train.drafts import fused
from eagle3_train.drafts.batch import to_device

Segments = list[tuple[int, int, int]]
SCORES = 1 << 26  # of `attend_pieces` in memory at once


def attend(q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments, kind: str) -> Tensor:
    """Attention by `kind`: auto | merge | flex | reference. See the module's docstring for shapes.

    auto: merge where there is a kernel for it, elsewhere flex to train and pieces otherwise. ValueError where `kind`
    cannot run on the device of `q`.
    """
    if kind == "auto" and not fused.has_kernel(q):
        kind = "flex" if torch.is_grad_enabled() and q.requires_grad else "pieces"
    if kind in ("auto", "merge"):
        fused.check(q)
        return _Merge.apply(q, k0, v0, ck, cv, segments)
    if kind == "flex":
        return attend_flex(q, k0, v0, ck, cv, segments)
    if kind == "pieces":
        return attend_pieces(q, k0, v0, ck, cv, segments)
    return attend_reference(q, k0, v0, ck, cv, segments)


def visible(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each row, its document's start and its anchor, both [R] int64: it sees the step-0 keys from the one to the
    other."""
    none = [np.zeros(0)]
    anchors = np.concatenate([np.arange(first, first + n) for _, first, n in segments] or none)
    starts = np.concatenate([np.full(n, start) for start, _, n in segments] or none)
    return to_device(starts, device), to_device(anchors, device)


def attend_reference(q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments) -> Tensor:
    """Explicit mask and softmax over step-0 keys and own chain at once; the softmax in fp32 at least."""
    n_heads, d = q.shape[1:]
    group = n_heads // k0.shape[1]
    starts, anchors = visible(segments, q.device)
    keys = torch.arange(k0.shape[0], device=q.device)
    seen = (keys <= anchors[:, None]) & (keys >= starts[:, None])  # [R, N]
    scores0 = torch.einsum("rhd,nhd->rhn", q, k0.repeat_interleave(group, 1)).masked_fill(~seen[:, None], float("-inf"))
    scores_c = torch.einsum("rhd,crhd->rhc", q, ck.repeat_interleave(group, 2))
    scores = torch.cat([scores0, scores_c], -1) * d**-0.5
    probs = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
    p0, pc = probs.split([k0.shape[0], ck.shape[0]], -1)
    out0 = torch.einsum("rhn,nhd->rhd", p0, v0.repeat_interleave(group, 1))
    return out0 + torch.einsum("rhc,crhd->rhd", pc, cv.repeat_interleave(group, 2))


def attend_pieces(q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments) -> Tensor:
    """`attend_reference` of as many rows at a time as have at most `SCORES` scores, over their own keys alone."""
    out, row = torch.empty_like(q), 0
    for start, first, n in segments:
        size = max(1, SCORES // (q.shape[1] * (first + n - start)))
        for a in range(0, n, size):
            b = min(a + size, n)
            rows, keys = slice(row + a, row + b), slice(start, first + b)
            seen = [(0, first + a - start, b - a)]
            out[rows] = attend_reference(q[rows], k0[keys], v0[keys], ck[:, rows], cv[:, rows], seen)
        row += n
    return out


def block_mask(segments: Segments, n_tokens: int, chain: int, device: torch.device) -> BlockMask:
    """Mask of R queries over N step-0 keys, then R keys for each of `chain` steps, of which each row sees its own."""
    starts, anchors = visible(segments, device)
    n_rows = len(anchors)

    def seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        step0 = (key >= starts[row]) & (key <= anchors[row])
        own = (key - n_tokens) % n_rows == row
        return torch.where(key < n_tokens, step0, own)

    return create_block_mask(seen, None, None, n_rows, n_tokens + chain * n_rows, device=device)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def attend_flex(q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments) -> Tensor:
    """FlexAttention: compiled on GPUs; on CPUs its forward alone, for comparison. Not yet run on a GPU."""
    if q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
        raise ValueError("draft.attention=flex cannot be trained on a CPU: use draft.attention=auto or merge")
    if not len(q):
        return attend_reference(q, k0, v0, ck, cv, segments)
    mask = block_mask(segments, len(k0), len(ck), q.device)
    keys, values = (torch.cat((x0, xc.flatten(0, 1))) for x0, xc in ((k0, ck), (v0, cv)))
    kernel = _compiled_flex() if q.is_cuda else flex_attention
    q, keys, values = (_heads_first(x).contiguous() for x in (q, keys, values))
    return kernel(q, keys, values, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """[T, h, d] -> [1, h, T, d], a view: the layout of FlexAttention."""
    return x.transpose(0, 1)[None]


class _Merge(torch.autograd.Function):
    """The device's fused kernel over step-0 keys, merged with the own chain."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments) -> Tensor:
        n_rows, n_heads, d = q.shape
        n_kv = k0.shape[1]
        group = n_heads // n_kv
        scale = d**-0.5
        assert sum(n for _, _, n in segments) == n_rows, "segments must cover the rows"
        out, lse, kernel_state = fused.forward(q, k0, v0, segments, scale)
        if ck.shape[0]:
            scores = torch.einsum("rkgd,crkd->rkgc", q.view(n_rows, n_kv, group, d), ck).mul_(scale).to(lse.dtype)
            merged = torch.logaddexp(lse, scores.logsumexp(-1).view(n_rows, n_heads))
            own = (scores - merged.view(n_rows, n_kv, group, 1)).exp_().to(q.dtype)
            out.mul_((lse - merged).exp_()[..., None].to(q.dtype))
            out.view(n_rows, n_kv, group, d).add_(torch.einsum("rkgc,crkd->rkgd", own, cv))
            lse = merged
        ctx.save_for_backward(q, k0, v0, ck, cv, out, lse, *kernel_state)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, ck, cv, out, lse, *kernel_state = ctx.saved_tensors
        grad = grads[0].contiguous()
        n_rows, n_heads, d = q.shape
        n_kv = k0.shape[1]
        group = n_heads // n_kv
        scale = d**-0.5
        dq, dk0, dv0 = fused.backward(grad, q, k0, v0, out, lse, ctx.segments, scale, kernel_state)
        dck, dcv = torch.zeros_like(ck), torch.zeros_like(cv)
        if ck.shape[0]:
            qg, gg = q.view(n_rows, n_kv, group, d), grad.view(n_rows, n_kv, group, d)
            scores = torch.einsum("rkgd,crkd->rkgc", qg, ck).mul_(scale).to(lse.dtype)
            probs = (scores - lse.view(n_rows, n_kv, group, 1)).exp_().to(q.dtype)
            delta = (grad * out).sum(-1).view(n_rows, n_kv, group, 1)
            dscores = (torch.einsum("rkgd,crkd->rkgc", gg, cv) - delta).mul_(probs).mul_(scale)
            dq.view(n_rows, n_kv, group, d).add_(torch.einsum("rkgc,crkd->rkgd", dscores, ck))
            dck = torch.einsum("rkgc,rkgd->crkd", dscores, qg)
            dcv = torch.einsum("rkgc,rkgd->crkd", probs, gg)
        return dq, dk0, dv0, dck, dcv, None

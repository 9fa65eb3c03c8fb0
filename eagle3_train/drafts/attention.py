"""Attention of training-time test (DESIGN section 5).

The query of anchor t at step i sees the step-0 keys j <= t of its document and the i keys (t, 1..i) of its own chain,
nothing else.

Two implementations of the same function:

- `merge`: the device's fused kernel over the step-0 keys, i dot products a row over the own chain, merged through the
  log-sum-exp. Its exact backward for the step-0 part is the ordinary flash backward called with the *merged* output
  and the *merged* log-sum-exp (the identity that ring attention uses: P = exp(s - L) and dS = P (dP - rowsum(dO * O))
  hold for any subset of the keys); the own-chain part is elementwise. Nothing of size [rows, keys] is ever kept.
- `reference`: the explicit mask and a plain softmax, quadratic in memory: the definition, and the fallback where no
  fused kernel is wired up.

Shapes: q [R, n_heads, d]; k0, v0 [N, n_kv, d] (step-0 keys of all tokens); ck, cv [C, R, n_kv, d] (own chain, C = i
keys a row); segments (document start, first anchor, rows), whose rows lie end to end in q. Returns [R, n_heads, d].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Segments = list[tuple[int, int, int]]
_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments, kind: str) -> Tensor:
    """Attention by `kind`: merge | reference. See the module's docstring for shapes."""
    if kind == "merge" and q.device.type == "cpu":
        return _Merge.apply(q, k0, v0, ck, cv, segments)
    return attend_reference(q, k0, v0, ck, cv, segments)


def attend_reference(q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments) -> Tensor:
    """Explicit mask and softmax over step-0 keys and own chain at once; the softmax in fp32 at least."""
    n_heads, d = q.shape[1:]
    group = n_heads // k0.shape[1]
    none = [torch.zeros(0, dtype=torch.long)]
    anchors = torch.cat([torch.arange(first, first + n) for _, first, n in segments] or none)
    starts = torch.cat([torch.full((n,), start) for start, _, n in segments] or none)
    keys = torch.arange(k0.shape[0])
    seen = ((keys <= anchors[:, None]) & (keys >= starts[:, None])).to(q.device)  # [R, N]
    scores0 = torch.einsum("rhd,nhd->rhn", q, k0.repeat_interleave(group, 1)).masked_fill(~seen[:, None], float("-inf"))
    scores_c = torch.einsum("rhd,crhd->rhc", q, ck.repeat_interleave(group, 2))
    scores = torch.cat([scores0, scores_c], -1) * d**-0.5
    probs = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
    p0, pc = probs.split([k0.shape[0], ck.shape[0]], -1)
    out0 = torch.einsum("rhn,nhd->rhd", p0, v0.repeat_interleave(group, 1))
    return out0 + torch.einsum("rhc,crhd->rhd", pc, cv.repeat_interleave(group, 2))


_masks: dict[tuple[torch.dtype, int], Tensor] = {}


def _causal_mask(size: int, dtype: torch.dtype) -> Tensor:
    """Additive causal mask of at least `size`; segments use views of it, so that none is built in the loop."""
    rounded = 1 << max(size - 1, 1).bit_length()
    if (dtype, rounded) not in _masks:
        _masks[dtype, rounded] = torch.full((rounded, rounded), float("-inf"), dtype=dtype).triu(1)
    return _masks[dtype, rounded]


def _heads_first(x: Tensor) -> Tensor:
    """[T, h, d] -> [1, h, T, d], a view: the layout of the fused kernels."""
    return x.transpose(0, 1)[None]


class _Merge(torch.autograd.Function):
    """The CPU's fused kernel over step-0 keys, merged with the own chain."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor, segments: Segments) -> Tensor:  # ty: shapes in the module's docstring
        n_rows, n_heads, d = q.shape
        n_kv = k0.shape[1]
        group = n_heads // n_kv
        scale = d**-0.5
        out = torch.empty_like(q)
        lse = q.new_empty(n_rows, n_heads, dtype=torch.promote_types(q.dtype, torch.float32))
        row = 0
        for start, first, n in segments:
            mask = _causal_mask(first - start + n, q.dtype)[first - start : first - start + n, : first - start + n]
            keys, values = (_heads_first(x[start : first + n].repeat_interleave(group, 1)) for x in (k0, v0))
            o, part = _flash_forward(
                _heads_first(q[row : row + n]), keys, values, 0.0, False, attn_mask=mask, scale=scale
            )
            out[row : row + n] = o[0].transpose(0, 1)
            lse[row : row + n] = part[0].T
            row += n
        assert row == n_rows, "segments must cover the rows"
        if ck.shape[0]:
            scores = torch.einsum("rkgd,crkd->rkgc", q.view(n_rows, n_kv, group, d), ck).mul_(scale).to(lse.dtype)
            merged = torch.logaddexp(lse, scores.logsumexp(-1).view(n_rows, n_heads))
            own = (scores - merged.view(n_rows, n_kv, group, 1)).exp_().to(q.dtype)
            out.mul_((lse - merged).exp_()[..., None].to(q.dtype))
            out.view(n_rows, n_kv, group, d).add_(torch.einsum("rkgc,crkd->rkgd", own, cv))
            lse = merged
        ctx.save_for_backward(q, k0, v0, ck, cv, out, lse)
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, ck, cv, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        n_rows, n_heads, d = q.shape
        n_kv = k0.shape[1]
        group = n_heads // n_kv
        scale = d**-0.5
        dq, dk0, dv0 = torch.empty_like(q), torch.zeros_like(k0), torch.zeros_like(v0)
        row = 0
        for start, first, n in ctx.segments:
            rows, span = slice(row, row + n), slice(start, first + n)
            mask = _causal_mask(first - start + n, q.dtype)[first - start : first - start + n, : first - start + n]
            keys, values = (_heads_first(x[span].repeat_interleave(group, 1)) for x in (k0, v0))
            gq, gk, gv = _flash_backward(
                _heads_first(grad[rows]), _heads_first(q[rows]), keys, values, _heads_first(out[rows]),
                lse[rows].T[None].contiguous(), 0.0, False, attn_mask=mask, scale=scale,
            )  # fmt: skip
            dq[rows] = gq[0].transpose(0, 1)
            dk0[span] += gk[0].transpose(0, 1).reshape(-1, n_kv, group, d).sum(2)
            dv0[span] += gv[0].transpose(0, 1).reshape(-1, n_kv, group, d).sum(2)
            row += n
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

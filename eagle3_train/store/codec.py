"""Hidden states to bytes and back. bf16, fp16 and fp32 are casts; fp8 is e4m3 with a scale for each token and layer."""

from __future__ import annotations

import torch

# On disk.
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
E4M3_MAX = 448.0


def read_dtype(dtype: str) -> torch.dtype:
    """Dtype of `Sequence.hidden`: fp8 is decoded to bf16, which is 16 times finer than e4m3 and has fp32's range."""
    return torch.bfloat16 if dtype == "fp8" else DTYPES[dtype]


def encode(hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """Cast `hidden` [T, layers, H] into `out`, of any dtype in `DTYPES`. For fp8 return the scales [T, layers], fp32.

    The scale maps a state's largest entry to e4m3's largest number: one dimension of a state may be a thousand times
    the others, and states of one layer differ as much between tokens (attention sinks), so coarser scales lose both.
    """
    if out.dtype != torch.float8_e4m3fn:
        out.copy_(hidden)
        return None
    hidden = hidden.float()
    scale = hidden.abs().amax(-1) / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    out.copy_(hidden / scale[..., None])
    return scale.cpu()


def decode(stored: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """`stored` e4m3 [T, layers, H] times `scale` [T, layers] into `out`, rounded once."""
    out.copy_(stored.float() * scale[..., None])


def problem(stored: torch.Tensor, scale: torch.Tensor | None) -> str | None:
    """What is wrong with states about to be written, or None: NaN, or an infinity, also one made by the cast."""
    checked = stored if scale is None else scale
    low, high = torch.aminmax(checked)  # NaN propagates; 20 times the speed of isfinite().all()
    if torch.isfinite(low) and torch.isfinite(high):
        return None
    return f"range {low.item():g} to {high.item():g}"

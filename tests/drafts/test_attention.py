"""The implementations of attention against a plain masked softmax in float64; FlexAttention's mask key by key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_train.drafts import attention, fused
from eagle3_train.drafts.attention import attend, block_mask

# (document start, first anchor, rows): a whole document, two turns of one, a turn of one row; 9 tokens are nobody's.
SEGMENTS = [(0, 0, 7), (7, 9, 3), (7, 14, 5), (20, 20, 1)]
N_TOKENS, N_ROWS = 30, 16


def make(n_heads: int, n_kv: int, d: int, chain: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(chain)
    shapes = [(N_ROWS, n_heads, d), (N_TOKENS, n_kv, d), (N_TOKENS, n_kv, d)] + 2 * [(chain, N_ROWS, n_kv, d)]
    return [torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def plain(q: Tensor, k0: Tensor, v0: Tensor, ck: Tensor, cv: Tensor) -> Tensor:
    """The definition, one query and one head at a time."""
    rows = [(start, first + n) for start, first, rows in SEGMENTS for n in range(rows)]
    group = q.shape[1] // k0.shape[1]
    out = []
    for r, (start, anchor) in enumerate(rows):
        for h in range(q.shape[1]):
            kv = h // group
            keys = torch.cat([k0[start : anchor + 1, kv], ck[:, r, kv]])
            values = torch.cat([v0[start : anchor + 1, kv], cv[:, r, kv]])
            out.append((keys @ q[r, h] / q.shape[-1] ** 0.5).softmax(0) @ values)
    return torch.stack(out).view_as(q)


@pytest.mark.parametrize("chain", [0, 1, 4])
@pytest.mark.parametrize(("n_heads", "n_kv", "d"), [(4, 2, 6), (3, 3, 16), (6, 1, 5), (9, 3, 64)])
@pytest.mark.parametrize("kind", ["merge", "reference"])
def test_values_and_gradients(kind: str, n_heads: int, n_kv: int, d: int, chain: int) -> None:
    inputs = make(n_heads, n_kv, d, chain)
    expected = plain(*inputs)
    found = attend(*inputs, SEGMENTS, kind)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, weights, allow_unused=not chain)
    grads = torch.autograd.grad(found, inputs, weights, allow_unused=not chain)
    for a, b in zip(grads, wanted, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scores", [1, 100, 1 << 20])
@pytest.mark.parametrize("chain", [0, 3])
def test_pieces_have_the_same_values(chain: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES", scores)
    with torch.no_grad():
        inputs = make(4, 2, 6, chain)
        torch.testing.assert_close(attention.attend_pieces(*inputs, SEGMENTS), plain(*inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n_heads", "n_kv"), [(6, 2), (2, 2)])
def test_a_long_segment_goes_in_pieces_and_reads_the_same(n_heads: int, n_kv: int) -> None:
    """Also when a mask made for another length is there already."""
    g = torch.Generator().manual_seed(1)
    for segments in ([(3, 9, 20)], [(0, 0, 901), (901, 1300, 100)], [(1, 700, 601)]):
        n_rows = sum(n for _, _, n in segments)
        assert max(n for _, _, n in segments) < 500 or len(fused._pieces(segments, n_heads // n_kv)) > len(segments)
        shapes = [(n_rows, n_heads, 8), (1400, n_kv, 8), (1400, n_kv, 8)] + 2 * [(2, n_rows, n_kv, 8)]
        inputs = [torch.randn(*s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]
        found, expected = (attend(*inputs, segments, kind) for kind in ("merge", "reference"))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        weights = torch.randn(expected.shape, generator=g, dtype=torch.float64)
        grads, wanted = (torch.autograd.grad(x, inputs, weights) for x in (found, expected))
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chain", [0, 1, 4])
def test_flex_sees_the_keys_it_should(chain: int) -> None:
    segments = [(0, 0, 70), (90, 93, 30), (90, 140, 50), (300, 320, 10)]
    n_tokens, n_rows = 400, 160
    keys = n_tokens + chain * n_rows
    expected = torch.zeros(n_rows, keys, dtype=torch.bool)
    r = 0
    for start, first, rows in segments:
        for n in range(rows):
            expected[r, start : first + n + 1] = True
            expected[r, n_tokens + r :: n_rows] = True
            r += 1
    mask = block_mask(segments, n_tokens, chain, torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.long)
    row, key = torch.arange(n_rows)[:, None], torch.arange(keys)[None]
    assert torch.equal(mask.mask_mod(zero, zero, row, key), expected)
    # Blocks: those with a visible key, and no other.
    assert mask.seq_lengths == (n_rows, keys)
    blocks = mask.to_dense()[0, 0].bool()
    for i, j in np.ndindex(*blocks.shape):
        assert blocks[i, j] == expected[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].any()
    assert not blocks.all()


@pytest.mark.parametrize("chain", [0, 3])
def test_flex_has_the_same_values(chain: int) -> None:
    inputs = [x.detach() for x in make(4, 2, 16, chain, torch.float32)]
    expected = plain(*[x.double() for x in inputs])
    torch.testing.assert_close(attend(*inputs, SEGMENTS, "flex").double(), expected, rtol=1e-5, atol=1e-5)


def test_auto_and_devices() -> None:
    inputs = make(4, 2, 6, 1)
    assert torch.equal(attend(*inputs, SEGMENTS, "auto"), attend(*inputs, SEGMENTS, "merge"))
    with pytest.raises(ValueError, match="cannot be trained on a CPU"):
        attend(*inputs, SEGMENTS, "flex")

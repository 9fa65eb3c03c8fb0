"""A CUDA device that is not there: tensors that say they lie on it, over CPU tensors that hold the numbers.

What the code does on a GPU, it does on them: its own branches (`is_cuda`), torch's autocast for CUDA, and the refusal
of tensors of two devices in one operation. The numbers are real, so data-dependent code runs, and results can be
compared with the CPU's. Every operation for which the host would wait for the device is counted.

What it cannot show: the kernels themselves (which dtypes and sizes they take, their rounding), streams, memory,
collectives, torch.compile, and autograd's own engine, which a CPU build of torch does not run for CUDA tensors.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten
ROOT = str(Path(__file__).parent.parent / "eagle3_train")


class Pretended(Tensor):
    """A tensor of the pretended device; `held` holds its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretended:
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CUDA
        )
        self.held = held
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor of the pretended device, after its end")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretended({self.held})"

    def tolist(self) -> Any:
        running().waits("tolist")
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def new_tensor(self, data: Any, **more: Any) -> Tensor:  # type: ignore[override]
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA} | more)

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin a CUDA tensor: only dense CPU tensors can be pinned")


# Operations that take tensors of two devices: a copy, and an index of the host over a tensor of the device.
_COPIES = {aten.copy_.default, aten._to_copy.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# The shape of their result is known to the device alone.
_UNKNOWN_SHAPE = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.bincount.default}


class Device(TorchDispatchMode):
    """What happens on the pretended device. `waited`: how often the host waited for it, by operation and place in the
    package; `copied`: the same of copies to it for which it does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: Counter[str] = Counter()
        self.copied: Counter[str] = Counter()
        self._pinned: set[int] = set()

    def waits(self, what: str) -> None:
        self.waited[f"{what} {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x for x in leaves if isinstance(x, Pretended)]
        on_host = [x for x in leaves if not isinstance(x, Pretended)]
        asked = kwargs.get("device")
        to = torch.device(asked) if asked is not None else CUDA if on_device else CPU
        self._check(func, args, on_device, on_host)
        self._note(func, args, kwargs, to)
        if asked is not None:
            kwargs["device"] = CPU
        is_pinned = kwargs.pop("pin_memory", None)
        run = KERNELS.get(func, func)
        out = run(*tree_map(_real, args), **tree_map(_real, kwargs))
        if is_pinned:
            assert to == CPU, "Only dense CPU tensors can be pinned"
            self._pinned.add(out.untyped_storage().data_ptr())
        if to.type != "cuda":
            return out
        known = {id(x.held): x for x in on_device}
        return tree_map(lambda x: known[id(x)] if id(x) in known else Pretended(x) if isinstance(x, Tensor) else x, out)

    def _check(self, func: Any, args: Any, on_device: list[Tensor], on_host: list[Tensor]) -> None:
        mixed = [x for x in on_host if x.dim()] if on_device else []
        if on_device and on_host and func in (aten.copy_.default, aten.lift_fresh.default):
            return
        if mixed and not (func in _INDEXED and isinstance(args[0], Pretended)):
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu")
        if on_host and func in (aten.index_select.default, aten.gather.default, aten.mm.default):
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu")

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], to: torch.device) -> None:
        if func in _COPIES:
            source = args[1] if func is aten.copy_.default else args[0]
            target = args[0].device if func is aten.copy_.default else to if "device" in kwargs else source.device
            if source.device == target:
                return
            quick = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            is_pinned = target != CPU and source.untyped_storage().data_ptr() in self._pinned
            way = "copy to host" if target == CPU else "copy of pinned memory" if is_pinned else "copy to device"
            if quick:
                self.copied[f"{way} {_place()}"] += 1
            else:
                self.waits(way)
        elif not any(isinstance(x, Pretended) for x in tree_leaves((args, kwargs))):
            return
        elif func is aten._local_scalar_dense.default:
            self.waits("item")
        elif func in _UNKNOWN_SHAPE:
            self.waits(func.__name__)
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.waits("repeat_interleave")
        elif func in _INDEXED:
            for index in args[1]:
                if index is not None and not isinstance(index, Pretended):
                    self.waits("index of the host")
                elif index is not None and index.dtype == torch.bool:
                    self.waits("index by a mask")


def _real(x: Any) -> Any:
    return x.held if isinstance(x, Pretended) else x


def _place() -> str:
    """Line of the package that asked for an operation."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT):
            return f"{os.path.relpath(name, ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


_devices: list[Device] = []


def running() -> Device:
    """The one that lasts."""
    return _devices[-1]


# -- FlashAttention 2, in fp32 on the CPU; signatures are torch's own -------------------------------------------------


def _check_flash(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> None:
    for x in (q, k, v):
        assert x.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
        assert x.dtype == q.dtype
        assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert q.shape[-1] in range(8, 257, 8), "head_size"
    assert q.shape[1] % k.shape[1] == 0
    for offsets, x, longest in ((q_offsets, q, max_q), (k_offsets, k, max_k)):
        assert (offsets.dtype, offsets.is_contiguous()) == (torch.int32, True)
        assert (int(offsets[-1]), int(offsets.diff().max())) == (len(x), longest)


def _pieces(q_offsets: Tensor, k_offsets: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Queries, keys, and what each query sees: it is the last of its keys that its own position stands at."""
    q, k = q_offsets.tolist(), k_offsets.tolist()
    for a, b, c, d in zip(q, q[1:], k, k[1:], strict=False):
        yield slice(a, b), slice(c, d), torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_flash(q, k, v, q_offsets, k_offsets, max_q, max_k)
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, True, False)
    group = q.shape[1] // k.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for rows, keys, seen in _pieces(q_offsets, k_offsets):
        kk, vv = (x[keys].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("rhd,nhd->hrn", q[rows].float(), kk).mul(scale).masked_fill(~seen, float("-inf"))
        out[rows] = torch.einsum("hrn,nhd->rhd", scores.softmax(-1), vv).to(q.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    # as torch's own meta kernel says: shapes and dtypes
    meta = aten._flash_attention_forward(
        *(x.to("meta") for x in (q, k, v, q_offsets, k_offsets)), max_q, max_k, 0.0, True, False, scale=scale
    )
    assert [(x.shape, x.dtype) for x in meta[:2]] == [(x.shape, x.dtype) for x in (out, lse)]
    return out, lse, *(torch.zeros(x.shape, dtype=x.dtype) for x in meta[2:])


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_flash(q, k, v, q_offsets, k_offsets, max_q, max_k)
    assert (dropout_p, is_causal) == (0.0, True)
    assert grad.dtype == out.dtype == q.dtype
    assert grad.stride(-1) == out.stride(-1) == 1
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((q.shape[1], len(q)), torch.float32, True)
    assert (rng_state.dtype, rng_state.shape, unused.shape) == (torch.uint64, (2,), ())
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for rows, keys, seen in _pieces(q_offsets, k_offsets):
        kk, vv = (x[keys].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("rhd,nhd->hrn", q[rows].float(), kk).mul(scale).masked_fill(~seen, float("-inf"))
        p = (scores - lse[:, rows, None]).exp()
        delta = (grad[rows].float() * out[rows].float()).sum(-1).T[..., None]
        ds = p * (torch.einsum("rhd,nhd->hrn", grad[rows].float(), vv) - delta) * scale
        dq[rows] = torch.einsum("hrn,nhd->rhd", ds, kk)
        for into, x in ((dk, torch.einsum("hrn,rhd->nhd", ds, q[rows].float())),
                        (dv, torch.einsum("hrn,rhd->nhd", p, grad[rows].float()))):  # fmt: skip
            into[keys] = x.unflatten(1, (-1, group)).sum(2)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


KERNELS = {
    aten._flash_attention_forward.default: _flash_forward,
    aten._flash_attention_backward.default: _flash_backward,
}
_sdpa = F.scaled_dot_product_attention


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention chooses by device in C++, where this one is unknown: the plain kernel."""
    if not isinstance(q, Pretended):
        return _sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))


def is_possible() -> bool:
    """A build of torch without GPUs, for Linux."""
    return sys.platform == "linux" and not torch.version.cuda and not torch.version.hip and hasattr(_library(), GUARDS)


@contextmanager
def pretended_device() -> Iterator[Device]:
    """The device is there for as long as this lasts, in a build of torch that has none; no gradients are recorded."""
    assert is_possible()
    guards = (ctypes.c_void_p * 32).in_dll(_library(), GUARDS)
    cuda, meta = 1, 14  # c10::DeviceType
    with ExitStack() as stack:
        for name, value in {
            "_lazy_init": lambda: None, "is_available": lambda: True, "is_bf16_supported": lambda *_, **__: True,
            "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3", "max_memory_allocated": lambda *_: 0,
            "get_device_capability": lambda *_: (9, 0), "device_count": lambda: 1, "current_device": lambda: 0,
        }.items():  # fmt: skip
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in ("__enter__", "__exit__"):  # in which composed operations would come whole; it is no_grad here
            stack.enter_context(mock.patch.object(torch.inference_mode, name, return_value=None))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _attention))
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor: made on the host, then copied by an operation
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # Module.to: new parameters
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        guards[cuda] = guards[meta]  # indexing asks for the device's guard, which need not do anything
        stack.callback(guards.__setitem__, cuda, None)
        device = stack.enter_context(Device())
        _devices.append(device)
        stack.callback(_devices.pop)
        stack.enter_context(torch.no_grad())
        yield device

"""The machine's side of torch: device, dtypes, allocator, memory."""

from __future__ import annotations

import ctypes
import platform
import re
import resource
import sys
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FEW_ROWS = 32  # of a product that `thin_products` turns around


def resolve_device(name: str) -> torch.device:
    """`auto`: CUDA (the local rank's) where there is one. Asking for CUDA where there is none, or no more, is an
    error."""
    import os

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU: use device=cpu, or install a CUDA build of torch")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ValueError(
            f"LOCAL_RANK={local}, and this process sees {count} GPUs: start as many processes on a machine as it has "
            "GPUs (launch.nproc_per_node, torchrun --nproc-per-node), and let each see all of them"
        )
    return torch.device("cuda", local)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 GEMMs are the faster ones. CPUs without AVX512-BF16 or AMX emulate them: 8x slower than fp32; GPUs
    before Ampere too."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine() in ("aarch64", "arm64"):
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Compute dtype of `bf16 | fp16 | fp32 | auto`."""
    if name == "auto":
        name = "bf16" if has_fast_bf16(device) else "fp32"
    return DTYPES[name]


# Kernels that oneDNN keeps, by the shape of their operands. Packed batches have ever new shapes, and its own 1,024
# took 0.6 GB more after 64 steps of the quick-start in bf16, at the same speed.
ONEDNN_KERNELS = "256"


def tune_allocator() -> None:
    """Keep large freed blocks in the process, and few of oneDNN's kernels. Before the first product.

    glibc returns each tensor above 32 MiB to the system, and every training step would fault the same pages in anew
    (measured: 1.2-1.5x slower). No effect without glibc. What the environment says of oneDNN's cache holds.
    """
    import os

    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", ONEDNN_KERNELS)
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def thin_products(linear: nn.Module | None) -> None:
    """Let a very tall matrix, an output head, meet a few rows at little more than the price of one, in fp32 on a CPU.

    For x @ W^T with 2 to 32 rows, MKL first copies all of W into another order: three times the work of a single row,
    which every verifying forward of speculative decoding would pay. W @ x^T needs no copy (benchmarks/decode.py).
    Modules that do more than this product stay as they are.
    """
    if type(linear) is not nn.Linear or linear.bias is not None:
        return
    if linear.weight.device.type == "cpu" and linear.weight.dtype == torch.float32:
        linear.forward = MethodType(_thin_forward, linear)  # type: ignore[method-assign]  # a copy's is the copy's


def _thin_forward(linear: nn.Linear, x: Tensor) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if not 1 < rows <= FEW_ROWS or not linear.weight.is_cpu:  # it may have moved since
        return F.linear(x, linear.weight)
    return (linear.weight @ x.flatten(0, -2).T).T.contiguous().unflatten(0, x.shape[:-1])


def arg_max(x: Tensor) -> Tensor:
    """Index of the first largest number of each row, int64 [...] of x [..., n].

    `max` and not `argmax`, which on a CPU takes four times as long over 16-bit numbers.
    """
    return x.max(-1).indices


def block_rows(device: torch.device) -> int:
    """Rows, of the size of a vocabulary, over which several passes in fp32 are best made one after the other: what
    stays in a core's caches on a CPU, and elsewhere what fills the device without holding much of its memory."""
    return 32 * torch.get_num_threads() if device.type == "cpu" else 512


def peak_rss_mb() -> float:
    """Peak resident memory of this process in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


# Dense bf16 peaks from the vendors' data sheets, TFLOP/s.
PEAK_BF16_TFLOPS = {
    "A100": 312, "A800": 312, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H200": 989, "GH200": 989,
    "B200": 2250, "L40S": 362, "L4": 121,
}  # fmt: skip


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak of a GPU that is known by name, in bf16; None elsewhere: a CPU's peak depends on clocks and cores."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for known, peak in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)

"""Parity of the GPU's code paths with the definition; `gpu_check.sh` says more. Prints a JSON line a check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "contenders"))

import ours  # noqa: E402
from workload import Workload, make  # noqa: E402

from eagle3_train.config import DraftConfig  # noqa: E402
from eagle3_train.drafts import DraftBatch, DraftVocab, build, supervised_counts  # noqa: E402
from eagle3_train.drafts.attention import attend  # noqa: E402
from eagle3_train.train.losses import Objective  # noqa: E402

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SEGMENTS = [(0, 0, 301), (400, 433, 130), (400, 640, 77), (900, 1000, 23)]
N_TOKENS, N_ROWS = 1100, 531
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}
failed = False


def report(check: str, errors: dict[str, float], tolerance: float, **facts: Any) -> None:
    global failed
    ok = all(e <= tolerance for e in errors.values())
    failed |= not ok
    print(
        json.dumps({"check": check, **facts, "ok": ok, "tolerance": tolerance, "relative_errors": errors}), flush=True
    )


def distance(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.double().cpu()
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


def check_attention(kind: str, dtype: torch.dtype, heads: tuple[int, int, int], chain: int) -> None:
    n_heads, n_kv, d = heads
    g = torch.Generator().manual_seed(0)
    shapes = [(N_ROWS, n_heads, d), *2 * [(N_TOKENS, n_kv, d)], *2 * [(chain, N_ROWS, n_kv, d)]]
    inputs = [torch.randn(*s, generator=g).to(dtype) for s in shapes]
    weights = torch.randn(N_ROWS, n_heads, d, generator=g).to(dtype)

    def run(kind: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = attend(*leaves, SEGMENTS, kind)
        used = leaves if chain else leaves[:3]
        return [out.detach(), *torch.autograd.grad(out, used, weights.to(device, dtype))]

    wanted, found = run("reference", CPU, torch.float64), run(kind, CUDA, dtype)
    names = ("out", "q", "k0", "v0", "ck", "cv")
    errors = {n: distance(a, b) for n, a, b in zip(names, found, wanted, strict=False)}
    report("attention", errors, TOLERANCE[dtype], kind=kind, dtype=str(dtype), heads=heads, chain=chain)


def check_head(attention: str, compiled: bool, recompute: bool) -> None:
    work = Workload("smollm2", 3, 2, 256, 0.76, "fp32", torch.get_num_threads())
    tensors = make(work)
    sequences = ours.sequences_of(work, tensors)
    results = []
    for device, kind in ((CPU, "merge"), (CUDA, attention)):
        torch.manual_seed(0)
        options: dict[str, Any] = {"compile": compiled, "recompute": recompute} if device == CUDA else {}
        d = work.sizes
        cfg = DraftConfig(steps=work.steps, vocab_size=d.draft_vocab, init_layer="random", attention=kind, **options)
        head = build(cfg, ours.Target(work, tensors), DraftVocab(work.draft_ids(), d.vocab, 1.0), 3).to(device)
        dtype = torch.float32 if device == CPU else torch.bfloat16
        batch = DraftBatch.collate(sequences, device, dtype)
        counts = supervised_counts(batch.loss_mask, batch.starts, work.steps)
        objective = Objective(counts, 0.8, "keep", device, compiled=head.compiled)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = head(batch, objective)
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in head.named_parameters()}))
    (wanted, wanted_grads), (found, grads) = results
    errors = {"loss": distance(found, wanted)} | {n: distance(grads[n], g) for n, g in wanted_grads.items()}
    report("head", errors, 5e-2, attention=attention, compiled=compiled, recompute=recompute)


def main() -> int:
    if not torch.cuda.is_available():
        print(json.dumps({"check": "gpu", "ok": False, "message": "no GPU here: nothing was checked"}))
        return 3
    print(json.dumps({"check": "gpu", "ok": True, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for heads in ((9, 3, 64), (32, 8, 128)):
        for chain in (0, 1, 6):
            for kind, dtype in (
                ("merge", torch.bfloat16), ("merge", torch.float16), ("flex", torch.bfloat16), ("flex", torch.float32),
            ):  # fmt: skip
                check_attention(kind, dtype, heads, chain)
    for attention in ("merge", "flex"):
        for compiled, recompute in ((False, False), (True, False), (False, True)):
            check_head(attention, compiled, recompute)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

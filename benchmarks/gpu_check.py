"""Parity of the GPU's code paths with the definition; `gpu_check.sh` says more. Prints a JSON line a check.

`python gpu_check.py eager` or `compiled`: what needs no compiler, and what does."""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "contenders"))

import ours  # noqa: E402
from workload import Workload, make  # noqa: E402

from eagle3_train.config import DraftConfig, EngineConfig, OptimConfig, TrainConfig  # noqa: E402
from eagle3_train.drafts import Draft, DraftBatch, DraftVocab, build, supervised_counts  # noqa: E402
from eagle3_train.drafts.attention import attend  # noqa: E402
from eagle3_train.train.distributed import World  # noqa: E402
from eagle3_train.train.engines import Engine, make_engine  # noqa: E402
from eagle3_train.train.losses import Objective  # noqa: E402
from eagle3_train.train.step import train_step  # noqa: E402

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


def guarded(check: Callable[..., None], *arguments: Any) -> None:
    """One that cannot be made is a line of the report, and the others follow."""
    global failed
    try:
        check(*arguments)
    except Exception as error:
        failed = True
        traceback.print_exc()
        shown = {"check": check.__name__, "arguments": [str(a) for a in arguments], "ok": False}
        print(json.dumps(shown | {"error": f"{type(error).__name__}: {error}"[:300]}), flush=True)


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


WORK = Workload("smollm2", 3, 2, 256, 0.76, "fp32", torch.get_num_threads())


def make_head(device: torch.device, **options: Any) -> tuple[Draft, list[Any]]:
    """The same weights at every call, and a batch's sequences."""
    tensors, d = make(WORK), WORK.sizes
    torch.manual_seed(0)
    cfg = DraftConfig(steps=WORK.steps, vocab_size=d.draft_vocab, init_layer="random", **options)
    head = build(cfg, ours.Target(WORK, tensors), DraftVocab(WORK.draft_ids(), d.vocab, 1.0), 3)
    return head.to(device), ours.sequences_of(WORK, tensors)


def loss_of(head: Draft, sequences: list[Any], device: torch.device, dtype: torch.dtype, oov: str) -> Tensor:
    batch = DraftBatch.collate(sequences, device, dtype)
    kept = head.kept_targets(batch.target_argmax) if oov == "drop" else None
    counts = supervised_counts(batch.loss_mask, batch.starts, WORK.steps, kept)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        return head(batch, Objective(counts, 0.8, oov, device, compiled=head.compiled))


def check_head(attention: str, compiled: bool, recompute: bool) -> None:
    results = []
    for device, dtype, options in (
        (CPU, torch.float32, {"attention": "merge"}),
        (CUDA, torch.bfloat16, {"attention": attention, "compile": compiled, "recompute": recompute}),
    ):
        head, sequences = make_head(device, **options)
        loss = loss_of(head, sequences, device, dtype, "keep")
        loss.backward()
        results.append((loss.detach(), {n: p.grad for n, p in head.named_parameters()}))
    (wanted, wanted_grads), (found, grads) = results
    errors = {"loss": distance(found, wanted)} | {n: distance(grads[n], g) for n, g in wanted_grads.items()}
    report("head", errors, 5e-2, attention=attention, compiled=compiled, recompute=recompute)


def check_predict() -> None:
    """Teacher-forced drafts in fp32, as replay makes them; ties may fall either way."""
    head, sequences = make_head(CPU)
    wanted = head.predict(DraftBatch.collate(sequences, CPU, torch.float32))
    found = head.to(CUDA).predict(DraftBatch.collate(sequences, CUDA, torch.float32))
    report("predict", {"share that differs": float((found.cpu() != wanted).double().mean())}, 1e-2)


def check_waits() -> None:
    """Forward and backward of a micro-batch queue all their work without waiting for the device."""
    head, sequences = make_head(CUDA)
    loss_of(head, sequences, CUDA, torch.bfloat16, "drop").backward()  # kernels, tables
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(head, sequences, CUDA, torch.bfloat16, "drop").backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report("waits", {}, 0.0)


def check_state() -> None:
    """An engine that is given another's weights and optimizer state takes the step that the other takes."""

    def new() -> tuple[Engine, Callable[[], float]]:
        head, sequences = make_head(CUDA)
        engine = make_engine(EngineConfig(kind="single"), head, OptimConfig(), World(), torch.bfloat16)
        return engine, lambda: train_step(engine, [sequences], 1e-3, TrainConfig(), World()).loss

    (first, step), (second, other_step) = new(), new()
    step()
    weights, state = ({k: copy.deepcopy(v) for k, v in part.items()} for part in (first.weights(), first.state()))
    second.load(weights, state)
    errors = {"loss": abs(step() - other_step())}
    errors |= {n: distance(w, first.weights()[n]) for n, w in second.weights().items()}
    report("state", errors, 1e-4)


def eager() -> None:
    for heads in ((9, 3, 64), (32, 8, 128)):
        for chain in (0, 1, 6):
            for dtype in (torch.bfloat16, torch.float16):
                guarded(check_attention, "merge", dtype, heads, chain)
    for recompute in (False, True):
        guarded(check_head, "merge", False, recompute)
    guarded(check_predict)
    guarded(check_waits)
    guarded(check_state)


def compiled() -> None:
    guarded(check_head, "merge", True, False)
    for chain, dtype in ((6, torch.float32), (0, torch.float32), (6, torch.bfloat16)):
        guarded(check_attention, "flex", dtype, (9, 3, 64), chain)
    guarded(check_head, "flex", False, False)


def main() -> int:
    if not torch.cuda.is_available():
        print(json.dumps({"check": "gpu", "ok": False, "message": "no GPU here: nothing was checked"}))
        return 3
    print(json.dumps({"check": "gpu", "ok": True, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    {"eager": eager, "compiled": compiled}[sys.argv[1]]()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

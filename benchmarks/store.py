"""Read and write speed of the store against the machine's own limit and against other layouts of the same data.

`python benchmarks/store.py [--quick]` prints a JSON line a measurement. Every contender gets the same sequences and
ends with the same batches: torch tensors of 2,048 tokens laid end to end, as training takes them. They
take turns, and the fastest of their rounds counts (whatever else runs on the machine only ever adds).
- store: with two reader threads, as training reads it; in the stored order, shuffled as in training, and by one thread
- raw: sequential read() of the store's own shards; and the same into one buffer, which stays in the processor's caches
- torch_save: one `torch.save` file a sample (the layout of SpecForge)
- safetensors: one safetensors file a sample (the layout of speculators)
- datasets: Hugging Face `datasets` streaming the store's own shards
- to_pylist: Arrow `to_pylist` of the store's own shards, a row group at a time
`--capture TARGET`: speed of capture=vllm against vLLM's plain prefill (benchmarks/capture.py).
Cold cache: the files are written back and dropped from the page cache (posix_fadvise) before each pass.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import safetensors.torch
import torch

from eagle3_train.device import tune_allocator
from eagle3_train.store import BatchPlan, Sequence, ShardWriter, Store, StoreSpec, concatenate, finalize, shard_rows
from eagle3_train.store.loader import LOCAL_READERS

Tensors = dict[str, torch.Tensor]
N_SHARDS = 4
RAW_CHUNK = 8 << 20
BATCH_TOKENS = 2048
READERS_OF_TRAINING = ThreadPoolExecutor(LOCAL_READERS)


def make_sequences(spec: StoreSpec) -> list[Sequence]:
    """Lengths as conversations have them; contents drawn from one pool of noise, since nothing compresses here."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 0.6, spec.n_rows), 32, 1024).astype(int)
    pool = torch.randn(1024 + 64, len(spec.layer_ids), spec.hidden_size).bfloat16()
    sequences = []
    for i, n in enumerate(lengths):
        ids = rng.integers(0, spec.vocab_size, n).astype(np.int32)
        mask = (np.arange(n) > n // 3).astype(np.uint8)
        sequences.append(Sequence(f"conversation-{i}", "bench", ids, mask, pool[i % 64 : i % 64 + n], ids + 0))
    return sequences


def tensors_of(sequence: Sequence) -> Tensors:
    return {
        "input_ids": torch.from_numpy(sequence.input_ids),
        "loss_mask": torch.from_numpy(sequence.loss_mask),
        "target_argmax": torch.from_numpy(sequence.target_argmax),
        "hidden": sequence.hidden,
    }


def write_store(path: Path, spec: StoreSpec, sequences: list[Sequence]) -> None:
    for shard in range(N_SHARDS):
        with ShardWriter(path, shard, spec) as writer:
            for row in shard_rows(spec.n_rows, N_SHARDS, shard):
                writer.add(sequences[row])
    finalize(path, spec)


def write_raw(path: Path, spec: StoreSpec, sequences: list[Sequence]) -> None:
    """The same bytes, a file a shard, fsync as the store's writer does."""
    path.mkdir()
    for shard in range(N_SHARDS):
        with open(path / f"raw-{shard}.bin", "wb", buffering=0) as f:
            for row in shard_rows(spec.n_rows, N_SHARDS, shard):
                for tensor in tensors_of(sequences[row]).values():
                    f.write(tensor.contiguous().view(torch.uint8).numpy().data)
            os.fsync(f.fileno())


def write_torch_save(path: Path, spec: StoreSpec, sequences: list[Sequence]) -> None:
    path.mkdir()
    for row, sequence in enumerate(sequences):
        torch.save({k: t.clone() for k, t in tensors_of(sequence).items()}, path / f"{row:06d}.ckpt")


def write_safetensors(path: Path, spec: StoreSpec, sequences: list[Sequence]) -> None:
    path.mkdir()
    for row, sequence in enumerate(sequences):
        tensors = {k: t.contiguous() for k, t in tensors_of(sequence).items()}
        safetensors.torch.save_file(tensors, path / f"{row:06d}.safetensors")


def collate(rows: Iterator[Tensors]) -> Iterator[Tensors]:
    """Batches laid end to end, as training takes them, from samples that came one by one."""
    batch: list[Tensors] = []
    for row in rows:
        batch.append(row)
        if sum(len(r["input_ids"]) for r in batch) >= BATCH_TOKENS:
            yield {k: torch.cat([r[k] for r in batch]) for k in row}
            batch = []
    if batch:
        yield {k: torch.cat([r[k] for r in batch]) for k in batch[0]}


def collate_store(sequences: list[Sequence]) -> Tensors:
    columns = ("input_ids", "loss_mask", "target_argmax")
    small = {c: torch.from_numpy(np.concatenate([getattr(s, c) for s in sequences])) for c in columns}
    return {**small, "hidden": concatenate(sequences)}


def read_store(path: Path, readers: Executor | None = READERS_OF_TRAINING) -> Iterator[Tensors]:
    store = Store.open(path)
    ends = np.cumsum(store.index.n_tokens, dtype=np.int64)
    start = 0
    while start < len(store):
        before = ends[start - 1] if start else 0
        stop = min(int(np.searchsorted(ends, before + BATCH_TOKENS)) + 1, len(store))
        yield collate_store(store.read_batch(range(start, stop), readers))
        start = stop


def read_plan(path: Path) -> Iterator[Tensors]:
    """The order of training: shuffled."""
    store = Store.open(path)
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, BATCH_TOKENS, epochs=1)
    return (collate_store(store.read_batch(plan.batch(s), READERS_OF_TRAINING)) for s in range(len(plan)))


def read_raw(path: Path, one_buffer: bool = False) -> Iterator[Tensors]:
    """Plain read() calls, which give new bytes each, as a reader of batches must. `one_buffer`: into one that stays in
    the processor's caches, faster than any reader whose batches are kept."""
    buffer = memoryview(bytearray(RAW_CHUNK)) if one_buffer else None
    for file in sorted(path.glob("shard-*")):
        with open(file, "rb", buffering=0) as f:
            while f.read(RAW_CHUNK) if buffer is None else f.readinto(buffer):
                pass
    yield {}


def read_torch_save(path: Path) -> Iterator[Tensors]:
    return collate(torch.load(f, weights_only=True) for f in sorted(path.iterdir()))


def read_safetensors(path: Path) -> Iterator[Tensors]:
    return collate(safetensors.torch.load_file(f) for f in sorted(path.iterdir()))


def _row_tensors(row: dict[str, Any]) -> Tensors:
    tensors = {k: torch.tensor(row[k]) for k in ("input_ids", "loss_mask", "target_argmax")}
    hidden = torch.frombuffer(bytearray(row["hidden_states"]), dtype=torch.bfloat16)
    return {**tensors, "hidden": hidden.view(len(row["input_ids"]), 4, -1)}


def read_datasets(path: Path) -> Iterator[Tensors]:
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    files = sorted(str(f) for f in path.glob("shard-*"))
    rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
    return collate(_row_tensors(row) for row in rows)


def read_to_pylist(path: Path) -> Iterator[Tensors]:
    def rows() -> Iterator[Tensors]:
        for file in sorted(path.glob("shard-*")):
            parquet = pq.ParquetFile(file)
            for group in range(parquet.num_row_groups):
                yield from map(_row_tensors, parquet.read_row_group(group).to_pylist())

    return collate(rows())


def drop_from_cache(path: Path) -> None:
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def consume(read: Callable[[Path], Iterator[Tensors]], path: Path) -> None:
    deque(read(path), maxlen=0)  # no batch is alive while the next one is read, as with raw reading


WRITERS = {"store": write_store, "raw": write_raw, "torch_save": write_torch_save, "safetensors": write_safetensors}
# contender -> (how it reads, whose files)
READERS: dict[str, tuple[Callable[[Path], Iterator[Tensors]], str]] = {
    "raw": (read_raw, "store"),
    "raw, one buffer": (partial(read_raw, one_buffer=True), "store"),
    "store": (read_store, "store"),
    "store, shuffled": (read_plan, "store"),
    "store, one thread": (partial(read_store, readers=None), "store"),
    "torch_save": (read_torch_save, "torch_save"),
    "safetensors": (read_safetensors, "safetensors"),
    "datasets": (read_datasets, "store"),
    "to_pylist": (read_to_pylist, "store"),
}
OTHER_BATCHES = ("raw", "raw, one buffer", "store, shuffled")
PEERS = ("torch_save", "safetensors", "datasets", "to_pylist")


def check_same(folder: Path) -> None:
    """Every contender gives the same batches; else the figures would compare different things."""
    batches = {n: list(read(folder / layout)) for n, (read, layout) in READERS.items() if n not in OTHER_BATCHES}
    expected = batches.pop("store")
    for name, found in batches.items():
        for a, b in zip(found, expected, strict=True):
            for key, tensor in b.items():
                assert torch.equal(a[key].to(tensor.dtype), tensor), (name, key)


def report(**values: Any) -> None:
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps(rounded), flush=True)


def bench(folder: Path, hidden_size: int, mib: int, rounds: int) -> None:
    layers = (2, 16, 29, 32)
    tokens_wanted = (mib << 20) // (len(layers) * hidden_size * 2)
    spec = StoreSpec(
        *("bench", "", "", "", layers, hidden_size, 32, 50_000, "bf16", "bf16"),
        n_rows=max(tokens_wanted // 450, 2 * N_SHARDS),
        n_shards=N_SHARDS,
        generator="bench",
    )
    sequences = make_sequences(spec)
    tokens = sum(s.n_tokens for s in sequences)
    size = spec.estimate_bytes(tokens) / 2**20
    shared = {"hidden_size": hidden_size, "mib": round(size)}

    seconds: dict[str, list[float]] = {name: [] for name in WRITERS}
    for _ in range(rounds):
        for name, write in WRITERS.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            seconds[name].append(timed(lambda: write(folder / name, spec, sequences)))  # noqa: B023
    best_of = {name: min(times) for name, times in seconds.items()}
    for name, taken in best_of.items():
        figures = {"mib_per_s": size / taken, "tokens_per_s": tokens / taken, "ratio_raw": best_of["raw"] / taken}
        report(bench="store.write", contender=name, **shared, **figures)

    check_same(folder)  # also imports what is imported on first use
    for cache in ("warm", "cold"):
        seconds = {name: [] for name in READERS}
        for _ in range(rounds):
            for name, (read, layout) in READERS.items():
                if cache == "cold":
                    drop_from_cache(folder / layout)
                seconds[name].append(timed(lambda: consume(read, folder / layout)))  # noqa: B023
        best_of = {name: min(times) for name, times in seconds.items()}
        best_peer = min(best_of[name] for name in PEERS)
        for name, taken in best_of.items():
            figures = {
                "mib_per_s": size / taken,
                "tokens_per_s": tokens / taken,
                "ratio_raw": best_of["raw"] / taken,
                "ratio_best_peer": best_peer / taken,
            }
            kind = "store.read" if name.startswith("store") else "store.read.other"
            report(bench=kind, contender=name, cache=cache, **shared, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small stores, fewer rounds: under 50 s on two cores")
    parser.add_argument("--dir", help="where to write (default: the system's temporary folder)")
    parser.add_argument(
        "--capture", type=Path, metavar="TARGET", help="capture=vllm with the target in this folder, alone"
    )
    args = parser.parse_args()
    if args.capture is not None:
        from capture import bench_capture

        bench_capture(args.capture, *((8, 2) if args.quick else (64, 3)), report)
        return
    torch.set_num_threads(1)
    tune_allocator()  # as training does; for every contender
    mib, rounds = (80, 3) if args.quick else (1024, 5)
    for hidden_size in (576, 4096):
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            bench(Path(folder), hidden_size, mib, rounds)


if __name__ == "__main__":
    main()

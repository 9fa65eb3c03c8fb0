"""Speed of capture=vllm against vLLM's plain prefill of the same prompts: `benchmarks/store.py --capture TARGET`.

Prefill is what any capture must do at least. The capture adds: states out of the cache, to another process, to the
arg max over the vocabulary at supervised positions, into shards with checksums and fsync.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_train import config
from eagle3_train.capture.generate import Sampling
from eagle3_train.capture.plan import Job
from eagle3_train.capture.vllm import Requests, VllmBackend, open_engine, sampling_params
from eagle3_train.corpus.rows import Row, RowWriter
from eagle3_train.device import resolve_device, resolve_dtype
from eagle3_train.store import ShardWriter, StoreSpec
from eagle3_train.target import text_config


def make_rows(count: int, longest: int, vocab_size: int) -> list[Row]:
    """Lengths as conversations have them; the last three quarters of each are supervised."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.6, count), 32, longest).astype(int)
    return [
        Row(
            f"row {i}",
            "bench",
            rng.integers(0, vocab_size, n).astype(np.int32),
            (np.arange(n) > n // 4).astype(np.uint8),
        )
        for i, n in enumerate(lengths)
    ]


def bench_capture(target: Path, count: int, rounds: int, report: Callable[..., None]) -> None:
    """Fastest of `rounds` for each contender. The engines run one after the other: an idle one still takes time."""
    cfg = config.compose([f"target.model={target}", "capture=vllm"])
    device = resolve_device(cfg.device)
    dtype = resolve_dtype(cfg.capture.compute_dtype, device)
    model = text_config(target)
    rows = make_rows(count, cfg.corpus.max_length, model["vocab_size"])
    tokens = sum(len(r.input_ids) for r in rows)
    layers, name = config.layer_ids(cfg.capture, model["num_hidden_layers"]), str(dtype).removeprefix("torch.")
    spec = StoreSpec(
        *("bench", "", "", "", layers, model["hidden_size"], layers[-1], model["vocab_size"], "bf16", name),
        n_rows=len(rows),
        n_shards=1,
        generator="bench",
    )

    def prefill(llm: Any) -> None:
        requests = Requests(llm)
        for number, row in enumerate(rows):
            requests.add(number, row.input_ids, sampling_params(1, [], Sampling(), ""))
        while len(requests.ended) < len(rows):
            requests.step()

    def capture(backend: VllmBackend, job: Job, rows: list[Row]) -> None:
        with tempfile.TemporaryDirectory() as store, ShardWriter(store, 0, spec) as writer:
            for sequence in backend.sequences(job, rows, lambda n: None):
                writer.add(sequence)

    best: dict[str, float] = {}

    def time_rounds(contender: str, work: Callable[[], None]) -> None:
        for _ in range(rounds):
            began = time.perf_counter()
            work()
            best[contender] = min(best.get(contender, float("inf")), time.perf_counter() - began)
        seconds = best[contender]
        figures = {"tokens_per_s": tokens / seconds, "ratio_prefill": best["vllm prefill"] / seconds}
        report(bench="capture", contender=contender, target=target.name, dtype=name, tokens=tokens, **figures)

    engine = open_engine(cfg, target, dtype, device, cfg.corpus.max_length + 1, enable_prefix_caching=False)
    prefill(engine)  # warm
    time_rounds("vllm prefill", lambda: prefill(engine))
    engine.llm_engine.engine_core.shutdown()
    with tempfile.TemporaryDirectory() as folder:
        with RowWriter(Path(folder) / "rows.parquet") as writer:
            for row in rows:
                writer.add(row)
        job = Job("bench", Path(folder) / "rows.parquet", folder, spec, finished=False)
        unsupervised = [Row(r.sample_id, r.source, r.input_ids, np.zeros_like(r.loss_mask)) for r in rows]
        with VllmBackend(cfg, target, dtype, device, [job]) as backend:
            capture(backend, job, rows)  # warm
            time_rounds("capture=vllm", lambda: capture(backend, job, rows))
            time_rounds("capture=vllm, states alone", lambda: capture(backend, job, unsupervised))

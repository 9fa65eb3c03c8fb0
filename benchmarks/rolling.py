"""Rolling against capture-then-train, on the quick-start model: `python benchmarks/rolling.py [--cores shared] ...`.

Both sides are the commands that a user runs (`eagle3 roll` beside `eagle3 train`; `eagle3 capture`, then `eagle3
train`), on the same corpus, each process on one core: a core of its own (`--cores own`), or one for all (`--cores
shared`). Wall times count from the start of a command to its end, imports and loading of the target included; processor
seconds beside them, since another load on the machine spoils the former. One JSON line; what runs, on stderr.

Fields: whole_s, rolling_s: wall time; capture_s, train_s: of its two halves; ratio; ratio_bound: the slower half over
both, the least that any overlap can reach on two cores; whole_cpu_s, rolling_cpu_s; whole_bytes: of the finished
training store; peak_bytes: of shards on disk while it rolls, unfinished ones included; disk_ratio; cap_bytes;
capture_waited, training_waited: shares of their time; tokens; same_weights: whether the two heads are equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_train import config
from eagle3_train.config import Config
from eagle3_train.exits import SUPERVISED
from eagle3_train.files import read_json

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", choices=("own", "shared"), default="own")
    parser.add_argument(
        "--target", help="a folder with the converted quick-start model; otherwise it is converted first"
    )
    parser.add_argument("--sequences", type=int, default=96)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--cap", type=float, default=0.1, help="share of the whole store's size")
    parser.add_argument("overrides", nargs="*", help="of the configuration, for both ways: draft.steps=7")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), options)
        print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}))


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    n, longest = options.sequences, options.max_length
    overrides = [
        f"corpus.sequences={n}", f"data.base_sequences={n}", f"capture.shards={n}", f"corpus.max_length={longest}",
        f"train.batch_tokens={2 * longest}", f"data.window={options.window}", f"train.epochs={options.epochs}",
        "corpus.validation_sequences=4", "train.checkpoint_every=null", "eval.tasks=[]",
        "eval.decode_tasks=[]", "train.compute_dtype=fp32", "capture.compute_dtype=fp32", "capture.batch_tokens=512",
        *([f"paths.target={options.target}"] if options.target else []), *options.overrides,
    ]  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))
    capture_core, train_core = (cores[0], cores[-1]) if options.cores == "own" else (cores[0], cores[0])
    if options.cores == "own" and len(cores) < 2:
        raise SystemExit("--cores own needs two cores")

    corpus = folder / "corpus"
    logs = folder / "logs"
    logs.mkdir()

    def run(step: str, overrides: list[str], core: int) -> None:
        finish({step: start(step, overrides, core, logs)}, logs)

    run("prepare", [*overrides, f"paths.outputs={folder}/whole", f"paths.corpus={corpus}"], capture_core)
    shared = [*overrides, f"paths.corpus={corpus}"]
    whole = [*shared, f"paths.outputs={folder}/whole"]
    cfg = config.compose(whole)
    rolls = ["store.mode=rolling", "store.cap_gib=1000"]
    for outputs in ("whole", "rolling"):  # validation states, and what is known beforehand, which both need alike
        run("capture", [*shared, *rolls, f"paths.outputs={folder}/{outputs}"], capture_core)

    halves = []
    for step, core in (("capture", capture_core), ("train", train_core)):
        with measured() as spent:
            run(step, whole, core)
        halves.append(spent)
    capture_s, train_s = (wall for wall, _ in halves)
    whole_s, whole_cpu_s = (sum(values) for values in zip(*halves, strict=True))
    whole_bytes = read_json(Path(cfg.paths.store) / "manifest.json")["bytes"]

    cap = options.cap * whole_bytes
    rolling = [*shared, f"paths.outputs={folder}/rolling", "store.mode=rolling", f"store.cap_gib={cap / 2**30}"]
    rolling_cfg = config.compose(rolling)
    with measured() as spent, peak(Path(rolling_cfg.paths.store)) as sizes:
        both = {"roll": capture_core, "train": train_core}
        finish({step: start(step, rolling, core, logs) for step, core in both.items()}, logs)
    rolling_s, rolling_cpu_s = spent
    worker = json.loads((Path(rolling_cfg.paths.study) / "rolling.jsonl").read_text().splitlines()[-1])
    training = read_json(rolling_cfg.point_dir / "train.json")["wall_seconds"]
    return {
        "bench": "rolling", "cores": options.cores, "overrides": options.overrides,
        "epochs": options.epochs, "sequences": options.sequences,
        "tokens": read_json(corpus / "report.json")["parts"]["train"]["tokens"],
        "whole_s": whole_s, "rolling_s": rolling_s, "ratio": rolling_s / whole_s,
        "capture_s": capture_s, "train_s": train_s, "ratio_bound": max(capture_s, train_s) / whole_s,
        "whole_cpu_s": whole_cpu_s, "rolling_cpu_s": rolling_cpu_s,
        "whole_bytes": whole_bytes, "peak_bytes": max(sizes), "disk_ratio": max(sizes) / whole_bytes,
        "cap_bytes": int(cap),
        "capture_waited": worker["waited_s"] / (worker["busy_s"] + worker["waited_s"]),
        "training_waited": training["data"] / (training["train"] + training["data"]),
        "same_weights": weights(cfg) == weights(rolling_cfg),
    }  # fmt: skip


def start(step: str, overrides: list[str], core: int, logs: Path) -> subprocess.Popen[bytes]:
    """The command `eagle3 STEP` on one core; it ends with this process, however that ends."""
    print(f"eagle3 {step} on core {core}", file=sys.stderr, flush=True)
    with open(logs / step, "wb") as log:  # a pipe that nobody reads would hold one of two processes up
        return subprocess.Popen(
            [sys.executable, "-m", "eagle3_train.cli", step, *overrides],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", SUPERVISED: "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finish(processes: dict[str, subprocess.Popen[bytes]], logs: Path) -> None:
    """Wait for all; where one fails, end the others, which would wait for it, and show its last words."""
    try:
        while True:
            codes = {step: process.poll() for step, process in processes.items()}
            for step, code in codes.items():
                if code:
                    raise SystemExit(f"eagle3 {step}: exit code {code}\n{(logs / step).read_text()[-3000:]}")
            if None not in codes.values():
                return
            time.sleep(0.05)
    finally:
        for process in processes.values():
            assert process.stdin
            process.stdin.close()
            process.kill()
            process.wait()


@contextmanager
def measured() -> Iterator[list[float]]:
    """Wall and processor seconds of the children that end in the block, once it has ended."""
    spent: list[float] = []
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield spent
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent += [
        time.perf_counter() - began,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    ]


@contextmanager
def peak(store: Path, every_s: float = 0.01) -> Iterator[list[int]]:
    """Bytes of shards in the folder, finished or not, looked at all the time."""
    sizes, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(every_s):
            total = 0
            for path in (*store.glob("*shard-*"), *store.glob("kept/*shard-*")):
                try:
                    total += path.stat().st_size
                except FileNotFoundError:  # renamed or deleted since
                    continue
            sizes.append(total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        ended.set()
        thread.join()


def weights(cfg: Config) -> bytes:
    newest = sorted((cfg.point_dir / "checkpoints").glob("step-*"))[-1]
    return (newest / "head.safetensors").read_bytes()


if __name__ == "__main__":
    main()

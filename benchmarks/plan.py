"""The batch plan at scale, from the index alone: memory, start-up time and balance of many ranks over many sequences.

`python benchmarks/plan.py [--ranks 1024] [--sequences 100000000] ...` prints one JSON line. Of a store, training reads
the column of the lengths before its first step, and nothing else; here they are drawn, log-normal as those of
conversations are, and cut at `--max-length`. One process plays all ranks of some steps in turn; a real rank does by
itself what this one does for it.
- start_s: from the lengths to a plan that can give its first batch; first_s: that first batch, the share of every rank
- step_s: a later step, mean; a rank computes it ahead, in the thread of its loader
- resume_s: finding the place of a checkpoint in the middle of the run
- plan_mib: memory of the plan and the lengths, which each rank holds; peak_mib: most at any time
- balance: tokens of the fullest rank by those of the mean rank, mean and worst over the steps; the last, cut, left out
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np

from eagle3_train.store import BatchPlan

CHUNK = 1 << 22  # lengths drawn at a time


def lengths_of(sequences: int, mean: float, spread: float, longest: int) -> np.ndarray:
    """[sequences] int32: log-normal around `mean`, from 16 to `longest` tokens."""
    rng, found = np.random.default_rng(0), np.empty(sequences, np.int32)
    for start in range(0, sequences, CHUNK):
        part = found[start : start + CHUNK]
        part[:] = np.clip(rng.lognormal(np.log(mean) - spread**2 / 2, spread, len(part)), 16, longest)
    return found


def resident_mib() -> float:
    """Of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=100_000_000)
    parser.add_argument("--rank-tokens", type=int, default=16384, help="tokens of a rank in a step, in the mean")
    parser.add_argument("--mean", type=float, default=1200, help="tokens of a sequence, before the longest are cut")
    parser.add_argument("--spread", type=float, default=0.8, help="standard deviation of the logarithm of the lengths")
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="steps that are looked at, spread over the run")
    args = parser.parse_args()
    before = resident_mib()
    lengths = lengths_of(args.sequences, args.mean, args.spread, args.max_length)

    def seconds_of(step: int) -> float:
        began = time.perf_counter()
        loads = np.array([lengths[plan.rank_rows(step, rank, args.ranks)].sum() for rank in range(args.ranks)])
        balance.append(float(loads.max() / loads.mean()))
        return time.perf_counter() - began

    balance: list[float] = []
    began = time.perf_counter()
    plan = BatchPlan(lengths, "benchmark", 0, args.ranks * args.rank_tokens, epochs=2)
    start = time.perf_counter() - began
    first = seconds_of(0)
    later = [seconds_of(int(step)) for step in np.linspace(1, len(plan) - 2, args.steps)]
    began = time.perf_counter()
    other = BatchPlan(lengths, "benchmark", 0, args.ranks * args.rank_tokens, epochs=2)
    assert other.resume(plan.state(len(plan) // 2)) == len(plan) // 2
    resume = time.perf_counter() - began
    figures = {
        "bench": "plan",
        "ranks": args.ranks,
        "sequences": args.sequences,
        "tokens": plan.epoch_tokens,
        "steps": len(plan),
        "start_s": start,
        "first_s": first,
        "step_s": sum(later) / len(later),
        "resume_s": resume,
        "plan_mib": resident_mib() - before,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "balance_mean": sum(balance) / len(balance),
        "balance_worst": max(balance),
    }
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in figures.items()}))


if __name__ == "__main__":
    main()

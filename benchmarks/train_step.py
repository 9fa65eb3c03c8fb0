"""Speed and memory of the training step against other EAGLE-3 trainers and against the machine's own limit.

`python benchmarks/train_step.py [--quick]` prints a JSON line a contender and K. Install the peers once with
`benchmarks/contenders/install.sh`; without them there are our lines alone. Contenders: benchmarks/contenders/.

Everybody computes the same optimizer step (forward, backward, clipping, fused AdamW) on the same random tensors of a
real model's sizes, in a process of its own, with the same threads, dtype and allocator; they take turns, a step each,
and medians count. All do it with a trained lm_head, as the paper, but for `speculators` as it ships, which freezes it
and has that much less to do; `ours_frozen` is its like.

    tokens_per_s        tokens of the batch over the median seconds of a step; supervised_tokens_per_s counts the
                        assistant's alone, cpu_s are processor seconds of a step, which other load changes less
    ratio_best_peer     our tokens/s over the fastest peer's; ratio_best_peer_cpu: of processor seconds
    ratio_limit         what ratio_best_peer were if our step's products, at the machine's rate, were all that it did
    ratio_peak_memory   our peak resident memory over the smallest of the peers'
    gemm_gflops         the machine's rate of plain matrix products of the step's sizes, measured in our process
    mfu                 FLOPs of the step (matrix products and attention that it needs) over its seconds, over that rate
    ratio_gemm_bound    the same: 1 were all other work free

A CPU without AVX512-BF16 or AMX emulates bf16 products, several times slower than fp32: `--dtype auto`, the default, is
fp32 there and bf16 elsewhere, as in training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "contenders")]

from workload import Workload  # noqa: E402

from eagle3_train.device import resolve_dtype  # noqa: E402

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (module beside worker.py, options)
    "ours": ("ours", {}),
    "ours_frozen": ("ours", {"eagle3": {"lm_head": "frozen"}}),
    "ours_flex": ("ours", {"attention": "flex"}),
    "ours_merge": ("ours", {"attention": "merge"}),
    "ours_compiled": ("ours", {"compile": True}),
    "speculators": ("peer_speculators", {"train_lm_head": True}),
    "speculators_frozen": ("peer_speculators", {}),
    "specforge": ("peer_specforge", {}),
    "specforge_compact": ("peer_specforge", {"compact": True}),
}
OURS = tuple(name for name, (module, _) in CONTENDERS.items() if module == "ours")
QUICK = ("ours", "speculators")  # SpecForge compiles for half a minute before its first step
ALL = ("ours", "ours_frozen", "speculators", "speculators_frozen", "specforge", "specforge_compact")


@dataclass
class Contender:
    """A worker process and what it has said."""

    name: str
    work: Workload
    python: str
    process: subprocess.Popen[str] = field(init=False)
    facts: dict[str, Any] = field(init=False)  # known once the first step, which is not timed, is done
    steps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        module, options = CONTENDERS[self.name]
        arguments = json.dumps({"work": asdict(self.work), "options": options})
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.work.threads),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = subprocess.Popen(
            [self.python, str(HERE / "contenders" / "worker.py"), module, arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            stderr=subprocess.DEVNULL,  # a pipe that nobody reads stops whoever fills it
        )  # fmt: skip

    def wait(self) -> None:
        self.facts = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self.process.communicate()

    @property
    def runs(self) -> bool:
        return "error" not in self.facts

    def middle(self, key: str) -> float:
        return median(step[key] for step in self.steps)


def report(**values: Any) -> None:
    print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}), flush=True)


def bench(work: Workload, names: list[str], peers: str, rounds: int) -> None:
    contenders = [Contender(n, work, sys.executable if n in OURS else peers) for n in names]
    try:
        for c in contenders:
            c.wait()
        running = [c for c in contenders if c.runs]
        for _ in range(rounds):
            for c in running:
                c.steps.append(c.ask("step"))
        ours = next((c for c in running if c.name in OURS), None)
        gemm = ours.ask("gemm")["gemm_flops_per_s"] if ours else 0.0
    finally:
        for c in contenders:
            c.close()
    rivals = [c for c in running if c.name not in OURS]
    shared = {"bench": "train.step", "K": work.steps, "dims": work.dims, "dtype": work.dtype}
    shared |= {"tokens": work.tokens, "supervised": work.supervised, "threads": work.threads, "device": work.device}
    for c in contenders:
        if not c.runs:
            report(who=c.name, **shared, error=c.facts["error"])
            continue
        seconds = c.middle("seconds")
        supervised = ours.facts["supervised_tokens"] if ours else None
        figures: dict[str, Any] = {
            "tokens_per_s": work.tokens / seconds,
            "supervised_tokens_per_s": supervised / seconds if supervised else None,
            "seconds": seconds,
            "cpu_s": c.middle("cpu_seconds"),
            "peak_rss_mb": c.steps[-1]["peak_rss_mb"],
            "loss": c.facts["loss"],
        }
        if c.name in OURS:
            rate = c.facts["flops"] / seconds
            figures |= {"gemm_gflops": gemm / 1e9, "mfu": rate / gemm, "ratio_gemm_bound": rate / gemm}
            if rivals:
                best = min(rivals, key=lambda r: r.middle("seconds"))
                figures |= {
                    "best_peer": best.name,
                    "ratio_best_peer": best.middle("seconds") / seconds,
                    "ratio_limit": best.middle("seconds") * gemm / c.facts["flops"],
                    "ratio_best_peer_cpu": min(r.middle("cpu_seconds") for r in rivals) / c.middle("cpu_seconds"),
                    "ratio_peak_memory": figures["peak_rss_mb"] / min(r.steps[-1]["peak_rss_mb"] for r in rivals),
                }
        if work.device == "cuda":
            figures["peak_gpu_mb"] = c.steps[-1]["peak_gpu_mb"]
        report(who=c.name, **shared, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batch, few rounds: under 50 s on two cores")
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 7], help="K")
    parser.add_argument("--dims", default="smollm2", choices=("smollm2", "8b"))
    parser.add_argument("--sequences", type=int, help="of a batch (default 4; 2 with --quick)")
    parser.add_argument("--length", type=int, default=512, help="of a sequence")
    parser.add_argument("--supervised", type=float, default=0.76, help="share of the assistant's tokens")
    parser.add_argument("--dtype", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, help="steps of each contender (default 5; 2 with --quick)")
    parser.add_argument(
        "--who", nargs="+", choices=tuple(CONTENDERS), help=f"default: {' '.join(ALL)}; with --quick {' '.join(QUICK)}"
    )
    parser.add_argument("--peers", default=str(HERE / "contenders/.venv/bin/python"), help="python of install.sh")
    args = parser.parse_args()
    names = list(args.who or (QUICK if args.quick else ALL))
    if not Path(args.peers).exists():
        print(f"no {args.peers}: our lines alone; run benchmarks/contenders/install.sh", file=sys.stderr)
        names = [n for n in names if n in OURS]
    dtype = "bf16" if resolve_dtype(args.dtype, torch.device(args.device)) is torch.bfloat16 else "fp32"
    for steps in args.steps:
        work = Workload(
            args.dims, steps, args.sequences or (2 if args.quick else 4), args.length,
            args.supervised, dtype, args.threads, args.device,
        )  # fmt: skip
        bench(work, names, args.peers, args.rounds or (2 if args.quick else 5))


if __name__ == "__main__":
    main()

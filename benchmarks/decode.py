"""Where the time of speculative decoding goes, against the machine's own limits: `python benchmarks/decode.py`.

Needs a trained point: give the overrides that name it (`study=quickstart data.scale=8 seed=0`). Prints JSON lines; all
seconds are processor seconds of one thread (`--threads`), which other load changes less, and ways take turns.

    target_forward      `ratio_one`: a forward of n tokens over that of one, both over a cache of 200 tokens, as a
                        verification of n - 1 drafts costs it. `before`: with the output head as torch multiplies it
    draft_step          a step of the head over `bound`, the products alone: each of its matrices once with one vector,
                        which is what its bytes cost. `observe`: step 0 after n accepted tokens
    batch_step          a step of plain batched generation (the capture's) over `bound`, the same products of
                        32 rows each, which is what its FLOPs cost
    decode              plain over speculative decoding, prompt by prompt; `expected` is what the lines above and tau
                        say: tau / (ratio_one of K + 1 tokens + draft seconds over those of a forward of one)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3_train import config
from eagle3_train.capture.generate import Prompt, Sampling, generate
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import decode_plain, decode_speculative
from eagle3_train.decode.runner import Query, TargetRunner
from eagle3_train.decode.schedule import Request
from eagle3_train.evaluate.transcripts import open_transcripts
from eagle3_train.store import inside
from eagle3_train.target import load_target
from eagle3_train.train import load_head

ROUNDS, CACHED, BATCH = 5, 200, 32
CPU = torch.device("cpu")


def report(bench: str, **figures: Any) -> None:
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({"bench": bench} | rounded), flush=True)


def seconds(**ways: Callable[[], object]) -> dict[str, float]:
    """Fewest processor seconds of each way, taking turns, after an untimed round."""
    best = dict.fromkeys(ways, float("inf"))
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if number:
                best[name] = min(best[name], time.process_time() - start)
    return best


def bench_forward(runner: TargetRunner) -> dict[int, float]:
    """Seconds of forwards by their tokens."""
    head = runner.model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    ours = head.forward

    def forward(n: int, way: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        def run() -> None:
            head.forward = way  # type: ignore[method-assign]
            runner.cache.truncate(0, CACHED)
            runner.forward([Query(torch.arange(n))])

        return run

    runner.forward([Query(torch.arange(CACHED))])
    plain = nn.Linear.forward.__get__(head)
    ways = {f"{name}{n}": forward(n, way) for n in (1, 2, 4, 6, 8) for name, way in (("", ours), ("before ", plain))}
    found = seconds(**ways)
    head.forward = ours  # type: ignore[method-assign]
    for n in (2, 4, 6, 8):
        ratios = {"ratio_one": found[f"{n}"] / found["1"], "before": found[f"before {n}"] / found["1"]}
        report("target_forward", tokens=n, **ratios)
    return {n: found[f"{n}"] for n in (1, 2, 4, 6, 8)}


def bench_draft(head: Any, steps: int) -> float:
    """Seconds of a draft of K tokens."""
    used = [p for p in head.parameters() if p.dim() == 2]
    stepped = [p for name, p in head.named_parameters() if p.dim() == 2 and not name.startswith("fc.")]
    state = head.new_state()
    features = torch.randn(CACHED, head.n_layers, head.hidden_size)[:, head.reads]
    token = torch.tensor(1)
    h, _ = head.observe(state, torch.arange(CACHED), features)

    def products(matrices: list[Tensor]) -> None:
        for matrix in matrices:
            torch.mv(matrix, matrix[0])

    def observe(n: int) -> None:
        state.length = CACHED
        head.observe(state, torch.arange(n), features[:n])

    def step() -> None:
        state.chain = 0
        head.step(state, token, h)

    with torch.inference_mode():
        found = seconds(
            step=step, step_bound=lambda: products(stepped), bound=lambda: products(used),
            observe1=lambda: observe(1), observe2=lambda: observe(2),
        )  # fmt: skip
    report("draft_step", ratio_bound=found["step"] / found["step_bound"], ms=1e3 * found["step"])
    for n in (1, 2):
        report("draft_step", observe=n, ratio_bound=found[f"observe{n}"] / found["bound"])
    return found["observe1"] + (steps - 1) * found["step"]


def bench_batch(model: Any) -> None:
    """A step of the capture's generation."""
    prompts = [Prompt(str(i), np.arange(1, CACHED + 1, dtype=np.int32), 8) for i in range(BATCH)]
    times: list[float] = []
    generate(model, prompts, [0], Sampling(), lambda n: times.append(time.process_time()))
    matrices = [m for m in model.modules() if isinstance(m, nn.Linear)]
    rows = {m.in_features: torch.randn(BATCH, m.in_features) for m in matrices}

    def products() -> None:
        for m in matrices:
            F.linear(rows[m.in_features], m.weight)

    with torch.inference_mode():
        bound = seconds(products=products)["products"]
    step = float(np.diff(times).min())
    flops = 2.0 * BATCH * sum(m.weight.numel() for m in matrices)
    report(
        "batch_step", batch=BATCH, ratio_bound=step / bound, gflops=flops / step / 1e9, gflops_bound=flops / bound / 1e9
    )


def bench_decode(cfg: config.Config, runner: TargetRunner, head: Any, prompts: int, one: float, cycle: float) -> None:
    """Both ways on a task's prompts, taking turns."""
    task = cfg.eval.tasks[0]
    transcripts = open_transcripts(inside(cfg.paths.store, "transcripts"), task.name)
    used = {"plain": 0.0, "drafted": 0.0}
    tokens = forwards = same = 0
    for number, transcript in enumerate(transcripts.read(prompts)):
        request = Request(torch.from_numpy(transcript.prompt_ids.astype("int64")), task.new_tokens)
        outputs = {}
        for way in ("plain", "drafted") if number % 2 else ("drafted", "plain"):
            start = time.process_time()
            if way == "plain":
                outputs[way] = decode_plain(runner, [request], [])[0]
            else:
                outputs[way] = decode_speculative(runner, head, Chain(head.steps), [request], [])[0]
            used[way] += time.process_time() - start
        tokens += len(outputs["drafted"].tokens) - 1
        forwards += len(outputs["drafted"].accepted)
        same += outputs["plain"].tokens == outputs["drafted"].tokens
    tau = tokens / forwards
    figures = {"tau": tau, "speedup": used["plain"] / used["drafted"], "expected": tau * one / cycle}
    report("decode", draft=cfg.draft.kind, steps=head.steps, prompts=prompts, lossless=same, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("overrides", nargs="*", help="of the point: study=quickstart data.scale=8 seed=0")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cfg = config.compose(args.overrides)
    head = load_head(cfg, CPU)
    model = load_target(cfg.paths.target, torch.float32, CPU)
    transcripts = open_transcripts(inside(cfg.paths.store, "transcripts"), cfg.eval.tasks[0].name)
    runner = TargetRunner(model, transcripts.layer_ids[head.reads])
    with torch.inference_mode():
        forwards = bench_forward(runner)
    draft = bench_draft(head, head.steps) if head.is_trained else 0.0
    bench_batch(model)
    verify = min(n for n in forwards if n > head.steps)
    bench_decode(cfg, runner, head, args.prompts, forwards[1], forwards[verify] + draft)


if __name__ == "__main__":
    main()

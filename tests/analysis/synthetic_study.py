"""Writes a study folder as a real one is: result.json, records.jsonl, metrics.jsonl, config.yaml for every point."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from analysis.bootstrap import Counts
from analysis.simulate import Design, Noise, Truth, simulate

TASKS = ("humaneval", "sharegpt")
CONFIG = """seed: {seed}
device: auto
target: {{name: smollm2-135m}}
corpus: {{name: sharegpt, max_length: 512}}
data: {{scale: {scale}, base_sequences: 32}}
draft: {{kind: {draft}, steps: {k}, vocab_size: 4096}}
train: {{regime: epochs, epochs: 2, batch_tokens: 2048}}
optim: {{kind: adamw, lr: 0.002}}
"""


def write_study(
    folder: Path,
    truth: Truth | None = None,
    design: Design | None = None,
    noise: Noise | None = None,
    draft: str = "eagle3",
    seed: int = 0,
    trainable: int = 12_000_000,
    suffix: str = "",
) -> Path:
    """A study with known truth at `folder`, which is returned. Several heads may go into one folder; `suffix` keeps
    the names of their points apart."""
    truth, design, noise = truth or Truth(), design or Design(), noise or Noise()
    rng = np.random.default_rng(seed)
    counts = simulate(design, truth.tau(design.scales, design.draft_steps), noise, rng)
    for i, scale in enumerate(design.run_scales):
        _write_point(folder, counts, i, float(scale), i % design.seeds, draft, trainable, suffix, design, rng)
    return folder


def _write_point(
    folder: Path,
    counts: Counts,
    i: int,
    scale: float,
    seed: int,
    draft: str,
    trainable: int,
    suffix: str,
    design: Design,
    rng: np.random.Generator,
) -> None:
    k = design.draft_steps
    name = f"{draft}-x{scale:g}-s{seed}-{zlib.crc32(f'{draft} {scale} {seed}'.encode()):08x}{suffix}"
    point = folder / name
    point.mkdir(parents=True)
    (point / "config.yaml").write_text(CONFIG.format(seed=seed, scale=scale, draft=draft, k=k))
    supervised = round(7600 * scale)
    steps = max(4, round(8 * scale * 2))
    val_loss = 3.1 + 2.6 * scale**-0.22 + 0.01 * rng.standard_normal()
    records, tau, alpha_by_task = [], {}, {}
    for t, task in enumerate(TASKS[: design.tasks]):
        own = counts.task == t
        tokens, forwards = counts.tokens[i, own].sum(), counts.forwards[i, own].sum()
        tau[task] = {
            "tau": tokens / forwards,
            "lo": tokens / forwards - 0.03,
            "hi": tokens / forwards + 0.03,
            "prompts": int(own.sum()),
            "tokens": int(tokens),
            "forwards": int(forwards),
        }
        alpha_by_task[task] = (counts.accepted[i, own].sum(0) / counts.drafted[i, own].sum(0)).tolist()
        for p in np.flatnonzero(own):
            records.append(
                {
                    "task": task,
                    "method": "replay",
                    "temperature": 0.0,
                    "prompt": f"{task}/{p}",
                    "tokens": int(counts.tokens[i, p]),
                    "forwards": int(counts.forwards[i, p]),
                    "drafted": counts.drafted[i, p].astype(int).tolist(),
                    "accepted": counts.accepted[i, p].astype(int).tolist(),
                }
            )
    result = {
        "schema": 1,
        "study": folder.name,
        "point": name,
        "target": "smollm2-135m",
        "draft": draft,
        "data_scale": scale,
        "seed": seed,
        "unique_sequences": round(32 * scale),
        "unique_tokens": round(12_500 * scale),
        "supervised_tokens": supervised,
        "consumed_tokens": round(25_000 * scale),
        "consumed_supervised_tokens": 2 * supervised,
        "epochs": 2,
        "steps": steps,
        "draft_steps": k,
        "draft_vocab_size": 4096,
        "vocab_coverage": 0.953,
        "parameters": {"trainable": trainable, "frozen": 28_311_552},
        "train_flops": 6.0 * trainable * 25_000 * scale,
        "wall_seconds": {"train": 14.0 * scale, "replay": 21.0},
        "train_tokens_per_s": 1780.0,
        "peak_rss_mb": 2210.0,
        "val_loss": val_loss,
        "val_loss_steps": [val_loss * (1 + 0.05 * j) for j in range(k)],
        "val_kl": val_loss - 2.4,
        "alpha": (counts.accepted[i].sum(0) / counts.drafted[i].sum(0)).tolist(),
        "alpha_by_task": alpha_by_task,
        "tau_replay": tau,
        "store_fingerprint": "3f9a61c2d0",
        "code_version": "0.1.0+g0123456789ab",
        "train_identity": f"{zlib.crc32(name.encode()):08x}",
    }
    if seed == 0 and scale in (min(design.scales), max(design.scales)):
        task = TASKS[0]
        measured = tau[task]["tau"]
        timed = {"method": "decode", "seconds": 2.0, "plain_seconds": 2.2}
        records += [r | timed | {"tokens": 9 * r["tokens"]} for r in records[:16]]  # absurd: must not count in tau
        speedup = measured / (1 + 0.06 * k)
        result["tau_decode"] = {task: {**tau[task], "prompts": 16}}
        result["wall_seconds"]["decode"] = 55.0
        result["speedup"] = {
            task: {
                "speedup": speedup,
                "lo": speedup - 0.03,
                "hi": speedup + 0.03,
                "plain_tokens_per_s": 21.0,
                "draft_tokens_per_s": 21.0 * speedup,
            }
        }
    (point / "result.json").write_text(json.dumps(result))
    (point / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    curve = [
        {
            "step": s,
            "loss": float(val_loss + 5 * np.exp(-3 * s / steps) + 0.05 * rng.standard_normal()),
            "lr": 2e-3 * (1 - s / steps),
            "grad_norm": 0.8,
            "tokens_per_s": 1780.0,
        }
        for s in range(1, steps + 1)
    ]
    (point / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in curve))

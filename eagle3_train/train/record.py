"""train.json: what training knows of a point's result."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from eagle3_train.config import Config, digest
from eagle3_train.console import say
from eagle3_train.device import peak_rss_mb
from eagle3_train.drafts import Draft
from eagle3_train.files import code_version
from eagle3_train.store import BatchPlan, Store


def make_record(
    cfg: Config, head: Draft, store: Store, plan: BatchPlan, totals: dict[str, Any], steps: int
) -> dict[str, Any]:
    """What training knows of the Result contract (docs/architecture.md)."""
    return {
        "schema": 1,
        "study": cfg.study.name,
        "point": cfg.point_name,
        "target": cfg.target.name,
        "draft": cfg.draft.kind,
        "data_scale": cfg.data.scale,
        "seed": cfg.seed,
        "unique_sequences": len(plan.lengths),
        "unique_tokens": plan.epoch_tokens,
        "supervised_tokens": int(store.index.n_supervised[: len(plan.lengths)].sum(dtype=np.int64)),
        "consumed_tokens": totals["tokens"],
        "consumed_supervised_tokens": totals["rows"],
        "epochs": totals["tokens"] / plan.epoch_tokens,
        "steps": steps,
        "draft_steps": head.steps,
        "draft_vocab_size": len(head.vocab.ids),
        "vocab_coverage": head.vocab.coverage,
        "parameters": head.parameter_counts(),
        "train_flops": totals["flops"],
        "wall_seconds": {"train": totals["seconds"]},
        "peak_rss_mb": peak_rss_mb(),
        "optim": asdict(cfg.optim),
        "store_fingerprint": store.fingerprint,
        "code_version": code_version(),
        "train_identity": digest(cfg.point_identity),
    }


def without_nan(record: dict[str, Any], name: str) -> dict[str, Any]:
    """Numbers that are not finite as null, which every reader of JSON takes; said aloud, hours of training kept."""
    bad: list[str] = []

    def clean(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {k: clean(v, f"{key}.{k}" if key else k) for k, v in value.items()}
        if isinstance(value, list):
            return [clean(v, f"{key}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            bad.append(f"{key} = {value}")
            return None
        return value

    cleaned: dict[str, Any] = clean(record, "")
    if bad:
        say(f"WARNING: {name}: {', '.join(bad)}: null in train.json; it has diverged, or held-out data is damaged")
    return cleaned

"""Replay of a head that is still being trained: the numbers of a log line, without intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eagle3_train.config import Config
from eagle3_train.device import resolve_device
from eagle3_train.drafts import Draft
from eagle3_train.evaluate.point import check_transcripts
from eagle3_train.evaluate.replay import replay_tasks
from eagle3_train.store import inside


def while_training(cfg: Config) -> Callable[[Draft], dict[str, Any]]:
    """What `train.eval_every` measures of a head on `cfg.device`, on the held-out transcripts of `cfg.eval.tasks`.

    The callable returns `tau` (all tasks together; bonus token included) and `tau/<task>`, and `alpha` [K]. ValueError,
    before any training, where transcripts are missing or not those of the tasks.
    """
    if not cfg.eval.tasks:
        return lambda head: {}
    check_transcripts(cfg)
    device, transcripts = resolve_device(cfg.device), inside(cfg.paths.store, "transcripts")

    def evaluate(head: Draft) -> dict[str, Any]:
        records, keys = replay_tasks(
            head, transcripts, cfg.eval.tasks, device, bootstrap=1, seed=cfg.seed, target_store=cfg.paths.store
        )
        taus = {f"tau/{task}": row["tau"] for task, row in keys.get("tau_replay", {}).items()}
        alpha = [a for a in keys.get("alpha", []) if a is not None]  # None: no cycle got so far
        tau = sum(r.tokens for r in records) / sum(r.forwards for r in records)
        return {"tau": tau, **taus, "alpha": alpha}

    return evaluate

"""wandb: a run a point, grouped by study. Offline works without a key; `wandb sync` uploads later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3_train.config import Config, digest
from eagle3_train.tracking.base import scalars


class WandbTracker:
    """One wandb run. Its id follows from the study and the point, so a resumed run continues the same curve; steps
    that are logged again after a resume are ignored by wandb, which is right: they repeat the same values."""

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        import wandb

        tracker = cfg.tracker
        if tracker.mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            raise ValueError("tracker.mode=online needs a key: run `wandb login`, or use tracker.mode=offline")
        run_dir.mkdir(parents=True, exist_ok=True)  # wandb would fall back to another folder, with a warning only
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            group=cfg.study.name,
            name=cfg.point_name,
            id=f"{cfg.point_name}-{digest([cfg.study.name, cfg.point_name])}".replace(".", "_"),
            resume="allow",
            mode="online" if tracker.mode == "online" else "offline",
            config=asdict(cfg),
            dir=str(run_dir),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self._run.log(scalars(metrics), step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def close(self) -> None:
        self._run.finish()

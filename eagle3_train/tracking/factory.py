"""From `cfg.tracker` to a tracker."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from eagle3_train.config import Config, TrackerConfig
from eagle3_train.tracking.base import MultiTracker, Tracker
from eagle3_train.tracking.jsonl import JsonlTracker

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard"}  # tracker kind -> the package it needs, an extra of ours


def check(cfg: TrackerConfig) -> None:
    """Raise ValueError for an unknown tracker or one whose package is not installed. Imports nothing heavy."""
    for kind in cfg.kinds:
        if kind not in PACKAGES:
            raise ValueError(f"tracker.kinds names {kind!r}, which is not among {', '.join(PACKAGES)}")
        if find_spec(PACKAGES[kind]) is None:
            raise ValueError(f"tracker={kind} needs a package that is missing: pip install 'eagle3-train[{kind}]'")


def make_tracker(cfg: Config, run_dir: Path, *, resume_step: int = 0, active: bool = True) -> Tracker:
    """All trackers of a run as one: `run_dir/metrics.jsonl` always, and `cfg.tracker.kinds`.

    `resume_step`: optimizer steps that the run continues after; 0 starts the log anew. `active=False` (ranks other than
    0): a tracker that takes everything and does nothing. Raises ValueError for an unknown tracker or a missing package.
    """
    check(cfg.tracker)
    if not active:
        return MultiTracker([])
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl", resume_step)]
    for kind in cfg.tracker.kinds:
        if kind == "wandb":
            from eagle3_train.tracking.wandb import WandbTracker

            trackers.append(WandbTracker(cfg, run_dir))
        else:
            from eagle3_train.tracking.tensorboard import TensorboardTracker

            trackers.append(TensorboardTracker(run_dir, resume_step))
    return MultiTracker(trackers)

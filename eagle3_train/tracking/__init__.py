"""Where a run's metrics go: `metrics.jsonl` always; wandb and TensorBoard when asked for; memory in tests."""

from eagle3_train.tracking.base import MultiTracker, Tracker
from eagle3_train.tracking.factory import check, make_tracker
from eagle3_train.tracking.jsonl import JsonlTracker, read_metrics
from eagle3_train.tracking.memory import MemoryTracker

__all__ = [
    "JsonlTracker",
    "MemoryTracker",
    "MultiTracker",
    "Tracker",
    "check",
    "make_tracker",
    "read_metrics",
]

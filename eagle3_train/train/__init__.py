"""Training of draft heads."""

from __future__ import annotations

from eagle3_train.train.loop import train
from eagle3_train.train.setup import head_source, load_head, parameter_counts

__all__ = ["head_source", "load_head", "parameter_counts", "train"]

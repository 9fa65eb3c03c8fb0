"""Acceptance measured: replay on the target's own transcripts, and real decoding. Page: docs/evaluate.md."""

from __future__ import annotations

from eagle3_train.evaluate.decode import decode_tasks
from eagle3_train.evaluate.point import check_target, measure
from eagle3_train.evaluate.records import Record
from eagle3_train.evaluate.replay import replay_tasks
from eagle3_train.evaluate.while_training import while_training

__all__ = ["Record", "check_target", "decode_tasks", "measure", "replay_tasks", "while_training"]

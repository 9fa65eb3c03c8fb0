"""TensorBoard event files in `<run>/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_train.tracking.base import scalars


class TensorboardTracker:
    def __init__(self, run_dir: Path, resume_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an interrupted run logged beyond the checkpoint that it resumes from.
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in scalars(metrics).items():
            self._writer.add_scalar(name, value, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._writer.add_text("summary", f"```\n{json.dumps(dict(values), indent=1, default=float)}\n```")

    def close(self) -> None:
        self._writer.close()

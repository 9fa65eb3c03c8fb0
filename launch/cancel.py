"""`eagle3 study cancel`: a word left in the study's folder, which every process that works on the study looks for."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from pathlib import Path

from eagle3_train.config import Config
from eagle3_train.files import write_text

LOOK_EVERY_S = 2.0


def cancel(study: Path) -> None:
    """Stop all jobs of a study that run now, wherever they run. Jobs that start later are not affected."""
    write_text(study / "cancel", uuid.uuid4().hex)


class Cancellation:
    """Called again and again: "cancelled" once `cancel` was used after this object was made, "" before. It compares
    contents, not times, so the clocks of machines need not agree."""

    def __init__(self, cfg: Config) -> None:
        self._path = Path(cfg.paths.study) / "cancel"
        self._first = self._word()
        self._looked, self._state = time.monotonic(), ""

    def __call__(self) -> str:
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            with suppress(OSError):  # a server that is away for a moment is no word: a job of days does not end by it
                self._state = "cancelled" if self._word() != self._first else ""
        return self._state

    def _word(self) -> str:
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

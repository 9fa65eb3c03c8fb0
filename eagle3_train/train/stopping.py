"""Stopping before the end, in good order: signals and the time limit, at a step that all ranks agree on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

import numpy as np

from eagle3_train.exits import Unfinished
from eagle3_train.train.distributed import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
# One that comes sooner is the first one again: SLURM tells all processes of a job step, and torchrun, one of these,
# hands it on to the ranks.
AGAIN_S = 5.0


class Lost(ValueError):
    """What this process works on is another's by now."""


class Stop:
    """While it is entered, SIGTERM and SIGUSR2 ask the loop to stop after the step; a second one, `AGAIN_S` or more
    later, ends the process.

    max_hours: of this attempt, from here on; None: no limit. is_lost: whether another process works on the same point
    by now, as rank 0 sees it.
    """

    def __init__(self, max_hours: float | None, is_lost: Callable[[], bool] = lambda: False) -> None:
        self._is_lost = is_lost
        self._deadline = time.monotonic() + 3600 * max_hours if max_hours is not None else float("inf")
        self._signal, self._told = 0, 0.0

    @property
    def is_told(self) -> bool:
        """Whether this process has had a signal; other ranks may not."""
        return self._signal != 0

    def reason(self, world: World) -> str | None:
        """Why to stop now, the same on all ranks; None: go on. A collective, asked once a step.

        Raises:
            Lost: another process has the point, and its files are that one's.
        """
        late, lost = time.monotonic() >= self._deadline, world.is_main and self._is_lost()
        signals, late_ranks, lost_ranks = world.sum(np.array([self._signal != 0, late, lost], np.int64)).tolist()
        if lost_ranks:
            raise Lost("this process had not moved for so long that another one took over its work: it ends here")
        if signals:
            return signal.Signals(self._signal).name if self._signal else "a signal to another rank"
        return "train.max_hours" if late_ranks else None

    def __enter__(self) -> Stop:
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # only there can handlers be set
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signal:
            self._signal, self._told = number, now
        elif now - self._told >= AGAIN_S:
            raise Unfinished()

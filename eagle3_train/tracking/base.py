"""The protocol that every tracker follows, and a tracker made of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes the metrics of one run. Scalars may be anything that `float()` takes (numpy, torch)."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Metrics after `step` optimizer steps. Steps never decrease within a run."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final values of the run: JSON-able, lists and mappings allowed."""

    def close(self) -> None:
        """Flush and end. Nothing may be logged afterwards."""


class MultiTracker:
    """Several trackers as one. Of none: swallows everything, which is what ranks other than 0 do."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.summary(values)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()

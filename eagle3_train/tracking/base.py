"""The protocol that every tracker follows, and a tracker made of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes the metrics of one run."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Metrics after `step` optimizer steps: numbers, or lists of numbers. Steps never decrease within a run."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final values of the run: JSON-able, lists and mappings allowed."""

    def close(self) -> None:
        """Flush and end. Nothing may be logged afterwards."""


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as every tracker stores them: numbers (numpy's and torch's too), item i of a list under `name/i`."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, list | tuple):
            flat |= {f"{name}/{i}": float(item) for i, item in enumerate(value)}
        else:
            flat[name] = float(value)
    return flat


class MultiTracker:
    """Several trackers as one. Of none: takes everything and does nothing, as ranks other than 0 do."""

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

"""What a person sees while something runs: progress with rate and time left, tables. No torch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eagle3_train.exits import SUPERVISED

console = Console(soft_wrap=True)
if not console.is_terminal:
    # A log has no width of its own; in a launcher's, a job's name stands in front of its lines.
    console.width = 114 if SUPERVISED in os.environ else 140
QUIET_INTERVAL_S = 10.0  # between lines where the output is no terminal (a log file, CI)


def say(text: str) -> None:
    """One line to the user. Markup is off: paths and brackets come out as they are."""
    console.print(text, markup=False, highlight=False)
    sys.stdout.flush()


def duration(seconds: float) -> str:
    """`95` -> `1m35s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def count(n: int, noun: str) -> str:
    """`1,024 turns`, `1 turn`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def size(n_bytes: float) -> str:
    """`450637679` -> `430 MiB`."""
    for unit, bytes_of in (("TiB", 2**40), ("GiB", 2**30)):
        if n_bytes >= bytes_of:
            return f"{n_bytes / bytes_of:,.2f} {unit}"
    return f"{n_bytes / 2**20:,.0f} MiB" if n_bytes >= 10 * 2**20 else f"{n_bytes / 2**20:.1f} MiB"


class Bar:
    """Progress of one task in units (tokens, steps, prompts). `update(n)` adds n units."""

    def __init__(
        self, title: str, total: float, unit: str, done: float = 0.0, progress: Progress | None = None
    ) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.start_units = self.units = done  # `done` was there before
        self.started = self.printed = time.monotonic()
        self._first: float | None = None  # when the first units came
        self.note = ""
        self._progress = progress
        if progress is not None:
            self._task = progress.add_task(title, total=total, completed=int(done), rate="", note="")

    @property
    def rate(self) -> float:
        """Units a second since the first ones came; 0 until more have. What comes before them (a warm-up, the prompts
        of what is generated) is no measure of the rest."""
        if self._first is None or self.units == self.start_units:
            return 0.0
        return (self.units - self.start_units) / max(time.monotonic() - self._first, 1e-9)

    def _rate_text(self) -> str:
        if not self.rate:
            return "?"
        if 0 < self.rate < 1:  # few and slow units (prompts): the time of one says more
            return f"{1 / self.rate:,.1f} s a {self.unit.removesuffix('s')}"
        return f"{self.rate:,.1f} {self.unit}/s" if self.rate < 100 else f"{self.rate:,.0f} {self.unit}/s"

    def update(self, units: float, note: str | None = None) -> None:
        self.units += units
        if units and self._first is None:
            self._first, self.start_units = time.monotonic(), self.units
        if note is not None:
            self.note = note
        rate = self._rate_text()
        if self._progress is not None:
            self._progress.update(self._task, completed=self.units, rate=rate, note=self.note)
        elif time.monotonic() - self.printed >= QUIET_INTERVAL_S:
            self.printed = time.monotonic()
            left = duration((self.total - self.units) / self.rate) if self.rate > 0 else "?"
            share = 100 * self.units / self.total if self.total else 100
            say(f"{self.title}: {share:3.0f} %  {self.units:,.0f}/{self.total:,.0f}  {rate}  {left} left  {self.note}")


@contextmanager
def progress_bar(title: str, total: float, unit: str, done: float = 0.0, show: bool = True) -> Iterator[Bar]:
    """A live bar on a terminal, a line every ten seconds elsewhere, nothing with `show=False` (other ranks)."""
    if show and console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=console) as progress:
            yield Bar(title, total, unit, done, progress)
        return
    bar = Bar(title, total, unit, done)
    if not show:
        bar.printed = float("inf")
    yield bar
    if show:
        say(f"{title}: done, {bar.units:,.0f} {bar.unit} in {duration(time.monotonic() - bar.started)}")

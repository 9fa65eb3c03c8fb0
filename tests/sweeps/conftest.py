"""Studies run as processes, with stand-ins for the rooms that do the work (fake_rooms/sitecustomize.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent / "fake_rooms"


@dataclass
class Bench:
    """A folder in which `eagle3` commands run, and a note of what the rooms were asked to do."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def study(self) -> Path:
        return self.folder / "outputs" / "quickstart"

    def start(self, *arguments: str, module: str = "eagle3_train.cli", **env: str) -> subprocess.Popen[str]:
        settings = {"PYTHONPATH": f"{FAKES}:{ROOT}", "FAKE_CALLS": str(self.folder / "calls"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=os.environ | settings | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, module: str = "eagle3_train.cli", code: int = 0, **env: str) -> str:
        """Run to the end; the exit code must be `code`. Returns what was printed."""
        process = self.start(*arguments, module=module, **env)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == code, out
        return out

    def calls(self, room: str = "") -> list[str]:
        """What the rooms were asked to do, in order, without the process ids; `room` filters by the first word."""
        path = self.folder / "calls"
        lines = [line.partition(" pid=")[0] for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if not room or line.split()[0] == room]

    def pids(self) -> list[int]:
        return [int(line.partition(" pid=")[2]) for line in (self.folder / "calls").read_text().splitlines()]

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


def wait_until(condition: Callable[[], bool], seconds: float = 300, every: float = 0.02) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(every)

"""`eagle3 study WORD`: how a study stands, its logs, and what to do about failed or running points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3_train import config
from eagle3_train.console import say
from launch.supervise import tail
from sweeps import status

WORDS = "status [--json], logs POINT"


def run(words: Sequence[str], overrides: Sequence[str]) -> int:
    """Do what `words` say with the study that `overrides` name."""
    folder = Path(config.compose(list(overrides)).paths.study)
    match list(words):
        case ["status"]:
            status.show(folder)
        case ["status", "--json"] | ["--json", "status"]:
            print(status.as_json(folder))
        case ["logs", name]:
            logs(folder, name)
        case _:
            raise ValueError(f"eagle3 study {' '.join(words)}: not understood; after `study` may stand {WORDS}")
    return 0


def logs(folder: Path, name: str) -> None:
    """Print the end of a job's log. `name` is a point, or the beginning of one, or prepare or capture."""
    found = [job for job in status.jobs(folder) if job.name == name] or [
        job for job in status.jobs(folder) if job.name.startswith(name)
    ]
    if len(found) != 1:
        names = ", ".join(job.name for job in found or status.jobs(folder))
        raise ValueError(f"{name!r} is {'no' if not found else 'more than one'} job of {folder}: {names}")
    for line in tail(found[0].folder / "log.txt", lines=200):
        say(line)

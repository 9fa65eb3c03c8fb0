"""`metrics.jsonl`: one JSON object a line, flushed line by line, so that a reader may follow a run from the file alone.

A line of metrics is `{"step": int, "time": Unix seconds, NAME: number, ...}`; the last line of a finished run is
`{"summary": {...}}`. JSON has no NaN and no infinity, and a diverged loss must not vanish from the log: they are
written as the strings "nan", "inf" and "-inf", which `read_metrics` (and `float`) turn back.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_train.files import write_text
from eagle3_train.tracking.base import scalars


class JsonlTracker:
    """Appends to `path`. A run that resumes after `resume_step` steps first drops the lines that it will write again:
    later steps, summaries, and a last line that a crash cut. So no step of the run stands twice."""

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        kept = [row for row in _rows(path) if row.get("step", math.inf) <= resume_step] if resume_step else []
        write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open for as long as the run

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        row = {"step": step, "time": round(time.time(), 3)}
        self._write(row | {name: _finite_or_text(value) for name, value in scalars(metrics).items()})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._write({"summary": _jsonable(values)})

    def close(self) -> None:
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metric lines of a `metrics.jsonl`, oldest first; "nan" and "inf" are numbers again. A cut last line is left
    out: the run may be writing it right now. No file: no lines."""
    return [{name: float(value) for name, value in row.items()} for row in _rows(path) if "step" in row]


def _rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines. Raises ValueError where a line other than the last is not JSON: the file is damaged, not cut."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1]]  # what follows the last line break is empty or cut
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} has a damaged line ({e}): delete the file, or the line, and go on") from e


def _finite_or_text(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _jsonable(value: Any) -> Any:
    """Mappings, lists and numbers of any library as JSON has them."""
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v) for v in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return _finite_or_text(float(value))

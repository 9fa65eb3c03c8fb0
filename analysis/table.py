"""Runs as a tidy table: a row a point, flat columns; beside it the per-prompt records and the training curves.

Reads run folders and study folders (docs/architecture.md, "Result" and "Records"), and tidy CSV or Parquet files of
other people's numbers. A point that has no readable result stays in the table, with its status and the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.bootstrap import Counts
from analysis.quantities import AXES
from analysis.settings import add_settings

SCHEMA = 1
REQUIRED = ("draft", "data_scale", "seed")
FINISHED, FAILED = "finished", "failed"
TRAINED = "trained"  # and not asked for more: `eagle3 study tune`
MEASURED = ("tau", "alpha_0", "val_loss", "val_kl")  # a tidy file must hold at least one


@dataclass(frozen=True)
class Table:
    """`runs`: index 0..n-1. Columns: docs/analysis.md. `records`, `metrics` and `configs` refer to that index."""

    runs: pd.DataFrame
    records: pd.DataFrame
    metrics: dict[int, pd.DataFrame] = field(default_factory=dict)
    configs: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> pd.DataFrame:
        return self.runs[self.runs["status"] == FINISHED]

    @property
    def tasks(self) -> list[str]:
        return [c.removeprefix("tau.") for c in self.runs.columns if c.startswith("tau.")]

    def has(self, column: str) -> bool:
        """Whether any run has a value in this column."""
        return column in self.runs.columns and bool(self.runs[column].notna().any())

    def tau_of_decoded(self, run: int, task: str) -> float | None:
        """tau of a run by greedy replay, on the prompts of a task that it also decoded; None without their records."""
        if self.records.empty:
            return None
        greedy = self.records[
            (self.records["run"] == run) & (self.records["task"] == task) & (self.records["temperature"] == 0)
        ]
        decoded = greedy.loc[greedy["method"] == "decode", "prompt"]
        replayed = greedy[(greedy["method"] == "replay") & greedy["prompt"].isin(decoded)]
        if decoded.empty or len(replayed) < decoded.nunique():
            return None
        return float(replayed["tokens"].sum() / replayed["forwards"].sum())

    def counts(self, runs: Sequence[int], method: str = "replay") -> Counts | None:
        """Greedy acceptance counts of these runs on the prompts of `records`; None where a run has none."""
        if self.records.empty:
            return None
        chosen = self.records[
            (self.records["method"] == method) & (self.records["temperature"] == 0) & self.records["run"].isin(runs)
        ]
        if set(chosen["run"]) != set(runs):
            return None
        keys = chosen[["task", "prompt"]].drop_duplicates().sort_values(["task", "prompt"], ignore_index=True)
        place = {key: i for i, key in enumerate(zip(keys["task"], keys["prompt"], strict=True))}
        row = chosen["run"].map({r: i for i, r in enumerate(runs)}).to_numpy()
        column = np.array([place[key] for key in zip(chosen["task"], chosen["prompt"], strict=True)])
        steps = max(len(d) for d in chosen["drafted"])

        def matrix(values: pd.Series) -> np.ndarray:
            out = np.zeros((len(runs), len(keys)))
            np.add.at(out, (row, column), values.to_numpy(dtype=float))
            return out

        def stack(name: str) -> np.ndarray:
            return np.stack(
                [matrix(chosen[name].map(lambda v, i=i: v[i] if i < len(v) else 0)) for i in range(steps)], -1
            )

        return Counts(
            task=pd.factorize(keys["task"])[0].astype(np.int64),
            tokens=matrix(chosen["tokens"]),
            forwards=matrix(chosen["forwards"]),
            drafted=stack("drafted"),
            accepted=stack("accepted"),
        )


def load_runs(paths: str | Path | Iterable[str | Path]) -> Table:
    """Read run folders, study folders, and tidy .csv or .parquet files into one table.

    A tidy file needs a data axis (any of `quantities.AXES`) and a measured column (`tau`, `alpha_0`, ..., `val_loss`);
    `draft` (default: the file's name), `seed`, `study`, `draft_steps` and all else are optional.

    Raises:
        ValueError: nothing to read at a path; a result of another schema; a file without the columns it needs.
    """
    tables = [_load(Path(p)) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    if not tables:
        raise ValueError("no runs were named: give run folders, a study folder, or a CSV/Parquet file")
    runs, records, notes = [], [], []
    metrics: dict[int, pd.DataFrame] = {}
    configs: dict[int, dict[str, Any]] = {}
    offset = 0
    for table in tables:
        runs.append(table.runs)
        if not table.records.empty:
            records.append(table.records.assign(run=table.records["run"] + offset))
        metrics |= {k + offset: v for k, v in table.metrics.items()}
        configs |= {k + offset: v for k, v in table.configs.items()}
        notes += table.notes
        offset += len(table.runs)
    both = add_settings(_own_names(pd.concat(runs, ignore_index=True)), configs)
    return Table(both, pd.concat(records, ignore_index=True) if records else pd.DataFrame(), metrics, configs, notes)


def _own_names(runs: pd.DataFrame) -> pd.DataFrame:
    """Studies of one name in several folders get names of their own: the folders'."""
    if "folder" not in runs:
        return runs
    parents = runs["folder"].map(lambda f: Path(f).absolute().parent, na_action="ignore")
    several = parents.groupby(runs["study"]).transform("nunique") > 1
    short = parents.map(lambda p: f"{p.parent.name}/{p.name}", na_action="ignore")
    unique = parents.groupby(short).transform("nunique") == 1
    return runs.assign(study=runs["study"].mask(several, short.where(unique, parents.astype(str))))


def _load(path: Path) -> Table:
    if path.is_file() and path.suffix in (".csv", ".parquet"):
        return _load_tidy(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no run folder, study folder, .csv or .parquet file")
    if _is_run(path):
        return _load_folders([path])
    folders = sorted(p for p in path.iterdir() if p.is_dir() and _is_run(p))
    if not folders:
        raise ValueError(f"{path} holds no run: expected folders with result.json (run `eagle3 study` first)")
    return _load_folders(folders)


def _is_run(path: Path) -> bool:
    """A point's folder: it has a result, or a configuration and so was started. A store has neither."""
    return (path / "result.json").exists() or (path / "config.yaml").exists()


def _load_folders(folders: list[Path]) -> Table:
    rows, records, notes = [], [], []
    metrics: dict[int, pd.DataFrame] = {}
    configs: dict[int, dict[str, Any]] = {}
    for i, folder in enumerate(folders):
        if (folder / "config.yaml").exists():
            configs[i] = _read_config(folder / "config.yaml")
        try:
            rows.append(_read_result(folder))
            if (folder / "records.jsonl").exists():
                records.append(_read_lines(folder / "records.jsonl").assign(run=i))
        except _PointFailed as e:
            status = TRAINED if _only_trained(folder) else FAILED
            rows.append({**_identity(configs.get(i, {})), "status": status, "reason": str(e)})
            if status == FAILED:
                notes.append(f"point {folder.name} has no result and takes no part in any fit: {e}")
        rows[-1] |= {"point": folder.name, "folder": str(folder)}
        if folder.is_symlink():  # a point that another study has done is this study's too
            rows[-1]["study"] = folder.parent.name
        rows[-1].setdefault("study", folder.parent.name)
        if (folder / "metrics.jsonl").exists():
            metrics[i] = _read_lines(folder / "metrics.jsonl")
    table = Table(
        pd.DataFrame(rows),
        pd.concat(records, ignore_index=True) if records else pd.DataFrame(),
        metrics,
        configs,
        notes,
    )
    return _pool_tau(table)


class _PointFailed(Exception):
    """A point without a usable result; shown in the report."""


def _only_trained(folder: Path) -> bool:
    """Whether the point has a trained head and was never to be measured, as the points of `eagle3 study tune`: the last
    job in its folder ended well, and was none that measures."""
    if (folder / "result.json").exists() or not (folder / "train.json").exists():
        return False
    status = folder / "status.json"
    try:
        return not status.exists() or json.loads(status.read_text(encoding="utf-8")).get("state") == "done"
    except json.JSONDecodeError:  # how it ended is not known: shown as a failure
        return False


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """What is known of a point from its configuration alone."""
    draft, data, target = (config.get(part, {}) for part in ("draft", "data", "target"))
    known = {"draft": draft.get("kind"), "target": target.get("name")}
    return known | {"data_scale": data.get("scale"), "seed": config.get("seed")}


def _read_result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    if not path.exists():
        log = folder / "log.txt"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
        raise _PointFailed(f"no result.json; last line of its log: {lines[-1]}" if lines else "no result.json")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise _PointFailed(f"result.json is not valid JSON ({e})") from e
    if result.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {result.get('schema')!r}, this version reads {SCHEMA}")
    missing = [key for key in REQUIRED if key not in result]
    if missing:
        raise _PointFailed(f"result.json lacks {', '.join(missing)}")
    return _flatten(result) | {"status": FINISHED, "reason": None}


def _flatten(result: dict[str, Any]) -> dict[str, Any]:
    """A flat row: `alpha` -> alpha_0, ..., `tau_replay` {task} -> tau.<task>, tau_lo.<task>, ..., dicts -> key.sub."""
    row: dict[str, Any] = {}
    for key, value in result.items():
        if key == "alpha":
            row |= {f"alpha_{i}": v for i, v in enumerate(value)}
        elif key == "alpha_by_task":
            row |= {f"alpha_{i}.{task}": v for task, values in value.items() for i, v in enumerate(values)}
        elif key in ("tau_replay", "tau_decode"):
            prefix = "" if key == "tau_replay" else "decode_"
            for task, entry in value.items():
                row |= {f"{prefix}{name if name == 'tau' else 'tau_' + name}.{task}": v for name, v in entry.items()}
        elif key == "speedup":
            for task, entry in value.items():
                row |= {f"{n if n == 'speedup' else 'speedup_' + n}.{task}": v for n, v in entry.items()}
        elif isinstance(value, dict):
            row |= {f"{key}.{sub}": v for sub, v in value.items()}
        elif isinstance(value, list):
            row |= {f"{key}.{i}": v for i, v in enumerate(value)}
        else:
            row[key] = value
    return row


def _read_lines(path: Path) -> pd.DataFrame:
    """A JSON Lines file. A last line that was cut by a crash is left out; any other bad line is an error."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as e:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not valid JSON: run the step that writes it again") from e
    return pd.DataFrame(rows)


def _pool_tau(table: Table) -> Table:
    """Add `tau` over all tasks and its counts: by target forward, from the records, else from the tasks' counts."""
    runs = table.runs.copy()
    runs["tau"] = np.nan
    if not table.records.empty:
        greedy = table.records[(table.records["method"] == "replay") & (table.records["temperature"] == 0)]
        sums = greedy.groupby("run")[["tokens", "forwards"]].sum()
        runs.loc[sums.index, "tau"] = sums["tokens"] / sums["forwards"]
    tasks = table.tasks
    if tasks and all(f"tau_{n}.{t}" in runs for n in ("tokens", "forwards") for t in tasks):
        tokens = runs[[f"tau_tokens.{t}" for t in tasks]].sum(axis=1)
        forwards = runs[[f"tau_forwards.{t}" for t in tasks]].sum(axis=1)
        runs["tau"] = runs["tau"].fillna(tokens / forwards.where(forwards > 0))
    return Table(runs, table.records, table.metrics, table.configs, table.notes)


def _load_tidy(path: Path) -> Table:
    runs = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    if not any(a in runs for a in AXES):
        raise ValueError(f"{path}: no data axis among its columns; name one of {', '.join(AXES)}")
    if not any(q in runs for q in MEASURED):
        raise ValueError(f"{path}: nothing measured among its columns; name one of {', '.join(MEASURED)}")
    runs = runs.reset_index(drop=True)
    axis = next(a for a in AXES if a in runs)
    defaults: dict[str, Any] = {"draft": path.stem, "study": path.stem, "status": FINISHED, "reason": None}
    for name, value in defaults.items():
        if name not in runs:
            runs[name] = value
    if "data_scale" not in runs:
        runs["data_scale"] = runs[axis] / runs.groupby("draft")[axis].transform("min")
    if "seed" not in runs:
        runs["seed"] = runs.groupby(["draft", "data_scale"]).cumcount()
    if "point" not in runs:
        runs["point"] = [
            f"{d}-x{x:g}-s{s}" for d, x, s in zip(runs["draft"], runs["data_scale"], runs["seed"], strict=True)
        ]
    if "draft_steps" not in runs:
        alphas = [c for c in map(str, runs) if c.startswith("alpha_") and "." not in c]
        if "tau" in runs and not alphas:
            raise ValueError(f"{path}: tau needs its ceiling K + 1: add a column draft_steps (K)")
        runs["draft_steps"] = len(alphas)
    return Table(runs, pd.DataFrame())

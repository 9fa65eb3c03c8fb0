"""A table's finished runs as series: which runs belong together, on which axis, and with what prompt noise."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.forms import Array
from analysis.quantities import AXES
from analysis.table import Table

Z95 = 1.959964
DRAFT_NAMES = {
    "eagle3": "EAGLE-3",
    "eagle1": "EAGLE-1",
    "medusa": "Medusa",
    "lm": "draft LM",
    "hf": "ready draft LM",
    "mtp": "MTP",
    "block": "block drafter",
    "prompt_lookup": "prompt lookup",
}


def choose_axis(runs: pd.DataFrame, axis: str | None) -> str:
    complete = [a for a in AXES if a in runs and runs[a].notna().all()]
    if axis is None and complete:
        return complete[0]
    if axis not in complete:
        raise ValueError(f"axis={axis!r}: not every finished run has it; choose one of {', '.join(complete) or 'none'}")
    return axis


def quantities_of(table: Table) -> list[str]:
    alphas = [c for c in map(str, table.runs) if c.startswith("alpha_") and "." not in c]
    alphas.sort(key=lambda c: int(c[6:]))
    return [n for n in ("tau", *alphas, "val_loss", "val_kl") if table.has(n)]


def group(runs: pd.DataFrame) -> list[tuple[str, NDArray[np.int64]]]:
    """Series of finished runs: split by draft head, study, target and K, then by what tells equal runs apart."""
    always = [c for c in ("draft", "study", "target", "draft_steps") if c in runs]
    splitters = ["draft_vocab_size", "parameters.trainable", "epochs", "steps", "train_identity", "point"]
    parts = [part for _, part in runs.groupby(always, dropna=False, sort=True)]
    labels = [c for c in always if c == "draft" or runs[c].nunique(dropna=False) > 1]
    out: list[tuple[str, NDArray[np.int64]]] = []
    for part in parts:
        head = ", ".join(_label(c, part[c].iloc[0]) for c in labels)
        for extra, members in _split(part, [c for c in splitters if c in runs]):
            out.append((", ".join([head, *extra]), members.index.to_numpy()))
    return out


def _split(group: pd.DataFrame, columns: list[str]) -> list[tuple[list[str], pd.DataFrame]]:
    """Split a group until no two runs share data scale and seed; each part with the labels that tell it apart."""
    if not group.duplicated(["data_scale", "seed"]).any() or not columns:
        return [([], group)]
    column, rest = columns[0], columns[1:]
    varies = group.groupby(["data_scale", "seed"], dropna=False)[column].nunique(dropna=False).max() > 1
    if not varies:
        return _split(group, rest)
    return [
        ([_label(column, value), *extra], part)
        for value, sub in group.groupby(column, dropna=False, sort=True)
        for extra, part in _split(sub, rest)
    ]


def _label(column: str, value: object) -> str:
    if column == "draft":
        return DRAFT_NAMES.get(str(value), str(value))
    short = {"study": "{}", "target": "{}", "draft_steps": "K={:g}", "parameters.trainable": "{:,.0f} parameters"}
    return short.get(column, column + "={}").format(value)


def prompt_replicates(
    table: Table, index: NDArray[np.int64], names: list[str], replicates: int, rng: np.random.Generator
) -> tuple[dict[str, Array | None], list[str]]:
    """Each quantity of every finished run under resampled prompts, [R, n], NaN for a run without per-prompt records;
    None where no run has them. Runs that only report an interval of tau get normal noise of that size."""
    out: dict[str, Array | None] = dict.fromkeys(names)
    recorded = sorted(set(table.records["run"]) & set(index)) if not table.records.empty else []
    counts = table.counts(recorded) if recorded else None
    if counts is not None:
        columns = np.searchsorted(index, recorded)
        for name, values in counts.measure(counts.prompt_weights(replicates, rng)).items():
            if name in out:
                full = np.full((replicates, len(index)), np.nan)
                full[:, columns] = values
                out[name] = full
    notes = []
    if "tau" in out and (counts is None or len(recorded) < len(index)):
        error = _reported_error(table, index)
        current = out["tau"] if out["tau"] is not None else np.full((replicates, len(index)), np.nan)
        missing = np.isnan(current).all(0)
        point = table.runs.loc[index, "tau"].to_numpy(dtype=float)
        noise = rng.standard_normal(current.shape) * np.nan_to_num(error)
        out["tau"] = np.where(missing, point + noise, current)
        known = "from their reported intervals, as independent" if np.isfinite(error[missing]).any() else "is not known"
        notes.append(f"{int(missing.sum())} runs have no per-prompt records: the prompt noise of their tau {known}")
    return out, notes


def _reported_error(table: Table, index: NDArray[np.int64]) -> Array:
    """Standard error of tau [n] from reported 95 % intervals: `tau_lo`, `tau_hi`, or the tasks' by their forwards."""
    runs = table.runs.loc[index]
    if {"tau_lo", "tau_hi"} <= set(runs):
        return ((runs["tau_hi"] - runs["tau_lo"]) / (2 * Z95)).to_numpy(dtype=float)
    tasks = [t for t in table.tasks if {f"tau_lo.{t}", f"tau_hi.{t}", f"tau_forwards.{t}"} <= set(runs)]
    if not tasks:
        return np.full(len(runs), np.nan)
    share = np.stack([runs[f"tau_forwards.{t}"].to_numpy(dtype=float) for t in tasks])
    errors = np.stack([((runs[f"tau_hi.{t}"] - runs[f"tau_lo.{t}"]) / (2 * Z95)).to_numpy(dtype=float) for t in tasks])
    return np.sqrt(((share / share.sum(0) * errors) ** 2).sum(0))

"""A table's finished runs as series: which runs belong together, on which axis, and with what prompt noise."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.forms import Array
from analysis.quantities import AXES
from analysis.settings import setting_columns, text
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
MAY_FOLLOW_DATA = ("optim.", "train.epochs", "train.steps", "train.batch_tokens")  # settings of how, not of what
OUTCOMES = ("draft_vocab_size", "parameters.trainable", "epochs", "steps")  # tell runs without a configuration apart
NAMED = 3  # settings in a label, at most


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
    """Series of finished runs, label and index: split by draft head, study, target and K, then by `_pieces`."""
    always = [c for c in ("draft", "study", "target", "draft_steps") if c in runs]
    parts = [part for _, part in runs.groupby(always, dropna=False, sort=True)]
    labels = [c for c in always if c == "draft" or runs[c].nunique(dropna=False) > 1]
    out: list[tuple[str, NDArray[np.int64]]] = []
    for part in parts:
        head = [_label(c, part[c].iloc[0]) for c in labels if pd.notna(part[c].iloc[0])]
        values = _values(part)
        pieces = _pieces(part, values)
        for extra, members in zip(_extras(pieces, values), pieces, strict=True):
            out.append((", ".join([*head, *extra]), members.index.to_numpy()))
    return out


def varied_with_data(runs: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
    """Of a series: setting -> value -> the data scales that were trained with it, for settings that differ in it."""
    values = _values(runs)[setting_columns(runs)]
    return {
        str(column): {
            str(v): sorted(set(scales)) for v, scales in runs["data_scale"].groupby(values[column], sort=False)
        }
        for column in values
        if values[column].nunique() > 1
    }


def repeats(runs: pd.DataFrame) -> list[pd.DataFrame]:
    """Runs of a series that have data, seed and store in common, so that nothing is known by which they differ."""
    return [same for _, same in runs.groupby(_same(runs), dropna=False) if len(same) > 1]


def _same(runs: pd.DataFrame) -> list[str]:
    return [c for c in ("data_scale", "seed", "store_fingerprint") if c in runs]


def _values(group: pd.DataFrame) -> pd.DataFrame:
    """What may tell runs of a group apart, as text. A setting that is not known of a run is that of most."""
    values = {}
    for column in [*setting_columns(group), *(c for c in OUTCOMES if c in group)]:
        known = group[column].map(text, na_action="ignore")
        usual = known.mode()
        values[column] = known.where(group[column].notna(), usual[0] if len(usual) else "")
    return pd.DataFrame(values, index=group.index)


def _pieces(group: pd.DataFrame, values: pd.DataFrame) -> list[pd.DataFrame]:
    """The series of a group: what defines the head and its objective is the same within each. What follows the data on
    purpose where each scale has its own value (a learning rate that was tuned, steps that grow) splits only where runs
    of one scale differ in it."""
    fixed = [c for c in setting_columns(group) if not c.startswith(MAY_FOLLOW_DATA) and values[c].nunique() > 1]
    parts = _split(group, values, fixed) if fixed else [group]
    pieces = [piece for part in parts for piece in _consistent(part, values)]
    return sorted(pieces, key=lambda p: p["data_scale"].nunique() == 1)  # curves first


def _consistent(part: pd.DataFrame, values: pd.DataFrame) -> list[pd.DataFrame]:
    """Split by one setting after the other, that of the fewest values first, which keeps the most together."""
    own = values.loc[part.index]
    differ = [c for c in setting_columns(part) if own[c].groupby(part["data_scale"]).nunique().max() > 1]
    if not differ:  # of runs whose configuration is not known, by what came out
        same = [part[c] for c in _same(part)]
        differ = [c for c in OUTCOMES if c in part and own[c].groupby(same, dropna=False).nunique().max() > 1]
    if not differ:
        return [part]
    column = min(differ, key=lambda c: own[c].nunique())
    return [piece for sub in _split(part, values, [column]) for piece in _consistent(sub, values)]


def _split(part: pd.DataFrame, values: pd.DataFrame, columns: list[str]) -> list[pd.DataFrame]:
    members = values.loc[part.index].groupby(columns, sort=False).groups
    keys = sorted(members, key=lambda key: [_order(v) for v in (key if isinstance(key, tuple) else (key,))])
    return [part.loc[members[key]] for key in keys]


def _order(value: str) -> tuple[float, str]:
    try:
        return float(value), ""
    except ValueError:
        return np.inf, value


def _extras(pieces: list[pd.DataFrame], values: pd.DataFrame) -> list[list[str]]:
    """What tells each piece of a group apart, in words. Where one piece is a curve and all others are single scales, it
    is the rule and they are the exceptions: it needs no words."""
    if len(pieces) == 1:
        return [[]]
    own = [values.loc[p.index] for p in pieces]
    curves = [i for i, p in enumerate(pieces) if p["data_scale"].nunique() > 1]
    settings = [c for c in map(str, values) if c not in OUTCOMES and values[c].nunique() > 1]
    outcomes = [c for c in OUTCOMES if c in values and values[c].nunique() > 1]

    def words(i: int, columns: list[str], most: int) -> list[str]:
        fixed = [c for c in columns if own[i][c].nunique() == 1]
        if len(curves) == 1:
            fixed = [] if i == curves[0] else [c for c in fixed if own[i][c].iloc[0] not in set(own[curves[0]][c])]
        named = [_label(c, own[i][c].iloc[0]) for c in fixed]
        return named if len(named) <= most else [*named[:most], f"{len(named) - most} more settings"]

    for columns, most in ((settings, NAMED), (settings, len(settings)), ([*settings, *outcomes], len(values.columns))):
        out = [words(i, columns, most) for i in range(len(pieces))]
        if len({*map(tuple, out)}) == len(pieces):
            return out
    return [[*words(i, columns, most), str(i + 1)] for i in range(len(pieces))]


def _label(column: str, value: object) -> str:
    if column == "draft":
        return DRAFT_NAMES.get(str(value), str(value))
    if column == "parameters.trainable":
        return f"{float(str(value)):,.0f} parameters"
    short = {"study": "{}", "target": "{}", "draft_steps": "K={:g}"}
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

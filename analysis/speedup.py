"""Speed-up: measured where points were decoded, modelled elsewhere from tau and the draft's cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.forms import Array
from analysis.study import Analysis, Series

ASSUMED_COSTS = (0.05, 0.1, 0.2)  # draft step over target forward, for a study in which nothing was decoded


def speedup_at(tau: float | Array, steps: int, cost: float) -> float | Array:
    """tau / (1 + K c): a cycle yields tau tokens for one target forward and K draft steps of cost c each."""
    return tau / (1 + steps * cost)


@dataclass(frozen=True)
class SpeedupModel:
    """speedup = tau / (1 + K c). `cost` c: a draft step in units of a target forward, overheads included, the mean of
    what the measured points imply: c = (tau / speedup - 1) / K. `measured`, `modelled`: scale, x, speedup, lo, hi."""

    task: str
    cost: float
    measured: pd.DataFrame
    modelled: pd.DataFrame

    def table(self, label: str) -> pd.DataFrame:
        rows = pd.concat([self.measured.assign(kind="measured"), self.modelled.assign(kind="modelled")])
        return pd.DataFrame(
            {
                "draft head": label,
                "task": self.task,
                "data": [f"{s:g}x" for s in rows["scale"]],
                "speed-up": [f"{v:.3f}x" for v in rows["speedup"]],
                "kind": rows["kind"].tolist(),
            }
        )


def speedup_model(analysis: Analysis, series: Series) -> SpeedupModel | None:
    """The model of the first task that has both a decoded tau and a speed-up; None where nothing was decoded."""
    runs = analysis.table.runs.loc[series.runs]
    for task in analysis.table.tasks:
        columns = [f"{c}.{task}" for c in ("decode_tau", "speedup", "speedup_lo", "speedup_hi")]
        if not set(columns) <= set(runs):
            continue
        decoded = runs[runs[columns[0]].notna() & runs[columns[1]].notna()]
        if decoded.empty:
            continue
        ratio = decoded[columns[0]] / decoded[columns[1]]  # 1 + K c
        cost = float((ratio - 1).mean() / series.draft_steps)
        measured = pd.DataFrame(
            {
                "scale": decoded["data_scale"],
                "x": decoded[analysis.axis],
                "speedup": decoded[columns[1]],
                "lo": decoded[columns[2]],
                "hi": decoded[columns[3]],
            }
        ).reset_index(drop=True)
        tau = runs.groupby("data_scale")[[analysis.axis, f"tau.{task}"]].mean()
        modelled = pd.DataFrame(
            {
                "scale": tau.index.to_numpy(),
                "x": tau[analysis.axis].to_numpy(),
                "speedup": speedup_at(tau[f"tau.{task}"].to_numpy(), series.draft_steps, cost),
                "lo": np.nan,
                "hi": np.nan,
            }
        )
        return SpeedupModel(task, cost, measured, modelled)
    return None

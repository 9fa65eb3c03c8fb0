"""What a reader must know beside the numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from analysis.bootstrap import WITHIN
from analysis.series import repeats, varied_with_data
from analysis.study import Series
from analysis.table import Table


def cautions(table: Table, series: Iterable[Series]) -> list[str]:
    series = list(series)
    out = [line for s in series for line in _joined(table, s)]
    for s in series:
        count = len(s.scales)
        if count < 3:
            out.append(
                f"{s.label}: {count} data scale{'s' if count > 1 else ''}: no form can be checked, only a difference "
                "given"
            )
        elif count < 6:
            out.append(
                f"{s.label}: {count} data scales tell a slope, not a ceiling: forms with two parameters can be fitted "
                "and checked, the floor and the exponent of a saturating law can hardly be told apart"
            )
        tau = s.fits.get("tau")
        if tau is not None and not tau.seeds.known:
            out.append(
                f"{s.label}: seed variation is not known ({tau.seeds.source}): intervals hold prompt noise alone"
            )
        elif tau is not None and tau.seeds.source != WITHIN:
            out.append(f"{s.label}: one seed a point: seed variation was estimated from the {tau.seeds.source}")
        for name, fitted in s.fits.items():
            best = fitted.best
            if best is not None and best.outliers.any():
                points = table.runs.loc[s.runs, "point"].to_numpy()
                marked = ", ".join(points[best.outliers]) if len(points) == len(best.outliers) else "runs"
                out.append(
                    f"{s.label}, {name}: {marked} lies too far from the fit of the others; it is kept and marked"
                )
    for column, what, but in (
        ("store_fingerprint", "trained on different stores", "their data axes may not be comparable"),
        ("eval_identity", "evaluated in different ways", "their tau may not be comparable"),
    ):
        # Each target has a store of its own.
        runs = table.finished.groupby("target", dropna=False) if "target" in table.finished else table.finished
        if column in table.finished and np.any(runs[column].nunique() > 1):
            out.append(f"the runs were {what} ({column} differs): {but}")
    return out


def _joined(table: Table, series: Series) -> list[str]:
    """What runs of one series do not have in common, and what they have in common too much."""
    runs = table.runs.loc[series.runs]
    out = []
    for key, values in varied_with_data(runs).items():
        told = "; ".join(f"{value} at {', '.join(f'{x:g}x' for x in scales)}" for value, scales in values.items())
        out.append(
            f"{series.label}: {key} is not the same at all data scales ({told}): what the curve shows is the "
            "effect of the data and of this setting together"
        )
    for same in repeats(runs):
        out.append(
            f"{series.label}: {' and '.join(same['point'].astype(str))} have the same data, seed and settings: they "
            "count as repeats of one point"
        )
    return out

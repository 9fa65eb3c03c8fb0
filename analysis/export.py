"""The fits as plain data: what fits.json holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from analysis.study import Analysis, QuantityFit, Series

SCHEMA = 1


def fits_json(analysis: Analysis) -> dict[str, Any]:
    """Everything fitted, with statuses; pass it through `clean` before writing."""
    return {
        "schema": SCHEMA,
        "axis": analysis.axis,
        "interval_method": analysis.method,
        "warnings": analysis.warnings,
        "series": [_series(s) for s in analysis.series],
        "comparisons": [
            {
                "first": c.first,
                "second": c.second,
                "difference_of_gain_per_doubling": c.difference.to_json(),
                "probability_first_larger": c.probability,
            }
            for c in analysis.comparisons
        ],
        "joint": [{"draft": draft, "quantity": name, **result.to_json()} for draft, name, result in analysis.joint],
    }


def _series(s: Series) -> dict[str, Any]:
    return {
        "label": s.label,
        "draft": s.draft,
        "draft_steps": s.draft_steps,
        "data_at_1x": s.base,
        "scales": s.scales,
        "quantities": {name: _quantity(f) for name, f in s.fits.items()},
        "tau_by_position": [
            {"form": m.form.name, "held_out_error": m.held_out, "statuses": [p.status for p in m.positions]}
            for m in s.positions
        ],
    }


def _quantity(f: QuantityFit) -> dict[str, Any]:
    return {
        "chosen": f.selection.best if f.selection else None,
        "tied": f.selection.tied if f.selection else [],
        "reason": f.selection.reason if f.selection else "too few scales to hold one out",
        "gain_per_doubling": f.gain.to_json() if f.gain else None,
        "seed_sd_of_log_loss": f.seeds.seed**0.5,
        "seed_variance_from": f.seeds.source,
        "fits": [r.to_json() for r in f.results.values()],
        "skipped": {form.name: reason for form, reason in f.skipped},
    }


def clean(value: Any) -> Any:
    """JSON values without numpy types; NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value

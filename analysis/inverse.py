"""The curve read backwards: how much data a wanted tau needs."""

from __future__ import annotations

import numpy as np

from analysis.fitting import Estimate, FitResult
from analysis.forms import Array
from analysis.study import PositionModel, compose_tau


def data_for_tau(
    result: FitResult | PositionModel, wanted: float, base: float, limit: float = 2.0**20
) -> Estimate | None:
    """Data (axis units) at which the curve reaches `wanted`; None where it does not within `limit` times `base`.

    `hi` None: some replicates in the upper 2.5 % never reach it.
    """
    data = base * np.geomspace(0.25, limit, 400)
    value = result.predict(data).value
    crossing = _first_crossing(data, value[None], wanted)[0]
    if not np.isfinite(crossing):
        return None
    draws = _curve_draws(result, data)
    if draws is None:
        return Estimate(float(crossing))
    reached = _first_crossing(data, draws, wanted)
    lo, hi = np.quantile(reached, [0.025, 0.975], method="nearest")
    return Estimate(float(crossing), float(lo) if np.isfinite(lo) else None, float(hi) if np.isfinite(hi) else None)


def _curve_draws(result: FitResult | PositionModel, data: Array) -> Array | None:
    if isinstance(result, FitResult):
        if result.draws is None:
            return None
        return result.data.quantity.from_loss(result.form.loss(result.draws, data[:, None] / result.data.reference))
    parts = [_curve_draws(p, data) for p in result.positions]
    return None if any(p is None for p in parts) else compose_tau(np.stack([p for p in parts if p is not None]))


def _first_crossing(data: Array, curves: Array, wanted: float) -> Array:
    """First data value at which each curve [R, m] is at least `wanted`, by interpolation in log data; inf: never."""
    above = curves >= wanted
    k = above.argmax(1)
    rows = np.arange(len(curves))
    before = np.maximum(k - 1, 0)
    y0, y1 = curves[rows, before], curves[rows, k]
    share = np.where(y1 > y0, (wanted - y0) / np.where(y1 > y0, y1 - y0, 1.0), 0.0)
    crossing = np.exp(np.log(data[before]) + np.clip(share, 0, 1) * (np.log(data[k]) - np.log(data[before])))
    return np.where(above.any(1), crossing, np.inf)

"""The curve read backwards: how much data a wanted tau needs."""

from __future__ import annotations

import numpy as np

from analysis.fitting import Estimate, FitResult
from analysis.forms import Array
from analysis.study import PositionModel, QuantityFit, compose_tau

LIMIT = 2.0**20  # times the data at 1x: no curve is read further


def data_for_tau(fit: QuantityFit | FitResult | PositionModel, wanted: float, base: float) -> Estimate:
    """Data (axis units) at which the curve reaches `wanted`: inf where it does not within `LIMIT` times `base`, 0 where
    a quarter of `base` already has more.

    Of a `QuantityFit` the chosen form's, with the ends of all forms tied with it. `lo`, `hi` None: replicates beyond
    that quantile never reach it, or there are none.

    Raises:
        ValueError: a `QuantityFit` of which no form was chosen.
    """
    if isinstance(fit, QuantityFit):
        if fit.best is None:
            raise ValueError(f"{fit.quantity.title}: no form was chosen, so nothing says what data it needs")
        needs = {form.name: data_for_tau(form, wanted, base) for form in fit.tied}
        los, his = [n.lo for n in needs.values() if n.lo is not None], [n.hi for n in needs.values()]
        hi = None if None in his else max(h for h in his if h is not None)
        return Estimate(needs[fit.best.name].value, min(los, default=None), hi)
    data = base * np.geomspace(0.25, LIMIT, 400)
    crossing = float(_first_crossing(data, fit.predict(data).value[None], wanted)[0])
    draws = _curve_draws(fit, data)
    if draws is None:
        return Estimate(crossing)
    lo, hi = np.quantile(_first_crossing(data, draws, wanted), [0.025, 0.975], method="nearest")
    return Estimate(crossing, float(lo) if np.isfinite(lo) else None, float(hi) if np.isfinite(hi) else None)


def _curve_draws(result: FitResult | PositionModel, data: Array) -> Array | None:
    if isinstance(result, FitResult):
        if result.draws is None:
            return None
        return result.data.quantity.from_loss(result.form.loss(result.draws, data[:, None] / result.data.reference))
    parts = [_curve_draws(p, data) for p in result.positions]
    return None if any(p is None for p in parts) else compose_tau(np.stack([p for p in parts if p is not None]))


def _first_crossing(data: Array, curves: Array, wanted: float) -> Array:
    """First data value at which each curve [R, m] is at least `wanted`, by interpolation in log data; inf: never, 0:
    before the first."""
    above = curves >= wanted
    k = above.argmax(1)
    rows = np.arange(len(curves))
    before = np.maximum(k - 1, 0)
    y0, y1 = curves[rows, before], curves[rows, k]
    share = np.where(y1 > y0, (wanted - y0) / np.where(y1 > y0, y1 - y0, 1.0), 0.0)
    crossing = np.exp(np.log(data[before]) + np.clip(share, 0, 1) * (np.log(data[k]) - np.log(data[before])))
    return np.where(above[:, 0], 0.0, np.where(above.any(1), crossing, np.inf))

"""The whole analysis of a table: series, replicates, fits, selection, what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from analysis.bootstrap import SeedVariance, around_line, resample_runs, seed_variance
from analysis.cautions import cautions
from analysis.fitting import Data, Estimate, FitResult, fit
from analysis.forms import JOINT, LOG_LINEAR, REPETITION, Array, Form, data_forms
from analysis.quantities import Quantity, quantity
from analysis.selection import select
from analysis.series import choose_axis, group, prompt_replicates, quantities_of
from analysis.study import REPLICATES, Analysis, PositionModel, QuantityFit, Series, SlopeComparison, compose_tau
from analysis.table import Table

SMALLEST_LOSS = 1e-6  # a perfect head has no logarithm


def analyse(
    table: Table,
    axis: str | None = None,
    quantities: Sequence[str] | None = None,
    replicates: int = REPLICATES,
    seed: int = 0,
    profiles: bool = True,
) -> Analysis:
    """Fit every series of a table.

    `axis`: a column of `quantities.AXES` (default: the first that every finished run has). `quantities`: columns to fit
    (default: all of tau, alpha_i, val_loss and val_kl that were measured). Deterministic for a `seed`.

    Raises:
        ValueError: no finished run, or an axis or a quantity that the runs do not have.
    """
    runs = table.finished
    if runs.empty:
        raise ValueError("no finished run among " + ", ".join(table.runs["point"].astype(str)) + ": nothing to analyse")
    axis = choose_axis(runs, axis)
    rng = np.random.default_rng(seed)
    index = runs.index.to_numpy()
    names = quantities_of(table) if quantities is None else list(quantities)
    if unknown := [n for n in names if not table.has(n)]:
        raise ValueError(f"no run measured {', '.join(unknown)}: choose from {', '.join(quantities_of(table))}")
    prompts, notes = prompt_replicates(table, index, names, replicates, rng)
    place = {run: i for i, run in enumerate(index)}
    series = []
    for label, members in group(runs):
        columns = [place[run] for run in members]
        own = {n: r[:, columns] for n, r in prompts.items() if r is not None and not np.isnan(r[:, columns]).any()}
        series.append(_analyse_series(table, label, members, axis, names, own, replicates, rng, profiles))
    warnings = [*table.notes, *notes, *cautions(table, series)]
    return Analysis(table, axis, series, _joint_fits(table, axis, series), _compare(series), warnings)


def _analyse_series(
    table: Table,
    label: str,
    members: NDArray[np.int64],
    axis: str,
    names: Sequence[str],
    prompts: dict[str, Array],
    replicates: int,
    rng: np.random.Generator,
    profiles: bool,
) -> Series:
    runs = table.runs.loc[members]
    steps = int(runs["draft_steps"].iloc[0])
    x = runs[axis].to_numpy(dtype=float)
    fits = {}
    for name in names:
        values = runs[name].to_numpy(dtype=float)
        keep = np.isfinite(values)
        if keep.any():
            own = prompts[name][:, keep] if name in prompts else None
            data, seeds = _data(quantity(name, steps), x[keep], values[keep], own, replicates, rng)
            fits[name] = _fit_quantity(data, seeds, profiles)
    return Series(
        label=label,
        draft=str(runs["draft"].iloc[0]),
        runs=members,
        x=x,
        scale=runs["data_scale"].to_numpy(dtype=float),
        draft_steps=steps,
        fits=fits,
        positions=_position_models(fits, steps),
    )


def _data(
    target: Quantity, x: Array, values: Array, prompts: Array | None, replicates: int, rng: np.random.Generator
) -> tuple[Data, SeedVariance]:
    """Loss-like values [n] with standard errors, and replicates [R, n] that hold prompt and seed noise.

    `prompts` [R, n]: the values under resampled prompts. Where neither noise is known, there are no replicates, and the
    scatter around a straight line serves as standard error.
    """
    log_loss = np.log(np.maximum(target.to_loss(values), SMALLEST_LOSS))
    cell, doublings = np.unique(x, return_inverse=True)[1], np.log2(x)
    log_prompts = None if prompts is None else np.log(np.maximum(target.to_loss(prompts), SMALLEST_LOSS))
    seeds = seed_variance(log_loss, log_prompts, cell, doublings)
    own = np.zeros(len(x))
    if log_prompts is not None:
        # Residuals from a curve do not hold the noise that all runs share, so the weights do not either.
        shared = log_prompts.mean(1, keepdims=True) if len(x) > 1 else 0.0
        own = (log_prompts - shared).var(0, ddof=1)
    variance = seeds.typical_seed + own
    draws = None
    if (variance > SMALLEST_LOSS**2).all():
        base = np.repeat(log_loss[None], replicates, 0) if log_prompts is None else log_prompts
        draws = resample_runs(base, seeds, cell, rng)
    else:
        residual, freedom = around_line(log_loss, doublings)
        scatter = (residual**2).sum() / freedom if freedom > 0 else 0.0
        variance = np.full(len(x), scatter or 1.0)
    inputs, reference = (x / x.min())[:, None], np.array([x.min()])
    return Data(target, inputs, reference, np.exp(log_loss), np.sqrt(variance), cell, draws), seeds


def _fit_quantity(data: Data, seeds: SeedVariance, profiles: bool) -> QuantityFit:
    results: dict[str, FitResult] = {}
    skipped: list[tuple[Form, str]] = []
    for form in data_forms(data.quantity.span):
        needed = form.scales_needed if form.nonlinear else len(form.names)
        if data.scales < needed:
            skipped.append((form, f"under-identified: needs {needed} scales, has {data.scales}"))
        else:
            results[form.name] = fit(form, data, profiles=profiles)
    line = results.get(LOG_LINEAR.name)
    gain = None if line is None else line.parameters["g"]
    return QuantityFit(
        quantity=data.quantity,
        data=data,
        seeds=seeds,
        results=results,
        skipped=skipped,
        selection=select(list(results.values()), gain if seeds.known else None),
        gain=gain,
    )


def _position_models(fits: dict[str, QuantityFit], steps: int) -> list[PositionModel]:
    names = [f"alpha_{i}" for i in range(steps)]
    if "tau" not in fits or not all(n in fits for n in names):
        return []
    tau = fits["tau"].data
    measured = float(tau.quantity.from_loss(tau.loss[tau.largest]).mean())
    models = []
    for form in data_forms(1.0):
        if all(form.name in fits[n].results for n in names):
            positions = [fits[n].results[form.name] for n in names]
            held_out = None
            if all(p.held_out is not None for p in positions):
                means = [p.data.quantity.from_loss(p.data.loss[p.data.largest]).mean() for p in positions]
                alphas = np.clip([m + (p.held_out or 0.0) for m, p in zip(means, positions, strict=True)], 0, 1)
                held_out = float(compose_tau(alphas)) - measured
            models.append(PositionModel(form, positions, held_out))
    return models


def _joint_fits(table: Table, axis: str, series: list[Series]) -> list[tuple[str, str, FitResult]]:
    """Forms with a second input, where it varies: draft size (`parameters.trainable`) and epochs at equal data. Of
    each draft head for each target: what a larger target changes is not the draft's size alone."""
    out: list[tuple[str, str, FitResult]] = []
    kinds = {s.label: (s.draft, _target(table, s)) for s in series}
    several = len({target for _, target in kinds.values()}) > 1
    for draft, target in sorted(set(kinds.values())):
        own = [s for s in series if kinds[s.label] == (draft, target)]
        title = f"{draft}, {target}" if several else draft
        if len({s.draft_steps for s in own}) > 1:
            continue
        runs = table.runs.loc[np.concatenate([s.runs for s in own])]
        for form, column in ((JOINT, "parameters.trainable"), (REPETITION, "epochs")):
            if column not in runs or runs[column].isna().any():
                continue
            if runs.groupby("data_scale")[column].nunique().max() < 2:
                continue
            for name in ("tau", "val_loss", "val_kl"):
                if all(name in s.fits for s in own):
                    data = _joint_data([s.fits[name].data for s in own], runs[[axis, column]].to_numpy(float), form)
                    if data.scales >= len(form.names):
                        out.append((title, name, fit(form, data)))
    return out


def _target(table: Table, series: Series) -> str:
    """Name of a series' target; empty where the table has none."""
    return str(table.runs.loc[series.runs[0], "target"]) if "target" in table.runs else ""


def _joint_data(parts: Sequence[Data], raw: Array, form: Form) -> Data:
    reference = raw.min(0) if form is JOINT else np.array([raw[:, 0].min(), 1.0])
    replicates = [p.replicates for p in parts if p.replicates is not None]
    return Data(
        quantity=parts[0].quantity,
        inputs=raw / reference,
        reference=reference,
        loss=np.concatenate([p.loss for p in parts]),
        sigma=np.concatenate([p.sigma for p in parts]),
        scale=np.unique(raw, axis=0, return_inverse=True)[1].reshape(-1),
        replicates=np.concatenate(replicates, 1) if len(replicates) == len(parts) else None,
    )


def _compare(series: list[Series]) -> list[SlopeComparison]:
    """Every pair of series with a slope of tau, the steeper first. Prompts are shared draws: their noise cancels."""
    slopes = {}
    for s in series:
        line = s.fits["tau"].results.get(LOG_LINEAR.name) if "tau" in s.fits else None
        if line is not None and line.draws is not None:
            slopes[s.label] = (float(line.theta[1]), line.draws[:, 1], s.fits["tau"].seeds.known)
    out = []
    steepest_first = sorted(slopes.items(), key=lambda item: -item[1][0])
    for (a, (value_a, draws_a, known_a)), (b, (value_b, draws_b, known_b)) in combinations(steepest_first, 2):
        difference = draws_a - draws_b
        lo, hi = np.quantile(difference, [0.025, 0.975])
        estimate = Estimate(value_a - value_b, float(lo), float(hi), float(difference.std(ddof=1)))
        larger = float((difference > 0).mean())
        out.append(SlopeComparison(a, b, estimate, larger, len(difference), known_a and known_b))
    return out

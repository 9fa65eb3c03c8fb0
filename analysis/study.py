"""The whole analysis of a table: series, replicates, fits, selection, what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from analysis.bootstrap import METHOD, SeedVariance, resample_runs, seed_variance
from analysis.fitting import Data, Estimate, FitResult, Prediction, fit, robust_sigma
from analysis.forms import JOINT, LOG_LINEAR, REPETITION, Array, Form, data_forms
from analysis.quantities import AXES, Quantity, quantity
from analysis.selection import Selection, select
from analysis.series import choose_axis, group, prompt_replicates, quantities_of
from analysis.table import Table

REPLICATES = 1000
EXTRAPOLATE = (16.0, 64.0)  # multiples of the 1x data


@dataclass(frozen=True)
class QuantityFit:
    """All forms of one quantity of one series. `gain`: change per doubling of the data by the straight line."""

    quantity: Quantity
    data: Data
    seeds: SeedVariance
    results: dict[str, FitResult]
    skipped: list[tuple[Form, str]]  # forms that were not fitted, and why
    selection: Selection | None
    gain: Estimate | None

    @property
    def best(self) -> FitResult | None:
        return self.results[self.selection.best] if self.selection else None


@dataclass(frozen=True)
class PositionModel:
    """tau = 1 + sum_i prod_{j<=i} alpha_j(D), every alpha_j fitted by the same form: never above K + 1.

    `held_out`: error in tau at the largest scale, every position fitted without it.
    """

    form: Form
    positions: list[FitResult]
    held_out: float | None

    def predict(self, data: Sequence[float] | Array) -> Prediction:
        raw = np.asarray(data, dtype=float)
        inputs = raw[:, None] / self.positions[0].data.reference
        value = compose_tau(np.stack([p.curve(inputs) for p in self.positions]))
        if any(p.draws is None for p in self.positions):
            return Prediction(raw, value)
        alphas = [
            p.data.quantity.from_loss(p.form.loss(p.draws, inputs)) for p in self.positions if p.draws is not None
        ]
        lo, hi = np.quantile(compose_tau(np.stack(alphas)), [0.025, 0.975], axis=0)
        return Prediction(raw, value, lo, hi)


def compose_tau(alpha: Array) -> Array:
    """tau of alpha [K, ...]: 1 + sum_i P(first i + 1 accepted)."""
    return 1 + np.cumprod(alpha, 0).sum(0)


@dataclass(frozen=True)
class Series:
    """Runs that differ in data and seed alone. `runs`: index into the table; `x` [n] on the data axis."""

    label: str
    draft: str
    runs: NDArray[np.int64]
    x: Array
    scale: Array  # data_scale of each run
    draft_steps: int
    fits: dict[str, QuantityFit]
    positions: list[PositionModel] = field(default_factory=list)

    @property
    def base(self) -> float:
        """The data axis at 1x."""
        i = int(self.scale.argmin())
        return float(self.x[i] / self.scale[i])

    @property
    def scales(self) -> list[float]:
        return sorted({float(s) for s in self.scale})


@dataclass(frozen=True)
class SlopeComparison:
    """Two series' gains per doubling, on the same replicates. `probability` that the first one's is larger."""

    first: str
    second: str
    difference: Estimate
    probability: float
    replicates: int


@dataclass(frozen=True)
class Analysis:
    table: Table
    axis: str
    series: list[Series]
    joint: list[tuple[str, str, FitResult]]  # (draft, quantity, result): forms with draft size or epochs
    comparisons: list[SlopeComparison]
    warnings: list[str]
    method: str = METHOD

    @property
    def axis_title(self) -> str:
        return AXES[self.axis]


def analyse(
    table: Table, axis: str | None = None, replicates: int = REPLICATES, seed: int = 0, profiles: bool = True
) -> Analysis:
    """Fit every series of a table.

    `axis`: a column of `quantities.AXES` (default: the first that every finished run has). Deterministic for a `seed`.

    Raises:
        ValueError: no finished run, or an axis that the runs do not have.
    """
    runs = table.finished
    if runs.empty:
        raise ValueError("no finished run among " + ", ".join(table.runs["point"].astype(str)) + ": nothing to analyse")
    axis = choose_axis(runs, axis)
    rng = np.random.default_rng(seed)
    index = runs.index.to_numpy()
    names = quantities_of(table)
    prompts, notes = prompt_replicates(table, index, names, replicates, rng)
    place = {run: i for i, run in enumerate(index)}
    series = []
    for label, members in group(runs):
        columns = [place[run] for run in members]
        own = {n: None if r is None or np.isnan(r[:, columns]).any() else r[:, columns] for n, r in prompts.items()}
        series.append(_analyse_series(table, label, members, axis, own, rng, profiles))
    warnings = [*table.notes, *notes, *_warnings(table, series)]
    return Analysis(table, axis, series, _joint_fits(table, axis, series), _compare(series), warnings)


def _analyse_series(
    table: Table,
    label: str,
    members: NDArray[np.int64],
    axis: str,
    prompts: dict[str, Array | None],
    rng: np.random.Generator,
    profiles: bool,
) -> Series:
    runs = table.runs.loc[members]
    steps = int(runs["draft_steps"].iloc[0])
    x = runs[axis].to_numpy(dtype=float)
    fits = {}
    for name in quantities_of(table):
        values = runs[name].to_numpy(dtype=float)
        keep = np.isfinite(values)
        if keep.any():
            replicates = prompts.get(name)
            data, seeds = _data(
                quantity(name, steps), x[keep], values[keep], None if replicates is None else replicates[:, keep], rng
            )
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
    target: Quantity, x: Array, values: Array, prompts: Array | None, rng: np.random.Generator
) -> tuple[Data, SeedVariance]:
    """Loss-like values with standard errors and replicates that hold prompt and seed noise."""
    floor = 1e-6
    loss = np.maximum(target.to_loss(values), floor)
    cell = np.unique(x, return_inverse=True)[1]
    replicates = REPLICATES if prompts is None else len(prompts)
    log_prompts = None if prompts is None else np.log(np.maximum(target.to_loss(prompts), floor))
    seeds = seed_variance(np.log(loss), log_prompts, cell, np.log2(x))
    base = np.repeat(np.log(loss)[None], replicates, 0) if log_prompts is None else log_prompts
    draws = resample_runs(base, seeds, cell, rng)
    # Residuals from a curve do not hold the noise that all runs share, so the weights do not either.
    own = 0.0 if log_prompts is None else (log_prompts - log_prompts.mean(1, keepdims=True)).var(0, ddof=1)
    variance = seeds.seed + own
    known = bool(np.all(variance > 1e-12))
    sigma = np.sqrt(variance) * np.ones(len(x)) if known else np.ones(len(x))
    data = Data(target, (x / x.min())[:, None], np.array([x.min()]), loss, sigma, cell, draws if known else None)
    if not known:
        scatter = robust_sigma(LOG_LINEAR, data) if data.scales > 2 else 0.0
        data = Data(target, data.inputs, data.reference, loss, sigma * (scatter or 1.0), cell, None)
    return data, seeds


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
    return QuantityFit(
        quantity=data.quantity,
        data=data,
        seeds=seeds,
        results=results,
        skipped=skipped,
        selection=select(list(results.values())),
        gain=None if line is None else line.parameters["g"],
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
    """Forms with a second input, where it varies: draft size (`parameters.trainable`) and epochs at equal data."""
    out: list[tuple[str, str, FitResult]] = []
    for draft in sorted({s.draft for s in series}):
        own = [s for s in series if s.draft == draft]
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
                        out.append((draft, name, fit(form, data)))
    return out


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
    """Every pair of series with a slope of tau. Prompts are shared draws, so their common noise cancels."""
    slopes = {}
    for s in series:
        line = s.fits["tau"].results.get(LOG_LINEAR.name) if "tau" in s.fits else None
        if line is not None and line.draws is not None:
            slopes[s.label] = (float(line.theta[1]), line.draws[:, 1])
    out = []
    for (a, (value_a, draws_a)), (b, (value_b, draws_b)) in combinations(slopes.items(), 2):
        difference = draws_a - draws_b
        lo, hi = np.quantile(difference, [0.025, 0.975])
        estimate = Estimate(value_a - value_b, float(lo), float(hi), float(difference.std(ddof=1)))
        out.append(SlopeComparison(a, b, estimate, float((difference > 0).mean()), len(difference)))
    return out


def _warnings(table: Table, series: Iterable[Series]) -> list[str]:
    out = []
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
        if tau is not None and tau.seeds.freedom == 0:
            out.append(
                f"{s.label}: seed variation is not known ({tau.seeds.source}): intervals hold prompt noise alone"
            )
        elif tau is not None and not tau.seeds.source.startswith("seeds"):
            out.append(f"{s.label}: one seed a point: seed variation was estimated from the {tau.seeds.source}")
        for name, fitted in s.fits.items():
            best = fitted.best
            if best is not None and best.outliers.any():
                points = table.runs.loc[s.runs, "point"].to_numpy()
                marked = ", ".join(points[best.outliers]) if len(points) == len(best.outliers) else "runs"
                out.append(
                    f"{s.label}, {name}: {marked} lies far from the curve; it is kept at Huber's weight and marked"
                )
    prints = table.finished.get("store_fingerprint")
    if prints is not None and prints.nunique() > 1:
        out.append(
            "the runs were trained on different stores (fingerprints differ): their data axes may not be comparable"
        )
    return out

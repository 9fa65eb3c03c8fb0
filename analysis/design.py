"""What a design can see, before it is run: the minimum detectable gain of tau per doubling of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.bootstrap import Counts, resample_runs, seed_variance
from analysis.forms import LOG_LINEAR, Array
from analysis.simulate import Design, Noise, Truth, alphas_for_tau, measure_noise, simulate_from_logits
from analysis.solver import solve
from analysis.table import Table
from analysis.tables import number, text_table

POWER = 0.8  # share of studies that would find a gain of the minimum detectable size
REPLICATES = 200


@dataclass(frozen=True)
class Row:
    """One design and what it sees: `gain` is the minimum detectable one, `half_width` the mean half of its interval."""

    name: str
    design: Design
    gain: float
    half_width: float


@dataclass(frozen=True)
class Power:
    """`minimum_gain`: the gain of tau per doubling that a study of this design finds (95 % interval above 0) in 80 %
    of cases. `alternatives`: the design itself, then each of its sizes enlarged."""

    design: Design
    noise: Noise
    noise_source: str
    simulations: int
    alternatives: list[Row]

    @property
    def minimum_gain(self) -> float:
        return self.alternatives[0].gain

    def text(self) -> str:
        """For a terminal."""
        d = self.design
        scales = ", ".join(f"{s:g}x" for s in d.scales)
        head = (
            f"{scales} with {d.seeds} seed{'s' if d.seeds > 1 else ''} each, on {d.tasks} x {d.prompts} prompts of "
            f"{d.tokens} tokens, K = {d.draft_steps}: a gain of {self.minimum_gain:.3f} tau per doubling of the data "
            f"would be found in {100 * POWER:.0f} % of such studies (95 % interval above 0)."
        )
        import pandas as pd

        table = pd.DataFrame(
            {
                "design": [r.name for r in self.alternatives],
                "runs": [str(len(r.design.run_scales)) for r in self.alternatives],
                "minimum detectable gain": [number(r.gain, 3) for r in self.alternatives],
                "half width of the interval": [number(r.half_width, 3) for r in self.alternatives],
            }
        )
        n = self.noise
        basis = (
            f"From {self.simulations} simulated studies a design. Noise {self.noise_source}: standard deviation of "
            f"logit alpha {n.prompt_sd:.2f} between prompts, {n.prompt_scale_sd:.2f} between their gains a doubling, "
            f"{n.seed_sd:.2f} between training seeds."
        )
        return "\n".join([head, "", text_table(table), "", basis])


def power(
    scales: Sequence[float],
    seeds: int,
    *,
    tasks: int = 2,
    prompts: int = 32,
    tokens: int = 64,
    draft_steps: int = 3,
    tau: float = 1.3,
    pilot: Table | None = None,
    simulations: int = 150,
    seed: int = 0,
) -> Power:
    """Minimum detectable gain of a design, by simulation of whole studies and of their intervals.

    `tau`: about where tau lies in the middle of the study. `pilot`: a table with per-prompt records whose noise is
    used; without one the noise is assumed (`simulate.Noise`), and the result says so.

    Raises:
        ValueError: fewer than two scales, or a tau that is not between 1 and K + 1.
    """
    if len(set(scales)) < 2:
        raise ValueError(f"scales={list(scales)}: a gain per doubling needs two data scales or more")
    design = Design(tuple(sorted({float(s) for s in scales})), seeds, tasks, prompts, tokens, draft_steps)
    noise, source = Noise(), "assumed, since there is no pilot study"
    if pilot is not None:
        noise, source = _pilot_noise(pilot), "measured on the pilot study"
    wider = tuple(sorted({*design.scales, 2 * max(design.scales)}))
    designs = {
        "as given": design,
        "twice the prompts": replace(design, prompts=2 * prompts),
        "twice the tokens": replace(design, tokens=2 * tokens),
        "one seed more": replace(design, seeds=seeds + 1),
        f"{wider[-1]:g}x too": replace(design, scales=wider),
    }
    rows = [Row(name, d, *_detectable(d, noise, tau, simulations, seed)) for name, d in designs.items()]
    return Power(design, noise, source, simulations, rows)


def _pilot_noise(pilot: Table) -> Noise:
    runs = [int(i) for i in pilot.finished.index]
    counts = pilot.counts(runs)
    if counts is None:
        raise ValueError("the pilot study has no per-prompt records for all its runs: noise cannot be measured on it")
    x = pilot.runs.loc[runs, "data_scale"].to_numpy(dtype=float)
    cell = np.unique(
        pilot.runs.loc[runs, ["draft", "study", "data_scale"]].astype(str).agg("|".join, axis=1), return_inverse=True
    )[1]
    return measure_noise(counts, cell, np.log2(x))


def _detectable(design: Design, noise: Noise, tau: float, simulations: int, seed: int) -> tuple[float, float]:
    """(minimum detectable gain, mean half width): over simulated studies, the interval starts at gain - half + error.

    The noise hardly depends on the gain, so it is simulated at a small one; a study with error e and half width h finds
    a gain g if g + e - h > 0, and the gain found by 80 % of studies is the 0.8 quantile of h - e.
    """
    rng = np.random.default_rng(seed)
    gain = 0.02
    middle = float(np.exp(np.log(design.scales).mean()))
    truth = Truth(tau_1x=tau - gain * np.log2(middle), gain=gain)
    taus = truth.tau(design.scales, design.draft_steps)
    logits = np.stack([alphas_for_tau(t, design.draft_steps, noise) for t in taus])
    studies = [simulate_from_logits(design, logits, noise, rng) for _ in range(simulations)]
    measured, replicates = zip(*(_replicate(c, design, rng) for c in studies), strict=True)
    x = (design.run_scales / design.run_scales.min())[:, None]
    weight = np.full(len(x), 1 / 0.005)  # equal: only their ratio to Huber's threshold matters, and here it is wide
    estimate = solve(LOG_LINEAR, x, np.stack(measured), weight)[0][:, 1]
    draws = solve(LOG_LINEAR, x, np.concatenate(replicates), weight)[0][:, 1].reshape(simulations, REPLICATES)
    below = estimate - np.quantile(draws, 0.025, axis=1)
    half = np.diff(np.quantile(draws, [0.025, 0.975], axis=1), axis=0)[0] / 2
    return float(np.quantile(below - (estimate - gain), POWER)), float(half.mean())


def _replicate(counts: Counts, design: Design, rng: np.random.Generator) -> tuple[Array, Array]:
    """log (K + 1 - tau) of a study's runs, measured [n] and in its bootstrap replicates [R, n]."""
    top = design.draft_steps + 1
    measured = np.log(top - counts.measure()["tau"][0])
    prompts = np.log(top - counts.measure(counts.prompt_weights(REPLICATES, rng))["tau"])
    cell = np.unique(design.run_scales, return_inverse=True)[1]
    seeds = seed_variance(measured, prompts, cell, np.log2(design.run_scales))
    return measured, resample_runs(prompts, seeds, cell, rng)

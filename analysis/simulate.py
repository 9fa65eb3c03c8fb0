"""Studies with a known truth: for the power of a design before it is run, and to check the intervals' coverage.

Noise has the three sources of a real study: prompts differ (a normal effect on the logit of every alpha, shared by all
runs, since all are evaluated on the same prompts), training seeds differ (a normal effect a run), and acceptance is
random within a prompt (binomial). tau of the population is calibrated to the wanted curve exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit

from analysis.bootstrap import Counts, seed_variance
from analysis.forms import Array

NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(31)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


@dataclass(frozen=True)
class Design:
    """What is run: every scale with every seed, evaluated on `prompts` prompts of `tokens` tokens for each task."""

    scales: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
    seeds: int = 2
    tasks: int = 2
    prompts: int = 32
    tokens: int = 64
    draft_steps: int = 3

    @property
    def run_scales(self) -> Array:
        """Scale of each run, [scales * seeds]."""
        return np.repeat(np.array(self.scales, dtype=float), self.seeds)


@dataclass(frozen=True)
class Noise:
    """Standard deviations on the logit of alpha, and how alpha falls along the chain.

    The defaults are assumptions; `measure_noise` measures them on a study with per-prompt records.
    """

    prompt_sd: float = 0.35
    prompt_scale_sd: float = 0.05  # of a prompt's own extra gain a doubling: prompts do not all profit alike
    seed_sd: float = 0.04
    step_drop: float = 0.35  # logit alpha_i falls by this a position


def alphas_for_tau(tau: float, steps: int, noise: Noise) -> Array:
    """Median-prompt logits of alpha_i, [K], at which tau of the population is `tau`.

    Averaged over target forwards: prompts of equal length have 1 / tau = mean over prompts of 1 / tau_prompt.
    """
    if not 1 < tau < steps + 1:
        raise ValueError(f"tau={tau:g} is not between 1 and K + 1 = {steps + 1}")
    offsets = -noise.step_drop * np.arange(steps)

    def population_tau(shift: float) -> float:
        alpha = expit(shift + offsets[None, :] + noise.prompt_sd * NODES[:, None])
        prompt_tau = 1 + np.cumprod(alpha, -1).sum(-1)
        return float(1 / (NODE_WEIGHTS / prompt_tau).sum())

    return brentq(lambda shift: population_tau(shift) - tau, -25, 25, xtol=1e-10) + offsets


def simulate(design: Design, tau: Sequence[float], noise: Noise, rng: np.random.Generator) -> Counts:
    """Counts of one study whose population tau at `design.scales` is `tau`."""
    logits = np.stack([alphas_for_tau(t, design.draft_steps, noise) for t in tau])  # [scales, K]
    return simulate_from_logits(design, logits, noise, rng)


def simulate_from_logits(design: Design, logits: Array, noise: Noise, rng: np.random.Generator) -> Counts:
    """`simulate` with the calibration done: `logits` [scales, K] (reuse them over many studies)."""
    n, prompts, k = len(design.run_scales), design.tasks * design.prompts, design.draft_steps
    doublings = np.log2(design.run_scales / np.exp(np.log(design.run_scales).mean()))
    prompt = noise.prompt_sd * rng.standard_normal(prompts)
    interaction = noise.prompt_scale_sd * rng.standard_normal(prompts)
    seed = noise.seed_sd * rng.standard_normal(n)
    effect = prompt[None, :] + doublings[:, None] * interaction[None, :] + seed[:, None]  # [n, P]
    alpha = expit(np.repeat(logits, design.seeds, 0)[:, None, :] + effect[..., None])  # [n, P, K]
    expected_tau = 1 + np.cumprod(alpha, -1).sum(-1)
    forwards = np.maximum(1, np.floor(design.tokens / expected_tau + rng.random((n, prompts)))).astype(np.int64)
    drafted, accepted = np.zeros((n, prompts, k), np.int64), np.zeros((n, prompts, k), np.int64)
    reached = forwards
    for i in range(k):
        drafted[..., i] = reached
        reached = rng.binomial(reached, alpha[..., i])
        accepted[..., i] = reached
    return Counts(
        task=np.repeat(np.arange(design.tasks), design.prompts),
        tokens=(forwards + accepted.sum(-1)).astype(float),
        forwards=forwards.astype(float),
        drafted=drafted.astype(float),
        accepted=accepted.astype(float),
    )


def measure_noise(counts: Counts, cell: NDArray[np.int64], doublings: Array, replicates: int = 300) -> Noise:
    """Noise of a study by moments, on the first draft position, which has the most counts.

    `cell` [n] numbers runs that differ in seed alone, `doublings` [n] = log2 of the data. Between prompts: the variance
    of each prompt's acceptance, all runs together, less its binomial part. Between prompts' gains: the same for the
    slope of acceptance in log2 data. Between seeds: as in the intervals. All moved to the logit by alpha (1 - alpha).
    How alpha falls along the chain is not measured: the default stays.
    """
    drafted, accepted = counts.drafted[..., 0], counts.accepted[..., 0]
    alpha = float(accepted.sum() / drafted.sum())
    logit_slope = alpha * (1 - alpha)
    rate = accepted.sum(0) / drafted.sum(0)
    prompt = rate.var(ddof=1) - (alpha * (1 - alpha) / drafted.sum(0)).mean()
    centred = doublings - doublings.mean()
    run_rate = accepted / np.maximum(drafted, 1)
    spread = (centred**2).sum()
    gains = (centred[:, None] * run_rate).sum(0) / spread
    binomial = ((centred**2)[:, None] * alpha * (1 - alpha) / np.maximum(drafted, 1)).sum(0) / spread**2
    interaction = gains.var(ddof=1) - binomial.mean()
    rng = np.random.default_rng(0)
    miss = np.log1p(-counts.measure()["alpha_0"][0])
    prompts = np.log1p(-counts.measure(counts.prompt_weights(replicates, rng))["alpha_0"])
    seeds = seed_variance(miss, prompts, cell, doublings)
    return Noise(
        prompt_sd=float(np.sqrt(max(prompt, 0.0)) / logit_slope),
        prompt_scale_sd=float(np.sqrt(max(interaction, 0.0)) / logit_slope),
        seed_sd=float(np.sqrt(seeds.seed) / alpha),  # d log(1 - alpha) = -alpha d logit
    )


@dataclass(frozen=True)
class Truth:
    """tau along the scales: `tau_1x + gain log2(x)` for `log_linear`; `K + 1 - E - A x^-b` for the power laws."""

    tau_1x: float = 1.17
    gain: float = 0.083
    floor: float | None = None
    exponent: float | None = None

    def tau(self, scales: Sequence[float], draft_steps: int) -> list[float]:
        x = np.array(scales, dtype=float)
        if self.exponent is None:
            return [float(t) for t in self.tau_1x + self.gain * np.log2(x)]
        floor = self.floor or 0.0
        scale = draft_steps + 1 - floor - self.tau_1x
        return [float(t) for t in draft_steps + 1 - floor - scale * x**-self.exponent]

"""Many small robust fits at once: variable-projection starts, then projected Levenberg-Marquardt, batched.

One dataset has n runs; a batch has R of them (bootstrap replicates, left-out scales, profile values, starts). All inner
work is numpy over the leading axis R, so 2,000 replicates of a three-parameter curve take well under a second.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from analysis.forms import Array, Form

NDArrayBool = NDArray[np.bool_]
HUBER = 1.345  # 95 % efficient on normal residuals; in units of each run's own standard error
TINY = 1e-12
CHUNK = 4096  # datasets solved at once: bounds the memory of the start's grid


def huber(residual: Array, delta: float) -> Array:
    """Huber's rho: r^2/2 inside `delta`, linear outside."""
    size = np.abs(residual)
    return np.where(size <= delta, 0.5 * residual**2, delta * (size - 0.5 * delta))


def objective(form: Form, theta: Array, inputs: Array, log_loss: Array, weight: Array, delta: float) -> Array:
    """Sum over runs of Huber(weight * (log L_hat - log L)), [R]."""
    return huber(_residual(form, theta, inputs, log_loss, weight), delta).sum(-1)


def _residual(form: Form, theta: Array, inputs: Array, log_loss: Array, weight: Array) -> Array:
    return weight * (np.log(np.maximum(form.loss(theta, inputs), TINY)) - log_loss)


def project_linear(form: Form, nu: Array, inputs: Array, log_loss: Array, weight: Array) -> tuple[Array, Array]:
    """Best linear coefficients for each grid value `nu` [g, q] and dataset: ([R, g, m], cost [R, g]).

    Relative residuals (L_hat - L) / L stand in for log residuals, which they equal to first order; coefficients with a
    lower bound of 0 are kept there by trying every subset of columns (m <= 3).
    """
    loss = np.exp(log_loss)  # [R, n]
    scale = weight / loss
    phi = form.basis(nu, inputs)  # [g, n, m]
    r, g, m = len(loss), len(phi), len(form.linear)
    gram = np.einsum("rn,gni,gnj->rgij", scale**2, phi, phi)
    moment = np.einsum("rn,gni->rgi", scale**2 * loss, phi)
    total = (scale * loss) ** 2
    best = np.zeros((r, g, m))
    cost = np.broadcast_to(total.sum(-1)[:, None], (r, g)).copy()
    for size in range(1, m + 1):
        for subset in combinations(range(m), size):
            rows = list(subset)
            a = gram[..., rows, :][..., rows] + TINY * np.eye(size) * gram[..., rows, rows].sum(-1)[..., None, None]
            c = np.linalg.solve(a, moment[..., rows, None])[..., 0]
            value = total.sum(-1)[:, None] - (c * moment[..., rows]).sum(-1)
            feasible = (c >= np.array(form.lower)[rows]).all(-1)
            better = feasible & (value < cost)
            cost = np.where(better, value, cost)
            full = np.zeros((r, g, m))
            full[..., rows] = c
            best = np.where(better[..., None], full, best)
    return best, cost


def start(form: Form, inputs: Array, log_loss: Array, weight: Array, delta: float) -> Array:
    """A start [R, p] for each dataset: the best of the grid after projecting the linear coefficients."""
    nu = form.starts()
    if not form.linear:
        theta = np.broadcast_to(nu, (len(log_loss), *nu.shape))
        cost = np.stack([objective(form, theta[:, k], inputs, log_loss, weight, delta) for k in range(len(nu))], -1)
    else:
        linear, cost = project_linear(form, nu, inputs, log_loss, weight)
        theta = np.concatenate([linear, np.broadcast_to(nu, (*linear.shape[:2], nu.shape[-1]))], -1)
    return theta[np.arange(len(log_loss)), cost.argmin(-1)]


def _jacobian(form: Form, theta: Array, inputs: Array, weight: Array) -> Array:
    """d residual / d theta [R, n, p]: exact for the linear coefficients, central differences for the others."""
    m = len(form.linear)
    loss = np.maximum(form.loss(theta, inputs), TINY)
    columns = [form.basis(theta[:, m:], inputs)] if m else []
    for j in range(m, theta.shape[-1]):
        step = 1e-6 * np.maximum(np.abs(theta[:, j]), 1e-2)
        up, down = theta.copy(), theta.copy()
        up[:, j] += step
        down[:, j] -= step
        columns.append(((form.loss(up, inputs) - form.loss(down, inputs)) / (2 * step)[:, None])[..., None])
    return (weight / loss)[..., None] * np.concatenate(columns, -1)


def refine(
    form: Form,
    theta: Array,
    inputs: Array,
    log_loss: Array,
    weight: Array,
    lower: Array,
    upper: Array,
    delta: float,
    iterations: int = 60,
    tolerance: float = 1e-6,
) -> tuple[Array, Array, NDArrayBool]:
    """Projected Levenberg-Marquardt with Huber weights from `theta` [R, p]: (theta, objective [R], converged [R]).

    A parameter on its bound whose gradient points outwards is held for the step. `lower`, `upper`: [p] or [R, p].
    Converged: an accepted step changed the objective by less than `tolerance` of it, or no step lowers it.
    """
    r, p = theta.shape
    lower, upper = np.broadcast_to(lower, (r, p)), np.broadcast_to(upper, (r, p))
    theta = np.clip(theta, lower, upper)
    cost = objective(form, theta, inputs, log_loss, weight, delta)
    damping = np.full(r, 1e-3)
    converged = np.zeros(r, dtype=bool)
    live = np.arange(r)
    for _ in range(iterations):
        if not len(live):
            break
        t, y, w, lo, hi = theta[live], log_loss[live], weight[live], lower[live], upper[live]
        residual = _residual(form, t, inputs, y, w)
        robust = np.minimum(1.0, delta / np.maximum(np.abs(residual), TINY))
        jac = _jacobian(form, t, inputs, w)
        gradient = np.einsum("rnp,rn->rp", jac, robust * residual)
        held = ((t <= lo) & (gradient > 0)) | ((t >= hi) & (gradient < 0))
        jac = np.where(held[:, None, :], 0.0, jac)
        hessian = np.einsum("rnp,rn,rnq->rpq", jac, robust, jac)
        diagonal = np.einsum("rpp->rp", hessian)
        ridge = damping[live, None] * np.maximum(diagonal, 1e-9) + held
        hessian[:, np.arange(p), np.arange(p)] += ridge
        step = -np.linalg.solve(hessian, np.where(held, 0.0, gradient)[..., None])[..., 0]
        trial = np.clip(t + step, lo, hi)
        value = objective(form, trial, inputs, y, w, delta)
        better = value < cost[live]
        gain = cost[live] - value
        still = (np.abs(trial - t) <= 1e-10 * np.maximum(np.abs(t), 1e-3)).all(-1)
        done = (better & (gain <= tolerance * (cost[live] + tolerance))) | (~better & (still | (damping[live] > 1e8)))
        theta[live] = np.where(better[:, None], trial, t)
        cost[live] = np.where(better, value, cost[live])
        damping[live] = np.clip(np.where(better, damping[live] / 5, damping[live] * 6), 1e-9, 1e10)
        converged[live[done]] = True
        live = live[~done]
    return theta, cost, converged


def solve(
    form: Form, inputs: Array, log_loss: Array, weight: Array, delta: float = HUBER
) -> tuple[Array, Array, NDArrayBool]:
    """Fit every dataset of a batch: `log_loss` [R, n], `weight` [R, n] or [n] (1 / standard error; 0 leaves a run out).

    One start each, the best of the variable-projection grid. Returns (theta [R, p], objective [R], converged [R]).
    """
    weight = np.broadcast_to(weight, log_loss.shape)
    parts = []
    for k in range(0, len(log_loss), CHUNK):
        y, w = log_loss[k : k + CHUNK], weight[k : k + CHUNK]
        first = start(form, inputs, y, w, delta)
        parts.append(refine(form, first, inputs, y, w, np.array(form.lower), np.array(form.upper), delta))
    theta, cost, converged = (np.concatenate(column) for column in zip(*parts, strict=True))
    return theta, cost, converged


def solve_many_starts(
    form: Form, inputs: Array, log_loss: Array, weight: Array, delta: float = HUBER
) -> tuple[Array, float, bool]:
    """One dataset `log_loss` [n] from every start of the grid, the lowest objective: (theta [p], objective, ok)."""
    nu = form.starts()
    y = np.broadcast_to(log_loss, (len(nu), len(log_loss)))
    w = np.broadcast_to(weight, y.shape)
    if form.linear:
        linear, _ = project_linear(form, nu, inputs, y[:1], w[:1])
        theta = np.concatenate([linear[0], nu], -1)
    else:
        theta = nu.copy()
    lower, upper = np.array(form.lower), np.array(form.upper)
    theta, cost, converged = refine(form, theta, inputs, y, w, lower, upper, delta, iterations=500, tolerance=1e-13)
    best = int(cost.argmin())
    return theta[best], float(cost[best]), bool(converged[best])

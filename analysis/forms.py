"""The curves: how a loss-like quantity L falls with data.

Every form is written for a loss-like quantity (`quantities.Quantity.to_loss`): K + 1 - tau, 1 - alpha_i, or a
validation loss itself; so a floor of L is a ceiling of acceptance. All forms of a quantity are fitted on the same
residual, log L, and can be compared. Inputs are relative to the smallest point (x = D / D_1): coefficients are for 1x.

A form is L = sum_j c_j phi_j(X; nu): linear in c, which lets the fit start from variable projection (Golub and Pereyra,
1973): for given nu the best c is a small linear problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SHARPNESS = 0.25  # of the bend of `broken_power`, in units of ln x; fixed, since no realistic study can tell it


@dataclass(frozen=True)
class Form:
    """One curve. Parameters are ordered linear first; `lower`, `upper` and `theta[..., p]` follow that order.

    `basis(nu [..., q], inputs [n, d]) -> [..., n, m]`; `inputs` columns are named by `inputs`.
    """

    name: str
    title: str
    equation: str  # with L, x and the parameters' names
    linear: tuple[str, ...]
    nonlinear: tuple[str, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    grid: tuple[tuple[float, ...], ...]  # starting values of each nonlinear parameter
    basis: Callable[[Array, Array], Array]
    inputs: tuple[str, ...] = ("data",)

    @property
    def names(self) -> tuple[str, ...]:
        return self.linear + self.nonlinear

    @property
    def scales_needed(self) -> int:
        """Distinct inputs that determine the parameters and leave one to contradict the form."""
        return len(self.names) + 1

    def loss(self, theta: Array, inputs: Array) -> Array:
        """L [..., n] at `inputs` [n, d] for parameters `theta` [..., p]."""
        m = len(self.linear)
        phi = self.basis(theta[..., m:], inputs)
        return (phi * theta[..., None, :m]).sum(-1) if m else phi[..., 0]

    def starts(self) -> Array:
        """All combinations of the grid, [g, q]."""
        combinations = list(product(*self.grid))
        return np.array(combinations, dtype=float).reshape(len(combinations), len(self.nonlinear))


def _power(inputs: Array, exponent: Array, column: int = 0) -> Array:
    """x^-exponent [..., n] for exponent [...]."""
    return np.exp(-exponent[..., None] * np.log(inputs[:, column]))


def _ones(nu: Array, inputs: Array) -> Array:
    return np.ones((*nu.shape[:-1], len(inputs)))


EXPONENTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.27, 0.35, 0.45, 0.6, 0.8, 1.1, 1.6, 2.4)
FEW_EXPONENTS = (0.05, 0.15, 0.3, 0.5, 0.8, 1.3, 2.0)  # where two exponents are gridded together

CONSTANT = Form(
    name="constant",
    title="constant (no effect of data)",
    equation="L = c",
    linear=("c",),
    nonlinear=(),
    lower=(0.0,),
    upper=(np.inf,),
    grid=(),
    basis=lambda nu, inputs: _ones(nu, inputs)[..., None],
)
LOG_LINEAR = Form(
    name="log_linear",
    title="log-linear",
    equation="L = c - g log2(x)",
    linear=("c", "g"),
    nonlinear=(),
    lower=(0.0, -np.inf),
    upper=(np.inf, np.inf),
    grid=(),
    basis=lambda nu, inputs: np.stack([_ones(nu, inputs), -np.log2(inputs[:, 0]) * _ones(nu, inputs)], -1),
)
POWER = Form(
    name="power",
    title="pure power law",
    equation="L = A x^-b",
    linear=("A",),
    nonlinear=("b",),
    lower=(0.0, -1.0),
    upper=(np.inf, 3.0),
    grid=((-0.05, 0.0, 0.02, *EXPONENTS),),
    basis=lambda nu, inputs: _power(inputs, nu[..., 0])[..., None],
)
POWER_FLOOR = Form(
    name="power_floor",
    title="saturating power law",
    equation="L = E + A x^-b",
    linear=("E", "A"),
    nonlinear=("b",),
    lower=(0.0, 0.0, 0.01),
    upper=(np.inf, np.inf, 3.0),
    grid=(EXPONENTS,),
    basis=lambda nu, inputs: np.stack([_ones(nu, inputs), _power(inputs, nu[..., 0])], -1),
)
HYPERBOLA = Form(
    name="hyperbola",
    title="saturating hyperbola",
    equation="L = E + A / (1 + x / h)",
    linear=("E", "A"),
    nonlinear=("h",),
    lower=(0.0, 0.0, 0.05),
    upper=(np.inf, np.inf, 1e4),
    grid=((0.1, 0.3, 0.6, 1.0, 1.6, 2.5, 4.0, 6.0, 10.0, 20.0, 50.0, 200.0, 2000.0),),
    basis=lambda nu, inputs: np.stack([_ones(nu, inputs), 1 / (1 + inputs[:, 0] / nu[..., :1])], -1),
)


def _broken_basis(nu: Array, inputs: Array) -> Array:
    log_x = np.log(inputs[:, 0])
    before, after, bend = nu[..., 0:1], nu[..., 1:2], np.log(nu[..., 2:3])
    softplus = np.logaddexp(0.0, (log_x - bend) / SHARPNESS) * SHARPNESS
    return np.exp(-before * log_x - (after - before) * softplus)[..., None]


BROKEN_POWER = Form(
    name="broken_power",
    title="broken power law",
    equation=f"L = A x^-b1 (1 + (x / d)^{1 / SHARPNESS:g})^(-{SHARPNESS:g} (b2 - b1))",
    linear=("A",),
    nonlinear=("b1", "b2", "d"),
    lower=(0.0, -1.0, -1.0, 1.0),
    upper=(np.inf, 3.0, 3.0, 1e4),
    grid=((0.0, 0.1, 0.3, 0.8), (0.0, 0.1, 0.3, 0.8), (2.0, 4.0, 8.0, 16.0)),
    basis=_broken_basis,
)


def logit_linear(top: float) -> Form:
    """logit(L / top) falls linearly with log x: acceptance is a logistic curve between 0 and its ceiling.

    For alpha_i (top 1) it is the straight line of logit alpha_i against log2 x; for tau (top K) it stays below K + 1.
    """
    return Form(
        name="logit_linear",
        title="logit-linear",
        equation=f"L = {top:g} / (1 + exp(a + g log2(x)))",
        linear=(),
        nonlinear=("a", "g"),
        lower=(-20.0, -5.0),
        upper=(20.0, 5.0),
        grid=((-4.0, -2.0, -1.0, 0.0, 1.0, 2.0), (0.0, 0.1, 0.4)),
        basis=lambda nu, inputs: (
            top * np.exp(-np.logaddexp(0.0, nu[..., :1] + nu[..., 1:] * np.log2(inputs[:, 0])))[..., None]
        ),
    )


def effective_data(unique: Array, epochs: Array, decay: Array) -> Array:
    """Muennighoff et al. (2023), eq. 5: data worth `D' = U + U R* (1 - exp(-R / R*))`, R = epochs - 1 repetitions.

    `unique` [n], `epochs` [n] (>= 1), `decay` R* [...]; returns [..., n] in the unit of `unique`.
    """
    r_star = decay[..., None]
    return unique * (1 + r_star * -np.expm1(-(epochs - 1) / r_star))


def _repetition_basis(nu: Array, inputs: Array) -> Array:
    worth = effective_data(inputs[:, 0], inputs[:, 1], nu[..., 1])
    return np.stack([_ones(nu, inputs), np.exp(-nu[..., 0:1] * np.log(worth))], -1)


REPETITION = Form(
    name="repetition",
    title="saturating power law in effective data (Muennighoff et al., 2023)",
    equation="L = E + A x'^-b, x' = x (1 + R (1 - exp(-(epochs - 1) / R)))",
    linear=("E", "A"),
    nonlinear=("b", "R"),
    lower=(0.0, 0.0, 0.01, 0.05),
    upper=(np.inf, np.inf, 3.0, 1e3),
    grid=(FEW_EXPONENTS, (0.5, 2.0, 8.0, 30.0, 120.0)),
    basis=_repetition_basis,
    inputs=("data", "epochs"),
)
JOINT = Form(
    name="joint",
    title="joint law in draft size and data (Hoffmann et al., 2022)",
    equation="L = E + A n^-alpha + B x^-beta",
    linear=("E", "A", "B"),
    nonlinear=("alpha", "beta"),
    lower=(0.0, 0.0, 0.0, 0.01, 0.01),
    upper=(np.inf, np.inf, np.inf, 3.0, 3.0),
    grid=(FEW_EXPONENTS, FEW_EXPONENTS),
    basis=lambda nu, inputs: np.stack(
        [_ones(nu, inputs), _power(inputs, nu[..., 0], 1), _power(inputs, nu[..., 1], 0)], -1
    ),
    inputs=("data", "size"),
)


def data_forms(top: float | None) -> list[Form]:
    """Forms in data alone, simplest first; `top` is the loss-like quantity's largest value (None: unbounded)."""
    bounded = [] if top is None else [logit_linear(top)]
    return [CONSTANT, LOG_LINEAR, *bounded, POWER, POWER_FLOOR, HYPERBOLA, BROKEN_POWER]

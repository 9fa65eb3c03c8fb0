"""What is fitted, and against what."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from analysis.forms import Array


@dataclass(frozen=True)
class Quantity:
    """A measured column of a run. `top`: its upper limit; then `top - y` is the loss-like quantity that is fitted."""

    name: str
    title: str
    symbol: str
    top: float | None = None
    bottom: float = 0.0

    @property
    def rises(self) -> bool:
        return self.top is not None

    @property
    def span(self) -> float | None:
        """Largest value of the loss-like quantity; None where it has no limit."""
        return None if self.top is None else self.top - self.bottom

    @property
    def loss_symbol(self) -> str:
        return self.symbol if self.top is None else f"{self.top:g} - {self.symbol}"

    def to_loss(self, y: Array) -> Array:
        """The loss-like quantity: positive, falls as the draft head gets better."""
        return y if self.top is None else self.top - y

    def from_loss(self, loss: Array) -> Array:
        """Back to the measured quantity, kept within its limits (a straight line leaves them somewhere)."""
        return loss if self.top is None else np.clip(self.top - loss, self.bottom, self.top)


def quantity(name: str, draft_steps: int) -> Quantity:
    """The quantity of a column name. `draft_steps` is K, so that tau's ceiling is K + 1."""
    if name == "tau":
        return Quantity("tau", "tau (tokens per target forward)", "tau", top=draft_steps + 1.0, bottom=1.0)
    if match := re.fullmatch(r"alpha_(\d+)", name):
        return Quantity(name, f"acceptance at draft position {match[1]}", f"alpha_{match[1]}", top=1.0)
    if name == "val_loss":
        return Quantity(name, "validation loss", "val_loss")
    if name == "val_kl":
        return Quantity(name, "validation KL to the target", "val_kl")
    raise ValueError(f"no quantity is called {name!r}: tau, alpha_0 ... alpha_{draft_steps - 1}, val_loss, val_kl")


# Columns that may stand on the data axis, in the order in which a default is looked for.
AXES: dict[str, str] = {
    "supervised_tokens": "unique supervised tokens",
    "unique_sequences": "unique conversations",
    "unique_tokens": "unique tokens",
    "data_scale": "data scale",
    "consumed_tokens": "tokens consumed in training",
    "consumed_supervised_tokens": "supervised tokens consumed in training",
    "train_flops": "training FLOPs",
}

"""`eagle3 study tune`: the learning rate, chosen where training is cheap, and whether the choice holds with more data.

At the smallest data scale of a study and its first seed, every value of `optim.lr` is trained, and that of the lowest
validation loss is chosen: on held-out conversations, never on the evaluation tasks, which it would flatter. Then the
transfer check: at the next scale, the choice is trained again, and the values beside it. These are ordinary points of
the study, which finds them trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle3_train.cli import Failed
from eagle3_train.config import Config
from eagle3_train.console import duration, say
from eagle3_train.files import read_object
from launch import Job, run
from launch.jobs import is_of_another_store
from sweeps.points import Point, plan
from sweeps.study import share_data

KEY = "optim.lr"
NOT_COMPARED = (KEY, "data.scale", "seed")  # axes that the choice is not made for one by one


@dataclass(frozen=True)
class Choice:
    """For one combination of the other axes. `losses`: data scale -> learning rate -> validation loss."""

    of: dict[str, str]
    losses: dict[float, dict[float, float]]

    @property
    def best(self) -> float:
        """At the smallest scale."""
        small = self.losses[min(self.losses)]
        return min(small, key=small.__getitem__)

    def text(self) -> str:
        """The losses, a line a scale, and what follows from them."""
        name = " ".join(f"{key}={value}" for key, value in self.of.items()) or "all points"
        lines = [f"{name}: validation loss by {KEY}"]
        for scale, losses in self.losses.items():
            lines.append(f"  {scale:g}x  " + "  ".join(f"{lr:g}: {loss:.4f}" for lr, loss in sorted(losses.items())))
        grid = sorted(self.losses[min(self.losses)])
        if len(grid) > 1 and self.best in (grid[0], grid[-1]):
            lines.append(f"  {self.best:g} is at the edge of the values tried: try beyond it")
        return "\n".join([*lines, f"  {KEY}={self.best:g}; {self._transfer()}"])

    def _transfer(self) -> str:
        if len(self.losses) == 1:
            return "no transfer check: the study has one data scale"
        scale = max(self.losses)
        there = self.losses[scale]
        best = min(there, key=there.__getitem__)
        if best == self.best:
            return f"transfer check: it is the best at {scale:g}x too"
        return (
            f"transfer check: it does NOT hold at {scale:g}x, where {best:g} is better by "
            f"{there[self.best] - there[best]:.4f}: a curve over data scale would mix both"
        )


def tune(overrides: Sequence[str]) -> list[Choice]:
    """Train what the choice needs, print it and the transfer check.

    Raises ValueError without values to choose from, and `cli.Failed` where a training fails.
    """
    study = plan(overrides)
    cfg = study.cfg
    if len(cfg.study.axes.get(KEY, [])) < 2:
        raise ValueError(f"eagle3 study tune chooses among several values: give them, such as {KEY}=5e-4,1e-3,2e-3")
    if cfg.launch.kind == "slurm":
        raise ValueError("eagle3 study tune waits for its points: give it inside an allocation, with launch=local")
    first_seed = study.points[0].cfg.seed
    points = [p for p in study.points if p.cfg.seed == first_seed and p.cfg.train.regime != "none"]
    scales = sorted({p.cfg.data.scale for p in points})[:2]
    groups: dict[tuple[tuple[str, str], ...], list[Point]] = {}
    for point in points:
        of = tuple((key, value) for key, value in point.overrides.items() if key not in NOT_COMPARED)
        groups.setdefault(of, []).append(point)
    say(f"{KEY} at {scales[0]:g}x, seed {first_seed}, by the validation loss; {len(groups)} choice(s) to make")
    if cfg.dry_run:
        return []
    for part in study.parts:
        share_data(part.cfg)
    choices = []
    for of, members in groups.items():
        losses = {scales[0]: _losses(p for p in members if p.cfg.data.scale == scales[0])}
        small = Choice(dict(of), losses)
        if len(scales) > 1:
            near = _beside(sorted(losses[scales[0]]), small.best)
            again = (p for p in members if p.cfg.data.scale == scales[1] and p.cfg.optim.lr in near)
            losses[scales[1]] = _losses(again)
        choices.append(small)
    for choice in choices:
        say(choice.text())
    return choices


def _beside(grid: list[float], value: float) -> list[float]:
    """A value of the grid with its neighbours."""
    at = grid.index(value)
    return grid[max(0, at - 1) : at + 2]


def _losses(points: Iterable[Point]) -> dict[float, float]:
    """Learning rate -> validation loss, trained if need be; one that diverged counts as infinite."""
    return {point.cfg.optim.lr: _loss(point.cfg) for point in points}


def _loss(cfg: Config) -> float:
    path = cfg.point_dir / "train.json"
    if not path.is_file() or is_of_another_store(cfg, cfg.point_dir):
        outcome = run(Job("train", cfg))
        if outcome.state != "done":
            raise Failed(outcome.text(cfg.point_name))
        say(f"{cfg.point_name}: trained in {duration(outcome.seconds)}")
    loss = read_object(path).get("val_loss")
    return math.inf if loss is None else float(loss)

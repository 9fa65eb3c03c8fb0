"""The points of a study: the product of its axes, less the excluded ones, each a complete configuration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eagle3_train import config
from eagle3_train.config import Config, parse_overrides
from launch.jobs import data_identity
from sweeps.cost import shape_of


@dataclass(frozen=True)
class Point:
    """One training run with its evaluation. `overrides`: what the axes set, config key -> literal."""

    name: str
    cfg: Config
    overrides: dict[str, str]

    @property
    def dir(self) -> Path:
        return self.cfg.point_dir


@dataclass(frozen=True)
class Part:
    """Points that share their data: those of one target. `cfg`: the first of them, for the steps that they share."""

    cfg: Config
    points: list[Point]

    @property
    def largest(self) -> Point:
        """The point that needs the most data."""
        return max(self.points, key=lambda p: p.cfg.data.tokens or p.cfg.data.sequences or 0)


@dataclass(frozen=True)
class Study:
    """The points are in the order of the axes."""

    parts: list[Part]  # one a target
    points: list[Point]
    unmatched: list[str]  # items of study.exclude and study.decode_points that no point has

    @property
    def cfg(self) -> Config:
        """For what is not varied: launch, the study's folder, and the like."""
        return self.parts[0].cfg

    @property
    def dir(self) -> Path:
        return Path(self.cfg.paths.study)


def plan(overrides: Sequence[str]) -> Study:
    """Compose a study and all its points.

    `overrides` are Hydra overrides of anything. One of an axis sets the values of that axis, one or several:
    `seed=0`, `data.scale=1,2,4`. Several values for another key add an axis; `study.axes={...}` sets them all, in place
    of the study file's. Of several overrides of one key the last holds. Raises ValueError for points that would have to
    share a name or data that they do not share.
    """
    fixed, swept = split(overrides)
    instead = _axes_of(fixed.pop("study.axes", None))
    raw = config.compose_raw([*fixed.values()])
    study: Any = OmegaConf.to_container(raw.study, resolve=True)
    of_file = {key: [literal(v) for v in values] for key, values in study["axes"].items()}
    axes = (of_file if instead is None else instead) | swept
    if empty := [key for key, values in axes.items() if not values]:
        raise ValueError(f"study {study['name']!r}: axis {empty[0]} has no values; ~study.axes.{empty[0]} removes it")
    for key in axes.keys() & fixed.keys():  # the user fixed an axis
        axes[key] = [fixed.pop(key).partition("=")[2]]
    parsed = {key: [_parsed(key, value) for value in values] for key, values in axes.items()}
    OmegaConf.update(raw, "study.axes", parsed, merge=False)
    parts: dict[tuple[str, ...], Part] = {}
    points, found = [], set()
    items = [("exclude", i) for i in study["exclude"]] + [("decode_points", i) for i in study["decode_points"]]
    for chosen, cfg in compositions([*fixed.values()], raw, axes):
        matched = {n for n, (_, item) in enumerate(items) if matches(cfg, chosen, item)}
        found |= matched
        if any(n < len(study["exclude"]) for n in matched):
            continue
        target = tuple(value for key, value in chosen.items() if config.is_of_target(key))
        part = parts.setdefault(target, Part(deepcopy(cfg), []))
        set_decode(cfg, chosen)
        points.append(Point(cfg.point_name, cfg, chosen))
        part.points.append(points[-1])
    if not parts:
        raise ValueError(f"study {study['name']!r} has no point: study.exclude leaves none")
    _check(points, [*parts.values()])
    unmatched = [f"study.{key}: {literal(item)}" for n, (key, item) in enumerate(items) if n not in found]
    return Study([*parts.values()], points, unmatched)


def compositions(
    fixed: list[str], raw: DictConfig, axes: Mapping[str, list[str]]
) -> Iterator[tuple[dict[str, str], Config]]:
    """The configuration of every combination. Hydra composes once for each choice of config groups (a quarter of a
    second each; `raw` is that of none); values of single keys, and of the keys that a mapping in place of a group's
    choice has, are then set in copies, as Hydra itself sets them."""
    groups = {p.name for p in config.conf_dir().iterdir() if p.is_dir()}
    composed: dict[tuple[str, ...], DictConfig] = {(): raw}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        by_name = {key: value for key, value in chosen.items() if key in groups and not value.startswith("{")}
        choice = tuple(f"{key}={value}" for key, value in by_name.items())
        if choice not in composed:
            composed[choice] = config.compose_raw([*fixed, *choice])
            composed[choice].study.axes = raw.study.axes
        cfg = deepcopy(composed[choice])
        for key in chosen.keys() - by_name.keys():
            OmegaConf.update(cfg, key, _parsed(key, chosen[key]))
        yield chosen, config.resolve(cfg)


def _parsed(key: str, value: str) -> Any:
    """A value of an axis, as Hydra reads it on its command line."""
    return parse_overrides([f"{key}={value}"])[0].value()


def set_decode(cfg: Config, chosen: Mapping[str, str]) -> None:
    """Leave `eval.decode` on only where the study asks for it (`study.decode_points`)."""
    wanted = cfg.study.decode_points
    if wanted and not any(matches(cfg, chosen, item) for item in wanted):
        cfg.eval.decode = False


def matches(cfg: Config, chosen: Mapping[str, str], item: Mapping[str, Any]) -> bool:
    """Whether a point has all values of `item` (config key or group -> value)."""
    return all(_value(cfg, chosen, key) == value for key, value in item.items())


def _value(cfg: Config, chosen: Mapping[str, str], key: str) -> Any:
    node: Any = cfg
    for part in key.split("."):
        if not is_dataclass(node) or part not in {f.name for f in fields(node)}:
            raise ValueError(f"study {cfg.study.name!r}: exclude or decode_points names {key!r}, which is no key")
        node = getattr(node, part)
    return chosen.get(key) if is_dataclass(node) else node  # a group (`draft`) has the name that was chosen


def literal(value: Any) -> str:
    """A value of a study file as Hydra's command line has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(literal(v) for v in value) + "]"
    if isinstance(value, str) and (
        not value.isidentifier() or value.lower() in ("null", "true", "false", "nan", "inf")
    ):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def split(overrides: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Overrides of one value by their key, and those of several (`seed=0,1`) as axes."""
    fixed: dict[str, str] = {}
    swept: dict[str, list[str]] = {}
    for text, override in zip(overrides, parse_overrides(list(overrides)), strict=True):
        key = override.key_or_group
        fixed.pop(key, None)
        swept.pop(key, None)
        if override.is_sweep_override():
            swept[key] = list(override.sweep_string_iterator())
        else:
            fixed[key] = text
    return fixed, swept


def _axes_of(override: str | None) -> dict[str, list[str]] | None:
    """The axes of an override `study.axes={key: [values], ...}`; a single value may stand without brackets."""
    if override is None:
        return None
    value = parse_overrides([override])[0].value()
    if not isinstance(value, dict):
        raise ValueError(f"{override}: the axes are a mapping, such as 'study.axes={{data.scale: [1, 2], seed: [0]}}'")
    return {str(k): [literal(x) for x in (v if isinstance(v, list) else [v])] for k, v in value.items()}


def _check(points: list[Point], parts: list[Part]) -> None:
    study = parts[0].cfg.study
    names: dict[str, Point] = {}
    for point in points:
        if (other := names.setdefault(point.name, point)) is not point:
            raise ValueError(
                f"study {study.name!r}: {point.overrides} and {other.overrides} define the same point "
                f"{point.name}: remove the axis that changes nothing"
            )
    for part in parts:
        if shape := shape_of(part.cfg):
            config.layer_ids(part.cfg.capture, shape.layers)
        if len({data_identity(p.cfg) for p in part.points}) > 1:
            varied = [k for k in study.axes if k.partition(".")[0] in ("corpus", "capture", "store", "eval")]
            raise ValueError(
                f"study {study.name!r}: its points share what is prepared and captured once, and the axis "
                f"{' and '.join(varied)} would change that: make a study for each value (study.name=...); `python -m "
                "analysis STUDY STUDY` reads several. Of such axes only the target has data of its own in a study"
            )
    for first, second in itertools.combinations([part.cfg for part in parts], 2):
        for name in ("corpus", "store", "target"):
            if (path := getattr(first.paths, name)) == getattr(second.paths, name):
                raise ValueError(
                    f"study {study.name!r}: the targets {first.target.model} and {second.target.model} would "
                    f"share paths.{name}={path}: give each a target.name of its own, as 'target={{name: a, model: "
                    f"FOLDER}}' does, and leave paths.{name} alone, or name its folder by ${{target.name}}"
                )

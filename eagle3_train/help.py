"""Help texts. What a key means is said once, by its comment in config.py, and read from there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from eagle3_train import config
from eagle3_train.config import Config

if TYPE_CHECKING:
    from eagle3_train.steps import Step

INTRO = """\
eagle3: scaling-law studies of speculative-decoding draft heads.

usage: eagle3 STEP [key=value ...]

steps:
{steps}

  eagle3 STEP --help      what a step reads and writes, its keys with their values, examples
  eagle3 STEP --cfg job   the resolved configuration
  eagle3 --version

Start with: eagle3 study study=quickstart"""

STEP = """\
eagle3 {name}: {summary}

reads:   {reads}
writes:  {writes}

keys (any key of the configuration can be given as key=value; `--cfg job` prints them all):
{keys}

examples:
{examples}"""


def overview(steps: Mapping[str, Step]) -> str:
    width = max(map(len, steps))
    return INTRO.format(steps="\n".join(f"  {name:<{width}}  {step.summary}" for name, step in steps.items()))


def step_help(name: str, step: Step, cfg: Config) -> str:
    """Help of one step, with the values that its keys have now."""
    keys = "\n".join(_setting(cfg, key) for key in step.keys)
    examples = "\n".join(f"  {example}" for example in step.examples)
    return STEP.format(
        name=name, summary=step.summary, reads=step.reads, writes=step.writes, keys=keys, examples=examples
    )


@cache
def all_keys() -> tuple[str, ...]:
    """Every key of the configuration, dotted."""
    return tuple(_walk(Config, ""))


def _walk(cls: type, prefix: str) -> Iterator[str]:
    for name, kind in inspect.get_annotations(cls, eval_str=True).items():
        if is_dataclass(kind):
            yield from _walk(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name


def _setting(cfg: Config, key: str) -> str:
    """`key=value  what it means`, on two lines where the value is long."""
    setting, comment = f"  {key}={_value(cfg, key)}", _comment(key)
    if not comment:
        return setting
    return f"{setting:<34}  {comment}" if len(setting) <= 34 else f"{setting}\n{'':34}  {comment}"


def _value(cfg: Config, key: str) -> Any:
    node: Any = cfg
    for part in key.split("."):
        node = getattr(node, part)
    return "null" if node is None else str(node).lower() if isinstance(node, bool) else node


def _comment(key: str) -> str:
    """The comment of a key in config.py: behind the field, or in the lines above it."""
    *path, name = key.split(".")
    cls: type = Config
    for part in path:
        cls = next(vars(config)[f.type] for f in fields(cls) if f.name == part)  # type: ignore[arg-type, index]
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if match := re.match(rf"\s+{name}:[^#]*(?:#\s*(.*))?$", line):
            return match[1] or " ".join(above)
        above = [*above, line.strip(" #")] if line.strip().startswith("#") else []
    return ""

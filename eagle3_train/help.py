"""Help texts. What a key means is said once, by its comment in config/schema.py, and read from there."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf

from eagle3_train import config
from eagle3_train.config import Config, schema

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
{parts}
examples:
{examples}"""

COMMANDS = """
commands (`eagle3 {name} COMMAND`):
{commands}
"""

KEYS = """
keys, with the values they have now (any key can be given as key=value; `--cfg job` prints them all):
{keys}

files of values, chosen as GROUP=FILE:
{groups}
"""


def overview(steps: Mapping[str, Step]) -> str:
    width = max(map(len, steps))
    return INTRO.format(steps="\n".join(f"  {name:<{width}}  {step.summary}" for name, step in steps.items()))


def step_help(name: str, step: Step, cfg: Config) -> str:
    """Help of one step, with the values that its keys have now."""
    parts = ""
    if step.commands:
        width = max(map(len, step.commands))
        lines = (f"  {command:<{width}}  {text}" for command, text in step.commands.items())
        parts += COMMANDS.format(name=name, commands="\n".join(lines))
    if step.keys:
        options = "\n".join(f"  {group:<9}{', '.join(_options(group))}" for group in groups())
        parts += KEYS.format(keys="\n".join(_setting(cfg, key) for key in step.keys), groups=options)
    examples = "\n".join(f"  {example}" for example in step.examples)
    return STEP.format(
        summary=step.summary, name=name, reads=step.reads, writes=step.writes, parts=parts, examples=examples
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`: did you mean a or b?`, or nothing where nothing is near. Keys are known by their last part too."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=3, cutoff=0.6)
    near += [w for w in words if w.rpartition(".")[2] == word.rpartition(".")[2] and w not in near]
    return f": did you mean {' or '.join(near[:3])}?" if near else ""


def groups() -> list[str]:
    """The config groups: folders of conf/."""
    return sorted(p.name for p in config.conf_dir().iterdir() if p.is_dir())


def _options(group: str) -> list[str]:
    return sorted(p.stem for p in (config.conf_dir() / group).glob("*.yaml"))


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
    plain = OmegaConf.to_container(OmegaConf.create({"value": node}))["value"]  # type: ignore[call-overload, index]
    return (
        yaml.safe_dump(plain, default_flow_style=True, width=float("inf"), sort_keys=False)
        .removesuffix("\n...\n")
        .strip()
    )


def _comment(key: str) -> str:
    """The comment of a key in config/schema.py: behind the field, or in the lines above it."""
    *path, name = key.split(".")
    cls: type = Config
    for part in path:
        cls = next(vars(schema)[f.type] for f in fields(cls) if f.name == part)  # type: ignore[arg-type, index]
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if match := re.match(rf"\s+{name}:[^#]*(?:#\s*(.*))?$", line):
            return match[1] or " ".join(above)
        above = [*above, line.strip(" #")] if line.strip().startswith("#") else []
    return ""

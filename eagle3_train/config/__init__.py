"""Structured configuration: types in `schema`, cross-checks in `checks`, values in `conf/`; composed and kept here.

Hydra composes `conf/config.yaml` over the dataclasses, so an unknown key or a wrong type is refused before any work.
Every package may import this one; it imports no torch.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3_train.config.checks import check, layer_ids, parse_objective
from eagle3_train.config.schema import (
    HEADS,
    SAMPLING,
    UNUSED_BY,
    BlockConfig,
    CaptureConfig,
    Config,
    CorpusConfig,
    CoupledConfig,
    DraftConfig,
    Eagle1Config,
    Eagle3Config,
    EngineConfig,
    HFConfig,
    LMConfig,
    MedusaConfig,
    OptimConfig,
    PathsConfig,
    ServeConfig,
    SourceConfig,
    TargetConfig,
    TaskConfig,
    TrackerConfig,
    TrainConfig,
    TreeConfig,
    differences,
    digest,
    is_of_target,
)
from eagle3_train.files import write_text

__all__ = [
    "HEADS", "SAMPLING", "BlockConfig", "CaptureConfig", "Config", "CorpusConfig", "CoupledConfig", "DraftConfig",
    "Eagle1Config", "Eagle3Config", "EngineConfig", "HFConfig", "LMConfig", "MedusaConfig", "OptimConfig",
    "PathsConfig", "ServeConfig", "SourceConfig", "TargetConfig", "TaskConfig", "TrackerConfig", "TrainConfig",
    "TreeConfig", "check", "compose", "compose_raw", "conf_dir", "differences", "digest", "is_of_target",
    "layer_ids", "load", "parse_objective", "parse_overrides", "register", "relocated", "resolve", "save", "unread",
]  # fmt: skip


def resolve(cfg: DictConfig) -> Config:
    """A composed Hydra configuration as a checked `Config`; every interpolation resolved, paths made absolute."""
    paths = OmegaConf.to_container(cfg.paths, resolve=False)
    assert isinstance(paths, dict)
    if any(is_of_target(str(key)) for key in cfg.study.axes) and paths["data"] == PathsConfig.data:
        cfg.paths.data = "${paths.study}/targets/${target.name}"
    OmegaConf.resolve(cfg)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    for name in ("outputs", "study", "data", "corpus", "store", "target", "regenerated"):
        path = getattr(config.paths, name)
        if "://" not in path:
            setattr(config.paths, name, str(Path(path).absolute()))
    check(config)
    return config


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration; written aside and renamed, so that a reader never sees half of it."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(config)))


def load(path: str | Path) -> Config:
    """Read a resolved configuration back. ValueError, which names the file, where it is missing, damaged or empty, or
    has keys or values that this version does not know."""
    try:
        found = OmegaConf.load(path)
        if not isinstance(found, DictConfig) or not found:
            raise ValueError("it is empty, or no mapping of keys to values")
        return resolve(OmegaConf.merge(OmegaConf.structured(Config), found))  # type: ignore[arg-type]
    except FileNotFoundError as e:
        raise ValueError(f"{path}: no such file; the step that runs there writes it") from e
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as e:
        reason = " ".join(str(e).partition("full_key:")[0].split())
        raise ValueError(
            f"{path} is damaged, or not a configuration of this version of the code ({reason}): delete it and give the "
            "command that wrote it again"
        ) from e


def relocated(config: Config, study: Path) -> Config:
    """The configuration of a study whose folder was moved or copied to `study` since: what lay in it lies there now."""
    paths, old, new = config.paths, Path(config.paths.study), Path(study).absolute()
    for name in ("data", "corpus", "store", "target", "regenerated", "study"):
        path = Path(getattr(paths, name))
        if "://" not in getattr(paths, name) and path.is_relative_to(old):
            setattr(paths, name, str(new / path.relative_to(old)))
    return config


def conf_dir() -> Path:
    """The folder `conf`: beside the package in a clone, inside it in a wheel."""
    inside = Path(__file__).parents[1] / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "conf"


OPEN = (
    "study.axes",
    "target.chat_template_args",
    "target.shape",
    "launch.slurm.env",
)  # keys whose value is a mapping of any keys


def compose_raw(overrides: list[str]) -> DictConfig:
    """Compose `conf/config.yaml` with Hydra overrides, from anywhere; interpolations are left as they are. Of several
    overrides of one key the last holds, of a config group too."""
    import hydra

    last: dict[str, str] = {}
    for text, override in zip(overrides, parse_overrides(overrides), strict=True):
        # The keys of such a mapping are the user's own, and Hydra would take them for slips of the fingers.
        is_open = override.type is OverrideType.CHANGE and override.key_or_group in OPEN
        if override.type is OverrideType.CHANGE:
            last.pop(override.key_or_group, None)
            last[override.key_or_group] = f"++{text}" if is_open else text
        else:
            last[text] = text
    with hydra.initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return hydra.compose("config", overrides=list(last.values()))


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Hydra's overrides as it reads them. Its own exception names the one that it cannot read."""
    return OverridesParser.create().parse_overrides(overrides)


def unread(overrides: list[str], kind: str) -> list[str]:
    """Keys of `overrides` that a draft head of this `kind` does not read, such as `draft.eagle1.noise` of Medusa."""
    unused = {*(HEADS - {kind}), *UNUSED_BY.get(kind, ())}
    keys = [str(override.key_or_group) for override in parse_overrides(overrides)]
    return [key for key in keys if key.startswith("draft.") and key.split(".")[1] in unused]


def compose(overrides: list[str]) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides, from anywhere, and check it."""
    return resolve(compose_raw(overrides))


def register() -> None:
    """Put the schema where `conf/config.yaml` finds it (`defaults: [schema, ...]`)."""
    ConfigStore.instance().store(name="schema", node=Config)


register()

"""What tells series apart is what names a point's folder, less the data and the seed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from analysis.settings import LATER, LATER_OF_EAGLE3, settings
from eagle3_train.config import HEADS, Config, SourceConfig

BY_COLUMNS = {"seed", "data.scale", "corpus.sequences", "target.name", "corpus.sources"}


def leaves(value: Any, prefix: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key, v in value.items() for leaf in leaves(v, f"{prefix}.{key}" if prefix else key)]
    return [prefix]


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "fp8" if value == "recapture" else value + "x"
    if isinstance(value, list):
        return [*value, 1.0]
    return {"x": 1} if isinstance(value, dict) else 1 if value is None else value + 1


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("mode", ["whole", "rolling"])
def test_settings_differ_where_the_identity_of_a_point_does(kind: str, mode: str) -> None:
    cfg = Config()
    cfg.draft.kind, cfg.store.mode = kind, mode
    identity, before = cfg.point_identity, settings(asdict(cfg))
    assert len(before) > 20
    for leaf in set(leaves(asdict(cfg))) - BY_COLUMNS - {"draft.kind", "store.mode"}:
        *path, name = leaf.split(".")
        owner: Any = cfg
        for part in path:
            owner = getattr(owner, part)
        old = getattr(owner, name)
        setattr(owner, name, changed(old))
        differs = settings(asdict(cfg)) != before
        assert differs == (cfg.point_identity != identity), leaf
        setattr(owner, name, old)


def test_data_scale_and_seed_are_no_settings() -> None:
    cfg = Config()
    before = settings(asdict(cfg))
    cfg.seed, cfg.data.scale, cfg.corpus.sequences = 5, 8.0, 100
    assert settings(asdict(cfg)) == before


def test_sources_count_without_their_paths() -> None:
    cfg = Config()
    cfg.corpus.sources = [SourceConfig(name="a", path="here")]
    before = settings(asdict(cfg))
    cfg.corpus.sources[0].path = "there"
    assert settings(asdict(cfg)) == before
    cfg.corpus.sources[0].limit = 5
    assert settings(asdict(cfg)) != before


def test_options_that_older_runs_lack_have_the_defaults_of_the_schema() -> None:
    whole = asdict(Config())
    for key, value in (LATER | LATER_OF_EAGLE3).items():
        node: Any = whole
        for part in key.split("."):
            node = node[part]
        assert node == value, key
    older = asdict(Config())
    del older["train"]["objective"], older["draft"]["eagle3"], older["data"]["window"]
    older["draft"]["kind"] = whole["draft"]["kind"] = "eagle3"
    assert settings(older) == settings(whole)

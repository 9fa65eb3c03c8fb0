"""Studies whose runs differ in settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def configure(folder: Path, points: str, **sections: dict[str, Any]) -> None:
    """Set settings (`train={"step_weight": 0.0}`) in the config.yaml of all points of a study that match a pattern."""
    paths = sorted(folder.glob(f"{points}/config.yaml"))
    assert paths
    for path in paths:
        config = yaml.safe_load(path.read_text())
        for section, values in sections.items():
            config.setdefault(section, {}).update(values)
        path.write_text(yaml.safe_dump(config))


def replace_in_results(folder: Path, **values: Any) -> None:
    """Set top-level keys of all results of a study."""
    for path in folder.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

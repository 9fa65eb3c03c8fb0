"""One synthetic study and its analysis, shared by the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_study import write_study

from analysis import Analysis, analyse, load_runs


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick-start's design: 1x to 8x, two seeds, two tasks; tau rises by 0.083 a doubling from 1.17."""
    return write_study(tmp_path_factory.mktemp("outputs") / "quickstart")


@pytest.fixture(scope="session")
def analysed(study: Path) -> Analysis:
    return analyse(load_runs(study), replicates=200)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests of this folder (the full numbers of simulated studies) run where `-m slow` asks for them."""
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: ask for it with -m slow"))

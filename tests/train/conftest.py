"""One small store for all tests of this folder, and outputs of its own for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.tiny_store import make_study

NewOutputs = Callable[[str], Path]


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    make_study(folder)
    return folder


@pytest.fixture
def outputs(study: Path, tmp_path: Path) -> NewOutputs:
    """Another outputs folder, with the same store, so that points do not meet."""

    def new(name: str) -> Path:
        folder = tmp_path / name
        (folder / "tiny").mkdir(parents=True)
        (folder / "tiny" / "store").symlink_to(study / "tiny" / "store")
        return folder

    return new

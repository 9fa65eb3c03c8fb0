"""Who may import whom (docs/architecture.md), and that what must start quickly imports no torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASE = {"config", "files", "console", "exits", "device", "target", "tensors", "trained"}
ROOMS: dict[str, set[str]] = {
    "corpus": set(),
    "store": set(),
    "drafts": set(),
    "tracking": set(),
    "capture": {"corpus", "store"},
    "export": {"drafts"},
    "train": {"drafts", "export", "store", "tracking"},
    "decode": {"drafts"},
    "evaluate": {"decode", "drafts", "store"},
}
TOP: dict[str, set[str]] = {"launch": set(), "sweeps": {"launch"}, "analysis": set()}


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, inside functions too; relative imports made absolute."""
    package = path.relative_to(ROOT).parent.parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            names |= {module} | {f"{module}.{a.name}" for a in node.names}
    return names


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def rooms_of(names: set[str]) -> set[str]:
    parts = (n.split(".") for n in names)
    return {p[1] for p in parts if p[0] == "eagle3_train" and len(p) > 1}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    for path in files_of(ROOT / "eagle3_train" / room):
        names = imported(path)
        foreign = (rooms_of(names) & set(ROOMS)) - ROOMS[room] - {room}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"
        tops = {n.split(".")[0] for n in names} & set(TOP)
        # A room's own subpackage may carry a top-level package's name only if it is ours by a relative import.
        assert not tops, f"{path.relative_to(ROOT)} imports {tops}"


@pytest.mark.parametrize("package", TOP)
def test_launch_sweeps_and_analysis_start_without_torch(package: str) -> None:
    for path in files_of(ROOT / package):
        names = imported(path)
        tops = {n.split(".")[0] for n in names}
        assert "torch" not in tops, path
        assert not (tops & set(TOP)) - TOP[package] - {package}, path
        allowed = set() if package == "analysis" else {"config", "files", "console", "exits", "trained", "cli"}
        assert rooms_of(names) <= allowed, f"{path.relative_to(ROOT)} imports {rooms_of(names)}"


def test_store_needs_no_transformers_and_config_no_torch() -> None:
    for path in files_of(ROOT / "eagle3_train" / "store"):
        assert "transformers" not in {n.split(".")[0] for n in imported(path)}, path
    base = ROOT / "eagle3_train"
    for path in (*files_of(base / "config"), *(base / f"{name}.py" for name in ("files", "console", "exits"))):
        assert "torch" not in {n.split(".")[0] for n in imported(path)}, path

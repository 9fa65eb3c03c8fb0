"""Files that are whole or not there; what tells their contents apart."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from eagle3_train.capture.run import _summary
from eagle3_train.console import size
from eagle3_train.files import (
    append_line,
    content_fingerprint,
    new_folder,
    read_json,
    sweep_temporaries,
    temporary_path,
)
from eagle3_train.target import read_config


def test_a_line_behind_a_cut_one_is_a_line_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "capture.jsonl"
    line = {"store": "train", "shard": 0, "tokens": 5, "seconds": 1.0, "mismatched": 0, "compared": 0}
    append_line(log, json.dumps(line))
    with log.open("a") as f:
        f.write(json.dumps(line | {"shard": 1})[:20])  # the writer was killed here
    assert _summary(log)["train"]["tokens"] == 5
    append_line(log, json.dumps(line | {"shard": 2}))
    assert log.read_bytes().count(b"\n") == 3
    assert _summary(log)["train"]["tokens"] == 10


def test_temporaries_of_dead_writers_are_swept_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "target[1].model"
    host, gone = socket.gethostname(), 2**22 + 1  # above the largest process id
    dead = [tmp_path / f".{path.name}.{host}.{gone}.{kind}" for kind in ("tmp", "old")]
    alive = [
        temporary_path(path),
        tmp_path / f".{path.name}.another-host.{gone}.tmp",
        tmp_path / f".other.{host}.{gone}.tmp",
        path,
    ]
    dead[1].mkdir()
    (dead[1] / "weights").write_text("")
    for file in (dead[0], *alive):
        file.write_text("")
    sweep_temporaries(path)
    assert sorted(tmp_path.iterdir()) == sorted(alive)


def test_content_and_not_the_path_is_the_fingerprint(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.json", tmp_path / "f"
    folder.mkdir()
    file.write_text("one")
    (folder / "part").write_text("one")
    seen = {content_fingerprint(str(file)), content_fingerprint(str(folder))}
    (tmp_path / "b.json").write_text("one")
    assert content_fingerprint(str(tmp_path / "b.json")) in seen
    file.write_text("two")
    (folder / "part").write_text("two")
    seen |= {content_fingerprint(str(file)), content_fingerprint(str(folder))}
    assert len(seen) == 4
    assert content_fingerprint("nobody/model-on-the-hub") is None
    assert content_fingerprint("package:nothing_here/x.json") is None


def test_damaged_json_is_named(tmp_path: Path) -> None:
    for content in (b"{", b"\xff\xfe{\0}\0", b"[" * 200_000):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.json is not valid JSON"):
            read_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(300_000, "0.3 MiB"), (449_400_000, "429 MiB"), (2**31, "2.00 GiB"), (2**42, "4.00 TiB")]
)
def test_sizes_read_right(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


def test_the_remedy_is_the_callers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json does not hold what it should: fetch the target model again"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON .*: fetch the target model again"):
        read_config(tmp_path)


def test_a_writer_killed_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "head"
    left = f".head.{socket.gethostname()}.{2**22 + 1}"
    for kind in ("old", "tmp"):
        (tmp_path / f"{left}.{kind}").mkdir()
        (tmp_path / f"{left}.{kind}" / "kind").write_text(kind)
    with pytest.raises(OSError, match="full"), new_folder(path):
        raise OSError("full")
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    assert (path / "kind").read_text() == "old"
    with new_folder(path) as aside:
        (aside / "kind").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    assert (path / "kind").read_text() == "new"

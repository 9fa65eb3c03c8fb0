"""The files by which the two sides of a rolling store know of each other."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from eagle3_train.store import signs as signs_module
from eagle3_train.store.folder import Folder
from eagle3_train.store.signs import READERS, WORKERS, Sign, living, read_sign, read_signs

from .helpers import WORKER_FACTS, of_reader, of_worker


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs_module, "BEAT_S", 0.1)


def test_a_file_that_is_damaged_is_read_when_it_is_whole_again_or_named(tmp_path: Path) -> None:
    folder, file = Folder(tmp_path), tmp_path / READERS / "run.json"
    assert read_sign(folder, READERS, "run") is None
    file.parent.mkdir()
    less = {key: value for key, value in of_reader().items() if key != "session"}
    values = ({"beat": 3}, less, of_reader(mark="3"), of_reader(ended=None))
    for text in ('{"mark": 3, "be', "", "[]", "\0\0\0", *map(json.dumps, values)):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"readers/run\.json is damaged: delete it"):
            read_sign(folder, READERS, "run")
        assert read_signs(folder, READERS) == {}
    file.write_text("{")
    whole = json.dumps(of_reader()).encode()
    healer = threading.Timer(0.15, lambda: folder.child(READERS).write("run.json", whole))
    healer.start()
    assert read_sign(folder, READERS, "run") == of_reader()


def test_who_lives_is_known_by_process_or_by_signs_of_life(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    workers = folder.child(WORKERS)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    own = os.uname().nodename
    for name, host, pid, ended in (("0", own, child, False), ("1", "elsewhere", 1, False), ("2", own, 1, True)):
        workers.write(f"{name}.json", json.dumps(of_worker(host=host, pid=pid, ended=ended)).encode())
    began = time.monotonic()
    assert living(folder, WORKERS, ["0", "2", "none"]) == []
    assert time.monotonic() - began < 0.1  # known at once
    assert living(folder, WORKERS, ["0", "1", "2"]) == []  # silent for three beats
    sign = Sign(folder, WORKERS, "3", **WORKER_FACTS)
    assert living(folder, WORKERS, ["0", "1", "2", "3"]) == ["3"]
    sign.close(ended=True)
    assert living(folder, WORKERS, ["3"]) == []


def test_a_process_whose_name_another_has_taken_notices_and_leaves_its_file_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    sign = Sign(folder, WORKERS, "0", **WORKER_FACTS)
    sign.say(doing="capturing")
    assert not sign.is_replaced()
    other = of_worker(generation=2)
    for _ in range(2):  # a beat that had looked before overwrites once
        folder.child(WORKERS).write("0.json", json.dumps(other).encode())
        time.sleep(0.5)
    assert sign.is_replaced()
    sign.close()
    assert read_sign(folder, WORKERS, "0") == other
    Sign(folder, WORKERS, "0", **WORKER_FACTS).close()  # a new one takes the name
    assert (read_sign(folder, WORKERS, "0") or other)["host"] != "elsewhere"


def test_a_folder_that_comes_to_be_while_it_is_listed_is_empty_and_no_error(tmp_path: Path) -> None:
    """As when two workers start: one makes the folder of signs, the other looks into it."""
    inside, ended = tmp_path / WORKERS, threading.Event()

    def make_and_remove() -> None:
        while not ended.is_set():
            inside.mkdir()
            inside.rmdir()

    other = threading.Thread(target=make_and_remove)
    other.start()
    try:
        for _ in range(20_000):
            assert read_signs(Folder(tmp_path), WORKERS) == {}
    finally:
        ended.set()
        other.join()

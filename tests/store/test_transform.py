"""Merging and pruning: the store that a capture of just these sequences would have made."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from eagle3_train.store import (
    ShardWriter,
    Store,
    finalize,
    merge,
    missing_shards,
    prune,
    read_target_part,
    shard_name,
    shard_rows,
    write_target_part,
)
from eagle3_train.store.commands import main

from .helpers import make_sequence, make_spec, make_store

TOKENIZER = {"tokenizer.json": b"{}"}


def part(path: Path, rows: list[int], **changes: object) -> Store:
    """A store of some rows of the whole, captured by itself."""
    spec = make_spec(n_rows=len(rows), n_shards=2, **changes)
    for shard in range(2):
        with ShardWriter(path, shard, spec) as writer:
            for i in shard_rows(len(rows), 2, shard):
                writer.add(make_sequence(spec, rows[i]))
    finalize(path, spec)
    ends = {"embed_tokens": torch.ones(spec.vocab_size, spec.hidden_size), "norm_weight": torch.ones(spec.hidden_size)}
    write_target_part(path, spec, ends, {"a": 1}, TOKENIZER)
    return Store.open(path)


def test_merged_parts_are_the_capture_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part(tmp_path / "a", list(range(9)))
    part(tmp_path / "b", list(range(9, 23)), generator="v2")
    out = tmp_path / "out"
    assert main(["merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out), "--seed", "5"]) == 0
    store = Store.open(out)
    assert f"fingerprint {store.fingerprint}" in capsys.readouterr().out
    assert store.verify() == []
    spec = store.spec
    assert (spec.n_rows, spec.n_shards) == (23, 4)
    by_hash = sorted(range(23), key=lambda r: hashlib.sha256(f"5:{make_sequence(spec, r).sample_id}".encode()).digest())
    for sequence, row in zip(store.read(range(23)), by_hash, strict=True):
        expected = make_sequence(spec, row)
        assert sequence.sample_id == expected.sample_id
        assert torch.equal(sequence.hidden, expected.hidden.bfloat16())
    assert read_target_part(out, spec).config == {"a": 1}
    assert (out / "target" / "tokenizer.json").read_bytes() == b"{}"
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("shard-*")}
    (out / shard_name(2, 4)).unlink()
    assert merge([tmp_path / "a", tmp_path / "b"], out, 5) == store.manifest
    after = {p.name: p.stat().st_mtime_ns for p in out.glob("shard-*")}
    assert [n for n in before if before[n] != after[n]] == [shard_name(2, 4)]
    # Parts in another order are another list of parts, but the same rows in the same order.
    again = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "again", 5)
    assert Store.open(tmp_path / "again").index.sample_id.equals(store.index.sample_id)
    assert again.tokens == store.manifest.tokens


def test_what_does_not_fit_is_not_merged(tmp_path: Path) -> None:
    part(tmp_path / "a", list(range(9)))
    part(tmp_path / "b", list(range(8, 23)))
    part(tmp_path / "c", list(range(9, 23)), target_hash="t1")
    with pytest.raises(ValueError, match=r"sample 'sample-é8' is in more than one"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    with pytest.raises(ValueError, match=r"/c and .*/a are of different captures \(target_hash: 't1', not 't0'\)"):
        merge([tmp_path / "a", tmp_path / "c"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pruned_store_is_a_nested_subset(tmp_path: Path) -> None:
    store = make_store(tmp_path / "whole")
    assert prune(tmp_path / "whole", tmp_path / "rows", rows=10).rows == 10
    for a, b in zip(store.read(range(10)), Store.open(tmp_path / "rows").read(range(10)), strict=True):
        assert a.sample_id == b.sample_id
        assert torch.equal(a.hidden, b.hidden)
    arguments = [str(tmp_path / "whole"), "--out", str(tmp_path / "code"), "--sources", "code", "--tokens", "500"]
    assert main(["prune", *arguments, "--dtype", "fp8", "--shards", "2"]) == 0
    pruned = Store.open(tmp_path / "code")
    assert pruned.spec.dtype == "fp8"
    assert missing_shards(tmp_path / "code", 2) == []
    assert set(pruned.index.source.to_pylist()) == {"code"}
    assert pruned.manifest.tokens >= 500 > pruned.manifest.tokens - pruned.index.n_tokens[-1]
    assert pruned.index.sample_id.to_pylist() == store.index.sample_id.to_pylist()[1::2][: len(pruned)]
    assert pruned.verify() == []
    with pytest.raises(ValueError, match="no source maths: it has code, sharegpt"):
        prune(tmp_path / "whole", tmp_path / "none", sources=["maths"])
    with pytest.raises(ValueError, match="has 23 such rows"):
        prune(tmp_path / "whole", tmp_path / "none", rows=24)
    assert not (tmp_path / "none").exists()


def test_no_store_takes_the_place_of_another(tmp_path: Path) -> None:
    source, other = part(tmp_path / "a", list(range(9))), part(tmp_path / "b", list(range(9, 15)))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for out in (source, other):
        for rows, shards in ((5, None), (5, 2), (8, 2)):
            with pytest.raises(ValueError, match="holds another store: choose another --out"):
                prune(source.folder.uri, out.folder.uri, rows=rows, shards=shards)
    with pytest.raises(ValueError, match="holds another store"):
        merge([source.folder.uri, other.folder.uri], other.folder.uri)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before

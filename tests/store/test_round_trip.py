"""What is written is what is read, bit for bit; and what a store says about itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from eagle3_train.store import (
    Sequence,
    ShardWriter,
    Store,
    concatenate,
    finalize,
    holds_target_part,
    missing_shards,
    read_target_part,
    shard_name,
    shard_rows,
    write_target_part,
)
from eagle3_train.store.codec import DTYPES

from .helpers import capture, make_sequence, make_spec, make_store


def assert_same(found: Sequence, expected: Sequence, dtype: torch.dtype) -> None:
    assert (found.sample_id, found.source) == (expected.sample_id, expected.source)
    for name in ("input_ids", "loss_mask", "target_argmax", "target_logsumexp"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert found.hidden.dtype == dtype
    assert torch.equal(found.hidden, expected.hidden.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "logsumexp", "readers"), [("bf16", False, 1), ("fp16", True, 1), ("fp32", False, 1), ("bf16", True, 3)]
)
def test_round_trip_is_bitwise_in_any_order(tmp_path: Path, dtype: str, logsumexp: bool, readers: int) -> None:
    # 256 values a token: a row group of 1 MiB holds a few of these rows, and some rows are larger than it
    store = make_store(tmp_path, max_tokens=3000, dtype=dtype, logsumexp=logsumexp, row_group_mib=1, hidden_size=64)
    assert int(store.index.row_group.max()) > 0
    rows = [*np.random.default_rng(0).permutation(len(store)).tolist(), 3, 3]
    found = list(store.read(rows, readers))
    for row, sequence in zip(rows, found, strict=True):
        assert_same(sequence, make_sequence(store.spec, row, 3000), DTYPES[dtype])
    assert store.manifest.bytes == pytest.approx(store.spec.estimate_bytes(store.manifest.tokens), rel=0.02)
    assert store.verify() == []


def test_fp8_keeps_each_state_to_the_precision_of_e4m3(tmp_path: Path) -> None:
    spec = make_spec(dtype="fp8", n_rows=1, n_shards=1)
    plain = make_sequence(spec, 0)
    hidden = plain.hidden.clone()
    # Tokens and layers of very different size, one dimension that dwarfs the others, one state of zeros.
    hidden *= torch.logspace(-6, 6, plain.n_tokens)[:, None, None] * torch.tensor([1, 1e3, 1e-3, 1.0])[:, None]
    hidden[:, :, 3] *= 50
    hidden[1, 2] = 0
    with ShardWriter(tmp_path, 0, spec) as writer:
        writer.add(Sequence(**{**plain.__dict__, "hidden": hidden}))
    finalize(tmp_path, spec)
    found = Store.open(tmp_path)[0].hidden
    assert found.dtype == torch.bfloat16
    # e4m3 has 3 bits after the leading one: half a unit is 1/16; below 2^-6 of 448 (subnormal) half a step is absolute.
    allowed = torch.maximum(hidden.abs() / 16, hidden.abs().amax(-1, keepdim=True) / 448 * 2**-10) * 1.01
    assert ((found.float() - hidden).abs() <= allowed).all()
    assert Store.open(tmp_path).verify() == []
    assert spec.token_bytes * 2 == make_spec().token_bytes
    with pytest.raises(ValueError, match="not finite as fp8"), ShardWriter(tmp_path, 0, spec) as writer:
        writer.add(Sequence(**{**plain.__dict__, "hidden": hidden / 0}))


def test_a_batch_lies_in_one_piece_of_memory(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    rows = [7, 2, 19, 2]
    batch = store.read_batch(rows)
    for row, sequence in zip(rows, batch, strict=True):
        assert_same(sequence, make_sequence(store.spec, row), torch.bfloat16)
    whole = concatenate(batch)
    assert whole.data_ptr() == batch[0].hidden.data_ptr()
    assert torch.equal(whole, torch.cat([s.hidden for s in batch]))
    for others in ([batch[0], batch[2]], batch[::-1], [store[1], store[2]]):
        assert torch.equal(concatenate(others), torch.cat([s.hidden for s in others]))
    assert torch.equal(concatenate(batch[1:3]), torch.cat([s.hidden for s in batch[1:3]]))
    assert store.read_batch([]) == []
    with pytest.raises(IndexError, match="row 23"):
        store.read_batch([0, 23])


def test_any_parquet_reader_reads_a_shard(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    table = pq.read_table(tmp_path / shard_name(1, 4))
    row = shard_rows(23, 4, 1)[2]
    expected = make_sequence(store.spec, row)
    assert table["sample_id"][2].as_py() == expected.sample_id
    assert table["input_ids"][2].as_py() == expected.input_ids.tolist()
    raw = torch.frombuffer(bytearray(table["hidden_states"][2].as_py()), dtype=torch.bfloat16)
    assert torch.equal(raw.view(expected.hidden.shape), expected.hidden.bfloat16())


def test_index_and_manifest_count_what_is_there(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    sequences = [make_sequence(store.spec, row) for row in range(23)]
    assert store.index.sample_id.to_pylist() == [s.sample_id for s in sequences]
    assert store.index.source.to_pylist() == [s.source for s in sequences]
    assert store.index.n_tokens.tolist() == [s.n_tokens for s in sequences]
    assert store.index.n_supervised.tolist() == [s.n_supervised for s in sequences]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["tokens"] == store.manifest.tokens == sum(s.n_tokens for s in sequences)
    assert manifest["supervised_tokens"] == sum(s.n_supervised for s in sequences)
    assert [s["bytes"] for s in manifest["shards"]] == [(tmp_path / shard_name(i, 4)).stat().st_size for i in range(4)]


def test_fingerprint_follows_the_contents_and_not_the_layout(tmp_path: Path) -> None:
    base = make_store(tmp_path / "a").fingerprint
    assert make_store(tmp_path / "b", n_shards=7, row_group_mib=2, generator="v2").fingerprint == base
    assert make_store(tmp_path / "c", max_tokens=199).fingerprint != base
    for change in ({"target_hash": "t1"}, {"dtype": "fp16"}, {"layer_ids": (1, 4, 5, 8)}, {"config": {"corpus": "x"}}):
        assert make_store(tmp_path / str(change), **change).fingerprint != base


@pytest.mark.parametrize(("rows", "shards"), [(23, 4), (8, 8), (100, 7), (5, 1)])
def test_shards_are_contiguous_and_balanced(rows: int, shards: int) -> None:
    blocks = [shard_rows(rows, shards, s) for s in range(shards)]
    assert [r for b in blocks for r in b] == list(range(rows))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_finalize_is_idempotent_and_clears_up(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()}
    (tmp_path / f".{shard_name(0, 4)}.elsewhere.0123.tmp").touch()  # a writer killed on another host
    finalize(tmp_path, store.spec)
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.iterdir()} == before


def test_finalize_names_missing_shards(tmp_path: Path) -> None:
    spec = make_spec()
    capture(tmp_path, spec)
    (tmp_path / shard_name(2, 4)).unlink()
    with pytest.raises(ValueError, match=r"1 of 4 shards \(2\) missing; run eagle3 capture"):
        finalize(tmp_path, spec)
    assert not (tmp_path / "manifest.json").exists()


def test_finalize_names_foreign_shards_and_allows_what_it_is_told(tmp_path: Path) -> None:
    spec = make_spec()
    with ShardWriter(tmp_path, 1, make_spec(generator="v0")) as writer:
        for row in shard_rows(23, 4, 1):
            writer.add(make_sequence(spec, row))
    with pytest.raises(ValueError, match=r"shard-00001.*generator: 'v0', not 'v1'"):
        missing_shards(tmp_path, 4, spec)
    for shard in (0, 2, 3):
        with ShardWriter(tmp_path, shard, spec) as writer:
            for row in shard_rows(23, 4, shard):
                writer.add(make_sequence(spec, row))
    with pytest.raises(ValueError, match=r"shard-00001.*generator: 'v0', not 'v1'.*eagle3 capture"):
        finalize(tmp_path, spec)
    finalize(tmp_path, spec, allow=("generator",))
    assert Store.open(tmp_path).verify() == []


def test_expect_says_what_differs_and_what_to_do(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.expect(target_hash="t0", tokenizer_hash="k0", layer_ids=[2, 4, 5, 8], dtype="bf16")
    with pytest.raises(
        ValueError, match=r"target_hash: the store has 't0', this run wants 'x'; dtype: .*eagle3 capture"
    ):
        store.expect(target_hash="x", dtype="fp32", tokenizer_hash="k0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_ids": (4, 2, 8)}, "ascending"),
        ({"layer_ids": (2, 4, 5)}, "n_layers=8"),
        ({"dtype": "int4"}, "bf16, fp16, fp32, fp8"),
        ({"n_shards": 24}, "capture.shards=24 for 23 rows"),
        ({"n_rows": 0}, "without rows"),
        ({"row_group_mib": 0}, "row_group_mib"),
    ],
)
def test_impossible_specs_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_spec(**change)


def test_writer_refuses_what_no_reader_could_use(tmp_path: Path) -> None:
    spec = make_spec(n_rows=2, n_shards=1, dtype="fp16")
    good = make_sequence(spec, 0)

    def change(**values: object) -> Sequence:
        return Sequence(**{**good.__dict__, **values})  # type: ignore[arg-type]

    infinite = good.hidden.clone()
    infinite[-1, 2, 3] = 1e6  # beyond fp16
    nan = good.hidden.clone()
    nan[0, 0, 0] = float("nan")
    bad = {
        "shape": change(hidden=good.hidden[:, :3]),
        "loss_mask has shape": change(loss_mask=good.loss_mask[:-1]),
        "target_argmax has shape": change(target_argmax=good.target_argmax[:-1]),
        "store.dtype=bf16 has the range": change(hidden=infinite),
        "not finite": change(hidden=nan),
        "no tokens": change(input_ids=good.input_ids[:0]),
    }
    for words, sequence in bad.items():
        with pytest.raises(ValueError, match=words), ShardWriter(tmp_path, 0, spec) as writer:
            writer.add(sequence)
    with pytest.raises(ValueError, match="takes 2 rows, and 1 were added"), ShardWriter(tmp_path, 0, spec) as writer:
        writer.add(good)
    with ShardWriter(tmp_path / "full", 0, spec) as writer:
        writer.add(good)
        writer.add(good)
        with pytest.raises(ValueError, match="one more"):
            writer.add(good)
    assert [p.name for p in tmp_path.rglob("*")] == ["full", shard_name(0, 1)]


@pytest.mark.parametrize("tied", [False, True])
def test_target_part_round_trips(tmp_path: Path, tied: bool) -> None:
    embed = torch.randn(50, 8).bfloat16()
    head = embed if tied else torch.randn(50, 8).bfloat16()
    tensors = {
        "embed_tokens": embed,
        "norm_weight": torch.randn(8),
        "lm_head": head,
        "last_layer.mlp.up": torch.randn(3),
    }
    spec = make_spec(vocab_size=50, hidden_size=8)
    write_target_part(tmp_path, spec, tensors, {"hidden_size": 8})
    part = read_target_part(tmp_path, spec)
    assert part.config == {"hidden_size": 8}
    assert torch.equal(part.embed_tokens, embed)
    assert torch.equal(part.lm_head, head)
    assert torch.equal(part.last_layer["mlp.up"], tensors["last_layer.mlp.up"])
    assert (part.lm_head is part.embed_tokens) == tied
    with pytest.raises(ValueError, match="eagle3 capture"):
        read_target_part(tmp_path / "nowhere", spec)
    with pytest.raises(ValueError, match="lmhead"):
        write_target_part(tmp_path, spec, {**tensors, "lmhead": head}, {})


def damaged_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = safetensors.torch.load_file(path) | changes
    safetensors.torch.save_file({n: t for n, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize("says_whose", [True, False])
def test_a_damaged_target_part_is_named_with_the_remedy(tmp_path: Path, says_whose: bool) -> None:
    spec, folder = make_spec(vocab_size=50, hidden_size=8), tmp_path / "target"
    good = {"embed_tokens": torch.randn(50, 8), "norm_weight": torch.randn(8)}

    def refused(message: str, **changes: torch.Tensor | None) -> None:
        damaged_tensors(folder / "target.safetensors", **changes)
        with pytest.raises(ValueError, match=f"{message}.*rm -r .*target.*eagle3 capture"):
            read_target_part(tmp_path, spec)
        write_target_part(tmp_path, spec, good, {"hidden_size": 8})
        if not says_whose:
            (folder / "identity.json").unlink()

    write_target_part(tmp_path, spec, good, {"hidden_size": 8})
    if says_whose:
        refused("its checksum is another", norm_weight=torch.full((8,), torch.nan))
    else:
        (folder / "identity.json").unlink()
        refused("damaged", embed_tokens=None)
        refused(r"embed_tokens \[49, 8\]", embed_tokens=torch.randn(49, 8))
    for text in ("[]", "", "null", "[" * 10_000):
        (folder / "config.json").write_text(text)
        refused("config.json")
    (folder / "target.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"target.safetensors is damaged"):
        read_target_part(tmp_path, spec)


def test_a_target_part_of_another_target_is_refused(tmp_path: Path) -> None:
    spec = make_spec(vocab_size=50, hidden_size=8)
    write_target_part(tmp_path, spec, {"embed_tokens": torch.randn(50, 8), "norm_weight": torch.randn(8)}, {})
    assert holds_target_part(tmp_path, spec)
    for name in ("target_hash", "tokenizer_hash", "chat_template_hash", "compute_dtype"):
        assert not holds_target_part(tmp_path, make_spec(vocab_size=50, hidden_size=8, **{name: "other"}))
    read_target_part(tmp_path, replace(spec, compute_dtype="bf16"))  # of a transcript: the same target
    with pytest.raises(ValueError, match=r"of another target than the states \(target_hash\).*rm -r"):
        read_target_part(tmp_path, replace(spec, target_hash="other"))

"""The same store code over the S3 protocol, against a real server on loopback."""

from __future__ import annotations

import pytest
import torch

from eagle3_train.store import (
    BatchPlan,
    Loader,
    ShardWriter,
    Store,
    finalize,
    missing_shards,
    read_target_part,
    shard_name,
    write_target_part,
)
from eagle3_train.store.folder import Folder

from .helpers import capture, make_sequence, make_spec, make_store


def test_capture_read_and_verify(uri: str) -> None:
    spec = make_spec()
    capture(uri, spec)
    finalize(uri, spec)
    ends = {"embed_tokens": torch.ones(spec.vocab_size, spec.hidden_size), "norm_weight": torch.ones(spec.hidden_size)}
    write_target_part(uri, spec, ends, {"a": 1})
    assert read_target_part(uri, spec).config == {"a": 1}
    store = Store.open(uri)
    assert store.verify() == []
    for row, sequence in enumerate(store.read(range(23), readers=4)):
        assert torch.equal(sequence.hidden, make_sequence(spec, row).hidden.bfloat16())
    plan = BatchPlan(store.index.n_tokens, store.fingerprint, 0, 400, epochs=1)
    with Loader(store, plan, readers=4) as loader:
        assert sum(len(sequences) for _, sequences in loader) == 23


def test_an_object_store_and_a_disk_hold_the_same_bytes(uri: str, tmp_path: object) -> None:
    local = make_store(tmp_path)  # type: ignore[arg-type]
    capture(uri, local.spec)
    assert finalize(uri, local.spec) == local.manifest


def test_a_shard_appears_whole_or_not_at_all(uri: str) -> None:
    spec = make_spec()
    with pytest.raises(ValueError, match="takes 5 rows, and 1 were added"), ShardWriter(uri, 0, spec) as writer:
        writer.add(make_sequence(spec, 0))
    assert missing_shards(uri, 4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="is no store"):
        Store.open(uri)


def test_damage_is_found_and_named(uri: str) -> None:
    spec = make_spec()
    capture(uri, spec)
    finalize(uri, spec)
    folder = Folder(uri)
    name = shard_name(2, 4)
    data = bytearray(folder.read(name))
    data[1000] ^= 1
    folder.write(name, bytes(data))
    folder.remove(shard_name(1, 4))
    missing, damaged = map(str, Store.open(uri).verify())
    assert "shard-00001" in missing
    assert "missing" in missing
    assert "shard-00002" in damaged
    assert "damaged" in damaged
    with pytest.raises(ValueError, match=r"shard-00001.*is missing"):
        Store.open(uri)[8]

"""`eagle3 store ...`: what a person sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_train.store import Store, finalize, shard_name
from eagle3_train.store.commands import main
from eagle3_train.store.folder import Folder
from eagle3_train.store.signs import WORKERS, Sign

from .helpers import WORKER_FACTS, announce, capture, make_sequence, make_spec, make_store, write_shard


def test_info_and_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert all(line == line.rstrip() for line in text.splitlines())  # not filled up with blanks
    for words in (store.fingerprint, "layer ids 2, 4, 5, 8 of 8 layers", f"{store.manifest.tokens:,}", "code 11"):
        assert words in text
    expected = make_sequence(store.spec, 5)
    assert main(["sample", str(tmp_path), "--rows", "5", "6"]) == 0
    text = capsys.readouterr().out
    assert (
        f"row 5: {expected.sample_id} from code, {expected.n_tokens} tokens, {expected.n_supervised} supervised" in text
    )
    assert " ".join(map(str, expected.input_ids[:24])) in text
    spans = text.split("supervised  ")[1].split("\n")[0]
    covered = [t for span in spans.split(", ") for t in range(int(span.split("..")[0]), int(span.split("..")[1]) + 1)]
    with pytest.raises(ValueError, match=r"--rows 999: .* has rows 0 to 22"):
        main(["sample", str(tmp_path), "--rows", "999"])
    assert covered == expected.loss_mask.nonzero()[0].tolist()


def test_long_facts_are_neither_cut_nor_padded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = replace(make_spec(), target_hash="0123456789abcdef" * 4, target="a-name-" * 20)
    capture(tmp_path, spec)
    finalize(tmp_path, spec)
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "(weights 0123456789abcdef, tokenizer " in text
    assert spec.target in text


def test_what_a_rolling_store_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec()
    rolling = announce(tmp_path, spec)
    write_shard(tmp_path, spec, 2)
    facts = WORKER_FACTS | {"doing": "capturing shard 3", "cap_bytes": 3 << 20}
    Sign(Folder(tmp_path), WORKERS, "0", **facts).close()
    assert main(["info", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        rolling.fingerprint,
        "rolls: 1 of 4 shards are here now",
        "capturing shard 3",
        " MiB; all together at most ",
        "its workers keep within 3.0 MiB (store.cap_gib)",
        "layer ids 2, 4, 5, 8",
    ):
        assert words in text
    new = ["--out", str(tmp_path / "new")]
    for command in (["verify"], ["sample"], ["prune", *new], ["merge", *new], ["finalize"]):
        with pytest.raises(ValueError, match=r"is a rolling store.*store\.mode=whole"):
            main([command[0], str(tmp_path), *command[1:]])
    capture(tmp_path, spec)
    finalize(tmp_path, spec)
    assert main(["verify", str(tmp_path)]) == 0
    assert not (tmp_path / "rolling.json").exists()


def test_finalize_then_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="eagle3 capture"):
        main(["finalize", str(tmp_path)])
    capture(tmp_path, make_spec())
    assert main(["finalize", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path)]) == 0
    assert "sound, 4 shards, 23 rows" in capsys.readouterr().out
    Store.open(tmp_path).require_whole()
    (tmp_path / shard_name(2, 4)).unlink()
    with pytest.raises(ValueError, match=r"shard-00002-of-00004\.parquet is missing: run eagle3 capture again"):
        Store.open(tmp_path).require_whole()
    assert main(["verify", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "shard-00002-of-00004.parquet: is missing\n    repair: eagle3 capture" in text
    assert "1 problem in" in text

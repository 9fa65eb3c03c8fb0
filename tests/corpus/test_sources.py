"""Sources of all kinds give the same conversations; mixtures have the shares their weights ask for."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pytest

from eagle3_train import config
from eagle3_train.config import SourceConfig
from eagle3_train.corpus import prepare, read_rows
from eagle3_train.corpus.messages import Conversation
from eagle3_train.corpus.pool import Pool
from eagle3_train.corpus.readers import SourceReport, fingerprint, read_conversations

RECORDS = [
    {"id": f"r{i}", "messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": f"a {i}"}]}
    for i in range(300)
]
LINES = "".join(json.dumps(r) + "\n" for r in RECORDS).encode()


def read(source: SourceConfig) -> tuple[list[Conversation], SourceReport]:
    report = SourceReport()
    return list(read_conversations(source, report)), report


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def lz4(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd, ".lz4": lz4}


@pytest.mark.parametrize("format", ["sharegpt", "jsonl"])
@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_files_plain_and_compressed(format: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"chats.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES) if suffix else LINES)
    found, report = read(SourceConfig(name="s", format=format, path=str(path)))
    assert [c.sample_id for c in found] == [f"s/r{i}" for i in range(300)]
    assert (report.conversations, report.stream_cut, report.cut_bytes) == (300, False, 0)


@pytest.mark.parametrize("format", ["sharegpt", "jsonl"])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_that_is_cut_gives_what_is_there(format: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"chats.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES)[:-40])
    found, report = read(SourceConfig(name="s", format=format, path=str(path)))
    assert report.stream_cut
    assert [c.sample_id for c in found] == [f"s/r{i}" for i in range(len(found))]
    assert len(found) < 300
    assert len(found) > 100 or suffix != ".gz"  # the others are one block here, which is whole or lost


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_that_is_damaged_is_named(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"chats.jsonl{suffix}"
    data = bytearray(COMPRESS[suffix](LINES))
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    contents = [bytes(data)] if suffix != ".lz4" else []  # these frames have no checksum: what is damaged is malformed
    for content in (*contents, b"[plain text, not compressed at all]" * 10):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"source 's': {path} is damaged: \d+ records could be read, then"):
            read(SourceConfig(name="s", format="jsonl", path=str(path)))


@pytest.mark.parametrize("format", ["sharegpt", "jsonl"])
def test_other_encodings_and_nesting_without_end(format: str, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    source = SourceConfig(name="s", format=format, path=str(path))
    path.write_bytes(b"\xef\xbb\xbf" + LINES)  # UTF-8 with a byte-order mark
    assert len(read(source)[0]) == 300
    for encoding in ("utf-16", "utf-16-le"):
        path.write_bytes(LINES.decode().encode(encoding))
        with pytest.raises(ValueError, match=rf"source 's': {path}: its text is UTF-16 .*iconv"):
            read(source)
    path.write_bytes(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n" + LINES)
    found, report = read(source)
    assert (len(found), report.malformed) == (300, 1)


def test_a_table_is_no_file_of_json(tmp_path: Path) -> None:
    (tmp_path / "chats.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"chats\.parquet is a table.*use format=dataset"):
        fingerprint(SourceConfig(name="s", path=str(tmp_path / "chats.parquet")))


def test_data_sets_in_parquet_folders_and_saved(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(RECORDS)
    (tmp_path / "folder").mkdir()
    data.to_parquet(tmp_path / "folder" / "train.parquet")
    data.save_to_disk(tmp_path / "saved")
    expected = [c.messages for c in read(SourceConfig(name="s", format="jsonl", path=str(write(tmp_path))))[0]]
    for path in (tmp_path / "folder" / "train.parquet", tmp_path / "folder", tmp_path / "saved"):
        source = SourceConfig(name="s", format="dataset", path=str(path))
        found, report = read(source)
        assert [c.messages for c in found] == expected
        assert report.conversations == 300
        state = fingerprint(source)
        assert fingerprint(source) == state
    with pytest.raises(ValueError, match=r"source 's'.*split=test"):
        read(SourceConfig(name="s", format="dataset", path=str(tmp_path / "folder"), split="test"))


SHAPES = {  # one record of each data set as its card on the hub describes it -> roles of the conversation
    "UltraChat-200k": (
        {
            "prompt": "hi", "prompt_id": "f0e3", "messages": [
                {"content": "hi", "role": "user"}, {"content": "hello", "role": "assistant"},
                {"content": "why?", "role": "user"}, {"content": "because", "role": "assistant"},
            ],
        },
        ["user", "assistant", "user", "assistant"],
    ),
    "OpenThoughts-114k": (
        {
            "system": "Think first.", "conversations": [
                {"from": "user", "value": "1 + 1?"}, {"from": "assistant", "value": "<|begin_of_thought|> ... 2"},
            ],
        },
        ["system", "user", "assistant"],
    ),
    "open-perfectblend": (
        {
            "source": "meta-math/MetaMathQA", "conversations": [
                {"from": "human", "value": "1 + 2?"}, {"from": "gpt", "value": "3"},
            ],
        },
        ["user", "assistant"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("streamed", [False, True])  # with a limit a data set is streamed
def test_data_sets_of_the_hub_have_shapes_that_are_read(name: str, streamed: bool, tmp_path: Path) -> None:
    import datasets

    record, roles = SHAPES[name]
    datasets.Dataset.from_list([record]).to_parquet(tmp_path / "train.parquet")
    source = SourceConfig(name="s", format="dataset", path=str(tmp_path), limit=1 if streamed else None)
    ((conversation,), report) = read(source)
    assert [m["role"] for m in conversation.messages] == roles
    assert report.conversations == 1


def write(folder: Path) -> Path:
    (folder / "chats.jsonl").write_bytes(LINES)
    return folder / "chats.jsonl"


def test_a_limit_ends_the_reading(tmp_path: Path) -> None:
    found, report = read(SourceConfig(name="s", format="jsonl", path=str(write(tmp_path)), limit=7))
    assert len(found) == report.conversations == 7


def test_a_mixture_has_the_shares_of_its_weights_and_keeps_the_scarcest_whole(tmp_path: Path) -> None:
    with Pool(tmp_path, 0, 0.1) as pool:
        for source, n in (("large", 3000), ("small", 500)):
            for i in range(n):
                pool.add(
                    Conversation(
                        f"{source}/{i}", f"{source}/{i}", source, [{"role": "user", "content": f"{source} {i}"}]
                    )
                )
        before = [c.sample_id for c in pool.walk(held_out=False)]
        kept = pool.mix({"large": 1.0, "small": 0.5})
        after = [c.sample_id for c in pool.walk(held_out=False)]
        assert kept == {"large": pytest.approx(1 / 3), "small": 1.0}
        assert [i for i in before if i in set(after)] == after  # thinned, in the same order
        n_small = sum(i.startswith("small") for i in after)
        assert n_small == sum(i.startswith("small") for i in before)
        assert 1.7 < (len(after) - n_small) / n_small < 2.3
        assert pool.size(held_out=False) == len(after)


def study(folder: Path, target: Path, sources: str, *more: str) -> config.Config:
    overrides = (
        "corpus.sequences=30",
        "corpus.validation_sequences=3",
        "corpus.held_out_fraction=0.2",
        "corpus.min_supervised=2",
        "corpus.near_duplicates=null",
        "data.base_sequences=2",
        "eval.tasks=[]",
        "eval.decode_tasks=[]",
    )
    fixed = [f"paths.outputs={folder}", f"target.model={target}", "corpus.path=null", f"corpus.sources={sources}"]
    return config.compose([*fixed, *overrides, *more])


def test_several_sources_and_rows_that_are_tokenised_already(tmp_path: Path, tiny_target: Path) -> None:
    rows = [{"id": i, "input_ids": [65, 66, i], "labels": [-100, 66, i]} for i in range(200)]
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources = f"[{{name: a, format: jsonl, path: {write(tmp_path)}}}, {{name: t, format: jsonl, path: {tokens}}}]"
    cfg = study(tmp_path, tiny_target, sources)
    report = prepare(cfg)
    assert report["sources"]["a"]["conversations"] == 300
    assert report["sources"]["a"]["kept"] == pytest.approx(2 / 3)
    found = list(read_rows(Path(cfg.paths.corpus) / "train.parquet"))
    assert {r.source for r in found} == {"a", "t"}
    row = next(r for r in found if r.source == "t")
    assert row.input_ids.tolist() == [65, 66, int(row.sample_id.removeprefix("t/"))]
    assert row.loss_mask.tolist() == [0, 1, 1]


def test_rows_of_another_tokenizer_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    rows = [{"input_ids": [65, 100_000 + i, 3], "loss_mask": [0, 1, 1]} for i in range(100)]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources = f"[{{name: t, format: jsonl, path: {tmp_path}/tokens.jsonl}}]"
    with pytest.raises(ValueError, match=r"source 't': record t/\w+ holds token 1000\d\d, and the target has"):
        prepare(study(tmp_path, tiny_target, sources))


def test_too_few_rows_are_explained_by_what_was_read(tmp_path: Path, tiny_target: Path) -> None:
    file = tmp_path / "x.jsonl"
    sources = f"[{{name: s, format: jsonl, path: {file}}}]"
    for content, words in (
        (b"", r"s: 0 records read \(no JSON objects: is `format` right\?\)"),
        (b"[1]\n[2]\n", r"s: 0 records read \(2 malformed, no JSON objects"),
        (LINES.splitlines(keepends=True)[0] * 5, r"s: 5 records read \(4 exact duplicate\)"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            prepare(study(tmp_path, tiny_target, sources))
    with pytest.raises(ValueError, match=rf"path={tmp_path}: a folder; .*format=dataset"):
        fingerprint(SourceConfig(name="s", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("corpus.sources=[]", "corpus.path=FILE"),
        ("corpus.path=x.json", "not both"),
        ("corpus.sources=[{name: a, path: x, weight: 0}]", "weight=0"),
        ("corpus.sources=[{name: a, path: x, format: csv}]", "format='csv'"),
        ("corpus.sources=[{name: a, path: x}, {name: a, path: y}]", "name twice"),
        ("corpus.sources=[{name: a, path: x, limit: 0}]", "limit=0 must be at least 1"),
        ("corpus.sources=[{name: a, path: x, limit: -3}]", "limit=-3 must be at least 1"),
        ("corpus.sources=[{name: a/../b, path: x}]", "corpus.sources: the name 'a/../b' must be"),
        ("corpus.name=''", "corpus.name: the name '' must be"),
        ("corpus.near_duplicates=1.5", "corpus.near_duplicates"),
        ("corpus.contamination_words=0", "corpus.contamination_words"),
    ],
)
def test_mistakes_in_the_configuration_are_named(override: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        study(tmp_path, tmp_path, "[{name: a, path: x}]", override)

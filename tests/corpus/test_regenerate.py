"""Conversations that the target wrote itself: each turn sees the earlier ones; a kill changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_train import config
from eagle3_train.capture import open_writer
from eagle3_train.config import Config
from eagle3_train.corpus import prepare, read_rows, regenerate
from eagle3_train.corpus.messages import conversation_of
from eagle3_train.corpus.order import order_key
from eagle3_train.target import load_tokenizer

TURNS = 3


def chats(n: int = 12) -> list[dict[str, Any]]:
    """Parts of conversations, as ShareGPT has them: c0_0, c0_1, c1_0 ..."""
    return [
        {
            "id": f"c{i // 2}_{i % 2}",
            "conversations": [
                turn
                for t in range(1 + i % TURNS)
                for turn in ({"from": "human", "value": f"question {i} {t}"}, {"from": "gpt", "value": f"old {i} {t}"})
            ],
        }
        for i in range(n)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "chats.json").write_text(json.dumps(chats()))
    return tmp_path


def study(folder: Path, target: Path, *overrides: str) -> Config:
    return config.compose(
        [
            f"paths.outputs={folder}",
            f"target.model={target}",
            "target.name=tiny",
            "eval.tasks=[]",
            "eval.decode_tasks=[]",
            "capture.compute_dtype=fp32",  # sums of another batch differ in bf16, the default where it is fast
            f"corpus.path={folder}/chats.json",
            "corpus.sequences=4",
            "data.base_sequences=1",
            "corpus.validation_sequences=1",
            "corpus.held_out_fraction=0.5",
            "corpus.min_supervised=1",
            "corpus.near_duplicates=null",
            "corpus.max_length=192",
            "regenerate.batch=5",
            "regenerate.max_new_tokens=12",
            *overrides,
        ]
    )


class Echo:
    """A target that answers with the number of the call and what it was asked, so that one sees what it saw."""

    def __init__(self, cfg: Config, dies_at: int | None = None, stops: bool = True) -> None:
        self.tokenizer = load_tokenizer(cfg.target.model)
        self.asked: list[str] = []
        self.dies_at, self.stops = dies_at, stops

    @contextmanager
    def __call__(self) -> Iterator[Callable[..., list[list[int]]]]:
        yield self.write

    def write(self, prompts: list[tuple[str, np.ndarray, int]], progress: Callable[[int], None]) -> list[list[int]]:
        answers = []
        for name, ids, limit in prompts:
            if len(self.asked) == self.dies_at:
                raise KeyboardInterrupt
            self.asked.append(self.tokenizer.decode(ids))
            text = f"new {name.rpartition('/')[2]}"
            end = [self.tokenizer.eos_token_id] if self.stops else []
            answers.append([*self.tokenizer(text)["input_ids"], *end][:limit])
        return answers


def records(files: dict[str, Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files.values() for line in file.read_text().splitlines()]


def test_every_turn_sees_the_earlier_ones_as_the_target_wrote_them(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    echo = Echo(cfg)
    found = records(regenerate(cfg, echo))
    assert len(found) == 12
    for record in found:
        source = next(c for c in chats() if c["id"] == record["id"])
        users = [t["value"] for t in source["conversations"] if t["from"] == "human"]
        expected = [m for t, u in enumerate(users) for m in (("user", u), ("assistant", f"new {t}"))]
        assert [(m["role"], m["content"]) for m in record["messages"]] == expected
    assert not any("old" in prompt for prompt in echo.asked)
    assert sum("new 0" in prompt and "new 1" in prompt for prompt in echo.asked) == 4  # third turns


def test_ids_order_and_the_side_of_the_split_stay(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    found = records(regenerate(cfg, Echo(cfg)))
    ids = [f"sharegpt/{record['id']}" for record in found]
    assert ids == sorted(ids, key=lambda i: order_key(0, i))
    for record in found:
        new, old = (
            conversation_of(r, "sharegpt") for r in (record, next(c for c in chats() if c["id"] == record["id"]))
        )
        assert (new.sample_id, new.group) == (old.sample_id, old.group)


def test_killed_anywhere_it_continues_and_the_file_is_the_undisturbed_one(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    undisturbed = regenerate(cfg, Echo(cfg))["sharegpt"].read_bytes()
    other = study(folder, tiny_target, f"paths.regenerated={folder}/other")
    for dies_at in (3, 8, 2, 9):
        echo = Echo(other, dies_at)
        with pytest.raises(KeyboardInterrupt):
            regenerate(other, echo)
        part = folder / "other" / "part-00000.jsonl"
        if part.is_file():  # a kill in the middle of a write
            part.write_bytes(part.read_bytes() + b'{"sample_id": "sharegpt/c')
    echo = Echo(other)
    assert regenerate(other, echo)["sharegpt"].read_bytes() == undisturbed
    assert len(echo.asked) < sum(
        len(c["conversations"]) // 2 for c in chats()
    )  # what was finished is not written again
    again = Echo(other)
    regenerate(other, again)
    assert again.asked == []


def test_workers_share_without_a_coordinator_and_more_continue_what_is_there(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target, "regenerate.conversations=6")
    whole = study(folder, tiny_target, f"paths.regenerated={folder}/whole")
    expected = regenerate(whole, Echo(whole))["sharegpt"].read_text().splitlines()
    assert regenerate(cfg, Echo(cfg), rank=1, world=2) == {}
    assert regenerate(cfg, Echo(cfg), rank=0, world=2)["sharegpt"].read_text().splitlines() == expected[:6]
    more = study(folder, tiny_target)
    assert regenerate(more, Echo(more))["sharegpt"].read_text().splitlines() == expected


def test_a_turn_that_was_cut_off_ends_the_conversation(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    for record in records(regenerate(cfg, Echo(cfg, stops=False))):
        assert [m["role"] for m in record["messages"]] == ["user", "assistant"]


def test_text_of_another_target_or_sampling_is_refused_by_name(folder: Path, tiny_target: Path) -> None:
    cfg = study(folder, tiny_target)
    regenerate(cfg, Echo(cfg))
    warm = study(folder, tiny_target, "regenerate.temperature=0.7")
    with pytest.raises(ValueError, match=r"other values of regenerate\.temperature.*rm -r"):
        regenerate(warm, Echo(warm))


def test_a_dry_run_says_how_much_there_is(folder: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = study(folder, tiny_target, "dry_run=true")
    assert regenerate(cfg, Echo(cfg, dies_at=0)) == {}
    out = capsys.readouterr().out
    assert "12 conversations, 0 of them done; left 12 with 24 turns" in out
    short = study(folder, tiny_target, "dry_run=true", "corpus.max_length=8")
    assert regenerate(short, Echo(short)) == {}
    out = capsys.readouterr().out
    assert "0 conversations, 0 of them done" in out
    assert out.splitlines()[-1].startswith("  left out: ")
    assert not list(Path(cfg.paths.regenerated).glob("*.json*"))


@pytest.mark.parametrize(
    "sampling", [(), ("regenerate.temperature=0.9", "regenerate.top_p=0.9")], ids=["greedy", "sampled"]
)
def test_by_the_target_itself_whatever_the_batch(folder: Path, tiny_target: Path, sampling: tuple[str, ...]) -> None:
    """... and `prepare` takes what it wrote."""
    texts = {}
    for batch in (12, 5):
        cfg = study(folder, tiny_target, *sampling, f"regenerate.batch={batch}", f"paths.regenerated={folder}/{batch}")
        (file,) = regenerate(cfg, lambda cfg=cfg: open_writer(cfg)).values()  # type: ignore[misc]
        texts[batch] = file.read_text()
    assert texts[12] == texts[5]
    cfg = study(folder, tiny_target, "corpus.format=jsonl", f"corpus.path={file}", "corpus.sequences=2")
    prepare(cfg)
    assert len(list(read_rows(Path(cfg.paths.corpus) / "train.parquet"))) == 2

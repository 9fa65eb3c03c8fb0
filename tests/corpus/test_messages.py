"""Records of all shapes to clean conversations, and the order and split by ids."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_train.corpus.messages import Unusable, conversation_of
from eagle3_train.corpus.order import is_held_out, order_key


def chat(*turns: tuple[str, Any]) -> list[tuple[str, str]]:
    record = {"id": "a_3", "conversations": [{"from": role, "value": text} for role, text in turns]}
    return [(m["role"], m["content"]) for m in conversation_of(record, "s").messages]


def test_turns_are_cleaned() -> None:
    assert chat(
        ("gpt", "said before any question"),
        ("system", "be kind"),
        ("human", "one"),
        ("human", "more"),
        ("gpt", "  \n"),
        ("gpt", "\n answer \n"),
        ("user", ""),
        ("chatgpt", "and on"),
        ("human", "never answered"),
    ) == [("system", "be kind"), ("user", "one\n\nmore"), ("assistant", "answer\n\nand on")]
    assert chat(("human", " keep my space\n"), ("gpt", "x")) == [("user", " keep my space\n"), ("assistant", "x")]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("human", "hi"), ("narrator", "x")], "unknown role"),
        ([("human", "hi")], "no answered user turn"),
        ([("gpt", "hi")], "no answered user turn"),
        ([("human", "hi"), ("gpt", [{"type": "image"}])], "no text"),
        ([("human", "hi"), ("gpt", 3)], "no text"),
    ],
)
def test_unusable_conversations_name_the_reason(turns: list[tuple[str, Any]], reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        chat(*turns)
    with pytest.raises(Unusable, match="no conversation"):
        conversation_of({"id": "x", "text": "a"}, "s")


def test_odd_unicode_becomes_text_that_a_tokenizer_takes() -> None:
    assert chat(("human", "\ud800 \ud83e\udd85 é"), ("gpt", "a"))[0][1] == "\ufffd \U0001f985 é"


def test_shapes_of_data_sets() -> None:
    expected = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for record in (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ]
        },
        {"prompt": "q", "response": "a"},
        {"instruction": "q", "output": "a"},
    ):
        assert conversation_of(record, "s").messages == expected
    assert conversation_of({"prompt": "q", "response": "a", "system": "s"}, "s").messages[0]["role"] == "system"
    tokens = conversation_of({"input_ids": [1, 2], "labels": [-100, 2]}, "s")
    assert (tokens.messages, tokens.input_ids, tokens.loss_mask) == ([], [1, 2], [0, 1])
    with pytest.raises(Unusable, match="loss_mask"):
        conversation_of({"input_ids": [1, 2], "loss_mask": [1]}, "s")


def test_ids_and_groups() -> None:
    part = conversation_of(
        {"id": "a_3", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "s"
    )
    assert (part.sample_id, part.group) == ("s/a_3", "s/a")
    nameless = {"prompt": "q", "response": "a"}
    assert conversation_of(nameless, "s").sample_id == conversation_of(dict(nameless), "s").sample_id
    assert conversation_of(nameless, "s").sample_id != conversation_of({"prompt": "q", "response": "b"}, "s").sample_id
    # Numbers behind an underscore are parts in ShareGPT alone.
    assert conversation_of({"id": "train_7", **nameless}, "s").group == "s/train_7"


def test_the_order_is_the_documented_hash_and_depends_on_the_seed() -> None:
    assert order_key(0, "a").hex().startswith("9df3c5fa")
    ids = [str(i) for i in range(50)]
    assert sorted(ids, key=lambda i: order_key(0, i)) != sorted(ids, key=lambda i: order_key(1, i))


def test_the_held_out_side_has_its_share_and_grows_with_it() -> None:
    ids = [f"conversation {i}" for i in range(4000)]
    small = {i for i in ids if is_held_out(i, 0.05)}
    large = {i for i in ids if is_held_out(i, 0.2)}
    assert small < large
    assert 150 < len(small) < 250
    assert 700 < len(large) < 900


@pytest.mark.parametrize(
    "ids", [["a", "b"], [1.7, 2], [float("nan"), 2], [-1, 2], [[1], [2]], 5, None, [], [True, 2], {"a": 1, "b": 2}]
)
def test_what_is_no_row_of_token_ids_is_left_out_for_that_reason(ids: Any) -> None:
    with pytest.raises(Unusable, match="input_ids that are no list of token ids"):
        conversation_of({"input_ids": ids, "loss_mask": [0, 1]}, "s")


@pytest.mark.parametrize("rest", [{"labels": 5}, {"loss_mask": [0, [1]]}, {"loss_mask": 3}, {"loss_mask": [0, 2]}, {}])
def test_what_is_no_mask_is_left_out_for_that_reason(rest: dict[str, Any]) -> None:
    with pytest.raises(Unusable, match="without a loss_mask"):
        conversation_of({"input_ids": [1, 2], **rest}, "s")


def test_names_that_no_file_takes_are_made_whole() -> None:
    record = {"id": "a\ud800", "split_group": "b\udfff", "prompt": "q", "response": "a"}
    found = conversation_of(record, "s")
    assert (found.sample_id, found.group) == ("s/a\ufffd", "s/b\ufffd")

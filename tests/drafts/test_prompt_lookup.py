"""Prompt lookup on paper, and against the definition read aloud."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3_train.drafts.prompt_lookup import Text
from tests.drafts.tiny import tiny_batch, tiny_draft, tiny_sequence


def text(tokens: list[int], max_ngram: int) -> Text:
    made = Text(max_ngram)
    for token in tokens:
        made.append(token)
    return made


def draft(tokens: list[int], max_ngram: int, steps: int) -> list[int]:
    return [text(tokens, max_ngram).guess(i) for i in range(steps)]


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "drafted"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),  # what followed (1, 2)
        ([1, 2, 3, 4, 2, 5, 1, 2], 3, [3, 4, 2]),  # the longer match wins over the later one
        ([1, 2, 3, 4, 2, 5, 1, 2], 1, [5, 1, 2]),  # of equal length the latest wins
        ([7, 8, 7], 3, [8, 7, 8]),  # the copy goes on in the draft
        ([4, 4], 3, [4, 4, 4]),
        ([1, 2, 3], 3, [3, 3, 3]),  # nothing matches
        ([5], 3, [5, 5, 5]),
    ],
)
def test_on_paper(tokens: list[int], max_ngram: int, drafted: list[int]) -> None:
    assert draft(tokens, max_ngram, 3) == drafted


def slow(tokens: list[int], max_ngram: int, steps: int) -> list[int]:
    """Search every place for the longest suffix, from the end; then copy one token after another."""
    for n in range(min(max_ngram, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                longer = list(tokens)
                for i in range(steps):
                    longer.append(longer[start + n + i])
                return longer[len(tokens) :]
    return [tokens[-1]] * steps


def test_every_draft_is_that_of_a_plain_search() -> None:
    head = tiny_draft("prompt_lookup")
    sequence = tiny_sequence(120, [(10, 120)], 0)
    sequence.input_ids = np.random.default_rng(0).integers(0, 4, 120).astype(np.int32)
    batch = tiny_batch([sequence])
    drafted, ids = head.predict(batch), sequence.input_ids.tolist()
    for t in range(9, 118):
        wanted = slow(ids[1 : t + 2], 3, 4)
        assert drafted[t].tolist() == [w if t + 2 + i < 120 else -1 for i, w in enumerate(wanted)]


def test_it_says_that_it_cannot_be_trained() -> None:
    head = tiny_draft("prompt_lookup")
    assert not head.is_trained
    with pytest.raises(ValueError, match="no parameters"):
        head(tiny_batch(), None)  # type: ignore[arg-type]
    assert head.parameter_counts() == {"trainable": 0, "frozen": 0}
    assert torch.equal(head.target_ids(torch.arange(3)), torch.arange(3))

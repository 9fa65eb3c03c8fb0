"""Near duplicates and text of evaluation prompts are left out; what is merely similar stays."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_train.corpus.filters import Filters
from eagle3_train.corpus.messages import Unusable

WORDS = np.array([f"word{i}" for i in range(5000)])


def text(seed: int, n: int = 200) -> list[str]:
    return list(np.random.default_rng(seed).choice(WORDS, n))


def test_near_duplicates_are_left_out_and_others_stay() -> None:
    filters = Filters(near=0.8, words=None)
    for seed in range(30):
        filters.check([" ".join(text(seed))])
    changed = text(3)
    changed[100] = "another"
    with pytest.raises(Unusable, match="near duplicate"):
        filters.check([" ".join(changed)])
    with pytest.raises(
        Unusable, match="near duplicate"
    ):  # neither case, nor white space, nor the split into turns counts
        filters.check([" ".join(text(5)[:100]).upper(), "\n".join(text(5)[100:])])
    filters.check([" ".join(text(7)[:100] + text(900)[:100])])  # half of it: a similarity of a third
    Filters(near=None, words=None).check(["the same"])


def test_text_that_was_left_out_is_not_compared_with() -> None:
    filters = Filters(near=0.8, words=5)
    filters.protect("the quick brown fox jumps over")
    contaminated = " ".join([*text(1), "quick brown fox jumps over"])
    with pytest.raises(Unusable, match="evaluation prompt"):
        filters.check([contaminated])
    filters.check([" ".join(text(1))])


def test_a_shared_run_of_words_is_contamination() -> None:
    filters = Filters(near=None, words=13)
    prompt = text(1, 40)
    filters.protect(" ".join(prompt))
    filters.check([" ".join([*text(2), *prompt[10:22], *text(3)])])  # twelve words
    with pytest.raises(Unusable, match="evaluation prompt"):
        filters.check(["hello", " ".join([*text(2), *prompt[10:23], *text(3)]).title()])


def test_a_prompt_shorter_than_the_run_counts_word_for_word() -> None:
    filters = Filters(near=None, words=13)
    filters.protect("Who was Ada Lovelace?")
    filters.check(["Tell me: who was Ada Lovelace?"])
    with pytest.raises(Unusable, match="evaluation prompt"):
        filters.check(["hi", "who was ada lovelace"])

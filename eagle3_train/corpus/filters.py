"""What is left out for its likeness to something else: near duplicates, and text of the evaluation's prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .messages import Unusable

if TYPE_CHECKING:
    from datasketch import MinHash

WORD = re.compile(r"\w+")
SHINGLE_WORDS = 5
PERMUTATIONS = 128  # the similarity is estimated to about 1 / sqrt(PERMUTATIONS)


class Filters:
    """Texts are compared with those accepted before them, so the outcome for a prefix of the order is final.

    near: Jaccard similarity of the texts' word 5-grams from which the later one is left out (MinHash and locality-
    sensitive hashing, Broder 1997). words: what shares a run of so many words with a protected prompt, or has a message
    that is a shorter prompt word for word, is left out. None switches either off.
    """

    def __init__(self, near: float | None, words: int | None) -> None:
        from datasketch import MinHashLSH

        self._near, self._words = near, words
        self._index = MinHashLSH(threshold=near, num_perm=PERMUTATIONS) if near is not None else None
        self._sketches: dict[int, MinHash] = {}
        self._runs: set[str] = set()
        self._short: set[str] = set()

    def protect(self, prompt: str) -> None:
        """A prompt of the evaluation: what holds it is not to be trained on."""
        if self._words is None:
            return
        found = WORD.findall(prompt.lower())
        if len(found) < self._words:
            self._short.add(" ".join(found))
        self._runs.update(_runs(found, self._words))

    def check(self, texts: list[str]) -> None:
        """Accept a conversation, given its messages' texts.

        Raises:
            Unusable: it is like something that was accepted or protected before.
        """
        messages = [WORD.findall(t.lower()) for t in texts]
        if self._words is not None:
            for found in messages:
                if " ".join(found) in self._short or any(r in self._runs for r in _runs(found, self._words)):
                    raise Unusable("text of an evaluation prompt")
        if self._index is not None:
            sketch = _sketch([word for found in messages for word in found])
            if any(sketch.jaccard(self._sketches[k]) >= (self._near or 0) for k in self._index.query(sketch)):
                raise Unusable("near duplicate")
            number = len(self._sketches)
            self._sketches[number] = sketch
            self._index.insert(number, sketch)


def _runs(words: list[str], n: int) -> Iterator[str]:
    return (" ".join(words[i : i + n]) for i in range(len(words) - n + 1))


def _sketch(words: list[str]) -> MinHash:
    from datasketch import MinHash

    sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
    shingles = set(_runs(words, min(SHINGLE_WORDS, max(len(words), 1))))
    sketch.update_batch([s.encode() for s in sorted(shingles)])
    return sketch

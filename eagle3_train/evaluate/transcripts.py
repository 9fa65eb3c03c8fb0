"""Transcripts: prompts with the continuation that the target itself generated, kept as a store a task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eagle3_train.decode.sampling import Sampling
from eagle3_train.store import Sequence, Store, inside


@dataclass(frozen=True)
class Transcript:
    """One prompt and its continuation."""

    sequence: Sequence
    prompt_length: int  # tokens before the first generated one, >= 1

    @property
    def prompt_id(self) -> str:
        return self.sequence.sample_id

    @property
    def prompt_ids(self) -> np.ndarray:
        """[prompt_length] int32."""
        return self.sequence.input_ids[: self.prompt_length]

    @classmethod
    def of(cls, sequence: Sequence) -> Transcript:
        """Raises ValueError where the supervised tokens are not a prompt's continuation to the sequence's end."""
        generated = np.flatnonzero(sequence.loss_mask)
        total = len(sequence.input_ids)
        start = int(generated[0]) if len(generated) else total
        if start == 0 or start == total or len(generated) != total - start:
            raise ValueError(
                f"sequence {sequence.sample_id!r} is no transcript (a prompt, then generated tokens to its end): "
                "make the transcripts again with `eagle3 capture`"
            )
        return cls(sequence, start)


class Transcripts:
    """The transcripts of one task."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """All that are stored, ascending; a head's `reads` picks those that it takes while decoding."""
        return tuple(self.store.spec.layer_ids)

    @property
    def sampling(self) -> Sampling:
        """How the target chose the tokens."""
        how = self.store.spec.sampling
        return Sampling(how.get("temperature", 0.0), how.get("top_p", 1.0), how.get("top_k", 0))

    def read(self, count: int | None = None) -> Iterator[Transcript]:
        """The first `count`, in the store's order; all by default."""
        rows = range(len(self) if count is None else min(count, len(self)))
        return (Transcript.of(s) for s in self.store.read(rows))


def open_transcripts(folder: str, task: str) -> Transcripts:
    """Open `<folder>/<task>`. The store says in its error what is missing."""
    return Transcripts(Store.open(inside(folder, task)))

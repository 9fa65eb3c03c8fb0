"""The conversations of all sources on disk: shuffled, split, mixed by weight, free of exact duplicates."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from .messages import Conversation, digest
from .order import fraction_of, is_held_out, order_key


class Pool:
    """Conversations in the global order. Memory holds a key and a place for each, not its text."""

    def __init__(self, folder: Path, seed: int, held_out_fraction: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the pool
        self._seed, self._fraction = seed, held_out_fraction
        # held out? -> (order key, share of its source that is left out with it, source, offset, bytes)
        self._places: dict[bool, list[tuple[bytes, float, str, int, int]]] = {False: [], True: []}
        self._texts: set[bytes] = set()
        self._ids: Counter[str] = Counter()
        self._kept: dict[str, float] = {}

    def add(self, conversation: Conversation) -> bool:
        """Put a conversation in; False for an exact duplicate of an earlier one, which is left out."""
        text = bytes.fromhex(digest(conversation))
        if text in self._texts:
            return False
        self._texts.add(text)
        self._ids[conversation.sample_id] += 1
        record = asdict(conversation)
        if (n := self._ids[conversation.sample_id]) > 1:
            record["sample_id"] += f"#{n}"
        data = json.dumps(record).encode()
        key, share = order_key(self._seed, record["sample_id"]), fraction_of("mix", record["sample_id"])
        place = (key, share, conversation.source, self._spool.seek(0, 2), len(data))
        self._spool.write(data)
        self._places[is_held_out(conversation.group, self._fraction)].append(place)
        return True

    def mix(self, weights: dict[str, float]) -> dict[str, float]:
        """Thin the sources out, by a hash of the id, until their shares are as the weights say; returns what is kept.

        The scarcest source, for its weight, stays whole: no conversation is ever repeated.
        """
        sizes = Counter(source for places in self._places.values() for _, _, source, _, _ in places)
        per_row = {name: weight / sizes[name] for name, weight in weights.items() if sizes[name]}
        self._kept = {name: value / max(per_row.values()) for name, value in per_row.items()}
        return self._kept

    def _chosen(self, held_out: bool) -> Iterator[tuple[bytes, float, str, int, int]]:
        return (p for p in self._places[held_out] if p[1] < self._kept.get(p[2], 1.0))

    def walk(self, held_out: bool) -> Iterator[Conversation]:
        """One side's conversations, in the global order."""
        for *_, offset, size in sorted(self._chosen(held_out)):
            self._spool.seek(offset)
            yield Conversation(**json.loads(self._spool.read(size)))

    def size(self, held_out: bool) -> int:
        return sum(1 for _ in self._chosen(held_out))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()

"""Read a source of conversations once, and put what is usable into a pool: shuffled, split, free of duplicates."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from eagle3_train.console import progress_bar
from eagle3_train.files import find_package_file

from .messages import Conversation, Unusable, conversation_of, digest
from .order import is_held_out, order_key
from .scan import ScanReport, scan_lines, scan_objects

OPENERS: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SCANNERS = {"sharegpt": scan_objects, "jsonl": scan_lines}


@dataclass
class SourceReport:
    """What one source gave."""

    conversations: int = 0  # whole records
    malformed: int = 0
    cut_bytes: int = 0
    stream_cut: bool = False
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> conversations

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dropped": dict(self.dropped.most_common())}


def source_file(path: str) -> Path:
    """The file of `corpus.path`; ValueError where there is none."""
    file = find_package_file(path) if path.startswith("package:") else Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"corpus.path={path}: no such file")
    return file


def read_conversations(path: Path, format: str, name: str, report: SourceReport) -> Iterator[Conversation]:
    """The usable conversations of a file, in file order; the rest is counted in `report`."""
    scan = ScanReport()
    with open(path, "rb") as raw, progress_bar(f"reading {name}", path.stat().st_size, "bytes") as bar:
        opener = OPENERS.get(path.suffix)
        for record in SCANNERS[format](opener(raw) if opener else raw, scan):
            try:
                yield conversation_of(record, name)
            except Unusable as e:
                report.dropped[str(e)] += 1
            if (position := raw.tell()) != bar.units:
                bar.update(position - bar.units)
        bar.update(path.stat().st_size - bar.units)
    report.conversations, report.malformed = scan.objects, scan.malformed
    report.cut_bytes, report.stream_cut = scan.cut_bytes, scan.stream_cut


class Pool:
    """Conversations in the global order, on disk: memory holds a key and a place a conversation, not its text."""

    def __init__(self, folder: Path, seed: int, held_out_fraction: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the pool
        self._seed, self._fraction = seed, held_out_fraction
        self._places: dict[bool, list[tuple[bytes, int, int]]] = {
            False: [],
            True: [],
        }  # held out? -> (key, offset, bytes)
        self._texts: set[bytes] = set()
        self._ids: Counter[str] = Counter()

    def add(self, conversation: Conversation, report: SourceReport) -> None:
        """Put a conversation in; an exact duplicate of an earlier one is counted and left out."""
        text = bytes.fromhex(digest(conversation.messages))
        if text in self._texts:
            report.dropped["exact duplicate"] += 1
            return
        self._texts.add(text)
        self._ids[conversation.sample_id] += 1
        record = asdict(conversation)
        if (n := self._ids[conversation.sample_id]) > 1:
            record["sample_id"] += f"#{n}"
        data = json.dumps(record).encode()
        place = (order_key(self._seed, record["sample_id"]), self._spool.seek(0, 2), len(data))
        self._spool.write(data)
        self._places[is_held_out(conversation.group, self._fraction)].append(place)

    def walk(self, held_out: bool) -> Iterator[Conversation]:
        """One side's conversations, in the global order."""
        for _, offset, size in sorted(self._places[held_out]):
            self._spool.seek(offset)
            yield Conversation(**json.loads(self._spool.read(size)))

    def size(self, held_out: bool) -> int:
        return len(self._places[held_out])

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()

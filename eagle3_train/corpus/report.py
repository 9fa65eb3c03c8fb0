"""What became of the conversations: counts and lengths of one file of rows, and the table that a person sees."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from eagle3_train.console import console, say

from .rows import ANEW, Row, file_state, read_rows
from .template import Encoded

QUANTILES = (0, 10, 25, 50, 75, 90, 99, 100)


@dataclass
class Tally:
    """Counts of the rows of one file, and of what was passed over on the way to them."""

    lengths: list[int] = field(default_factory=list)
    supervised: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0  # sequences that lost tokens
    dropped_tokens: int = 0
    dropped_turns: int = 0
    context_turns: int = 0
    content: hashlib._Hash = field(default_factory=hashlib.sha256)  # of all rows, in order

    def row(self, row: Row) -> None:
        for part in (row.sample_id.encode() + b"\0", row.input_ids.tobytes(), row.loss_mask.tobytes()):
            self.content.update(part)
        self.lengths.append(len(row.input_ids))
        self.supervised += int(row.loss_mask.sum())

    def encoded(self, encoded: Encoded) -> None:
        self.truncated += encoded.dropped_tokens > 0
        self.dropped_tokens += encoded.dropped_tokens
        self.dropped_turns += encoded.dropped_turns
        self.context_turns += encoded.context_turns

    def to_json(self) -> dict[str, Any]:
        quantiles = np.percentile(self.lengths, QUANTILES) if self.lengths else np.zeros(len(QUANTILES))
        return {
            "content": self.content.hexdigest()[:16],
            "sequences": len(self.lengths),
            "tokens": sum(self.lengths),
            "supervised_tokens": self.supervised,
            "skipped": dict(self.skipped.most_common()),
            "truncated_sequences": self.truncated,
            "dropped_tokens": self.dropped_tokens,
            "dropped_turns": self.dropped_turns,
            "context_turns": self.context_turns,
            "length_quantiles": {str(q): float(v) for q, v in zip(QUANTILES, quantiles, strict=True)},
        }


def expect_content(path: Path, content: str) -> tuple[int, int, int]:
    """The state of a file whose rows have this `content` (of its part of the report): all of them are read for it.

    Raises:
        ValueError: rows other than those that were prepared.
    """
    state, tally = file_state(path), Tally()
    for row in read_rows(path):
        tally.row(row)
    if (found := tally.to_json()["content"]) != content:
        raise ValueError(
            f"{path} does not hold the rows that were prepared ({len(tally.lengths):,} rows of content {found}, and "
            f"its report.json says {content}): {ANEW}"
        )
    return state


def show(report: dict[str, Any]) -> None:
    """Print a corpus report (docs/corpus.md) as a few lines and a table."""
    for name, source in report["sources"].items():
        unread = [f"{source['cut_bytes']:,} bytes cut at the end"] if source["cut_bytes"] else []
        unread += ["the compressed stream ends too early"] if source["stream_cut"] else []
        unread += [f"{source['malformed']:,} malformed"] if source["malformed"] else []
        say(f"{name}: {source['conversations']:,} whole conversations" + (f" ({', '.join(unread)})" if unread else ""))
        if source["kept"] < 1:
            say(f"  kept: {source['kept']:.1%} of them, for its weight in the mixture")
        for reason, n in source["dropped"].items():
            say(f"  left out: {n:,} {reason}")
    table = Table("rows", "sequences", "tokens", "supervised", "median", "longest", "tokens cut off")
    for name, part in report["parts"].items():
        quantiles = part["length_quantiles"]
        numbers = (part["sequences"], part["tokens"], part["supervised_tokens"], quantiles["50"], quantiles["100"])
        table.add_row(name, *(f"{n:,.0f}" for n in (*numbers, part["dropped_tokens"])))
    console.print(table)
    for name, part in report["parts"].items():
        for reason, n in part["skipped"].items():
            say(f"{name}: passed over {n:,}: {reason}")

"""One record a prompt, however it was measured: counts that add up, so that means are ratios of sums. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle3_train.files import write_text


@dataclass(frozen=True)
class Record:
    """What happened on one prompt (docs/evaluate.md says exactly what is counted)."""

    task: str
    method: str  # replay | decode
    temperature: float
    prompt: str  # sample id
    tokens: int  # generated after the first one
    forwards: (
        float  # target forwards after the prompt's: cycles; an expected number where a sampled transcript is replayed
    )
    drafted: list[float]  # [K] cycles that compared a draft at position i
    accepted: list[float]  # [K] of these, cycles that accepted it
    shape: str = "chain"  # of the draft
    # Decoding alone:
    seconds: float | None = None  # wall time of the whole generation with the draft head, the prompt's forward included
    plain_seconds: float | None = None  # the same without it, where greedy
    lossless: bool | None = None  # whether both gave the same tokens, where greedy
    first_difference: int | None = None  # where they did not: index of the first differing token
    logit_gap: float | None = None  # and how far apart the target's logits of the two tokens are there

    @classmethod
    def of_cycles(cls, accepted: Sequence[int], steps: int, **fields: Any) -> Record:
        """From the accepted drafts of each cycle: a cycle emits one token more than it accepts.

        Position i of a cycle was compared if all earlier ones were accepted and a further token was to come after it:
        the transcript's last token is never a draft, since its cycle emits it whatever the draft says. So a cycle with
        r tokens left compares at most min(K, r - 1) drafts.
        """
        drafted_at: list[float] = [0] * steps
        accepted_at: list[float] = [0] * steps
        tokens = sum(accepted) + len(accepted)
        left = tokens
        for a in accepted:
            limit = min(steps, left - 1)
            assert a <= limit, f"{a} drafts accepted where at most {limit} were compared"
            for i in range(min(a + 1, limit)):
                drafted_at[i] += 1
                accepted_at[i] += i < a
            left -= a + 1
        return cls(tokens=tokens, forwards=len(accepted), drafted=drafted_at, accepted=accepted_at, **fields)

    def to_json(self) -> dict[str, Any]:
        """Fields that were measured."""
        return {k: v for k, v in asdict(self).items() if v is not None}


def by_prompt(records: Iterable[Record]) -> list[Record]:
    """One record a prompt, of all that were measured on it: a bootstrap over prompts must not take repetitions for
    more prompts. They are of one task, method, temperature and shape."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.prompt, []).append(record)
    return [
        replace(
            group[0],
            tokens=sum(r.tokens for r in group),
            forwards=sum(r.forwards for r in group),
            drafted=[sum(at) for at in zip(*(r.drafted for r in group), strict=True)],
            accepted=[sum(at) for at in zip(*(r.accepted for r in group), strict=True)],
        )
        for group in groups.values()
    ]


def write_records(path: Path, records: Iterable[Record]) -> None:
    """`records.jsonl`, whole or not at all."""
    write_text(path, "".join(json.dumps(r.to_json(), ensure_ascii=False, allow_nan=False) + "\n" for r in records))


def read_records(path: Path) -> list[Record]:
    """Inverse of `write_records`."""
    return [Record(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]

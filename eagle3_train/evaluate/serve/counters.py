"""Speculative decoding's counters of a server, from its Prometheus endpoint."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from eagle3_train.evaluate.serve.client import get

PATIENCE_S = 5.0  # the counters may trail the last answer
_LINE = re.compile(r"^([a-z_]+):([a-z_]+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """Since the server started; a difference of two is of what lies between them."""

    generated: float  # tokens
    drafts: float  # target forwards that verified a draft
    accepted: float  # tokens
    by_position: tuple[float, ...]  # accepted, by place in the draft

    def __sub__(self, other: Counters) -> Counters:
        before = other.by_position or (0.0,) * len(self.by_position)
        return Counters(
            self.generated - other.generated,
            self.drafts - other.drafts,
            self.accepted - other.accepted,
            tuple(a - b for a, b in zip(self.by_position, before, strict=True)),
        )

    @property
    def tau(self) -> float | None:
        """Tokens a target forward, bonus token included; drafts that reach beyond a generation's end count too."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def alpha(self) -> list[float | None]:
        """Acceptance at each position given that all earlier ones were accepted."""
        reached = (self.drafts, *self.by_position)
        return [a / r if r else None for r, a in zip(reached, self.by_position, strict=False)]


def read_counters(url: str) -> Counters | None:
    """Now, summed over a server's engines; None where there is no such endpoint."""
    body = get(url, "/metrics")
    return None if body is None else parse(body.decode())


def parse(text: str) -> Counters:
    """Of Prometheus' text format. A server without speculative decoding has zeros."""
    total: dict[str, float] = {}
    positions: dict[int, float] = {}
    for _, name, labels, value in _LINE.findall(text):
        if name == "spec_decode_num_accepted_tokens_per_pos":
            if position := _POSITION.search(labels):
                positions[int(position[1])] = positions.get(int(position[1]), 0.0) + float(value)
        else:
            total[name] = total.get(name, 0.0) + float(value)
    return Counters(
        generated=total.get("generation_tokens", 0.0),
        drafts=total.get("spec_decode_num_drafts", 0.0),
        accepted=total.get("spec_decode_num_accepted_tokens", 0.0),
        by_position=tuple(positions[i] for i in sorted(positions)),
    )


def counters_after(url: str, before: Counters, tokens: int) -> Counters:
    """What was counted since `before`, once all of `tokens` generated ones are in.

    Raises:
        ValueError: the server counts other requests than ours.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = read_counters(url)
        counted = (now - before) if now is not None else None
        if counted is not None and counted.generated == tokens:
            return counted
        if time.monotonic() > deadline:
            found = "nothing" if counted is None else f"{counted.generated:,.0f} tokens"
            raise ValueError(
                f"{url} counted {found} where {tokens:,} were generated for us: it serves others too, so that its "
                "counters and its speed are not ours. Measure on a server that is used by nobody else"
            )
        time.sleep(0.05)

"""Decoding many prompts over one target: as many at once as the runner has slots, the next one as soon as one ends.

How one prompt is decoded is a generator function (`decode.loop`): it yields what it wants of the target, and is sent
what the target gave. Here the wishes of the prompts in flight become one forward (continuous batching, Yu et al. 2022).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3_train.decode.runner import Output, Query, TargetRunner


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt to continue.

    prompt_ids: int64 [T], T >= 1. max_new_tokens: at most this many tokens, the first one included. generator: its own
    random numbers, for sampling, so that they do not depend on the prompts around it; None: torch's global ones.
    """

    prompt_ids: Tensor
    max_new_tokens: int
    generator: torch.Generator | None = None


@dataclass
class Generation:
    """One generated continuation.

    `tokens`: all of it, the first one from the prompt's forward. `accepted`: for each following target forward (cycle),
    the drafts that it accepted: it emitted that many tokens and one more. Where the generation ends inside a cycle (a
    stop token), only the tokens up to the end count, so sum(accepted) + len(accepted) = len(tokens) - 1 always.
    `seconds`: its share of the wall time; prompts that share a forward have equal shares of it and of its drafting.
    """

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    seconds: float = field(default=0.0, compare=False)


Steps = Generator[Query, Output, Generation]


class _Running:
    """A prompt in a slot."""

    def __init__(self, number: int, steps: Steps) -> None:
        self.number, self.steps = number, steps
        self.query = next(steps)
        self.seconds = 0.0
        self.generation: Generation | None = None  # once it has ended

    def take(self, output: Output) -> None:
        """Go on with what the target gave, to the next query or to the end."""
        try:
            self.query = self.steps.send(output)
        except StopIteration as end:
            self.generation = end.value


@torch.inference_mode()
def run(
    runner: TargetRunner, requests: Sequence[Request], start: Callable[[Request], Steps], *, features: bool
) -> list[Generation]:
    """Decode all requests, each by the steps that `start` makes of it. `features`: whether they read the target's.

    Raises:
        ValueError: a request does not fit the target; before any work.
    """
    for request in requests:
        _check(runner, request)
    runner.reset()
    waiting = deque(enumerate(requests))
    running: list[_Running] = []  # by slot
    ended: dict[int, Generation] = {}
    while waiting or running:
        started = time.perf_counter()
        first = 0
        if prefill := bool(waiting) and len(running) < runner.slots:
            # A prompt runs alone: padded to its length, the others would cost as much.
            first = len(running)
            number, request = waiting.popleft()
            running.append(_Running(number, start(request)))
        ran = running[first:]
        outputs = runner.forward([r.query for r in ran], first=first, features=features, last_only=prefill)
        for slot in reversed(range(first, len(running))):  # a slot that is freed takes the last one, which was served
            current = running[slot]
            n = len(current.query.tokens)
            current.take(outputs[slot - first])
            if current.generation is None:
                if current.query.kept is not None:
                    runner.keep(slot, n, current.query.kept)
                continue
            runner.remove(slot)
            last = running.pop()
            if last is not current:
                running[slot] = last
        share = (time.perf_counter() - started) / len(ran)
        for r in ran:
            r.seconds += share
            if r.generation is not None:
                r.generation.seconds = r.seconds
                ended[r.number] = r.generation
    return [ended[number] for number in range(len(requests))]


def _check(runner: TargetRunner, request: Request) -> None:
    length, new = len(request.prompt_ids), request.max_new_tokens
    if length < 1 or new < 1:
        raise ValueError(f"a prompt of {length} tokens and max_new_tokens={new}: both must be at least 1")
    if runner.max_length is not None and length + new > runner.max_length:
        raise ValueError(
            f"a prompt of {length} tokens and max_new_tokens={new} exceed the target's {runner.max_length} "
            "positions: shorten the task's max_prompt_tokens or new_tokens"
        )

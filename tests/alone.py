"""Decoding of one prompt alone. `runner`: the real one or a table (tests.tables)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer, decode_plain, decode_speculative
from eagle3_train.decode.sampling import GREEDY, Sampling
from eagle3_train.decode.schedule import Generation, Request


def plain(
    runner: Any,
    prompt: Tensor,
    new: int,
    stop_ids: Sequence[int],
    sampling: Sampling = GREEDY,
    generator: torch.Generator | None = None,
) -> Generation:
    return decode_plain(runner, [Request(prompt, new, generator)], stop_ids, sampling=sampling)[0]


def speculative(
    runner: Any,
    head: Any,
    proposer: Proposer,
    prompt: Tensor,
    new: int,
    stop_ids: Sequence[int],
    generator: torch.Generator | None = None,
) -> Generation:
    return decode_speculative(runner, head, proposer, [Request(prompt, new, generator)], stop_ids)[0]


def chain(runner: Any, head: Any, prompt: Tensor, new: int, stop_ids: Sequence[int], steps: int) -> Generation:
    """Greedy, of at most `steps` drafts."""
    return speculative(runner, head, Chain(steps), prompt, new, stop_ids)

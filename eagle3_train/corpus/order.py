"""The global order and the split into train and held-out: pure functions of ids, the same on every machine.

A prefix of the order is a random sample, so 1x lies inside 2x inside 4x; more sequences never move the earlier ones.
"""

from __future__ import annotations

import hashlib


def order_key(seed: int, sample_id: str) -> bytes:
    """Sort key of a sample: rows ascend by it."""
    return hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()


def fraction_of(purpose: str, name: str) -> float:
    """A number in [0, 1) that is random, but fixed, for a name; independent between purposes."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{name}".encode()).digest()[:6], "big") / 2**48


def is_held_out(group: str, fraction: float) -> bool:
    """Whether a conversation belongs to the held-out side. No seed: another shuffle never trains on held-out text."""
    return fraction_of("held-out", group) < fraction

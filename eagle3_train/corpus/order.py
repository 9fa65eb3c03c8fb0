"""The global order and the split into train and held-out: pure functions of ids, the same on every machine.

A prefix of the order is a random sample, so 1x lies inside 2x inside 4x; more sequences never move the earlier ones.
"""

from __future__ import annotations

import hashlib


def order_key(seed: int, sample_id: str) -> bytes:
    """Sort key of a sample: rows ascend by it."""
    return hashlib.sha256(f"{seed}:{sample_id}".encode()).digest()


def is_held_out(group: str, fraction: float) -> bool:
    """Whether a conversation belongs to the held-out side. No seed: another shuffle never trains on held-out text."""
    value = int.from_bytes(hashlib.sha256(f"held-out:{group}".encode()).digest()[:8], "big")
    return value < fraction * 2**64

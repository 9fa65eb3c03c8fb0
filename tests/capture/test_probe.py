"""The first estimate of a capture's rate."""

from __future__ import annotations

import time

import pytest

from eagle3_train.capture.backend import PROBE_PASSES, PROBE_S, probe


class Machine:
    """One whose clock is its own: so many tokens a second, in the first pass a tenth of it."""

    def __init__(self, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rate, self.now = rate, 0.0
        self.passes: list[tuple[int, int]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def run(self, sequences: int, length: int) -> None:
        self.passes.append((sequences, length))
        self.now += sequences * length / self.rate * (10 if len(self.passes) == 1 else 1)


@pytest.mark.parametrize("rate", [30.0, 600.0, 1e6])
def test_the_first_pass_and_a_slow_machine_do_not_decide(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(rate, monkeypatch)
    assert probe(machine.run, 512, 4096) == pytest.approx(rate)
    assert machine.passes[0] == (1, 512)
    assert len(machine.passes) <= PROBE_PASSES
    assert max(machine.passes) <= (8, 512)  # a batch of the capture
    first_two = 512 / rate * (10 + 2)
    assert machine.now <= max(first_two, PROBE_S)


def test_what_else_the_machine_does_makes_no_pass_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2000.0, monkeypatch)

    def busy(sequences: int, length: int) -> None:
        machine.run(sequences, length)
        machine.now += 3.0 if len(machine.passes) == 3 else 0.0

    assert probe(busy, 512, 4096) == pytest.approx(2000.0)


def test_sequences_are_as_long_as_the_corpus_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1e6, monkeypatch)
    probe(machine.run, 48, 100)
    assert set(machine.passes) == {(1, 48), (2, 48)}

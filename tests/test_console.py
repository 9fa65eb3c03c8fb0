"""Progress and numbers as a person reads them."""

from __future__ import annotations

import pytest

from eagle3_train import console
from eagle3_train.console import count, progress_bar


def test_what_comes_before_the_first_units_does_not_count_in_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt is read for 14 s, then a step of 8 tokens takes half a second: 648 tokens are left, 40 s."""
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with progress_bar("capturing", 656, "tokens", show=True) as bar:
        now += 14
        bar.update(8)
        assert "8/656  ?  ? left" in capsys.readouterr().out
        for _ in range(20):
            now += 0.5
            bar.update(8)
        assert "168/656  16.0 tokens/s  30s left" in capsys.readouterr().out
        bar.update(488)
    assert "656 tokens in 24s" in capsys.readouterr().out


def test_what_was_done_before_does_not_count_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with progress_bar("x1", 100, "steps", done=90, show=False) as bar:
        for _ in range(3):
            now += 2
            bar.update(1)
        assert bar.rate == 0.5


def test_one_is_singular() -> None:
    assert [count(1, "turn"), count(1024, "turn")] == ["1 turn", "1,024 turns"]

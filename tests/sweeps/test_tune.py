"""The choice of the learning rate: at the smallest scale, by the validation loss, and checked at the next."""

from __future__ import annotations

import json

import pytest

from sweeps import status
from tests.sweeps.conftest import Bench

GRID = ("study", "tune", "data.scale=1,2,4", "seed=3,4", "optim.lr=1e-4,1e-3,1e-2,1e-1")


def test_the_learning_rate_is_tuned_where_training_is_cheap(bench: Bench) -> None:
    out = bench.run(*GRID, FAKE_LR=json.dumps({"1": 1e-3, "2": 1e-3}))
    assert "  1x  0.0001: 2.0000  0.001: 1.0000  0.01: 2.0000  0.1: 3.0000" in out.splitlines()
    assert "  2x  0.0001: 2.0000  0.001: 1.0000  0.01: 2.0000" in out.splitlines()  # itself and its neighbours
    assert "  optim.lr=0.001; transfer check: it is the best at 2x too" in out.splitlines()
    trained = bench.calls("trained")
    assert sum("-x1-s3-" in name for name in trained) == 4
    assert sum("-x2-s3-" in name for name in trained) == 3
    assert len(trained) == 7  # one seed, two scales
    assert not list(bench.study.glob("*/result.json"))  # no evaluation task was touched
    # They are no points of a study's plan yet, so nothing is left to do for them (`status --watch` would wait for it).
    found = {job.name: (job.state, job.reason) for job in status.collect(bench.study)}
    assert found[trained[0].split()[1]] == ("done", "trained, not evaluated; it is no point of the study's plan")
    bench.run(*GRID, FAKE_LR=json.dumps({"1": 1e-3, "2": 1e-3}))
    assert len(bench.calls("train")) == 7
    # They are points of the study itself.
    bench.run("study", "data.scale=1", "seed=3", "optim.lr=1e-3")
    assert len(bench.calls("trained")) == 8
    assert bench.calls("trained")[-1] in trained
    assert all("`eagle3 study`" not in (job.reason or "") for job in status.collect(bench.study))


@pytest.mark.parametrize(
    ("best", "words"),
    [
        ({"1": 1e-3, "2": 1e-4}, "does NOT hold at 2x, where 0.0001 is better by 1.0000"),
        ({"1": 1e-4, "2": 1e-4}, "0.0001 is at the edge of the values tried: try beyond it"),
    ],
)
def test_what_speaks_against_the_choice_is_said(bench: Bench, best: dict[str, float], words: str) -> None:
    out = bench.run("study", "tune", "data.scale=1,2", "seed=0", "optim.lr=1e-4,1e-3", FAKE_LR=json.dumps(best))
    assert words in out


def test_without_values_there_is_nothing_to_choose(bench: Bench) -> None:
    assert "give them, such as optim.lr=5e-4,1e-3,2e-3" in bench.run("study", "tune", code=2)

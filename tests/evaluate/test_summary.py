"""Intervals and summaries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from eagle3_train.evaluate.records import Record, read_records, write_records
from eagle3_train.evaluate.summary import Bootstrap, pooled_alpha, result_keys, summary_rows
from eagle3_train.evaluate.table import evaluation_tables


def record(task: str, prompt: int, accepted: list[int], **more: object) -> Record:
    fields = {"task": task, "method": "replay", "temperature": 0.0, "prompt": f"p{prompt}"} | more
    return Record.of_cycles(accepted, 3, **fields)


def some_records(task: str, count: int, seed: int) -> list[Record]:
    rng = np.random.default_rng(seed)
    return [record(task, i, [*rng.integers(0, 4, rng.integers(1, 9)).tolist(), 0]) for i in range(count)]


def test_ratio_and_interval_equal_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    above, below = rng.integers(1, 30, 12), rng.integers(1, 30, 12)
    bootstrap = Bootstrap([12], 300, 7)
    value, lo, hi = bootstrap.ratio(above, below)
    assert value == above.sum() / below.sum()
    ratios = []
    for weights in bootstrap.weights:
        drawn = np.repeat(np.arange(12), weights)
        assert len(drawn) == 12
        ratios.append(above[drawn].sum() / below[drawn].sum())
    assert (lo, hi) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])))
    assert lo < value < hi


def test_intervals_cover_the_truth() -> None:
    """Prompts have effects of their own: an interval over prompts covers, one over tokens would be too narrow."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        rate = rng.beta(2, 2, 60)
        length = rng.integers(20, 60, 60)
        _, lo, hi = Bootstrap([60], 400, 3).ratio(rng.binomial(length, rate), length)
        covered += lo <= 0.5 <= hi
    assert 175 <= covered <= 199


def test_strata_keep_their_sizes() -> None:
    weights = Bootstrap([5, 9], 50, 0).weights
    assert (weights[:, :5].sum(1) == 5).all()
    assert (weights[:, 5:].sum(1) == 9).all()


def test_what_was_never_counted_is_none_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (row,) = summary_rows([record("t", 0, [0, 0]), record("t", 1, [])], 50, 0)
        empty = summary_rows([record("t", 0, [])], 50, 0)[0]
    assert row["alpha"] == [0.0, None, None]
    assert row["alpha_lo"][1:] == row["alpha_hi"][1:] == [None, None]
    assert row["tau"] == 1.0
    assert (empty["tau"], empty["tau_lo"], empty["tokens"]) == (None, None, 0)
    json.dumps(row, allow_nan=False)


def test_the_table_of_a_job_fits_a_log_with_the_name_in_front_whatever_the_steps() -> None:
    (row,) = summary_rows([record("humaneval", 0, [1], seconds=1.0, plain_seconds=2.0, lossless=True)], 50, 0)
    row |= {"tokens": 12345, "alpha": [0.5] * 7}
    show = "from eagle3_train.console import console; print(console.width)"
    widths = [
        int(subprocess.run([sys.executable, "-c", show], env=os.environ | env, check=True, capture_output=True).stdout)
        for env in ({"EAGLE3_SUPERVISED": "1"}, {})
    ]
    assert widths[0] + len("eagle3-x1-s0-9394fd0a | ") <= widths[1] == 140
    console = Console(width=200)
    with console.capture() as capture:
        console.print(*evaluation_tables([row], widths[0]))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= widths[0]
    assert capture.get().count("0.50") >= 7


def test_result_keys() -> None:
    records = some_records("a", 6, 0) + some_records("b", 9, 1)
    keys = result_keys(records, 100, 0)
    drafted = np.sum([r.drafted for r in records], 0)
    assert keys["alpha"] == pytest.approx(list(np.sum([r.accepted for r in records], 0) / drafted))
    assert set(keys["tau_replay"]) == set(keys["alpha_by_task"]) == {"a", "b"}
    a = keys["tau_replay"]["a"]
    assert a["tau"] == sum(r.tokens for r in records[:6]) / sum(r.forwards for r in records[:6])
    assert (a["prompts"], a["tokens"]) == (6, sum(r.tokens for r in records[:6]))
    assert a["lo"] <= a["tau"] <= a["hi"]
    assert result_keys(records, 100, 0) == keys
    assert pooled_alpha(records, 100, 1)["alpha_lo"] != keys["alpha_lo"]


def test_speedup_is_a_ratio_of_summed_seconds() -> None:
    times = [(1.0, 2.0), (3.0, 3.0)]
    records = [
        record("t", i, [2, 1, 0], method="decode", seconds=s, plain_seconds=p, lossless=True)
        for i, (s, p) in enumerate(times)
    ]
    speedup = result_keys(records, 50, 0)["speedup"]["t"]
    assert speedup["speedup"] == 5 / 4
    assert speedup["plain_tokens_per_s"] == 14 / 5
    assert speedup["draft_tokens_per_s"] == 14 / 4
    assert speedup["lossless"] == 2
    assert "alpha" not in result_keys(records, 50, 0)


def test_records_round_trip(tmp_path: Path) -> None:
    records = [*some_records("a", 3, 0), record("a", 9, [1], seconds=1.5, plain_seconds=2.0, lossless=True)]
    write_records(tmp_path / "records.jsonl", records)
    assert read_records(tmp_path / "records.jsonl") == records
    first = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])
    assert set(first) == {
        "task",
        "method",
        "temperature",
        "prompt",
        "tokens",
        "forwards",
        "drafted",
        "accepted",
        "shape",
    }

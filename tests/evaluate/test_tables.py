"""The printed tables at the widths of terminals and logs: no number is cropped, nothing goes beyond the width."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from eagle3_train.evaluate.serve.table import serve_tables
from eagle3_train.evaluate.table import evaluation_tables

WIDTHS = (80, 100, 120, 140)


def printed(tables: list[Table], width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, soft_wrap=True).print(*tables)
    return out.getvalue()


def alpha(steps: int, first: int) -> list[float | None]:
    """Numbers that occur nowhere else; the last position is never reached."""
    return [*(0.01 * (first + i) for i in range(steps - 1)), None]


def evaluation_rows(steps: int, tasks: tuple[str, ...], temperatures: tuple[float, ...]) -> list[dict[str, Any]]:
    rows = []
    for task in tasks:
        for t in temperatures:
            for method in ("replay", "decode"):
                for shape in ("chain", f"tree {steps}x10/60"):
                    n = len(rows)
                    tau = 1 + n / 100
                    row = {"task": task, "temperature": t, "method": method, "shape": shape, "tau": tau}
                    row |= {"tau_lo": tau + 2, "tau_hi": tau + 4, "alpha": alpha(steps, 2 * n + 10)}
                    if method == "decode":
                        row |= {"speedup": tau + 10, "speedup_lo": tau + 12, "speedup_hi": tau + 14}
                    rows.append(row | {"prompts": 32, "tokens": 12_000 + n})
    return rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("tasks", [("humaneval",), ("humaneval", "sharegpt-held-out", "gsm8k")])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0)])
def test_no_number_of_an_evaluation_is_cropped(
    width: int, steps: int, tasks: tuple[str, ...], temperatures: tuple[float, ...]
) -> None:
    rows = evaluation_rows(steps, tasks, temperatures)
    text = printed(evaluation_tables(rows, width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "T" in text
    for row in rows:
        for name in ("tau", "speedup") if "speedup" in row else ("tau",):
            assert f"{row[name]:.2f}" in text
            assert f"({row[name + '_lo']:.2f}-{row[name + '_hi']:.2f})" in text
        for a in row["alpha"][:-1]:
            assert f"{a:.2f}" in text
        assert f"{row['tokens']:,}" in text
        assert row["task"] in text
        assert row["shape"] in text


def served_rows(steps: int, tasks: tuple[str, ...], temperatures: tuple[float, ...]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for task in tasks:
        for t in temperatures:
            rows.append({"task": task, "temperature": t, "method": "replay", "tau": 1.01, "tau_lo": 1.0, "tau_hi": 1.1})
            rows[-1]["alpha"] = alpha(steps, 50)
            for method in ("plain", "serve"):
                for c in (1, 4, 16, 64):
                    n = len(rows)
                    times = {k: 100.25 + n + i * 200 for i, k in enumerate(TIMES)}
                    row = {"task": task, "temperature": t, "method": method, "concurrency": c} | times
                    if method == "serve":
                        tau = 2 + n / 100
                        row |= {"tau": tau, "tau_lo": tau + 2, "tau_hi": tau + 4, "alpha": alpha(steps, n + 10)}
                        row |= {"speedup": 1.125, "lossless": 15, "compared": 64}
                    rows.append(row)
    return rows


TIMES = ("tokens_per_s", "latency_p50", "latency_p99", "first_p50", "first_p99")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("steps", [3, 7])
@pytest.mark.parametrize("tasks", [("humaneval",), ("humaneval", "sharegpt-held-out")])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0)])
def test_no_number_of_a_server_is_cropped(
    width: int, steps: int, tasks: tuple[str, ...], temperatures: tuple[float, ...]
) -> None:
    rows = served_rows(steps, tasks, temperatures)
    text = printed(serve_tables(rows, width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for row in rows:
        for key in TIMES if "tokens_per_s" in row else ():
            assert f"{row[key]:,.2f}" in text
        if "tau" in row:
            assert f"{row['tau']:.2f}" in text
            assert f"({row['tau_lo']:.2f}-{row['tau_hi']:.2f})" in text
        for a in row.get("alpha", [None])[:-1]:
            assert f"{a:.2f}" in text
        assert row["task"] in text
        assert row["method"] in text
    assert "15/64" in text


def test_what_is_equal_in_all_rows_is_said_once() -> None:
    """Above the table, so that the other columns have its room; what tells rows apart stays."""
    rows = [row for row in evaluation_rows(3, ("humaneval",), (0.0,)) if row["shape"] == "chain"]
    tables = evaluation_tables(rows, 140)
    assert len(tables) == 1
    assert str(tables[0].title).endswith("\ntask humaneval, T 0, draft chain, prompts 32")
    assert [c.header for c in tables[0].columns] == ["method", "tau", "alpha\n0-2", "speed-up", "tokens"]


def test_a_divided_table_says_in_each_part_which_row_is_which() -> None:
    rows = served_rows(7, ("humaneval", "sharegpt"), (0.0, 1.0))
    tables = serve_tables(rows, 80)
    assert len(tables) > 1
    for table in tables:
        assert [c.header for c in table.columns][:4] == ["task", "T", "method", "at\nonce"]
        assert table.row_count == len(rows)


def test_a_long_name_is_folded_and_not_cut() -> None:
    name = "conversations-of-several-turns-in-german"
    text = printed(evaluation_tables(evaluation_rows(7, (name, "gsm"), (0.0, 1.0)), 80), 80)
    assert name[:24] in text
    assert name[24:] in text
    assert "…" not in text

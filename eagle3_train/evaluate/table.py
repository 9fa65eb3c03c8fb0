"""The table that a person reads: task x temperature x method."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def evaluation_table(rows: list[dict[str, Any]]) -> Table:
    """Of `summary.summary_rows`."""
    table = Table(
        title="Acceptance (intervals: 95 %, bootstrap over prompts)", title_justify="left", box=None, pad_edge=False
    )
    # One column for all steps: a study's log has the point's name in front, and a K of 7 would not fit a screen.
    for name in ("task", "T", "method", "draft", "tau", "alpha by step", "speed-up", "prompts", "tokens"):
        words = ("task", "method", "draft", "alpha by step")
        table.add_column(name, justify="left" if name in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['temperature']:g}",
            row["method"],
            row["shape"],
            _interval(row, "tau"),
            " ".join(f"{_number(a):>4}" for a in row["alpha"]),
            _interval(row, "speedup") if "speedup" in row else "",
            str(row["prompts"]),
            f"{row['tokens']:,}",
        )
    return table


def _interval(row: dict[str, Any], name: str) -> str:
    return f"{_number(row[name])} ({_number(row[name + '_lo'])}-{_number(row[name + '_hi'])})"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"

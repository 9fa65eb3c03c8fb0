"""The table that a person reads: task x temperature x method."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def evaluation_table(rows: list[dict[str, Any]]) -> Table:
    """Of `summary.summary_rows`."""
    steps = max((len(row["alpha"]) for row in rows), default=0)
    table = Table(title="Acceptance (intervals: 95 %, bootstrap over prompts)")
    columns = (
        "task",
        "T",
        "method",
        "draft",
        "tau",
        *(f"alpha {i}" for i in range(steps)),
        "speed-up",
        "prompts",
        "tokens",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("task", "method", "draft") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['temperature']:g}",
            row["method"],
            row["shape"],
            _interval(row, "tau"),
            *(_number(a) for a in row["alpha"]),
            *[""] * (steps - len(row["alpha"])),
            _interval(row, "speedup") if "speedup" in row else "",
            str(row["prompts"]),
            f"{row['tokens']:,}",
        )
    return table


def _interval(row: dict[str, Any], name: str) -> str:
    return f"{_number(row[name])} ({_number(row[name + '_lo'])}-{_number(row[name + '_hi'])})"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"

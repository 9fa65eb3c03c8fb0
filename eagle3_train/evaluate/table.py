"""The table that a person reads: task x temperature x method."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from eagle3_train.evaluate.layout import Column, alpha_head, alphas, interval, laid_out


def evaluation_tables(rows: list[dict[str, Any]], width: int) -> list[Table]:
    """Of `summary.summary_rows`, to be printed below each other in `width` characters."""
    steps = max((len(row["alpha"]) for row in rows), default=0)
    columns = [
        Column("task", [(row["task"],) for row in rows], describes=True, is_name=True),
        Column("T", [(f"{row['temperature']:g}",) for row in rows], describes=True),
        Column("method", [(row["method"],) for row in rows], describes=True, is_name=True),
        Column("draft", [(row["shape"],) for row in rows], describes=True, is_name=True),
        Column("tau", [_interval(row, "tau") for row in rows]),
        Column(alpha_head(steps), [alphas(row["alpha"]) for row in rows]),
        Column("speed-up", [_interval(row, "speedup") for row in rows]),
        Column("prompts", [(str(row["prompts"]),) for row in rows], describes=True),
        Column("tokens", [(f"{row['tokens']:,}",) for row in rows]),
    ]
    return laid_out("Acceptance (intervals: 95 %, bootstrap over prompts)", columns, width)


def _interval(row: dict[str, Any], name: str) -> tuple[str, ...]:
    return interval(row[name], row[name + "_lo"], row[name + "_hi"]) if name in row else ()

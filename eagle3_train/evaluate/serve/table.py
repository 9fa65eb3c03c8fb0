"""What a load came to, as numbers and as the table that a person reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from eagle3_train.evaluate.layout import Column, alpha_head, alphas, interval, laid_out, number
from eagle3_train.evaluate.serve.client import Load


def load_row(load: Load) -> dict[str, Any]:
    """Throughput over the whole run; latency and time to the first token over its requests, in seconds."""
    tokens = sum(a.n_tokens for a in load.answers)
    latency = np.quantile([a.seconds for a in load.answers], [0.5, 0.99])
    first = np.quantile([a.first for a in load.answers], [0.5, 0.99])
    return {
        "requests": len(load.answers),
        "generated": tokens,
        "wall_seconds": load.seconds,
        "tokens_per_s": tokens / load.seconds,
        "latency_p50": float(latency[0]),
        "latency_p99": float(latency[1]),
        "first_p50": float(first[0]),
        "first_p99": float(first[1]),
    }


def serve_tables(rows: list[dict[str, Any]], width: int) -> list[Table]:
    """Rows of `serve_bench`, to be printed below each other in `width` characters."""
    alpha = [row.get("alpha") or row.get("counters", {}).get("alpha") or [] for row in rows]
    columns = [
        Column("task", [(row["task"],) for row in rows], describes=True, is_name=True),
        Column("T", [(f"{row['temperature']:g}",) for row in rows], describes=True),
        Column("method", [(row["method"],) for row in rows], describes=True, is_name=True),
        Column("at once", [(str(row.get("concurrency", "")),) for row in rows], describes=True),
        Column("tau", [_tau(row) for row in rows]),
        Column(alpha_head(max(map(len, alpha), default=0)), [alphas(values) for values in alpha]),
        *(Column(head, [_measured(row, key) for row in rows]) for head, key in MEASURED),
        Column("same output", [_same(row) for row in rows]),
    ]
    return laid_out("In a server (intervals: 95 %, bootstrap over prompts)", columns, width)


MEASURED = (
    ("tokens/s", "tokens_per_s"),
    ("speed-up", "speedup"),
    ("p50 s", "latency_p50"),
    ("p99 s", "latency_p99"),
    ("first p50 s", "first_p50"),
    ("first p99 s", "first_p99"),
)


def _tau(row: dict[str, Any]) -> tuple[str, ...]:
    """With its interval where requests were told apart, else the server's own count."""
    if row.get("tau") is not None:
        return interval(row["tau"], row["tau_lo"], row["tau_hi"])
    counted = row.get("counters")
    return (number(counted["tau"]),) if counted else ()


def _measured(row: dict[str, Any], key: str) -> tuple[str, ...]:
    return (number(row[key]),) if isinstance(row.get(key), float) else ()


def _same(row: dict[str, Any]) -> tuple[str, ...]:
    return (f"{row['lossless']}/{row['compared']}",) if "compared" in row else ()

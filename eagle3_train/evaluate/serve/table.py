"""What a load came to, as numbers and as the table that a person reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

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


COLUMNS = (
    "task", "T", "method", "at once", "tau", "alpha", "tokens/s", "speed-up", "p50 s", "p99 s", "first p50 s",
    "first p99 s", "same output",
)  # fmt: skip


def serve_table(rows: list[dict[str, Any]]) -> Table:
    """Rows of `serve_bench`."""
    table = Table(title="In a server (intervals: 95 %, bootstrap over prompts)")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("task", "method") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["task"],
            f"{row['temperature']:g}",
            row["method"],
            str(row.get("concurrency", "")),
            _tau(row),
            _alpha(row),
            *(_number(row, key) for key in ("tokens_per_s", "speedup", "latency_p50", "latency_p99")),
            *(_number(row, key) for key in ("first_p50", "first_p99")),
            f"{row['lossless']}/{row['compared']}" if "compared" in row else "",
        )
    return table


def _tau(row: dict[str, Any]) -> str:
    """With its interval where requests were told apart, else the server's own count."""
    if row.get("tau") is not None:
        return f"{row['tau']:.2f} ({row['tau_lo']:.2f}-{row['tau_hi']:.2f})"
    counted = row.get("counters")
    return f"{counted['tau']:.2f}" if counted else ""


def _alpha(row: dict[str, Any]) -> str:
    alpha = row.get("alpha") or row.get("counters", {}).get("alpha") or []
    return " ".join("-" if a is None else f"{a:.2f}" for a in alpha)


def _number(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:,.2f}" if isinstance(row.get(key), float) else ""

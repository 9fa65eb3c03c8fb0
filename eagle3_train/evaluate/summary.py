"""From records to tau, alpha and speed-up with intervals. No torch.

All are ratios of sums over prompts. Tokens of one prompt depend on each other, prompts do not: the bootstrap draws
whole prompts (Efron & Tibshirani 1993, percentile interval), and the resamples of one seed are the same for every
quantity and method, so that equal records give equal intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eagle3_train.evaluate.records import Record

COVERAGE = 0.95  # of the intervals


class Bootstrap:
    """Resamples of P prompts, drawn within each stratum (task)."""

    def __init__(self, sizes: Sequence[int], resamples: int, seed: int) -> None:
        """sizes: prompts a stratum, in the order of the rows that `ratio` is given."""
        rng = np.random.default_rng(seed)
        # How often each resample holds each prompt, [resamples, P].
        self.weights = np.concatenate([rng.multinomial(n, np.full(n, 1 / n), size=resamples) for n in sizes], axis=1)

    def ratio(self, numerator: Any, denominator: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ratio of sums over prompts and its interval: (value, lo, hi), each [...] for inputs [P, ...].

        NaN where the denominator's sum is zero: nothing was counted. Resamples that counted nothing are left out.
        """
        above, below = np.asarray(numerator, float), np.asarray(denominator, float)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = above.sum(0) / below.sum(0)
            resampled = np.tensordot(self.weights, above, 1) / np.tensordot(self.weights, below, 1)
        resampled = np.where(np.isfinite(resampled), resampled, np.nan)
        # A column without a finite resample is one whose value is undefined too; numpy would warn of it.
        resampled = np.where(np.isnan(value), 0.0, resampled)
        lo, hi = np.nanquantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=0)
        return value, np.where(np.isnan(value), np.nan, lo), np.where(np.isnan(value), np.nan, hi)


def summary_rows(records: Iterable[Record], resamples: int, seed: int) -> list[dict[str, Any]]:
    """One row a (task, temperature, method, shape of the draft), in order of appearance.

    Keys: task, temperature, method, shape, prompts, tokens, forwards, tau, tau_lo, tau_hi, alpha, alpha_lo, alpha_hi
    (each [K]; None where no cycle got that far); and for greedy decoding speedup, speedup_lo, speedup_hi,
    plain_tokens_per_s, draft_tokens_per_s, lossless (prompts whose output is the target's own).
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        groups.setdefault((r.task, r.temperature, r.method, r.shape), []).append(r)
    return [
        dict(zip(("task", "temperature", "method", "shape"), key, strict=True)) | _row(group, resamples, seed)
        for key, group in groups.items()
    ]


def _row(group: list[Record], resamples: int, seed: int) -> dict[str, Any]:
    bootstrap = Bootstrap([len(group)], resamples, seed)
    tokens, forwards = [r.tokens for r in group], [r.forwards for r in group]
    row: dict[str, Any] = {"prompts": len(group), "tokens": sum(tokens), "forwards": sum(forwards)}
    row |= _named("tau", bootstrap.ratio(tokens, forwards))
    row |= _named("alpha", bootstrap.ratio([r.accepted for r in group], [r.drafted for r in group]))
    if group[0].plain_seconds is not None:
        seconds, plain = [r.seconds for r in group], [r.plain_seconds for r in group]
        row |= _named("speedup", bootstrap.ratio(plain, seconds))
        generated = [r.tokens + 1 for r in group]
        row["plain_tokens_per_s"] = _plain(bootstrap.ratio(generated, plain)[0])
        row["draft_tokens_per_s"] = _plain(bootstrap.ratio(generated, seconds)[0])
        row["lossless"] = sum(bool(r.lossless) for r in group)
    return row


def pooled_alpha(records: Iterable[Record], resamples: int, seed: int) -> dict[str, Any]:
    """alpha, alpha_lo, alpha_hi [K] over all records; prompts are resampled within their task."""
    tasks: dict[str, list[Record]] = {}
    for r in records:
        tasks.setdefault(r.task, []).append(r)
    ordered = [r for group in tasks.values() for r in group]
    bootstrap = Bootstrap([len(group) for group in tasks.values()], resamples, seed)
    return _named("alpha", bootstrap.ratio([r.accepted for r in ordered], [r.drafted for r in ordered]))


def _named(name: str, interval: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, Any]:
    return {name + end: _plain(x) for end, x in zip(("", "_lo", "_hi"), interval, strict=True)}


def _plain(x: np.ndarray) -> Any:
    """A float, or a list of floats; None for what is undefined (JSON knows no NaN)."""
    if np.ndim(x):
        return [_plain(y) for y in x]
    return None if np.isnan(x) else float(x)


def result_keys(records: Sequence[Record], resamples: int, seed: int) -> dict[str, Any]:
    """What greedy chains say for `result.json` (docs/architecture.md): alpha of replay, tau by method, speed-up."""
    records = [r for r in records if r.temperature == 0 and r.shape == "chain"]
    result: dict[str, Any] = {}
    for row in summary_rows(records, resamples, seed):
        task, method = row["task"], row["method"]
        counts = {k: row[k] for k in ("prompts", "tokens", "forwards")}
        result.setdefault(f"tau_{method}", {})[task] = {
            "tau": row["tau"],
            "lo": row["tau_lo"],
            "hi": row["tau_hi"],
        } | counts
        if method == "replay":
            result.setdefault("alpha_by_task", {})[task] = row["alpha"]
        if "speedup" in row:
            speedup = {"speedup": row["speedup"], "lo": row["speedup_lo"], "hi": row["speedup_hi"]}
            rates = {k: row[k] for k in ("plain_tokens_per_s", "draft_tokens_per_s", "lossless")}
            result.setdefault("speedup", {})[task] = speedup | rates
    replayed = [r for r in records if r.method == "replay"]
    return (pooled_alpha(replayed, resamples, seed) if replayed else {}) | result

"""Two studies, or a study and a peer's table, side by side: `python -m analysis.compare A B [--out DIR]`.

A and B are study folders, run folders, or tidy .csv/.parquet files. A peer's table need not have a data axis (published
figures have none): then its rows stand beside the study's largest scale, matched by task where both name tasks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd

from analysis.findings import comparison_sentence, headline
from analysis.pipeline import analyse
from analysis.quantities import AXES
from analysis.reporting import write_report
from analysis.study import REPLICATES, Analysis
from analysis.table import Table, load_runs
from analysis.tables import DASH, INTERVAL, bracketed, number, point_means, text_table


def side_by_side(analysis: Analysis) -> pd.DataFrame:
    """tau of every series at every data scale, a column a series; a dash where one has no such scale."""
    columns = {}
    for s in analysis.series:
        if "tau" in s.fits:
            means = point_means(s.fits["tau"])[INTERVAL].to_numpy()
            columns[s.label] = {scale: bracketed(*row) for scale, row in zip(s.scales, means, strict=False)}
    table = pd.DataFrame(columns).sort_index()
    table.insert(0, "data", [f"{x:g}x" for x in table.index])
    return table.reset_index(drop=True).fillna(DASH)


def beside_published(ours: Table, peer: pd.DataFrame, name: str) -> pd.DataFrame:
    """Our runs at the largest scale beside a peer's rows with `tau` (and `speedup`, `task`, labels of any kind).

    For orientation: another target, hardware, chain or tree is another experiment, and no difference is computed.

    Raises:
        ValueError: the peer's table has no column `tau`.
    """
    if "tau" not in peer:
        raise ValueError(f"{name}: no column tau to compare; its columns are {', '.join(map(str, peer.columns))}")
    labels = [c for c in peer.columns if c not in ("tau", "speedup", "task")]
    runs = ours.finished
    top = runs[runs["data_scale"] == runs["data_scale"].max()]
    rows = []
    for draft, own in top.groupby("draft"):
        for task in [*ours.tasks, "all tasks"]:
            tau = own["tau"] if task == "all tasks" else own[f"tau.{task}"]
            speedup = own.get(f"speedup.{task}")
            row = {"whose": "this study", "what": f"{draft}, {own['data_scale'].iloc[0]:g}x", "task": task}
            rows.append(
                row | {"tau": number(tau.mean()), "speed-up": number(None if speedup is None else speedup.mean())}
            )
    for _, r in peer.iterrows():
        what = ", ".join(str(r[c]) for c in labels if pd.notna(r[c]))
        row = {"whose": name, "what": what, "task": str(r.get("task", DASH))}
        rows.append(row | {"tau": number(float(r["tau"])), "speed-up": number(float(r.get("speedup", float("nan"))))})
    return pd.DataFrame(rows)


def _without_axis(path: Path) -> pd.DataFrame | None:
    """A tidy file's table if it has no data axis, so is no study; None otherwise."""
    if path.suffix not in (".csv", ".parquet"):
        return None
    frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    return None if any(a in frame for a in AXES) else frame


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 compared, 2 a user's mistake (said on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m analysis.compare", description="Two studies side by side.")
    parser.add_argument("first", type=Path, help="a study folder, a run folder, or a tidy .csv/.parquet file")
    parser.add_argument("second", type=Path, help="the same, or a peer's table of tau without a data axis")
    parser.add_argument("--out", type=Path, help="also write a report with both, overlaid, into this folder")
    parser.add_argument(
        "--replicates", type=int, default=REPLICATES, help="bootstrap replicates (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        peer = _without_axis(options.second)
        if peer is not None:
            print(text_table(beside_published(load_runs(options.first), peer, options.second.stem)))
            return 0
        analysis = analyse(load_runs([options.first, options.second]), replicates=options.replicates)
    except ValueError as e:
        print(f"python -m analysis.compare: {e}", file=sys.stderr)
        return 2
    print(headline(analysis))
    for c in analysis.comparisons:
        print(comparison_sentence(c))
    print("\n" + text_table(side_by_side(analysis)))
    if options.out is not None:
        print(f"\nReport: {write_report(analysis, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

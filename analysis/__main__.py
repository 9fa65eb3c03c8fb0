"""`python -m analysis RUNS [--out DIR]`: analyse run folders or tidy files and write the report."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from analysis.findings import summary_text
from analysis.join import join_studies
from analysis.pipeline import analyse
from analysis.quantities import AXES
from analysis.reporting import default_folder, write_report
from analysis.study import REPLICATES
from analysis.table import load_runs


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 written, 2 a user's mistake (said on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Fit scaling curves and write a report.")
    parser.add_argument("runs", nargs="+", type=Path, help="a study folder, run folders, or tidy .csv/.parquet files")
    parser.add_argument("--out", type=Path, help="folder of the report (default: RUNS/report for one study folder)")
    parser.add_argument("--axis", choices=list(AXES), help="data axis (default: the first that every run has)")
    parser.add_argument(
        "--join", action="store_true", help="several studies as one: a curve may go through all of their stores"
    )
    parser.add_argument(
        "--replicates", type=int, default=REPLICATES, help="bootstrap replicates (default: %(default)s)"
    )
    parser.add_argument("--tau", type=float, nargs="+", default=[], help="how much data these values of tau need")
    options = parser.parse_args(arguments)
    try:
        if missing := [path for path in options.runs if not path.exists()]:
            raise ValueError(f"{missing[0]}: there is no such file or folder")
        folder = options.out or default_folder(options.runs)
        folder.mkdir(parents=True, exist_ok=True)  # before the work: where it cannot be written, say so now
        table = load_runs(options.runs)
        table = join_studies(table) if options.join else table
        analysis = analyse(table, axis=options.axis, replicates=options.replicates)
        analysis = replace(analysis, wanted=tuple(options.tau))
        path = write_report(analysis, folder)
    except (ValueError, OSError) as e:
        print(f"python -m analysis: {e}", file=sys.stderr)
        return 2
    print(summary_text(analysis))
    print(f"\nReport: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

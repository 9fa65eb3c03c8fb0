"""`python -m analysis RUNS [--out DIR]`: analyse run folders or tidy files and write the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from analysis.findings import summary_text
from analysis.quantities import AXES
from analysis.reporting import write_report
from analysis.study import REPLICATES, analyse
from analysis.table import load_runs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis", description="Fit scaling curves to runs and write a report."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="a study folder, run folders, or tidy .csv/.parquet files")
    parser.add_argument("--out", type=Path, help="folder of the report (default: RUNS/report for one study folder)")
    parser.add_argument("--axis", choices=list(AXES), help="data axis (default: the first that every run has)")
    parser.add_argument(
        "--replicates", type=int, default=REPLICATES, help="bootstrap replicates (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.out is None and not (len(options.runs) == 1 and options.runs[0].is_dir()):
        parser.error("--out DIR is needed: there is not exactly one study folder to put the report in")
    try:
        analysis = analyse(load_runs(options.runs), axis=options.axis, replicates=options.replicates)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    path = write_report(analysis, options.out or options.runs[0] / "report")
    print(summary_text(analysis))
    print(f"\nReport: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

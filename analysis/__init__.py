"""Results table -> fits -> figures -> report. Imports no torch and nothing of the other rooms.

`load_runs` reads run folders or tidy files, `analyse` fits them, `report` writes report.html, `summary_text` is the
answer for a terminal, `power` tells the smallest slope that a design can see before it is run.
"""

from analysis.design import Power, power
from analysis.findings import summary_text
from analysis.fitting import FitResult, fit
from analysis.inverse import data_for_tau
from analysis.join import join_studies
from analysis.pipeline import analyse
from analysis.reporting import report, write_report
from analysis.study import Analysis
from analysis.table import Table, load_runs

__all__ = [
    "Analysis",
    "FitResult",
    "Power",
    "Table",
    "analyse",
    "data_for_tau",
    "fit",
    "join_studies",
    "load_runs",
    "power",
    "report",
    "summary_text",
    "write_report",
]

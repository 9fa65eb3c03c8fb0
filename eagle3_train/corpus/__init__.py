"""Sources to conversations to token ids and loss masks."""

from .prepare import prepare, read_report, task_origin
from .regenerate import regenerate
from .rows import Row, read_counts, read_lengths, read_rows
from .template import Template

__all__ = [
    "Row",
    "Template",
    "prepare",
    "read_counts",
    "read_lengths",
    "read_report",
    "read_rows",
    "regenerate",
    "task_origin",
]

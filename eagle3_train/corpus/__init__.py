"""Sources to conversations to token ids and loss masks."""

from .prepare import TASK, expect_report, in_words, prepare
from .regenerate import regenerate
from .report import expect_content
from .rows import Row, file_state, read_counts, read_lengths, read_rows
from .template import Template

__all__ = [
    "TASK", "Row", "Template", "expect_content", "expect_report", "file_state", "in_words", "prepare",
    "read_counts", "read_lengths", "read_rows", "regenerate",
]  # fmt: skip

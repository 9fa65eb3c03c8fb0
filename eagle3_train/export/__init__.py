"""Draft heads to and from the formats that inference engines read. Page: docs/export.md."""

from __future__ import annotations

from eagle3_train.export.check import check_export
from eagle3_train.export.layout import HeadSource, format_of
from eagle3_train.export.read import Published, read_published
from eagle3_train.export.start import start_from
from eagle3_train.export.write import export_head

__all__ = ["HeadSource", "Published", "check_export", "export_head", "format_of", "read_published", "start_from"]

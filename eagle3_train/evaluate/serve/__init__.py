"""Acceptance and speed in an inference server: the third way. Page: docs/serve.md."""

from __future__ import annotations

from eagle3_train.evaluate.serve.bench import serve_bench

__all__ = ["serve_bench"]

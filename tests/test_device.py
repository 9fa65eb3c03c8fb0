"""The machine's side of torch."""

from __future__ import annotations

import os

import pytest

from eagle3_train.device import ONEDNN_KERNELS, tune_allocator


def test_onednn_keeps_few_kernels_unless_it_was_told_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(name, "")  # put back afterwards, as it was
    monkeypatch.delenv(name)
    tune_allocator()
    assert os.environ[name] == ONEDNN_KERNELS
    monkeypatch.setenv(name, "7")
    tune_allocator()
    assert os.environ[name] == "7"

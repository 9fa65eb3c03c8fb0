"""A job of several processes through the real torchrun; the room that does the work is a stand-in."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_train import config
from launch import Job, run
from tests.sweeps.conftest import FAKES, ROOT


def test_ranks_of_a_job_run_one_step_and_share_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FAKES}:{ROOT}")
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))
    job = Job("capture", config.compose([f"paths.outputs={tmp_path}", "launch.nproc_per_node=2"]))
    outcome = run(job)
    assert outcome.state == "done", outcome.tail
    calls = sorted(line.split(" pid=")[0] for line in (tmp_path / "calls").read_text().splitlines())
    assert calls == ["capture 0/2", "capture 1/2"]
    assert job.is_done()
    assert run(job).seconds == 0.0  # done: no process is started

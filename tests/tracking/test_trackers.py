"""Trackers: what was logged can be read back, a resumed run has no step twice, a missing package is named."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_train import config
from eagle3_train.tracking import JsonlTracker, MemoryTracker, MultiTracker, factory, make_tracker, read_metrics
from eagle3_train.tracking.tensorboard import TensorboardTracker


def log_steps(path: Path, steps: range, resume_step: int = 0) -> None:
    tracker = JsonlTracker(path, resume_step)
    for step in steps:
        tracker.log({"loss": 10.0 - step}, step)
    tracker.close()


def test_jsonl_lines_are_there_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"loss": torch.tensor(1.5), "rate": np.float32(2.0), "loss_steps": [1, 2.5]}, 3)
    (row,) = read_metrics(tmp_path / "metrics.jsonl")  # the tracker is still open
    assert row.pop("time") > 1e9
    assert row == {"step": 3, "loss": 1.5, "rate": 2.0, "loss_steps/0": 1.0, "loss_steps/1": 2.5}


def test_resuming_drops_what_will_be_logged_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(1, 8))
    with open(path, "a") as f:
        f.write('{"summary": {"tau": 1}}\n{"step": 8, "lo')  # a crash cut the last line
    log_steps(path, range(5, 10), resume_step=4)
    rows = read_metrics(path)
    assert [r["step"] for r in rows] == list(range(1, 10))
    assert [r["loss"] for r in rows] == [10.0 - s for s in range(1, 10)]
    assert "summary" not in path.read_text()


def test_a_run_that_starts_anew_starts_the_log_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(1, 8))
    log_steps(path, range(1, 3))
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_diverged_loss_stays_visible_and_the_file_stays_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"loss": math.nan, "norm": math.inf}, 1)
    tracker.summary({"val_loss": float("-inf"), "alpha": [np.float64(0.5), None], "point": "p"})
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    (row,) = read_metrics(path)
    assert math.isnan(row["loss"])
    assert row["norm"] == math.inf
    summary = json.loads(path.read_text().splitlines()[-1])["summary"]
    assert summary == {"val_loss": "-inf", "alpha": [0.5, None], "point": "p"}


def test_a_damaged_line_in_the_middle_is_an_error_not_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl has a damaged line"):
        read_metrics(path)


def test_several_trackers_get_everything(tmp_path: Path) -> None:
    parts = [MemoryTracker(), MemoryTracker()]
    both = MultiTracker(parts)
    both.log({"loss": 1}, 1)
    both.summary({"tau": 1.5})
    both.close()
    for part in parts:
        assert (part.rows, part.final, part.closed) == ([{"step": 1, "loss": 1.0}], {"tau": 1.5}, True)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    tracker = make_tracker(config.compose([]), tmp_path / "run", active=False)
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["wandb", "tensorboard"])
def test_missing_package_is_named_with_the_way_to_install_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"pip install 'eagle3-train\[{kind}\]'"):
        make_tracker(config.compose([f"tracker={kind}"]), tmp_path)
    assert not any(tmp_path.iterdir())


def test_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'mlflow'.*wandb, tensorboard"):
        make_tracker(config.compose(["tracker.kinds=[mlflow]"]), tmp_path)


def wandb_records(run_dir: Path) -> list[dict[str, Any]]:
    """The offline file as wandb's own tool reads it."""
    (file,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return [json.loads(line) for line in out.stdout.splitlines()]


def test_wandb_offline_run_is_read_back_by_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", minversion="0.31")  # older ones have no `leet inspect`
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    cfg = config.compose(["tracker=wandb", "tracker.project=proof", "data.scale=2", "data.base_sequences=32"])
    tracker = make_tracker(cfg, tmp_path / "run")
    tracker.log({"loss": 1.5, "loss_steps": [1.0, 2.0]}, 1)
    tracker.log({"loss": 1.25}, 2)
    tracker.summary({"tau": 1.75})
    tracker.close()
    records = wandb_records(tmp_path / "run")
    run = next(r["run"] for r in records if "run" in r)
    assert (run["project"], run["run_group"], run["display_name"]) == ("proof", "quickstart", cfg.point_name)
    assert run["run_id"].startswith(cfg.point_name)
    assert run["config"]["update"]["data"] == {"scale": 2, "base_sequences": 32, "base_tokens": None, "window": None}
    history = [r["history"]["item"] for r in records if "history" in r]
    assert [(h["_step"], h["loss"]) for h in history] == [(1, 1.5), (2, 1.25)]
    assert history[0]["loss_steps/1"] == 2.0
    assert any(r["summary"]["update"].get("tau") == 1.75 for r in records if "summary" in r)


def test_wandb_online_without_a_key_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"tracker\.mode=offline"):
        make_tracker(config.compose(["tracker=wandb", "tracker.mode=online"]), tmp_path / "run")


def test_tensorboard_events_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorboardTracker(tmp_path)
    tracker.log({"loss": 1.5}, 1)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.5)]

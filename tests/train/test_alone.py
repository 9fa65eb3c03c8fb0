"""`eagle3 train` by itself: one process a point, and the plan of a point before it is trained."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from eagle3_train.steps import STEPS, Call
from launch.lock import Lock
from sweeps import cost
from tests.train.conftest import NewOutputs
from tests.train.results import record
from tests.train.tiny_store import overrides, tiny_config


def test_a_point_that_another_process_works_on_is_waited_for(
    outputs: NewOutputs, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = outputs("a")
    point = tiny_config(folder).point_dir
    lock = Lock(point / ".lock")
    assert lock.try_acquire()
    second = threading.Thread(target=STEPS["train"].run, args=(Call(overrides(folder), []),))
    second.start()
    second.join(timeout=3)
    assert second.is_alive()
    assert not (point / "config.yaml").exists()
    lock.release()
    second.join(timeout=120)
    assert record(point)["steps"] == 16
    assert "works on it; waiting for its end" in capsys.readouterr().out
    assert lock.try_acquire()  # it was given back


def test_the_plan_of_a_point(outputs: NewOutputs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = outputs("a")
    part = {"data__scale": 0.5}  # of the store, whose other rows are longer or shorter in the mean
    cfg = tiny_config(folder, **part)
    assert STEPS["train"].run(Call(overrides(folder, dry_run="true", **part), [])) == 0
    out = capsys.readouterr().out
    assert not cfg.point_dir.exists()
    STEPS["train"].run(Call(overrides(folder, **part), []))
    trained = record(cfg.point_dir)
    assert f" {trained['unique_tokens']:,} tokens, 3 epochs" in out
    assert round(cost.data_of(cfg).of(cfg).tokens) != trained["unique_tokens"]
    assert f"steps: {trained['steps']} of 100 tokens, {trained['consumed_tokens']:,} tokens in all" in out
    assert "already" not in out
    parts = ", ".join(f"{part} {count:,}" for part, count in trained["parameters"].items())
    assert f"parameters: {parts}" in out
    assert "memory: about" in out
    assert "TFLOP/s" not in out  # no speed is known yet
    capsys.readouterr()
    STEPS["train"].run(Call(overrides(folder, dry_run="true", **part), []))
    out = capsys.readouterr().out
    assert "TFLOP/s of the points that are trained" in out
    assert f"{cfg.point_dir}: trained already" in out


def test_memory_of_shards(outputs: NewOutputs) -> None:
    config = Path(outputs("a")) / "tiny" / "store" / "target" / "config.json"
    shape = cost.Shape.of(json.loads(config.read_text()))
    folder = config.parents[3]
    whole = cost.training_bytes(tiny_config(folder), shape)
    keys = {"engine": "fsdp2", "launch__nproc_per_node": 4}
    sharded = cost.training_bytes(tiny_config(folder, **keys), shape)
    first = "weights, gradients and optimizer state"
    assert sharded[first] == whole[first] / 4
    zero = cost.training_bytes(tiny_config(folder, **keys | {"engine": "deepspeed"}), shape)  # stage 2
    assert zero[first] == whole[first] / 16 * (4 + 4 / 4 + 12 / 4)
    assert sharded["activations"] == whole["activations"] / 4  # a rank's share of the batch
    half = cost.training_bytes(tiny_config(folder, train__micro_batch_tokens=50), shape)
    assert half["activations"] == whole["activations"] / 2

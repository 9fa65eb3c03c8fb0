"""Whole small runs: learning, resuming, data parallel against a single process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_train.train import checkpoint, load_head, train
from tests.train.tiny_store import make_study, overrides, tiny_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    make_study(folder)
    return folder


def copy_of(study: Path, folder: Path) -> Path:
    """The study's store under another outputs folder, so that points do not meet."""
    (folder / "tiny").mkdir(parents=True)
    (folder / "tiny" / "store").symlink_to(study / "tiny" / "store")
    return folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in lines(path / "metrics.jsonl") if "loss" in line]


def run(args: list[str], nproc: int = 1, wait: bool = True) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"] if nproc > 1 else []
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "eagle3_train.train", *args],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if wait:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
    return process


def test_a_run_learns_and_leaves_what_others_rely_on(study: Path, tmp_path: Path) -> None:
    cfg = tiny_config(copy_of(study, tmp_path), optim__lr="1e-2")
    head = train(cfg)
    curve = losses(cfg.point_dir)
    assert curve[-1] < 0.8 * curve[0]
    record = json.loads((cfg.point_dir / "train.json").read_text())
    index_tokens = record["unique_tokens"]
    assert record["consumed_tokens"] == 3 * index_tokens
    assert record["supervised_tokens"] < index_tokens
    assert len(record["val_loss_steps"]) == 3
    assert record["parameters"]["trainable"] == sum(p.numel() for p in head.parameters())
    loaded = load_head(cfg, CPU)
    for a, b in zip(head.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
    before = (cfg.point_dir / "metrics.jsonl").read_bytes()
    train(cfg)  # a finished point is not run again
    assert (cfg.point_dir / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(cfg.point_dir / "checkpoints")  # without its weights it is not finished
    for a, b in zip(head.parameters(), train(cfg).parameters(), strict=True):
        assert torch.equal(a, b)


def test_kill_9_and_resume_is_bit_identical(study: Path, tmp_path: Path) -> None:
    whole = tiny_config(copy_of(study, tmp_path / "a"))
    torch.set_num_threads(1)
    train(whole)
    folder = copy_of(study, tmp_path / "b")
    cut = tiny_config(folder)
    process = run(overrides(folder), wait=False)
    deadline = time.monotonic() + 120
    while checkpoint.newest(cut.point_dir / "checkpoints") is None and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    train(cut)
    assert losses(cut.point_dir) == losses(whole.point_dir)
    a, b = (checkpoint.newest(c.point_dir / "checkpoints").weights() for c in (whole, cut))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_resume_in_the_middle_continues_at_the_next_batch(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_config(copy_of(study, tmp_path / "a"))
    train(whole)
    cut = tiny_config(copy_of(study, tmp_path / "b"))
    import eagle3_train.train.loop as loop

    real, calls = loop.train_step, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop, "train_step", failing)
    with pytest.raises(KeyboardInterrupt):
        train(cut)
    monkeypatch.setattr(loop, "train_step", real)
    assert checkpoint.newest(cut.point_dir / "checkpoints").step == 4
    train(cut)
    assert losses(cut.point_dir) == losses(whole.point_dir)
    steps = [line["step"] for line in lines(cut.point_dir / "metrics.jsonl") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.distributed
@pytest.mark.parametrize(("engine", "nproc"), [("auto", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_engines_give_the_single_process_curve(study: Path, tmp_path: Path, engine: str, nproc: int) -> None:
    single = tiny_config(copy_of(study, tmp_path / "single"))
    train(single)
    folder = copy_of(study, tmp_path / engine)
    keys = {"train__micro_batch_tokens": 30, "engine": engine} | ({"engine__shard_size": 2} if engine == "hsdp" else {})
    run(overrides(folder, **keys), nproc)
    parallel = tiny_config(folder)
    np.testing.assert_allclose(losses(parallel.point_dir), losses(single.point_dir), rtol=2e-5)
    records = [json.loads((c.point_dir / "train.json").read_text()) for c in (single, parallel)]
    assert records[0]["consumed_tokens"] == records[1]["consumed_tokens"]
    assert records[0]["val_loss"] == pytest.approx(records[1]["val_loss"], rel=1e-4)


def test_engines_that_do_not_fit_the_processes_stop(study: Path, tmp_path: Path) -> None:
    folder = copy_of(study, tmp_path)
    for engine in ("ddp", "fsdp2", "hsdp"):
        with pytest.raises(ValueError, match="several processes"):
            train(tiny_config(folder, engine=engine))


def test_wrong_stores_are_refused_before_work(study: Path, tmp_path: Path) -> None:
    folder = copy_of(study, tmp_path)
    with pytest.raises(ValueError, match=r"dtype.*fp32"):
        train(tiny_config(folder, store__dtype="bf16"))
    with pytest.raises(ValueError, match="target"):
        train(tiny_config(folder, target__name="other"))
    with pytest.raises(ValueError, match="capture 6 more"):
        train(tiny_config(folder, corpus__sequences=30, data__scale=5))
    with pytest.raises(ValueError, match="vocabulary"):
        train(tiny_config(folder, draft__vocab_size=1000))


def test_a_broken_loss_stops_and_names_the_samples(study: Path, tmp_path: Path) -> None:
    cfg = tiny_config(copy_of(study, tmp_path), optim__lr="1e30")
    with pytest.raises(FloatingPointError, match=r"step \d+.*s\d+"):
        train(cfg)
    assert not (cfg.point_dir / "train.json").exists()

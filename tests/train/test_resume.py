"""Killed, told to stop, out of time: a run continues to the bit, and its checkpoints are whole or not there."""

from __future__ import annotations

import errno
import random
import re
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException

from eagle3_train.exits import REQUEUE, Unfinished
from eagle3_train.train import checkpoint, load_head, stopping, train
from eagle3_train.train.checkpoint import Saver
from eagle3_train.train.distributed import World
from eagle3_train.train.stopping import Lost, Stop
from tests.train.conftest import NewOutputs
from tests.train.ranks import run_ranks, train_and_die, train_tiny, train_with_signal
from tests.train.results import losses, newest, rows, same
from tests.train.tiny_store import tiny_config

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("engine", "ranks"),
    [("single", 1), ("ddp", 2), ("fsdp2", 2), pytest.param("deepspeed", 2, marks=needs_deepspeed)],
)
def test_killed_at_any_step_a_run_continues_to_the_bit(engine: str, ranks: int, outputs: NewOutputs) -> None:
    whole, cut = outputs("whole"), outputs("cut")
    keys = {"engine": engine, "train__checkpoint_every": 2}
    run_ranks(ranks, train_tiny, whole / "log", whole, keys)
    steps = random.randrange(4, 15)  # of 16; one checkpoint is whole by then
    run_ranks(ranks, train_and_die, cut / "log", cut, keys, steps, code=-signal.SIGKILL)
    done = newest(cut).step
    run_ranks(ranks, train_tiny, cut / "log", cut, keys)
    assert f"continuing at step {done}" in (cut / "log.0").read_text()
    assert same(newest(whole).weights(), newest(cut).weights())
    assert losses(cut) == losses(whole)
    steps_logged = [row["step"] for row in rows(cut) if "loss" in row]
    assert steps_logged == list(range(1, len(steps_logged) + 1))


@pytest.mark.distributed
def test_a_signal_to_one_rank_stops_all_after_the_same_step(outputs: NewOutputs) -> None:
    whole, cut = outputs("whole"), outputs("cut")
    keys = {"engine": "ddp"}
    run_ranks(2, train_tiny, whole / "log", whole, keys)
    logs = run_ranks(2, train_with_signal, cut / "log", cut, keys, 4, signal.SIGUSR2, 1, code=REQUEUE)
    assert newest(cut).step == 5  # no multiple of checkpoint_every
    assert "stopped by a signal to another rank after step 5 of 16" in logs[0]
    assert "the same command continues" in logs[0].replace("\n", " ")
    run_ranks(2, train_tiny, cut / "log", cut, keys)
    assert same(newest(whole).weights(), newest(cut).weights())


def test_the_time_limit_saves_and_asks_to_be_continued(outputs: NewOutputs) -> None:
    folder = outputs("limited")
    for step in (1, 2):
        with pytest.raises(Unfinished) as end:
            train(tiny_config(folder, train__max_hours=1e-9))
        assert end.value.code == REQUEUE
        assert newest(folder).step == step
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL  # handlers are given back


def test_who_has_lost_its_point_to_another_process_ends_and_saves_nothing_more(outputs: NewOutputs) -> None:
    folder = outputs("lost")
    asked: list[bool] = []

    def is_lost() -> bool:
        asked.append(len(asked) == 7)
        return asked[-1]

    with pytest.raises(Lost, match="another one took over its work"):
        train(tiny_config(folder, train__checkpoint_every=4), is_lost=is_lost)
    point = tiny_config(folder).point_dir
    assert (len(asked), newest(folder).step) == (8, 4)  # not 8, which was due
    assert not (point / "train.json").exists()


def test_ctrl_c_says_from_where_it_goes_on(outputs: NewOutputs, capsys: pytest.CaptureFixture[str]) -> None:
    folder = outputs("ctrl-c")
    for step, words in ((2, "it has no checkpoint yet"), (7, "its last checkpoint is of step 4")):
        calls: list[None] = []

        def is_lost(step: int = step, calls: list[None] = calls) -> bool:
            calls.append(None)
            if len(calls) == step:
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(folder, train__checkpoint_every=4), is_lost=is_lost)
        assert f"{words} (train.checkpoint_every=4)" in capsys.readouterr().out.replace("\n", " ")


def test_a_second_signal_ends_at_once_and_the_first_one_again_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with Stop(None) as stop:
        assert stop.reason(World()) is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # SLURM tells a rank, and torchrun, which SLURM has told, tells it too
        assert stop.reason(World()) == "SIGTERM"
        monkeypatch.setattr(stopping, "AGAIN_S", 0.0)
        with pytest.raises(Unfinished):
            signal.raise_signal(signal.SIGTERM)


class OneWeight:
    """An engine as far as a saver knows it."""

    world = World()

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])
        self.shapes = {"w": self.value.shape}

    def weights(self) -> dict[str, Any]:
        return {"w": self.value}

    def state(self) -> dict[str, Any]:
        return {"w": {"exp_avg": self.value, "step": torch.tensor(1.0)}}

    def load(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        self.value = weights["w"] + state["w"]["exp_avg"]


def save(saver: Saver, step: int, tau: float | None = None) -> OneWeight:
    engine = OneWeight(float(step))
    saver.save(engine, {"step": step, "plan": {}, "totals": {"tokens": 7}, "tau": tau})  # type: ignore[arg-type]
    engine.value += 1000  # what the next step makes of it is none of the checkpoint's business
    return engine


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        for step, tau in ((1, 1.2), (2, 1.5), (3, None), (4, 1.4), (5, None)):
            save(saver, step, tau)
    assert names(tmp_path) == ["best", "step-00000002", "step-00000004", "step-00000005"]
    assert (tmp_path / "best").resolve().name == "step-00000002"
    assert checkpoint.best(tmp_path).step == 2
    assert checkpoint.newest(tmp_path).step == 5
    engine = OneWeight(0.0)
    assert checkpoint.newest(tmp_path).load_into(engine)  # type: ignore[arg-type]
    assert engine.value == 10
    with Saver(tmp_path, World(), keep_last=1, keep_best=False) as saver:
        save(saver, 6, 1.0)
    assert names(tmp_path) == ["step-00000006"]


def test_what_a_killed_writer_left_is_swept_and_never_seen(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.tmp" / "optimizer").mkdir(parents=True)
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        assert checkpoint.newest(tmp_path) is None
        assert names(tmp_path) == []
        save(saver, 3)
    assert names(tmp_path) == ["step-00000003"]


def test_a_checkpoint_that_is_removed_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it is removed, a run finds no half of it."""
    folders = [tmp_path / f"step-{step:08d}" for step in (2, 4)]
    for folder in folders:
        folder.mkdir()
        (folder / "state.json").write_text("{}")

    def killed(path: Path) -> None:
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint._remove(folders[0])
    assert [found.path for found in checkpoint.all_in(tmp_path)] == folders[1:]
    checkpoint.Saver(tmp_path, World(), keep_last=1, keep_best=False)
    assert [path.name for path in tmp_path.iterdir()] == [folders[1].name]


def test_a_failed_write_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    saver = Saver(tmp_path, World(), keep_last=2, keep_best=True)
    save(saver, 1)
    with pytest.raises(OSError, match="no space left"):
        saver.wait()
    assert checkpoint.newest(tmp_path) is None


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path: Path) -> None:
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        save(saver, 1)
    found = checkpoint.newest(tmp_path)
    shard = next((found.path / "optimizer").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"step-00000001 is damaged.*delete that folder"):
        found.load_into(OneWeight(0.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("file_digest", OSError(errno.EIO, "Input/output error"), "Input/output error"),
        ("dcp.load", CheckpointException("of rank 1", {}), "could not be read, and is as it was written"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, words: str
) -> None:
    """Its user would delete it."""
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        save(saver, 1)
    found = checkpoint.newest(tmp_path)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as m:
        m.setattr(f"eagle3_train.train.checkpoint.{name}", fails)
        with pytest.raises(OSError, match=words):
            found.load_into(OneWeight(0.0))  # type: ignore[arg-type]
    assert found.load_into(OneWeight(0.0))  # type: ignore[arg-type]


def test_checksums_are_of_what_was_written_whatever_a_listing_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rglob", lambda *args: iter([]))  # files of other machines are not in it yet
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        save(saver, 1)
    files = checkpoint.newest(tmp_path).state["files"]
    assert set(files) == {"head.safetensors", "rng.pt", "optimizer/.metadata", "optimizer/__0_0.distcp"}


def test_a_state_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        save(saver, 1)
    real, reads = checkpoint.read_object, []
    monkeypatch.setattr(checkpoint, "read_object", lambda path: reads.append(path) or real(path))
    found = checkpoint.newest(tmp_path)
    assert found.load_into(OneWeight(0.0))  # type: ignore[arg-type]
    assert len(reads) == 1


def test_a_folder_in_the_place_of_the_link_to_the_best_is_named_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    with pytest.raises(ValueError, match=r"best is a folder.*move it away"):
        Saver(tmp_path, World(), keep_last=2, keep_best=True)


def test_a_flipped_bit_in_any_file_is_noticed(tmp_path: Path) -> None:
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        save(saver, 1)
    found = checkpoint.newest(tmp_path)
    files = [path for path in found.path.rglob("*") if path.is_file() and path.name != "state.json"]
    assert {"head.safetensors", "rng.pt", ".metadata", "__0_0.distcp"} == {path.name for path in files}
    for file in files:
        written = file.read_bytes()
        middle = len(written) // 2
        file.write_bytes(written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :])
        with pytest.raises(ValueError, match=rf"{re.escape(file.name)} has another checksum.*delete that folder"):
            found.load_into(OneWeight(0.0))  # type: ignore[arg-type]
        file.unlink()
        with pytest.raises(ValueError, match=rf"{re.escape(file.name)}.*delete that folder"):
            found.load_into(OneWeight(0.0))  # type: ignore[arg-type]
        file.write_bytes(written)
    assert found.load_into(OneWeight(0.0))  # type: ignore[arg-type]


def test_weights_that_are_not_as_they_were_written_are_refused(tmp_path: Path) -> None:
    with Saver(tmp_path, World(), keep_last=2, keep_best=True) as saver:
        save(saver, 1)
    found = checkpoint.newest(tmp_path)
    file, state = found.path / "head.safetensors", found.path / "state.json"
    written, as_written = file.read_bytes(), state.read_bytes()
    with pytest.raises(ValueError, match="is of another head: v, w"):
        found.weights({"v": torch.Size([1])})
    file.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    with pytest.raises(ValueError, match="another checksum"):
        found.weights()
    state.write_text('{"step": 1, "plan": {}, "totals": {}}')  # of before there were checksums
    found = checkpoint.newest(tmp_path)
    assert found.weights()
    for bad in (torch.tensor([float("nan")]), torch.tensor([1])):
        save_file({"w": bad}, file)
        with pytest.raises(ValueError, match="no finite fp32 numbers"):
            found.weights()
    state.write_bytes(as_written.replace(b'"tokens": 7', b'"tokens": 6'))
    with pytest.raises(ValueError, match=r"state.json has another checksum.*delete that folder"):
        checkpoint.newest(tmp_path).weights()
    for text in ("{}", "[]", "null", '{"step": 1, "plan": null, "totals": {}}', '{"step": "1", "plan": {}}'):
        state.write_text(text)
        with pytest.raises(ValueError, match=r"step-00000001 is damaged.*delete that folder"):
            checkpoint.newest(tmp_path).weights()


def test_a_head_whose_last_checkpoint_is_gone_is_trained_on(outputs: NewOutputs) -> None:
    folder = outputs("gone")
    cfg = tiny_config(folder)
    train(cfg)
    last = newest(folder)
    weights = last.weights()
    shutil.rmtree(last.path)
    with pytest.raises(ValueError, match=r"trained for 16 steps, and .* run `eagle3 train`"):
        load_head(cfg, torch.device("cpu"))
    train(cfg)
    assert same(newest(folder).weights(), weights)
    (cfg.point_dir / "train.json").unlink()
    with pytest.raises(ValueError, match="holds no trained head"):
        load_head(cfg, torch.device("cpu"))

"""Captures of two configurations into one store: the second is refused before its first forward pass."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3_train import config
from eagle3_train.capture import capture, run
from eagle3_train.capture.run import Worker
from eagle3_train.config import Config
from eagle3_train.corpus import prepare
from eagle3_train.store import Store, claim, shard_name
from tests.store.helpers import make_spec

from .test_capture import folder, study  # noqa: F401
from .test_faults import PROCESSES

OTHER = "capture.layer_ids=[1,2,3]"


@pytest.fixture
def cfgs(folder: Path, tiny_target: Path) -> list[Config]:  # noqa: F811
    """Two configurations of one store."""
    both = [study(folder, tiny_target, "eval.tasks=[]", *more) for more in ((), (OTHER,))]
    prepare(both[0])
    return both


def start(target: Callable[..., None], cfg: Config, *args: Any) -> Any:
    resolved = Path(cfg.paths.data) / f"config-{len(cfg.capture.layer_ids or ())}.yaml"
    config.save(cfg, resolved)
    process = PROCESSES.Process(target=target, args=(resolved, *args))
    process.start()
    return process


def capture_after_both_have_planned(resolved: Path, meeting: Any, refused: Any, said: Any) -> None:
    plan, open_backend, opened = run.plan, run.open_backend, []

    def plan_and_meet(*args: Any) -> Any:
        jobs = plan(*args)
        meeting.wait()
        return jobs

    def open_and_note(*args: Any) -> Any:
        opened.append(args)
        refused.wait(60)  # it holds the store meanwhile
        return open_backend(*args)

    run.plan, run.open_backend = plan_and_meet, open_and_note  # type: ignore[assignment]
    error = ""
    try:
        capture(config.load(resolved))
    except ValueError as e:
        error = str(e)
        refused.set()
    said.put((error, bool(opened)))


def test_of_two_that_begin_at_once_one_is_refused_before_it_loads_the_target(cfgs: list[Config]) -> None:
    meeting, refused, said = PROCESSES.Barrier(2), PROCESSES.Event(), PROCESSES.Queue()
    processes = [start(capture_after_both_have_planned, cfg, meeting, refused, said) for cfg in cfgs]
    reports = sorted(said.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    (error, opened), (refusal, refused_opened) = reports
    assert (error, opened, refused_opened) == ("", True, False)
    assert "another capture writes into" in refusal
    assert "layer_ids" in refusal
    assert "paths.store=FOLDER" in refusal
    for part in ("", "/validation"):
        assert Store.open(cfgs[0].paths.store + part).verify() == []


def killed(resolved: Path, where: str) -> None:
    setattr(run, where, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    capture(config.load(resolved))


@pytest.mark.parametrize("next_one", [0, 1], ids=["the same", "another configuration"])
@pytest.mark.parametrize("where", ["write_origin", "open_backend"])
def test_what_was_killed_before_its_first_shard_holds_the_store_no_more(
    where: str, next_one: int, cfgs: list[Config]
) -> None:
    process = start(killed, cfgs[0], where)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    store = Path(cfgs[0].paths.store)
    assert json.loads((store / "claim.json").read_text())["layer_ids"] == [2, 4, 5, 8]
    capture(cfgs[next_one])
    assert Store.open(store).spec.layer_ids == ((2, 4, 5, 8), (1, 2, 3, 8))[next_one]
    assert json.loads((store / "origin.json").read_text()) == json.loads(json.dumps(cfgs[next_one].data_identity))
    assert not list(store.rglob(".*.tmp"))


def test_one_that_has_lost_the_store_ends_before_its_next_shard(
    cfgs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may where locks do not reach all machines."""
    shard, done = Worker.shard, []

    def lose_after_one(self: Worker, *args: Any) -> None:
        if done:
            path = Path(cfgs[0].paths.store) / "claim.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_ids": [1, 2, 3, 8]}))
        shard(self, *args)
        done.append(args)

    monkeypatch.setattr(Worker, "shard", lose_after_one)
    with pytest.raises(ValueError, match=r"another capture writes into .*layer_ids: \[1, 2, 3, 8\], not"):
        capture(cfgs[0])
    assert len(done) == 1


def test_a_dead_claim_is_not_taken_over_where_its_capture_has_left_something(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("shards of another spec")

    with claim(tmp_path, make_spec(), refuse):
        pass
    with pytest.raises(ValueError, match="shards of another spec"), claim(tmp_path, make_spec(target_hash="b"), refuse):
        pass
    with claim(tmp_path, make_spec(generator="v2"), refuse):
        pass


def test_in_an_object_store_a_claim_is_compared_and_its_way_out_is_named(uri: str) -> None:
    with claim(uri, make_spec(), lambda: None), claim(uri, make_spec(), lambda: None):
        pass
    words = r"target_hash: 't0', not 'b'.*If no capture of that configuration runs any more, delete .*claim\.json"
    with pytest.raises(ValueError, match=words), claim(uri, make_spec(target_hash="b"), lambda: None):
        pass


def test_a_finished_store_with_a_shard_of_another_capture_is_refused(
    cfgs: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = cfgs
    theirs.paths.store += "-theirs"
    for cfg in cfgs:
        capture(cfg)
    name = shard_name(1, 3)
    (Path(theirs.paths.store) / name).replace(Path(ours.paths.store) / name)
    monkeypatch.setattr(run, "open_backend", None)
    words = rf"{name} is of another capture than its store \(layer_ids: .*rm .*{name}"
    with pytest.raises(ValueError, match=words):
        capture(ours)

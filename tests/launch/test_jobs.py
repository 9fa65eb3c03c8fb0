"""When a job is done: its files are whole and of the configuration that is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from eagle3_train import config
from eagle3_train.config import Config, digest
from eagle3_train.files import write_json
from launch.command import command, environment
from launch.jobs import Job, outputs


@pytest.fixture(scope="module")
def raw() -> DictConfig:
    return config.compose_raw([])


@pytest.fixture
def compose(raw: DictConfig, tmp_path: Path) -> Callable[..., Config]:
    def composed(*overrides: str) -> Config:
        settings = OmegaConf.from_dotlist([f"paths.outputs={tmp_path}", *overrides])
        return config.resolve(OmegaConf.merge(raw, settings))  # type: ignore[arg-type]

    return composed


def result_of(cfg: Config) -> dict[str, Any]:
    return {"train_identity": digest(cfg.point_identity), "eval_identity": digest(cfg.eval_identity)}


def test_a_point_is_done_when_its_result_is_whole_and_its_own(compose: Callable[..., Config]) -> None:
    cfg = compose("eval.decode=false")
    job = Job("point", cfg)
    path = job.folder / "result.json"
    assert not job.is_done()
    write_json(path, result_of(cfg))
    assert job.is_done()
    for broken in (json.dumps(result_of(cfg))[:-9], "{}", ""):
        path.write_text(broken)
        assert not job.is_done()
    for other in ("optim.lr=1e-5", "eval.tasks=[]"):
        write_json(path, result_of(compose("eval.decode=false", "eval.decode_tasks=[]", other)))
        assert not job.is_done()


def test_decoding_is_part_of_done_only_where_it_is_asked_for(compose: Callable[..., Config]) -> None:
    cfg = compose()
    assert cfg.eval.decode_tasks == ["humaneval"]
    write_json(cfg.point_dir / "result.json", result_of(cfg))
    assert not Job("point", cfg).is_done()
    assert Job("point", compose("eval.decode=false")).is_done()
    write_json(cfg.point_dir / "result.json", result_of(cfg) | {"tau_decode": {"humaneval": {}}})
    assert Job("point", cfg).is_done()


@pytest.mark.parametrize(
    ("step", "relevant", "irrelevant"),
    [
        ("prepare", "corpus.max_length=256", "capture.layer_ids=[1,2,3]"),
        ("capture", "capture.layer_ids=[1,2,3]", "optim.lr=1e-5"),
        ("capture", "corpus.seed=1", "data.scale=2"),
    ],
)
def test_a_shared_step_is_done_for_the_configuration_it_was_run_with(
    step: str, relevant: str, irrelevant: str, compose: Callable[..., Config]
) -> None:
    job = Job(step, compose())
    for path in outputs(job.cfg, step):
        write_json(path, {})
    assert not job.is_done()  # of what configuration are these?
    assert job.finish()
    assert job.is_done()
    assert Job(step, compose(irrelevant)).is_done()
    assert not Job(step, compose(relevant)).is_done()
    outputs(job.cfg, step)[-1].unlink()
    assert not job.is_done()
    assert not job.finish()  # it says that it ended well, but a part of it is missing


def test_one_process_needs_no_torchrun(compose: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = Job("point", compose())
    assert command(job)[1:] == ["-m", "eagle3_train.cli", "point", "--resolved", str(job.folder / "config.yaml")]
    assert environment(job) == {}  # all cores


def test_several_processes_share_the_cores(compose: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(12)), raising=False)
    cfg = compose("launch.nproc_per_node=4", "engine.kind=ddp")
    assert "--nproc-per-node 4 -m eagle3_train.cli point" in " ".join(command(Job("point", cfg)))
    assert environment(Job("point", cfg)) == {"OMP_NUM_THREADS": "3"}
    assert "eagle3_train.elastic" not in command(Job("prepare", cfg))  # this step does not divide its work
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert environment(Job("point", cfg)) == {}  # the user's choice stands

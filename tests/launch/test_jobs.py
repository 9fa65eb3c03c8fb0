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
from eagle3_train.files import inside, write_json
from eagle3_train.store.folder import Folder
from launch import Outcome, slurm
from launch.command import command, environment
from launch.jobs import Job, detach, is_of_another_store, outputs, set_aside
from launch.local import run
from launch.lock import Lock
from launch.worker import cut_short
from sweeps import cost


@pytest.fixture(scope="module")
def raw() -> DictConfig:
    return config.compose_raw([])


@pytest.fixture
def compose(raw: DictConfig, tmp_path: Path) -> Callable[..., Config]:
    def composed(*overrides: str) -> Config:
        settings = OmegaConf.from_dotlist([f"paths.outputs={tmp_path}", *overrides])
        return config.resolve(OmegaConf.merge(raw, settings))  # type: ignore[arg-type]

    return composed


def result_of(cfg: Config, store: str = "s", transcripts: str = "t") -> dict[str, Any]:
    identities = {name: digest(getattr(cfg, f"{name}_identity")) for name in ("eval", "decode")}
    return {
        "train_identity": digest(cfg.point_identity),
        **{f"{name}_identity": value for name, value in identities.items()},
        "store_fingerprint": store,
        "transcripts": {task.name: transcripts for task in cfg.eval.tasks},
    }


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
    for other in ("optim.lr=1e-5", "eval.tasks=[]", "eval.bootstrap=10"):
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
    for other in ("eval.decode_dtype=bf16", "eval.decode_prompts=2", "eval.decode_batch=4"):
        assert not Job("point", compose(other)).is_done()
        assert Job("point", compose(other, "eval.decode=false")).is_done()


def write_stores(cfg: Config, store: str, transcripts: str) -> None:
    write_json(Path(cfg.paths.store) / "manifest.json", {"fingerprint": store})
    for task in cfg.eval.tasks:
        write_json(Path(cfg.paths.store) / "transcripts" / task.name / "manifest.json", {"fingerprint": transcripts})


def test_a_point_of_another_store_or_of_other_transcripts_is_not_done(compose: Callable[..., Config]) -> None:
    cfg = compose("eval.decode=false")
    write_json(cfg.point_dir / "result.json", result_of(cfg))
    for store, transcripts, done, other in (
        ("s", "t", True, False),
        ("s", "new", False, False),
        ("new", "t", False, True),
    ):
        write_stores(cfg, store, transcripts)
        write_json(cfg.point_dir / "train.json", {"store_fingerprint": "s"})
        assert Job("point", cfg).is_done() is done
        assert is_of_another_store(cfg, cfg.point_dir) is other
    (cfg.point_dir / "train.json").unlink()
    assert is_of_another_store(cfg, cfg.point_dir)
    (cfg.point_dir / "result.json").unlink()  # interrupted: its checkpoints tell
    assert not is_of_another_store(cfg, cfg.point_dir)
    write_json(cfg.point_dir / "checkpoints" / "step-00000007" / "state.json", {"plan": {"fingerprint": "s"}})
    assert is_of_another_store(cfg, cfg.point_dir)
    set_aside(cfg, cfg.point_dir)
    assert not is_of_another_store(cfg, cfg.point_dir)
    (kept,) = cfg.point_dir.iterdir()
    assert sorted(p.name for p in kept.iterdir()) == ["checkpoints"]


def test_a_link_to_another_studys_point_goes_with_its_data(compose: Callable[..., Config], tmp_path: Path) -> None:
    cfg = compose()
    write_json(tmp_path / "other" / "train.json", {"store_fingerprint": "s"})
    cfg.point_dir.parent.mkdir(parents=True)
    cfg.point_dir.symlink_to(tmp_path / "other")
    write_stores(cfg, "s", "t")
    detach(cfg)
    assert cfg.point_dir.is_symlink()
    write_stores(cfg, "new", "t")
    detach(cfg)
    assert not cfg.point_dir.is_symlink()
    assert (tmp_path / "other" / "train.json").is_file()


def test_other_content_under_the_same_path_makes_a_shared_step_stale(
    compose: Callable[..., Config], tmp_path: Path
) -> None:
    source = tmp_path / "chats.json"
    source.write_text("one")
    job = Job("prepare", compose(f"corpus.path={source}"))
    write_json(Path(outputs(job.cfg, "prepare")[0]), {"digest": "1"})
    assert not job.has_changed()  # never done
    assert job.finish()
    assert (job.is_done(), job.has_changed()) == (True, False)
    source.write_text("two")
    assert (job.is_done(), job.has_changed()) == (False, True)
    source.unlink()  # on a machine that does not see it, there is nothing to compare
    assert job.is_done()
    capture = Job("capture", job.cfg)
    for path in map(Path, outputs(job.cfg, "capture")):
        write_json(path, {})
    assert capture.finish()
    write_json(Path(outputs(job.cfg, "prepare")[0]), {"digest": "2"})  # prepared anew
    assert capture.has_changed()
    Path(outputs(job.cfg, "capture")[0]).unlink()  # removed, since all points are done
    assert not capture.is_done()


def test_an_array_has_room_for_its_largest_job_and_a_dry_run_shows_the_order(compose: Callable[..., Config]) -> None:
    two = compose("launch.kind=slurm", "launch.nodes=2", "engine.kind=ddp")
    one = compose("launch.kind=slurm")
    assert "#SBATCH --nodes=2\n" in slurm.render(slurm.Batch("points", [Job("point", one), Job("point", two)]))
    prepare = slurm.Batch("prepare", [Job("prepare", one)])
    points = slurm.Batch("points", [Job("point", one)] * 3, {"prepare": "afterok", "capture": "afterok"}, at_once=2)
    text = slurm.show([prepare, points])
    assert "1. prepare: 1 job(s), starts at once\n" in text
    assert "2. points: 3 job(s), at most 2 at a time, starts when prepare has succeeded\n" in text


def test_a_job_that_another_process_took_over_is_not_put_back_into_the_queue() -> None:
    # Under SLURM the other process is, as a rule, the same job on another node: a requeue would end it.
    assert not cut_short(Outcome("lost"))
    assert cut_short(Outcome("preempted"))
    assert cut_short(Outcome("failed", reason="exit code 137"))
    assert not cut_short(Outcome("failed", reason="exit code 1"))


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
    for path in map(Path, outputs(job.cfg, step)):
        write_json(path, {})
    assert not job.is_done()  # of what configuration are these?
    assert job.finish()
    assert job.is_done()
    assert Job(step, compose(irrelevant)).is_done()
    assert not Job(step, compose(relevant)).is_done()
    Path(outputs(job.cfg, step)[-1]).unlink()
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
    words = " ".join(command(Job("point", cfg)))
    assert f"--nproc-per-node 4 --log-dir {cfg.point_dir}/ranks --tee 3 -m eagle3_train.cli point" in words
    assert environment(Job("point", cfg))["OMP_NUM_THREADS"] == "3"
    assert "eagle3_train.elastic" not in command(Job("prepare", cfg))  # this step does not divide its work
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" not in environment(Job("point", cfg))  # the user's choice stands


def test_what_is_done_is_seen_in_an_object_store_too(compose: Callable[..., Config], uri: str) -> None:
    cfg = compose("eval.decode=false", f"paths.store={uri}")
    capture, point = Job("capture", cfg), Job("point", cfg)
    write_json(point.folder / "result.json", result_of(cfg))
    assert point.is_done()  # a store that is not there is not compared
    assert not capture.finish()
    parts = {"": "s", "validation": "v", **{f"transcripts/{task.name}": "t" for task in cfg.eval.tasks}}
    for part, fingerprint in parts.items():
        assert not capture.is_done()
        manifest = {"fingerprint": fingerprint, "rows": 24, "tokens": 900, "supervised_tokens": 500}
        Folder(inside(uri, part)).write("manifest.json", json.dumps(manifest).encode())
    assert capture.finish()
    assert capture.is_done()
    assert point.is_done()
    assert cost.data_of(cfg) == cost.Data(24, 900, 500, exact=True)
    Folder(uri).write("manifest.json", b'{"fingerprint": "new"}')
    assert not point.is_done()
    assert is_of_another_store(cfg, point.folder)


def test_a_script_has_what_the_cluster_wants_to_know(compose: Callable[..., Config]) -> None:
    words = {"account": "lab", "qos": "high", "constraint": "h100", "partition": "gpu", "memory": "64G"}
    cfg = compose("launch.kind=slurm", *(f"launch.slurm.{key}={value}" for key, value in words.items()))
    cfg.launch.slurm.time = "12:00:00"
    cfg.launch.slurm.options = ["--exclusive"]
    cfg.launch.slurm.setup = ["module load cuda"]
    cfg.launch.slurm.srun = ["--container-image=torch.sqsh"]
    cfg.launch.slurm.env = {"NCCL_DEBUG": "INFO"}
    cfg.launch.nodes, cfg.launch.slurm.gpus_per_node, cfg.launch.slurm.cpus_per_node = 2, 8, 64
    text = slurm.render(slurm.Batch("points", [Job("point", cfg)]))
    asked = {
        "account": "lab",
        "qos": "high",
        "constraint": "h100",
        "partition": "gpu",
        "mem": "64G",
        "time": "12:00:00",
    }
    asked |= {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "cpus-per-task": "64", "signal": "B:USR2@120"}
    lines = text.splitlines()
    for key, value in asked.items():
        assert f"#SBATCH --{key}={value}" in lines
    for line in ("#SBATCH --exclusive", "#SBATCH --requeue", "#SBATCH --kill-on-invalid-dep=yes"):
        assert line in lines
    assert lines.index("module load cuda") < lines.index("jobs=(")
    allocation = {"SLURM_JOB_ID": "7", "EAGLE3_HEAD": "n1"}
    srun = command(Job("point", cfg), allocation)
    assert srun[: srun.index("--container-image=torch.sqsh") + 1] == [
        "srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=1",
        "--container-image=torch.sqsh",
    ]  # fmt: skip
    assert "n1:20007" in srun  # one torchrun a node meets the others there
    assert environment(Job("point", cfg))["NCCL_DEBUG"] == "INFO"


def test_who_waits_for_another_process_still_listens(compose: Callable[..., Config]) -> None:
    """SLURM tells a job before its time limit, whatever it does."""
    job = Job("point", compose())
    with Lock(job.folder / ".lock"):
        assert run(job, stop=lambda: "preempted") == Outcome("preempted")

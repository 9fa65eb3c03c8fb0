"""Jobs of several processes through the real torchrun; the room that does the work is a stand-in."""

from __future__ import annotations

import socket

from eagle3_train import config
from sweeps import status
from tests.sweeps.conftest import Bench


def test_two_nodes_run_one_step_together(bench: Bench) -> None:
    """Two processes on this machine stand for two nodes that share a folder; each gives the same command."""
    bench.run("prepare")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = ("capture", "launch=torchrun", "launch.nodes=2", "launch.nproc_per_node=2")
    nodes = [bench.start(*command, f"launch.rendezvous=127.0.0.1:{port}") for _ in range(2)]
    outs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    assert sorted(bench.calls("capture")) == [f"capture {rank}/4" for rank in range(4)]
    assert all(f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}" in out for out in outs)
    bench.run("study", "data.scale=1", "seed=0", "dry_run=true")
    folders = {p.name for p in (bench.study / "steps" / "capture").iterdir()}
    assert {"done.json", "log.txt", f"node-{socket.gethostname()}"} <= folders  # one of them led, one joined


def test_several_processes_on_this_machine(bench: Bench) -> None:
    bench.run("prepare")
    out = bench.run("capture", "launch.nproc_per_node=2")
    assert "eagle3_train.elastic --standalone --nproc-per-node 2" in out
    assert sorted(bench.calls("capture")) == ["capture 0/2", "capture 1/2"]
    assert [s.state for s in status.collect(bench.study) if s.name == "capture"] == ["done"]
    bench.run("capture", "launch.nproc_per_node=2")
    assert len(bench.calls("capture")) == 2  # done: no process is started


def test_what_the_user_got_wrong_is_one_line_of_one_rank(bench: Bench) -> None:
    out = bench.run("capture", "launch.nproc_per_node=2", code=1)  # nothing is prepared
    said = [line for line in out.splitlines() if line.startswith("capture | [rank ") and "] error: " in line]
    assert len(said) == 1
    assert "corpus/report.json" in said[0]
    assert "Traceback" not in out
    assert "capture: failed: exit code 2" in out
    (failed,) = (s for s in status.collect(bench.study) if s.name == "capture")
    assert "error: " in str(failed.reason)  # and not what torchrun says after it
    logs = {path.parent.name: path.read_text() for path in bench.study.glob("steps/capture/ranks/*/*/*/stderr.log")}
    assert sorted(logs) == ["0", "1"]  # a rank each
    assert "corpus/report.json" in logs["0"] + logs["1"]


def test_a_single_process_engine_is_refused_for_many(bench: Bench) -> None:
    out = bench.run("train", "engine=single", "launch.nproc_per_node=2", code=2)
    assert "engine=single is one process, but launch asks for 1 x 2: use engine=ddp" in out


def test_an_imported_head_is_measured_through_a_launcher_too(bench: Bench) -> None:
    bench.run("prepare")
    bench.run("capture")
    bench.run("import", "draft.init_from=/models/head", "launch.nproc_per_node=2", "eval.decode=false")
    (job,) = (s for s in status.collect(bench.study) if s.name.startswith("eagle3"))
    assert config.load(bench.study / job.name / "config.yaml").train.regime == "none"
    assert bench.calls("trained") == [f"trained {job.name}"]
    assert (bench.study / job.name / "result.json").is_file()

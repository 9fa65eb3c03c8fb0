"""Started by what users start runs with; and what is seen when a rank dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from eagle3_train.exits import INTERRUPTED, MISTAKE, REQUEUE
from eagle3_train.train.__main__ import adopt_srun
from tests.train.conftest import NewOutputs
from tests.train.ranks import free_port
from tests.train.results import record
from tests.train.tiny_store import overrides

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
SHORT = {"train__epochs": 1}
TORCHRUN = ("-m", "eagle3_train.elastic")
STEP = ("-m", "eagle3_train.train")


def start(*words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=400)
    assert process.returncode == code, out
    return out


def test_two_nodes_of_torchrun(outputs: NewOutputs) -> None:
    folder = outputs("nodes")
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    meet = (*meet, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "tiny")
    nodes = [start(*TORCHRUN, *meet, *STEP, *overrides(folder, engine="fsdp2", **SHORT)) for _ in range(2)]
    outs = [finish(node) for node in nodes]
    assert sum("6 steps" in out for out in outs) == 1
    assert record(folder)["steps"] == 6


def test_accelerate_launch(outputs: NewOutputs) -> None:
    folder = outputs("accelerate")
    command = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
    command = (*command, "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port()))
    finish(start(*command, *STEP, *overrides(folder, engine="accelerate", **SHORT)))
    assert record(folder)["steps"] == 6


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_launcher(outputs: NewOutputs) -> None:
    folder = outputs("deepspeed")
    command = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port()), "--module")
    finish(start(*command, "eagle3_train.train", *overrides(folder, engine="deepspeed", **SHORT)))
    assert record(folder)["steps"] == 6


@pytest.mark.parametrize(("code", "expected"), [(REQUEUE, REQUEUE), (3, 1)])
def test_torchrun_hands_on_that_ranks_ask_to_be_continued(code: int, expected: int, tmp_path: Path) -> None:
    """Rank 0 ends so; torchrun ends the others."""
    script = tmp_path / "ranks.py"
    script.write_text(f"import os, sys, time\nsys.exit({code}) if os.environ['RANK'] == '0' else time.sleep(100)\n")
    finish(start(*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script)), expected)


def test_ctrl_c_under_torchrun_does_not_ask_for_a_requeue(tmp_path: Path) -> None:
    script, ready = tmp_path / "ranks.py", tmp_path / "ready"
    script.write_text(f"import time, pathlib\npathlib.Path({str(ready)!r}).touch()\ntime.sleep(100)\n")
    job = start(*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(script))
    while not ready.exists():
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    finish(job, INTERRUPTED)


def test_groups_that_do_not_fit_the_processes_are_named_before_the_store_is_opened(outputs: NewOutputs) -> None:
    keys = overrides(outputs("groups"), engine="hsdp", engine__shard_size=2, paths__store="/none")
    out = finish(start(*TORCHRUN, "--standalone", "--nproc-per-node", "2", *STEP, *keys), MISTAKE)
    assert out.count("shard_size must be a proper divisor") >= 1
    assert "Traceback" not in out
    assert "error file" not in out


# Python imports a module of this name at its start: one rank dies as its third step begins.
DIES = """
import os
if os.environ.get("RANK") == "1":
    import signal, eagle3_train.train.loop as loop
    real, calls = loop.train_step, []
    def dying(*args):
        calls.append(1)
        if len(calls) == 3:
            {how}
        return real(*args)
    loop.train_step = dying
"""


@pytest.mark.parametrize(
    ("how", "code", "seen"),
    [
        ('raise RuntimeError("a cosmic ray")', 1, r"Root Cause.*rank\s*:\s*1 .*RuntimeError: a cosmic ray"),
        ('raise ValueError("your mistake")', MISTAKE, r"error: your mistake"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, r"rank 1 \(process \d+\) was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies_ends_the_job_with_its_own_error(
    how: str, code: int, seen: str, outputs: NewOutputs, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES.format(how=how))
    ranks = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", *STEP)
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    job = start(*ranks, *overrides(outputs("dies"), train__epochs=10000, train__log_every=100000), **paths)
    out = finish(job, code)
    assert re.search(seen, out, re.DOTALL), out
    assert ("Traceback" in out) == (code == 1), out
    assert "by peer" not in out


def test_ranks_that_srun_started_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = "n[3-4]" ] && printf "n3\\nn4\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "20007"}
    environ = slurm | {"SLURM_STEP_NODELIST": "n[3-4]"}
    adopt_srun(environ)
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n3", "MASTER_PORT": "20007"}
    assert expected.items() <= environ.items()
    environ = slurm | {"SLURM_STEP_NODELIST": "n[3-4]", "CUDA_VISIBLE_DEVICES": "1"}  # as --gpus-per-task=1 gives it
    adopt_srun(environ)
    assert environ["LOCAL_RANK"] == "0"
    for alone in ({"SLURM_STEP_NUM_TASKS": "1"}, slurm | {"RANK": "0"}, {}):
        before = dict(alone)
        adopt_srun(alone)
        assert alone == before  # a single task, or ranks of a torchrun that srun started

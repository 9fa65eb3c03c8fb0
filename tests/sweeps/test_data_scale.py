"""`python -m sweeps.data_scale -m ...`: a real Hydra multirun with the folders and names of the study."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from eagle3_train.files import write_json
from tests.sweeps.conftest import Bench
from tests.sweeps.test_study import NAMES

MODULE = "sweeps.data_scale"


def test_a_multirun_is_the_study(bench: Bench) -> None:
    out = bench.run("-m", "data.scale=1,2", "seed=0", module=MODULE, code=1, FAKE_FAIL="x1-")
    assert "Launching 2 jobs" in out
    assert "RuntimeError: the loss is not finite" in out.splitlines()[-1]
    assert bench.calls("trained") == [f"trained {NAMES[1]}"]  # a failing point stops no other
    assert len(bench.calls("prepare")) == len(bench.calls("capture")) == 1
    # Hydra leaves nothing outside <study>/.hydra.
    assert sorted(p.name for p in bench.folder.iterdir()) == ["calls", "outputs"]
    assert {p.name for p in bench.study.iterdir()} == {*NAMES, ".hydra", "corpus", "store", "steps"}
    # The study finds done what the multirun did, the decoding of its decode points included.
    out = bench.run("study", "data.scale=1,2", "seed=0", "study.decode_points=[{data.scale: 1}]")
    assert "2 points, 1 done" in out
    assert bench.calls("trained") == [f"trained {NAMES[1]}", f"trained {NAMES[0]}"]


@pytest.mark.skipif(find_spec("submitit") is None, reason="it is not installed")
def test_hydra_submitit(bench: Bench) -> None:
    """Both points at once, in processes of submitit's; the data are made once."""
    bench.run("-m", "data.scale=1,2", "seed=0", "hydra/launcher=submitit_local", module=MODULE)
    assert sorted(bench.calls("trained")) == [f"trained {name}" for name in NAMES]
    assert len(bench.calls("prepare")) == len(bench.calls("capture")) == 1
    assert "2 points, 2 done" in bench.run("study", "data.scale=1,2", "seed=0", "study.decode_points=[{data.scale: 4}]")


def test_a_mistake_is_one_line(bench: Bench) -> None:
    out = bench.run("-m", "data.scal=1,2", module=MODULE, code=2)
    assert out.startswith("error: there is no key 'data.scal': did you mean data.scale")
    out = bench.run("-m", "data.scale=1,999", module=MODULE, code=2)
    assert "raise corpus.sequences" in out.splitlines()[-1]
    assert bench.calls() == []  # the point that is possible did not run either


def test_points_that_their_store_has_no_data_for_are_refused_before_the_first(bench: Bench) -> None:
    captured = {"fingerprint": "rows", "rows": 256, "tokens": 1000, "supervised_tokens": 500}
    write_json(bench.study / "store" / "manifest.json", captured)
    words = ("-m", "data.scale=2,4", "seed=0", "corpus.sequences=null", "data.base_sequences=100")
    out = bench.run(*words, module=MODULE, code=2)
    assert f"4x needs 400 sequences, the store {bench.study}/store holds 256. A store does not grow" in out
    assert bench.calls() == []


def test_with_slurm_a_multirun_is_submitted_as_a_study_of_its_axes(bench: Bench) -> None:
    axes = ("-m", "data.scale=1,2", "draft=eagle3,eagle1", "seed=0,1", "launch=slurm")
    out = bench.run(*axes, "dry_run=true", module=MODULE)
    assert "8 points, 0 done" in out
    assert "3. points: 8 job(s), starts when prepare has succeeded, and capture has succeeded" in out
    assert "#SBATCH --array=0-7%8" in out
    assert "there is no sbatch on this machine" in bench.run(*axes, module=MODULE, code=2, PATH="")
    assert bench.calls() == []

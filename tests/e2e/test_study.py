"""The whole mission, small: real target, real conversations, real prompts, through the command line to the report."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

SMALL = (
    "study=quickstart", "corpus.sequences=12", "corpus.validation_sequences=6", "corpus.max_length=192",
    "study.decode_points=[]",
    "data.base_sequences=6", "data.scale=1,2", "seed=0", "train.batch_tokens=256", "train.epochs=2",
    "draft.vocab_size=1024", "capture.shards=2", "eval.decode_prompts=3", "eval.bootstrap=200",
    "eval.tasks=[{name:humaneval,source:humaneval,prompts:3,new_tokens:24},"
    "{name:sharegpt,source:held_out,prompts:3,new_tokens:24}]",
)  # fmt: skip
RESULT_KEYS = (
    "draft", "data_scale", "seed", "unique_tokens", "supervised_tokens", "val_loss", "alpha", "tau_replay",
    "tau_decode", "speedup", "parameters", "train_flops", "wall_seconds", "store_fingerprint", "code_version",
)  # fmt: skip


def eagle3(*args: str, outputs: Path, threads: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3_train.cli", *args, f"paths.outputs={outputs}"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": str(threads or os.cpu_count())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def study(real_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(study folder, output of the run that finished it): killed once in the middle, then run again."""
    outputs = tmp_path_factory.mktemp("outputs")
    folder = outputs / "quickstart"
    args = ("study", *SMALL, f"paths.target={real_target}")
    process = eagle3(*args, outputs=outputs)
    deadline = time.monotonic() + 1200
    while not list(folder.glob("eagle3-x1-*/train.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)  # in the first point: trained, not evaluated
    process.communicate()
    untouched = [folder / "corpus" / "train.parquet", folder / "store" / "manifest.json"]
    untouched += folder.glob("eagle3-x1-*/train.json")
    before = [p.stat().st_mtime_ns for p in untouched]
    process = eagle3(*args, outputs=outputs)
    output, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, output
    assert [p.stat().st_mtime_ns for p in untouched] == before, "what was done was done again"
    return folder, output


def results(folder: Path) -> list[dict]:
    return [json.loads(p.read_text()) for p in sorted(folder.glob("eagle3-*/result.json"))]


def test_every_point_has_its_result(study: tuple[Path, str]) -> None:
    found = results(study[0])
    assert [r["data_scale"] for r in found] == [1, 2]
    for result in found:
        assert [key for key in RESULT_KEYS if key not in result] == []
        assert len(result["alpha"]) == 3
        for tau in (*result["tau_replay"].values(), *result["tau_decode"].values()):
            assert 1 <= tau["lo"] <= tau["tau"] <= tau["hi"] <= 4
    assert found[0]["unique_tokens"] < found[1]["unique_tokens"]  # nested: 1x is inside 2x
    assert len({r["store_fingerprint"] for r in found}) == 1
    assert len({r["vocab_coverage"] for r in found}) == 1  # one draft vocabulary for all scales


def test_replay_equals_real_decoding_cycle_by_cycle(study: tuple[Path, str]) -> None:
    """In fp32, on the real model: the same counts prompt by prompt, and outputs equal to plain greedy decoding."""
    compared = 0
    for path in study[0].glob("eagle3-*/records.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        replayed = {r["prompt"]: r for r in records if r["method"] == "replay" and r["task"] == "humaneval"}
        for decoded in (r for r in records if r["method"] == "decode"):
            assert decoded["lossless"] is True
            fields = ("tokens", "forwards", "drafted", "accepted")
            assert {f: decoded[f] for f in fields} == {f: replayed[decoded["prompt"]][f] for f in fields}
            compared += 1
    assert compared == 6


def test_the_run_ends_with_the_answer(study: tuple[Path, str]) -> None:
    folder, output = study
    report = folder / "report" / "report.html"
    assert report.stat().st_size > 10_000
    assert str(report) in output
    assert "tau" in output.lower()


def test_done_work_is_not_repeated(study: tuple[Path, str], real_target: Path) -> None:
    stamps = {p: p.stat().st_mtime_ns for p in study[0].glob("eagle3-*/result.json")}
    started = time.monotonic()
    process = eagle3("study", *SMALL, f"paths.target={real_target}", outputs=study[0].parent)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert time.monotonic() - started < 120


@pytest.mark.skipif(
    not os.environ.get("EAGLE3_VLLM_PYTHON") and importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed, and EAGLE3_VLLM_PYTHON names no interpreter that has it",
)
def test_vllm_serves_the_exported_head_as_replay_says(study: tuple[Path, str], real_target: Path) -> None:
    """In fp32 and greedy: plain vLLM's outputs, up to ties; tau in replay's interval, alone and two at once."""
    point = [a for a in SMALL if not a.startswith("data.scale=")]
    more = ("data.scale=2", "serve.concurrency=[1,2]", 'serve.arguments=["--enforce-eager"]', "export.check=true")
    # One thread: several of vLLM's would wait for each other where other tests share the cores.
    process = eagle3("serve-bench", *point, *more, f"paths.target={real_target}", outputs=study[0].parent, threads=1)
    output, _ = process.communicate(timeout=1500)
    assert process.returncode == 0, output
    (path,) = study[0].glob("eagle3-x2-*/serve.json")
    rows = json.loads(path.read_text())["rows"]
    replayed = next(r for r in rows if r["method"] == "replay")
    served = [r for r in rows if r["method"] == "serve"]
    assert [(r["concurrency"], r["compared"]) for r in served] == [(1, 3), (2, 3)]
    for row in served:
        assert all(d["logit_gap"] is not None and d["logit_gap"] < 1e-2 for d in row.get("differences", []))
        assert replayed["tau_lo"] <= row["tau"] <= replayed["tau_hi"]
        assert row["counters"]["tau"] >= 1
        assert 0 < row["first_p50"] <= row["latency_p99"]
    assert "bit for bit" in output

"""Measuring a server: what is counted, what is compared, what is refused. tests/e2e has the real vLLM."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_train import config
from eagle3_train.config import Config, TaskConfig
from eagle3_train.evaluate import replay_tasks
from eagle3_train.evaluate.records import write_records
from eagle3_train.evaluate.serve import bench, serve_bench
from eagle3_train.evaluate.serve.counters import parse
from eagle3_train.evaluate.serve.server import SPREADS_TEMPERATURES, check_sampling, vllm_python, vllm_server
from eagle3_train.evaluate.transcripts import Transcript
from tests.evaluate.fake_server import FakeServer, running
from tests.evaluate.tiny import CPU, NEW, STOPS, trained_head, transcripts, write_store

TASK = TaskConfig(name="tiny", source="file", path="-", prompts=8, new_tokens=NEW)
Texts = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("transcripts")
    write_store(path / "tiny", transcripts(), {"temperature": 0.0, "max_new_tokens": NEW})
    return str(path)


@pytest.fixture
def point(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    cfg = config.compose([f"paths.outputs={tmp_path}", "eval.decode_tasks=[]", "eval.bootstrap=50", "device=cpu"])
    cfg.paths.store = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "transcripts").symlink_to(folder)
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')  # of the target
    cfg.eval.tasks, cfg.serve.tasks, cfg.serve.concurrency = [TASK], ["tiny"], [1, 3]
    monkeypatch.setattr(bench, "WARM_UP_TOKENS", 1)
    return cfg


def said() -> Texts:
    """The target's own texts."""
    parts = [Transcript.of(s) for s in transcripts()]
    return {tuple(t.prompt_ids.tolist()): t.sequence.input_ids[t.prompt_length :].tolist() for t in parts}


def cycles(folder: str, beyond: int = 0) -> dict[tuple[int, ...], list[int]]:
    """Replay's cycles of the tiny head, the last of each accepting `beyond` more, as a server does not cut drafts."""
    from eagle3_train.evaluate.replay import replay

    out = {}
    for t, accepted in replay(trained_head(), [Transcript.of(s) for s in transcripts()], CPU, 512):
        last = [min(accepted[-1] + beyond, 3)] if accepted else []
        out[tuple(t.prompt_ids.tolist())] = [*accepted[:-1], *last]
    return out


def no_explanation() -> Callable[..., dict[str, Any]]:
    raise AssertionError("nothing differs")


def measured(point: Config, head: FakeServer, plain: FakeServer, explain: Any = no_explanation) -> list[dict[str, Any]]:
    with running(head), running(plain):
        point.serve.url, point.serve.baseline_url = head.url, plain.url
        target = Path(point.paths.store).parent
        return serve_bench(point, target, Path("head"), 3, STOPS, explain)


def test_a_server_with_the_head_is_measured_as_replay_counts(folder: str, point: Config) -> None:
    """Though the server accepts, and counts, drafts beyond the ends of generations."""
    records, _ = replay_tasks(trained_head(), folder, [TASK], CPU, 50, 0)
    write_records(point.point_dir / "records.jsonl", records)
    head, plain = FakeServer(said(), cycles(folder, beyond=2)), FakeServer(said(), None)
    rows = measured(point, head, plain)
    assert [(r["method"], r.get("concurrency")) for r in rows] == [
        ("plain", 1), ("plain", 3), ("serve", 1), ("serve", 3), ("replay", None),
    ]  # fmt: skip
    replayed = rows[-1]
    for row in rows[2:4]:
        assert (row["tau"], row["alpha"]) == (replayed["tau"], replayed["alpha"])
        assert (row["tau_lo"], row["tau_hi"]) == (replayed["tau_lo"], replayed["tau_hi"])
        assert row["forwards"] == replayed["forwards"]
        assert row["counters"]["tau"] > replayed["tau"]  # with what lies beyond the ends
        assert row["lossless"] == row["compared"] == 8
        assert row["speedup"] == row["tokens_per_s"] / rows[0 if row["concurrency"] == 1 else 1]["tokens_per_s"]
        assert 0 < row["first_p50"] <= row["latency_p50"] <= row["latency_p99"]
    assert head.most_running == 3
    written = json.loads((point.point_dir / "serve.json").read_text())
    assert written["rows"] == rows
    assert written["setup"]["dtype"] == "float32"
    lines = (point.point_dir / "serve.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 8


def test_requests_ask_for_what_decoding_does(folder: str, point: Config) -> None:
    point.serve.temperatures, point.serve.concurrency = [0.7], [2]
    head = FakeServer(said(), cycles(folder))
    measured(point, head, FakeServer(said(), None))
    request = head.requests[-1]
    assert (request["temperature"], request["stop_token_ids"], request["ignore_eos"]) == (0.7, STOPS, True)
    assert request["max_tokens"] == NEW
    assert request["model"] == "fake"


def test_a_load_wider_than_the_prompts_repeats_them(folder: str, point: Config) -> None:
    point.serve.concurrency = [12]
    head = FakeServer(said(), cycles(folder))
    rows = measured(point, head, FakeServer(said(), None))
    assert [r["requests"] for r in rows] == [12, 12]
    # The first four prompts were asked twice, each time with other random numbers, and are no more prompts for that.
    counted = list(cycles(folder).values())
    counted += counted[:4]
    forwards = sum(map(len, counted))
    assert (rows[1]["prompts"], rows[1]["forwards"]) == (8, forwards)
    assert rows[1]["tokens"] == forwards + sum(map(sum, counted))
    seeds = [r["seed"] for r in head.requests if r["max_tokens"] == NEW]
    assert sorted(seeds) == list(range(point.seed, point.seed + 12))


def test_differing_outputs_are_counted_and_explained(folder: str, point: Config) -> None:
    texts = said()
    odd = list(texts)[4]
    other = texts | {odd: [*texts[odd][:-1], 23]}
    explained = []

    def explain() -> Callable[..., dict[str, Any]]:
        def why(prompt: Any, plain: list[int], drafted: list[int]) -> dict[str, Any]:
            explained.append((tuple(prompt.ids), plain, drafted))
            return {"logit_gap": 1e-6}

        return why

    point.serve.concurrency = [2]
    rows = measured(point, FakeServer(other, cycles(folder)), FakeServer(texts, None), explain)
    assert (rows[1]["lossless"], rows[1]["compared"]) == (7, 8)
    assert rows[1]["differences"] == [{"prompt": transcripts()[4].sample_id, "logit_gap": 1e-6}]
    assert explained == [(odd, texts[odd], other[odd])]


def test_without_word_on_each_request_the_servers_counters_speak(folder: str, point: Config) -> None:
    point.serve.concurrency = [1]
    accepted = cycles(folder)
    rows = measured(point, FakeServer(said(), accepted, tells=False), FakeServer(said(), None))
    row = rows[1]
    all_cycles = [a for c in accepted.values() for a in c]
    assert "tau" not in row
    assert row["counters"]["tau"] == pytest.approx(1 + sum(all_cycles) / len(all_cycles))
    reached = [len(all_cycles), *(sum(a > i for a in all_cycles) for i in range(3))]
    assert row["counters"]["alpha"] == pytest.approx([reached[i + 1] / reached[i] for i in range(3)])


@pytest.mark.parametrize("cumulative", [True, False])
def test_sglang_is_measured_by_what_it_says_of_each_request(folder: str, point: Config, cumulative: bool) -> None:
    """Against a fake that speaks as SGLang's documents say; no real one was run."""
    accepted = cycles(folder, beyond=2)
    head = FakeServer(said(), accepted, sglang=True, cumulative=cumulative, others=1)  # its totals are not read
    plain = FakeServer(said(), None, sglang=True, cumulative=cumulative)
    rows = measured(point, head, plain)
    records, _ = replay_tasks(trained_head(), folder, [TASK], CPU, 50, 0)
    whole = [a for c in accepted.values() for a in c]
    reached = [len(whole), *(sum(a > i for a in whole) for i in range(max(whole)))]
    for row in rows[2:4]:
        assert row["counters"]["tau"] == sum(r.tokens for r in records) / sum(r.forwards for r in records)
        assert row["counters"]["alpha"] == pytest.approx([reached[i + 1] / reached[i] for i in range(max(whole))])
        assert (row["lossless"], row["compared"]) == (8, 8)
        assert 0 < row["first_p50"] <= row["latency_p50"]
    assert "counters" not in rows[0]
    sampling = head.requests[-1]["sampling_params"]
    assert sampling == {"temperature": 0.0, "max_new_tokens": NEW, "stop_token_ids": STOPS}


def test_a_server_that_others_use_is_refused(folder: str, point: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3_train.evaluate.serve.counters.PATIENCE_S", 0.2)
    with pytest.raises(ValueError, match="it serves others too"):
        measured(point, FakeServer(said(), cycles(folder)), FakeServer(said(), None, others=1))


def test_mistakes_are_named(point: Config) -> None:
    point.serve.url = "http://127.0.0.1:9"
    with pytest.raises(ValueError, match="no OpenAI-compatible server answers"):
        serve_bench(point, Path(), Path("head"), 3, STOPS, no_explanation)
    point.serve.url = "127.0.0.1:9"
    with pytest.raises(ValueError, match="write http://HOST:PORT"):
        serve_bench(point, Path(), Path("head"), 3, STOPS, no_explanation)


def test_counters_of_several_engines_are_added() -> None:
    counters = parse(
        'vllm:generation_tokens_total{engine="0"} 5.0\nvllm:generation_tokens_total{engine="1"} 7.0\n'
        'vllm:spec_decode_num_drafts_total{engine="0"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 3.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 1.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09\n'
    )
    assert (counters.generated, counters.tau, counters.alpha) == (12, 2.5, [1.0, 0.5])


@pytest.mark.parametrize(
    ("accepted", "tokens", "expected"),
    [([2, 3], 5, [2, 1]), ([3], 1, [0]), ([0, 0], 2, [0, 0]), ([1], 4, [1, 0, 0]), ([2, 1], 3, [2])],
)
def test_cycles_end_where_the_generation_ends(accepted: list[int], tokens: int, expected: list[int]) -> None:
    assert bench.cut(accepted, tokens) == expected


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: Config) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such model; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE3_VLLM_PYTHON", str(python))
    with (
        pytest.raises(ValueError, match="no such model"),
        vllm_server(point.serve, tmp_path, None, 3, "float32", 64, tmp_path / "log"),
    ):
        raise AssertionError
    python.write_text("#!/bin/sh\necho INFO; echo wrong\n")
    with pytest.raises(ValueError, match=r"serve\.temperatures=\[0\] here"):
        check_sampling()
    for says in ("right", ""):  # of a GPU's vLLM nothing is known, or of one that has no such function
        python.write_text(f"#!/bin/sh\necho {says}\n")
        check_sampling()
    monkeypatch.delenv("EAGLE3_VLLM_PYTHON")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"serve\.url=URL"):
        vllm_python()


@pytest.mark.parametrize("writes", [True, False])
def test_a_vllm_that_loses_temperatures_is_recognised(
    writes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault of vLLM 0.32's CPU build, in its form: the kernel fills an integer copy of what it is given."""

    def expand(output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replaced: int, by: int) -> None:
        counts = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.long))
        target = output if writes else output.to(torch.int64)
        target.copy_(values.repeat_interleave(counts))

    platform = SimpleNamespace(is_cpu=lambda: True)
    for name, module in {
        "vllm": SimpleNamespace(_C=None), "vllm._C": SimpleNamespace(), "vllm.utils": SimpleNamespace(),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.utils.cpu_triton_utils": SimpleNamespace(_expand_kernel_impl=expand),
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    exec(SPREADS_TEMPERATURES, {})
    assert capsys.readouterr().out == ("right\n" if writes else "wrong\n")

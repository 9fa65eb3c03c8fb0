"""Decoding of whole tasks, and `measure`: what it checks, what it writes."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle3_train import config
from eagle3_train.config import Config, TaskConfig, TreeConfig, digest
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.runner import Query, TargetRunner
from eagle3_train.decode.sampling import Sampling
from eagle3_train.evaluate import check_target, decode, decode_tasks, measure
from eagle3_train.evaluate.records import read_records
from eagle3_train.files import write_json
from eagle3_train.store import Store, write_origin, write_target_part
from tests.evaluate.tiny import NEW, STOPS, tiny_part, trained_head, transcripts, write_store
from tests.heads import LAYER_IDS, tiny_target

TASK = TaskConfig(name="tiny", source="file", path="-", prompts=8, new_tokens=NEW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("transcripts")
    write_store(path / "tiny", transcripts(), {"temperature": 0.0, "max_new_tokens": NEW})
    return str(path)


def test_decode_tasks_measures_the_first_prompts(folder: str) -> None:
    records, keys = decode_tasks(trained_head(), tiny_target(), folder, [TASK], 3, Chain(3), STOPS, 50, 0)
    assert [r.prompt for r in records] == [s.sample_id for s in transcripts()[:3]]
    assert [r.tokens + 1 for r in records] == [int(s.loss_mask.sum()) for s in transcripts()[:3]]
    assert all(r.seconds > 0 and r.plain_seconds > 0 for r in records)  # type: ignore[operator]
    assert keys["decode_setup"] == {"dtype": "float32", "device": "cpu", "threads": torch.get_num_threads(), "batch": 1}
    assert keys["speedup"]["tiny"]["lossless"] == 3
    assert keys["tau_decode"]["tiny"]["prompts"] == 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_several_prompts_at_once_give_the_same_records(
    folder: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "TURN", 1)  # groups of three: the last one is smaller
    chain = Chain(3, Sampling(temperature))
    kept = []
    for batch in (1, 3):
        records, keys = decode_tasks(trained_head(), tiny_target(), folder, [TASK], 8, chain, STOPS, 50, 0, batch=batch)
        assert keys["decode_setup"]["batch"] == batch
        assert all(r.seconds > 0 for r in records)  # type: ignore[operator]
        kept.append([replace(r, seconds=None, plain_seconds=None) for r in records])
    assert kept[0] == kept[1]
    assert len({r.tokens for r in kept[0]}) > 1


def test_an_output_that_is_not_the_targets_is_an_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(choice: Tensor, drafts: Tensor) -> tuple[int, list[int]]:
        return len(drafts), [*drafts.tolist(), int(choice[-1])]  # accepts everything

    monkeypatch.setattr("eagle3_train.decode.chain.accept_chosen", wrong)
    with pytest.raises(RuntimeError, match=r"prompt-10.*not lossless"):
        decode_tasks(trained_head(), tiny_target(), folder, [TASK], 8, Chain(3), STOPS, 50, 0)


def test_a_tie_is_recorded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runner = TargetRunner(tiny_target(), LAYER_IDS)
    prompt = torch.tensor([4, 9])
    logits = runner.forward([Query(torch.tensor([4, 9, 7]))], last_only=True)[0].logits[0]
    gap = float(abs(logits[1] - logits[2]))
    with pytest.raises(RuntimeError, match=r"\[2\].*\[1\]"):
        decode.compare(runner, prompt, [7, 1, 5], [7, 2, 5], "p")
    monkeypatch.setattr(decode, "TIE", gap + 1e-3)
    found = decode.compare(runner, prompt, [7, 1, 5], [7, 2, 5], "p")
    assert found == {"lossless": False, "first_difference": 1, "logit_gap": pytest.approx(gap, abs=1e-4)}
    assert "prompt 'p'" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="not lossless"):
        decode.compare(runner, prompt, [7, 1, 5], [7, 1], "p")


@pytest.fixture
def point(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    cfg = config.compose([f"paths.outputs={tmp_path}", "eval.decode_tasks=[]", "eval.bootstrap=50", "device=cpu"])
    cfg.paths.store = str(tmp_path / "store")
    write_store(tmp_path / "store", transcripts())
    (tmp_path / "store" / "transcripts").symlink_to(folder)
    cfg.eval.tasks, cfg.eval.decode_tasks, cfg.eval.decode_prompts = [TASK], ["tiny"], 2
    # The tiny target has no tokenizer that could name its stop tokens.
    for name, value in (
        ("prepare_target", "-"),
        ("load_tokenizer", None),
        ("stop_ids", STOPS),
    ):
        monkeypatch.setattr(f"eagle3_train.evaluate.point.{name}", lambda *a, value=value: value)
    return cfg


def trained(point: Config) -> dict[str, str]:
    """What train.json must hold to be this point's."""
    return {"train_identity": digest(point.point_identity)}


def test_measure_completes_the_result(point: Config) -> None:
    write_json(
        point.point_dir / "train.json",
        trained(point) | {"draft": "eagle3", "wall_seconds": {"train": 5.0}, "val_loss": 2.5},
    )
    result = measure(point, trained_head(), tiny_target())
    assert result == json.loads((point.point_dir / "result.json").read_text())
    assert (result["schema"], result["draft"], result["val_loss"]) == (1, "eagle3", 2.5)
    assert set(result["wall_seconds"]) == {"train", "replay", "decode"}
    assert result["eval_identity"] == digest(point.eval_identity)
    assert result["decode_identity"] == digest(point.decode_identity)
    assert result["transcripts"] == {"tiny": Store.open(f"{point.paths.store}/transcripts/tiny").fingerprint}
    assert len(result["alpha"]) == 3
    assert (result["tau_replay"]["tiny"]["prompts"], result["tau_decode"]["tiny"]["prompts"]) == (8, 2)
    records = read_records(point.point_dir / "records.jsonl")
    assert [r.method for r in records] == ["replay"] * 8 + ["decode"] * 2


def test_measure_of_trees(point: Config, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(point.point_dir / "train.json", trained(point))
    point.eval.trees = [TreeConfig(2, 2, 4)]
    result = measure(point, trained_head(), tiny_target())
    kinds = [(row["method"], row["shape"]) for row in result["evaluation"]]
    shape = "tree 2x2/4"
    assert kinds == [("replay", "chain"), ("replay", shape), ("decode", "chain"), ("decode", shape)]
    assert result["tau_decode"]["tiny"]["tau"] == result["evaluation"][2]["tau"]
    assert shape in capsys.readouterr().out


def test_a_table_of_tasks_and_temperatures(point: Config, tmp_path: Path) -> None:
    """Sampled transcripts are replayed as an expectation, and decoded by sampling, chain and tree."""
    folder = tmp_path / "more"
    write_store(folder / "tiny", transcripts(), {"temperature": 0.0, "max_new_tokens": NEW})
    sampling = {"temperature": 0.7, "max_new_tokens": NEW, "top_p": 0.9, "top_k": 5}
    write_store(folder / "warm", transcripts(), sampling)
    tensors = {"embed_tokens": tiny_part().embed_tokens, "norm_weight": tiny_part().norm_weight}
    spec = Store.open(folder / "warm").spec
    write_target_part(point.paths.store, spec, tensors | {"lm_head": tiny_part().lm_head}, tiny_part().config)
    (Path(point.paths.store) / "transcripts").unlink()
    (Path(point.paths.store) / "transcripts").symlink_to(folder)
    write_json(point.point_dir / "train.json", trained(point))
    point.eval.tasks = [TASK, replace(TASK, name="warm", temperature=0.7, top_p=0.9, top_k=5)]
    point.eval.decode_tasks, point.eval.trees = ["tiny", "warm"], [TreeConfig(2, 2, 4)]
    write_json(point.point_dir / "train.json", trained(point))
    result = measure(point, trained_head(), tiny_target())
    rows = [(r["task"], r["temperature"], r["method"], r["shape"]) for r in result["evaluation"]]
    both = [(task, t, method) for method in ("replay", "decode") for task, t in (("tiny", 0.0), ("warm", 0.7))]
    assert set(rows) == {(*kind, shape) for kind in both for shape in ("chain", "tree 2x2/4")}
    assert set(result["tau_decode"]) == {"tiny"}  # the result's own keys are of greedy chains
    point.eval.tasks[1].top_k = 6
    with pytest.raises(ValueError, match=r"'warm' were made with top_k=5, now 6"):
        measure(point, trained_head(), None)


def test_measure_without_the_target_replays_alone(point: Config) -> None:
    write_json(point.point_dir / "train.json", trained(point))
    result = measure(point, trained_head(), None)
    assert "tau_replay" in result
    assert not {"tau_decode", "speedup", "decode_setup", "decode_identity"} & set(result)


def test_measure_of_an_untrained_point_is_refused_before_any_work(point: Config) -> None:
    point.eval.tasks = [replace(TASK, name="nowhere")]
    with pytest.raises(ValueError, match="train the point first"):
        measure(point, trained_head(), None)


def refused(point: Config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(point, trained_head(), None)
    assert not (point.point_dir / "result.json").exists()


def test_transcripts_of_other_prompts_another_target_or_cut_are_refused(point: Config, tmp_path: Path) -> None:
    write_json(point.point_dir / "train.json", trained(point))
    own = tmp_path / "own"
    write_store(own / "tiny", transcripts(), {"temperature": 0.0, "max_new_tokens": NEW})
    (Path(point.paths.store) / "transcripts").unlink()
    (Path(point.paths.store) / "transcripts").symlink_to(own)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}")
    point.eval.tasks = [replace(TASK, path=str(prompts))]
    write_origin(own / "tiny", point.eval.tasks[0].prompt_identity)
    prompts.write_text('{"prompt": 1}')
    refused(point, "'tiny' were made with file=")
    prompts.write_text("{}")
    point.eval.tasks[0].max_prompt_tokens = 7
    refused(point, "max_prompt_tokens=384, now 7")
    point.eval.tasks[0].max_prompt_tokens, point.store.transcript_dtype = 384, "bf16"
    refused(point, "dtype: the store has 'fp32'")
    point.store.transcript_dtype = "fp32"
    manifest = own / "tiny" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"target_hash": "0"', '"target_hash": "1"'))
    refused(point, "target_hash: the store has '1'")
    manifest.write_text(text)
    (shard,) = (own / "tiny").glob("shard-*")
    data = shard.read_bytes()
    shard.write_bytes(data[:-9])
    refused(point, "has .* of .* bytes")
    shard.write_bytes(data)
    measure(point, trained_head(), None)


def test_a_target_of_other_weights_is_refused_before_it_is_loaded(
    point: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_train.evaluate.point.weight_hash", lambda folder: "other")
    with pytest.raises(ValueError, match="target_hash: the store has '0'"):
        check_target(point, Path("-"))


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(
    point: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(point.point_dir / "train.json", trained(point))

    def touch(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", touch)
    monkeypatch.setattr("eagle3_train.evaluate.point.replay_tasks", None)
    refused(point, r"cannot be written \(Read-only file system\)")

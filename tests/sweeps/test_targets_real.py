"""A study over two targets with everything real: two tiny ones of their own tokenizers and widths, to the report."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.capture.test_capture import write_chats
from tests.conftest import MakeTokenizer, save_tiny_llama
from tests.sweeps.conftest import ROOT, Bench

pytestmark = pytest.mark.slow

STUDY = (
    "corpus.sequences=32", "corpus.validation_sequences=4", "corpus.held_out_fraction=0.3", "corpus.min_supervised=4",
    "corpus.near_duplicates=null", "corpus.max_length=128", "capture.shards=2", "capture.batch_tokens=1024",
    "eval.tasks=[{name: held, source: held_out, prompts: 4, new_tokens: 8}]", "eval.decode_tasks=[held]",
    "eval.decode_prompts=2", "eval.bootstrap=20", "study.decode_points=[]", "store.dtype=fp32",
    "data.base_sequences=8", "draft.steps=2", "draft.vocab_size=100", "train.batch_tokens=256", "train.epochs=1",
)  # fmt: skip


def test_every_target_has_its_curve(bench: Bench, tiny_target: Path, make_tokenizer: MakeTokenizer) -> None:
    write_chats(bench.folder / "chats.json", 100)
    tokenizer = make_tokenizer(special=("<|im_start|>", "<|im_end|>", "<|other|>"))
    wide = save_tiny_llama(bench.folder / "wide", tokenizer, hidden_size=64, head_dim=16)
    targets = f"{{name: narrow, model: '{tiny_target}'}}, {{name: wide, model: '{wide}'}}"
    axes = f"study.axes={{target: [{targets}], data.scale: [1, 2], seed: [0]}}"
    out = bench.run("study", axes, f"corpus.path={bench.folder}/chats.json", *STUDY, PYTHONPATH=str(ROOT))
    results = [json.loads(path.read_text()) for path in bench.study.glob("*/result.json")]
    assert sorted((r["target"], r["data_scale"]) for r in results) == [
        (t, x) for t in ("narrow", "wide") for x in (1, 2)
    ]
    stores = {r["target"]: r["store_fingerprint"] for r in results}
    assert len(set(stores.values())) == 2
    for result in results:  # each was trained on, and decoded with, its own target
        assert result["store_fingerprint"] == stores[result["target"]]
        store = bench.study / "targets" / result["target"] / "store"
        assert json.loads((store / "manifest.json").read_text())["fingerprint"] == result["store_fingerprint"]
        # Greedy decoding, which is lossless with the right target alone, agrees with the replay of its transcripts.
        assert result["tau_decode"]["held"]["tau"] >= 1
    report = bench.study / "report"
    assert set(pd.read_csv(report / "results.csv")["target"]) == {"narrow", "wide"}
    for name in ("EAGLE-3, narrow", "EAGLE-3, wide"):
        assert name in out
        assert name in (report / "report.html").read_text()
    assert "trained on different stores" not in out + (report / "report.html").read_text()

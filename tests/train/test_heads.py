"""Every kind of head through the whole loop; a head without parameters is a point too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train.drafts import HEADS
from eagle3_train.train import load_head, train
from tests.train.tiny_store import make_study, tiny_config


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    make_study(folder)
    return folder


@pytest.mark.parametrize("kind", sorted(HEADS.keys() - {"eagle3", "hf", "prompt_lookup"}))
def test_a_run_learns_and_its_head_loads(outputs: Path, kind: str) -> None:
    cfg = tiny_config(outputs, draft__kind=kind, optim__lr="1e-2", train__epochs=2)
    train(cfg)
    head = load_head(cfg, torch.device("cpu"))
    lines = [json.loads(line) for line in (cfg.point_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [line["loss"] for line in lines if "loss" in line]
    assert curve[-1] < 0.95 * curve[0]
    record = json.loads((cfg.point_dir / "train.json").read_text())
    assert record["draft"] == kind
    assert all(ce > 0 for ce in record["val_loss_steps"])
    loaded = load_head(cfg, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["prompt_lookup", "hf"])
def test_what_is_not_trained_is_a_point_that_consumes_nothing(outputs: Path, kind: str, tiny_target: Path) -> None:
    cfg = tiny_config(outputs, draft__kind=kind, draft__hf__model=tiny_target, target__model=tiny_target)
    train(cfg)
    record = json.loads((cfg.point_dir / "train.json").read_text())
    assert (record["steps"], record["consumed_tokens"], record["train_flops"], record["epochs"]) == (0, 0, 0, 0)
    assert record["parameters"]["trainable"] == 0
    assert not {"val_loss", "train_tokens_per_s"} & record.keys()
    assert not (cfg.point_dir / "checkpoints").exists()
    assert load_head(cfg, torch.device("cpu")).steps == 3


def test_a_draft_model_with_another_tokenizer_is_refused(
    outputs: Path, tiny_target: Path, make_tokenizer: Any, tmp_path: Path
) -> None:
    make_tokenizer(special=("<|start|>", "<|im_end|>")).save_pretrained(tmp_path)
    cfg = tiny_config(outputs, draft__kind="hf", draft__hf__model=tmp_path, target__model=tiny_target)
    with pytest.raises(ValueError, match=r"another tokenizer than tiny: 2 tokens are not the same, '<\|"):
        train(cfg)

"""From a trained point to a folder, and from the folder to points again: as it is, and trained further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_train.cli import main
from eagle3_train.config import Config
from eagle3_train.drafts import Eagle3
from eagle3_train.train import load_head, train
from tests.train.tiny_store import make_study, overrides, tiny_config

CPU = torch.device("cpu")
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 12,
    "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    make_study(folder)
    config = folder / "tiny" / "store" / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | TARGET))
    train(point(folder))
    return folder


def point(folder: Path, **keys: object) -> Config:
    return tiny_config(folder, target__model="org/tiny", **keys)


def eagle3(folder: Path, step: str, **keys: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([step, *overrides(folder, target__model="org/tiny", **keys), "device=cpu"])
    return int(end.value.code or 0)


def test_a_point_goes_out_and_comes_back(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = load_head(point(study), CPU)
    folder = tmp_path / "head"
    for format in ("eagle", "speculators"):
        path = folder if format == "speculators" else tmp_path / "other"
        assert eagle3(study, "export", export__format=format, export__path=path, export__check="true") == 0
        assert "bit for bit" in capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/tiny"
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert "24 sequences" in (folder / "README.md").read_text()

    # As it is: a point without checkpoints.
    assert eagle3(study, "import", draft__init_from=folder, draft__vocab_size=4) == 0
    cfg = point(study, draft__init_from=folder, draft__vocab_size=4, train__regime="none")
    assert not (cfg.point_dir / "checkpoints").exists()
    result = json.loads((cfg.point_dir / "result.json").read_text())
    assert (result["steps"], result["consumed_tokens"], result["draft_vocab_size"]) == (0, 0, 20)
    back = load_head(cfg, CPU)
    assert all(torch.equal(t, back.state_dict()[name]) for name, t in head.state_dict().items())
    assert back.vocab.ids.tolist() == head.vocab.ids.tolist()

    # Trained further: from these weights, into a point of its own.
    more = point(study, draft__init_from=folder, optim__lr=1e-6)
    train(more)
    trained = load_head(more, CPU)
    assert more.point_dir != cfg.point_dir
    assert isinstance(trained, Eagle3)
    start = load_file(folder / "model.safetensors")["fc.weight"]
    assert 0 < (trained.fc.weight - start).abs().max() < 1e-3


def test_a_head_of_no_other_kind_can_be_imported(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert eagle3(study, "import") == 2
    assert "name it with draft.init_from" in capsys.readouterr().err
    assert eagle3(study, "import", draft__init_from="/nowhere", draft="eagle1") == 2
    assert "EAGLE-3 heads alone" in capsys.readouterr().err

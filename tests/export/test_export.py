"""What an export writes: every key an engine reads, every tensor it needs, whole or not at all; and back again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_train.config import Eagle3Config
from eagle3_train.export import check_export, export_head, read_published
from eagle3_train.export.check import check_round_trip, our_logits
from tests.export.heads import Target, make_source, rebuilt, same_weights

FORMATS = ("speculators", "eagle")
FP32 = torch.float32


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


SHAPES: dict[str, dict[str, Any]] = {
    "cut vocabulary": {},
    "whole vocabulary": {"ids": list(range(29))},
    "tied target": {"target": Target(tied=True)},
    "padded target vocabulary": {"target": Target(vocab=64)},
    "wide heads": {"target": Target(n_heads=6, n_kv=3, head_dim=8)},
    "two inputs": {"layer_ids": (1, 9)},
    "four inputs": {"layer_ids": (0, 3, 6, 11)},
    "all inputs normed": {"options": Eagle3Config(norm_before_fc=True, norm_before_residual=True)},
    "EAGLE-3.1": {"options": Eagle3Config(fc_norm=True, norm_output=True)},
    "another MLP": {"options": Eagle3Config(intermediate_size=16)},
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exported_head_comes_back_bit_for_bit(shape: str, format: str, tmp_path: Path) -> None:
    source = make_source(**SHAPES[shape])
    folder = export_head(source, tmp_path / "head", format, FP32)
    check_round_trip(source, folder, FP32)
    target = SHAPES[shape].get("target", Target())
    assert same_weights(rebuilt(source, folder, target, source.layer_ids), source.head)


def test_two_layers_have_no_eagle_format(tmp_path: Path) -> None:
    source = make_source(options=Eagle3Config(layers=2))
    folder = export_head(source, tmp_path / "head", "speculators", FP32)
    assert same_weights(rebuilt(source, folder, Target()), source.head)
    assert read_config(folder)["transformer_layer_config"]["num_hidden_layers"] == 2
    with pytest.raises(ValueError, match=r"one layer, the head has 2: use export\.format=speculators"):
        export_head(source, tmp_path / "other", "eagle", FP32)


@pytest.mark.parametrize("init_lm_head", ["target", "random"])
@pytest.mark.parametrize("width", [12, 30])
def test_a_head_of_another_width_has_its_projections_multiplied_in(
    width: int, init_lm_head: str, tmp_path: Path
) -> None:
    source = make_source(options=Eagle3Config(hidden_size=width), init_lm_head=init_lm_head)
    folder = export_head(source, tmp_path / "head", "speculators", FP32)
    check_round_trip(source, folder, FP32)
    config = read_config(folder)
    assert config["target_hidden_size"] == 24
    assert config["transformer_layer_config"]["hidden_size"] == width
    back = rebuilt(source, folder, Target())
    assert back.embed_tokens.shape == (29, width)
    ids, hidden = torch.arange(29), torch.randn(29, 4, 24, generator=torch.Generator().manual_seed(0))
    for a, b in zip(*(our_logits(head, FP32, ids, hidden) for head in (source.head, back)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_speculators_configuration_says_everything_that_vllm_reads(tmp_path: Path) -> None:
    config = read_config(export_head(make_source(), tmp_path / "head", "speculators", FP32))
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == 13
    assert config["target_hidden_size"] == 24
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "tie_word_embeddings")
    assert [config[k] for k in flags] == [False] * 5
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal == {
        "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/tiny", "architectures": ["LlamaForCausalLM"]}
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert layer["vocab_size"] == 29  # the target's
    assert layer["max_position_embeddings"] == 512
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == 1234.0
    assert layer["num_aux_hidden_states"] == 3
    assert layer["head_dim"] == 6


def test_the_eagle_configuration_serves_both_engines(tmp_path: Path) -> None:
    folder = export_head(make_source(), tmp_path / "head", "eagle", FP32)
    config = read_config(folder)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]  # vLLM: by the layer that the state enters
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]  # SGLang: that it leaves
    assert config["hidden_size"] == 24
    assert config["draft_vocab_size"] == 13
    names = load_file(folder / "model.safetensors")
    assert "midlayer.self_attn.q_proj.weight" in names
    assert not any(name.startswith("layers.") for name in names)


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_of_the_maps_and_the_embedding(format: str, tmp_path: Path) -> None:
    source = make_source()
    found = load_file(export_head(source, tmp_path / "head", format, torch.bfloat16) / "model.safetensors")
    assert found["d2t"].dtype == torch.int64
    assert (found["d2t"] + torch.arange(13)).tolist() == source.head.vocab.ids.tolist()  # an offset
    assert found["t2d"].dtype == torch.bool
    assert found["t2d"].nonzero().flatten().tolist() == source.head.vocab.ids.tolist()
    assert found["embed_tokens.weight"].shape == (29, 24)
    assert {t.dtype for t in found.values()} == {torch.bfloat16, torch.int64, torch.bool}
    assert found["fc.weight"].shape == (24, 72)


def test_a_whole_vocabulary_has_no_maps(tmp_path: Path) -> None:
    """vLLM has no parameter for d2t then, and refuses a file with one."""
    source = make_source(ids=list(range(29)))
    found = load_file(export_head(source, tmp_path / "head", "speculators", FP32) / "model.safetensors")
    assert not {"d2t", "t2d"} & found.keys()


def test_scaled_rotary_embeddings_are_written_whole(tmp_path: Path) -> None:
    target = Target()
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    target.config |= {"rope_parameters": scaled | {"original_max_position_embeddings": 64}}
    source = make_source(target)
    folder = export_head(source, tmp_path / "head", "eagle", FP32)
    config = read_config(folder)
    assert config["rope_scaling"] == config["rope_parameters"] == target.config["rope_parameters"]
    back = rebuilt(source, folder, target)
    assert torch.equal(back.rotary.inverse_frequencies, source.head.rotary.inverse_frequencies)


def test_bf16_comes_back_rounded_once(tmp_path: Path) -> None:
    source = make_source()
    folder = export_head(source, tmp_path / "head", "speculators", torch.bfloat16)
    check_round_trip(source, folder, torch.bfloat16)
    back = rebuilt(source, folder, Target())
    assert torch.equal(back.fc.weight, source.head.fc.weight.bfloat16().float())


def test_a_changed_file_fails_the_check(tmp_path: Path) -> None:
    source = make_source()
    folder = export_head(source, tmp_path / "head", "speculators", FP32)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"][3, 4] += 1e-6
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.up_proj\.weight came back changed"):
        check_round_trip(source, folder, FP32)


def test_only_an_earlier_export_is_replaced_and_a_failed_one_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "head"
    export_head(make_source(), folder, "speculators", FP32)
    export_head(make_source(), folder, "eagle", FP32)
    assert read_config(folder)["architectures"] == ["LlamaForCausalLMEagle3"]

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("eagle3_train.export.write.write_json", full_disk)
    with pytest.raises(OSError, match="no space"):
        export_head(make_source(), folder, "speculators", FP32)
    assert read_config(folder)["architectures"] == ["LlamaForCausalLMEagle3"]
    assert "midlayer.hidden_norm.weight" in load_file(folder / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    monkeypatch.undo()

    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="no exported head"):
        export_head(make_source(), folder, "speculators", FP32)
    assert (folder / "notes.txt").read_text() == "mine"


def test_the_card_says_what_the_head_is_and_how_to_serve_it(tmp_path: Path) -> None:
    row = {
        "task": "humaneval", "temperature": 0.0, "method": "replay", "shape": "chain", "tau": 1.5, "tau_lo": 1.4,
        "tau_hi": 1.6, "alpha": [0.4, None], "prompts": 8,
    }  # fmt: skip
    result = {
        "target": "tiny", "unique_sequences": 12, "unique_tokens": 3456, "supervised_tokens": 2000,
        "consumed_tokens": 6912, "steps": 20, "study": "s", "point": "p", "vocab_coverage": 0.97, "evaluation": [row],
    }  # fmt: skip
    folder = export_head(make_source(), tmp_path / "head", "speculators", FP32, result)
    card = (folder / "README.md").read_text()
    for words in (
        "EAGLE-3 draft head for tiny", "decoder layers 2, 6, 9", "3,456 tokens", "97.0%", "13 of the target's 29",
        "| humaneval | 0 | replay | chain | 1.50 (1.40-1.60) | 0.40 - | 8 |",
        "vllm serve org/tiny", '"method": "eagle3"',
    ):  # fmt: skip
        assert words in card, words
    assert "Not measured." in (export_head(make_source(), tmp_path / "b", "eagle", FP32) / "README.md").read_text()


@pytest.mark.parametrize("origin", [None, "package:llm_x/tiny.gguf"])
def test_the_card_names_a_local_folder_once_and_what_it_was_made_of(origin: str | None, tmp_path: Path) -> None:
    source = replace(make_source(), target_name="/here/target-model", converted_from=origin)
    card = (export_head(source, tmp_path / "head", "eagle", FP32, {"target": "tiny"}) / "README.md").read_text()
    assert card.count("/here/target-model") == 1
    assert "vllm serve TARGET --speculative" in card
    assert "TARGET the folder of the target" in card
    assert "--model-path TARGET" in card
    assert "For tiny alone" in card
    assert origin is None or f"`{origin}` (converted to `/here/target-model`)" in card


def test_check_says_what_to_install_where_the_library_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eagle3_train.export.check.peer_python", lambda: None)
    source = make_source()
    check_export(source, export_head(source, tmp_path / "head", "speculators", FP32), FP32)
    said = capsys.readouterr().out
    assert "bit for bit" in said
    assert "EAGLE3_SPECULATORS_PYTHON" in said


def test_layer_ids_of_both_conventions_are_read_as_ours(tmp_path: Path) -> None:
    folder = export_head(make_source(), tmp_path / "head", "eagle", FP32)
    config = read_config(folder)
    del config["eagle_aux_hidden_state_layer_ids"]  # as SGLang's own heads are
    (folder / "config.json").write_text(json.dumps(config))
    assert read_published(folder).layer_ids == (2, 6, 9)

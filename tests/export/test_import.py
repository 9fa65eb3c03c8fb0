"""Published heads of every age are read; what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_train.config import DraftConfig
from eagle3_train.export import export_head, read_published, start_from
from tests.export.heads import Target, make_source, rebuilt, same_weights

Tensors = dict[str, Tensor]


def rewrite(folder: Path, tensors: Callable[[Tensors], Tensors] | None = None, **config: Any) -> Path:
    """Change a head on disk; a key given as None is removed. Without an own layer configuration the keys are flat."""
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    old = json.loads((folder / "config.json").read_text())
    new = {k: v for k, v in (old | config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(new))
    return folder


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    return export_head(make_source(), tmp_path / "head", "eagle", torch.float32)


def test_a_head_as_the_first_ones_were_published(eagle: Path) -> None:
    """PyTorch's own file, no layer ids, no embedding, a `model.` prefix, old rotary keys, no optional sizes."""
    tensors = load_file(eagle / "model.safetensors")
    del tensors["embed_tokens.weight"]
    renamed = {f"model.{k}" if k.startswith(("midlayer", "fc", "norm")) else k: t for k, t in tensors.items()}
    torch.save(renamed, eagle / "pytorch_model.bin")
    (eagle / "model.safetensors").unlink()
    gone = (
        "eagle_aux_hidden_state_layer_ids", "eagle_config", "rope_parameters", "head_dim", "target_hidden_size",
        "norm_before_residual", "dtype",
    )  # fmt: skip
    rewrite(eagle, **dict.fromkeys(gone))
    source, target = make_source(), Target()
    back = rebuilt(source, eagle, target)  # (2, 12 // 2, 12 - 3): what engines take where nothing is said
    assert torch.equal(back.embed_tokens, target.embed_tokens)
    assert torch.equal(back.rotary.inverse_frequencies, source.head.rotary.inverse_frequencies)
    assert all(torch.equal(t, back.state_dict()[k]) for k, t in source.head.state_dict().items())
    assert back.vocab.ids.tolist() == source.head.vocab.ids.tolist()


def test_own_embedding_and_own_sizes_are_the_files(tmp_path: Path) -> None:
    source = make_source(Target(n_heads=6, n_kv=3, head_dim=8))
    source.head.embed_tokens.add_(1)
    folder = export_head(source, tmp_path / "head", "speculators", torch.float32)
    back = rebuilt(source, folder, Target())  # of a target whose own layers have other sizes
    assert same_weights(back, source.head)
    assert back.dims == source.head.dims


def test_rows_of_padding_are_cut_from_the_embedding(eagle: Path) -> None:
    rewrite(eagle, lambda t: t | {"embed_tokens.weight": torch.cat((t["embed_tokens.weight"], torch.ones(3, 24)))})
    assert rebuilt(make_source(), eagle, Target()).embed_tokens.shape == (29, 24)


def test_a_head_that_uses_the_targets_lm_head(tmp_path: Path) -> None:
    source, target = make_source(ids=list(range(29))), Target()
    folder = export_head(source, tmp_path / "head", "eagle", torch.float32)
    rewrite(folder, lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"})
    assert torch.equal(rebuilt(source, folder, target).lm_head.weight, target.lm_head)
    rewrite(folder, tie_word_embeddings=True)
    assert torch.equal(rebuilt(source, folder, target).lm_head.weight, source.head.embed_tokens)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name]).contiguous()}


def maps(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    """d2t changed, and no t2d that says otherwise."""
    return lambda tensors: {k: v for k, v in changed("d2t", change)(tensors).items() if k != "t2d"}


def added(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(6)}


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (without("midlayer.mlp.up_proj.weight"), {}, r"layers\.0\.mlp\.up_proj\.weight is missing"),
        (added("midlayer.self_attn.q_norm.weight"), {}, r"q_norm\.weight is unknown"),
        (changed("norm.weight", lambda t: t[:-1]), {}, r"norm\.weight is \[23\] where \[24\]"),
        (without("d2t"), {}, r"lm_head has 13 rows, the target's vocabulary 29, and no d2t"),
        (maps(lambda t: t + 20), {}, r"d2t leads to target ids .* the target has 29"),
        (maps(lambda t: t[:-1]), {}, "d2t maps 12 tokens, lm_head has 13"),
        (changed("d2t", lambda t: t.flip(0)), {}, "d2t and t2d say different draft vocabularies"),
        (changed("d2t", lambda t: t + 0.4), {}, r"d2t is torch\.float32 .* integers"),
        (changed("d2t", lambda t: t.bfloat16()), {}, r"d2t is torch\.bfloat16"),
        (changed("norm.weight", lambda t: t / 0), {}, r"norm\.weight holds values that are no finite"),
        (changed("fc.weight", lambda t: t.to(torch.int8)), {}, r"fc\.weight is torch\.int8: quantised"),
        (changed("fc.weight", lambda t: t[0]), {}, r"fc\.weight is \[72\], where a matrix"),
        (changed("lm_head.weight", lambda t: t[0, 0]), {}, r"lm_head\.weight is \[\], where a matrix"),
        (added("layers.0.mlp.up_proj.weight"), {}, r"mlp\.up_proj\.weight is there twice"),
        (added("model.fc.weight"), {}, r"fc\.weight is there twice"),
        (None, {"norm_before_residual": "false"}, "norm_before_residual='false' where true or false"),
        (None, {"target_hidden_size": 0}, "target_hidden_size=0 where a number of at least 1"),
        (None, {"num_attention_heads": "4"}, "num_attention_heads='4' where"),
        (None, {"rope_parameters": {"rope_theta": -1.0}}, "rope_theta=-1.0 where a positive number"),
        (None, {"rope_scaling": "yarn"}, "rope_scaling='yarn', which is no object"),
        (None, {"rope_parameters": {"rope_type": "new"}}, "rope_type 'new' is not one of"),
        (None, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' .*factor"),
        (None, {"eagle_aux_hidden_state_layer_ids": 3}, "layer_ids=3 must be different layers"),
        (None, {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}, r"layer_ids=\[2, 3, 3\] must be"),
        (None, {"eagle_aux_hidden_state_layer_ids": ["1", "3", "4"]}, "must be different layers"),
        (None, {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": [1]}, "eagle_config=.1., which is no object"),
        (changed("embed_tokens.weight", lambda t: t[:20]), {}, r"embed_tokens is \[20, 24\], the target has 29 tokens"),
        (changed("fc.weight", lambda t: t[:, :-1]), {}, r"fc\.weight is \[24, 71\]"),
        (changed("fc.weight", lambda t: t[:, :48]), {}, "3 layer ids, but fc.weight takes 2 states"),
        (without("fc.weight"), {}, "no EAGLE-3 head"),
        (None, {"eagle_aux_hidden_state_layer_ids": [1, 6, 9]}, r"layers \[1, 6, 9\], the store holds \[2, 6, 9\]"),
        (None, {"attention_bias": True}, "attention_bias=True is not supported"),
        (None, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (None, {"model_type": "mixtral"}, "model_type 'mixtral'"),
        (None, {"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001, the target 1e-05"),
        (None, {"speculators_model_type": "dflash"}, "a 'dflash' head"),
    ],
)
def test_what_does_not_fit_is_named(
    eagle: Path, tensors: Callable[[Tensors], Tensors] | None, config: dict[str, Any], words: str
) -> None:
    rewrite(eagle, tensors, **config)
    with pytest.raises(ValueError, match=words):
        rebuilt(make_source(), eagle, Target())


def test_readers_that_disagree_about_a_missing_key_are_not_guessed_between(tmp_path: Path) -> None:
    folder = export_head(make_source(), tmp_path / "head", "speculators", torch.float32)
    rewrite(folder, norm_before_residual=None)
    with pytest.raises(ValueError, match="does not say norm_before_residual"):
        read_published(folder)


def test_a_folder_that_is_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no config"):
        read_published(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no hidden_size"):
        read_published(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 24}')
    with pytest.raises(ValueError, match="holds no weights"):
        read_published(tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 64])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights_are_named(eagle: Path, name: str, content: bytes) -> None:
    (eagle / "model.safetensors").unlink()
    (eagle / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged, or no file of weights"):
        read_published(eagle)


def test_files_and_parts_of_another_kind_are_named(eagle: Path) -> None:
    (eagle / "model.safetensors").unlink()
    (eagle / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match="holds no weights"):
        read_published(eagle)
    torch.save([torch.ones(1)], eagle / "pytorch_model.bin")
    with pytest.raises(ValueError, match="something else than tensors by name"):
        read_published(eagle)
    for layer in ('"text"', "null"):
        (eagle / "config.json").write_text(f'{{"transformer_layer_config": {layer}}}')
        with pytest.raises(ValueError, match=r"transformer_layer_config=.* no object"):
            read_published(eagle)
    for content in ("[]", "null", "{"):
        (eagle / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"config\.json .*: fetch the head again"):
            read_published(eagle)


def test_coverage_is_that_of_the_store(eagle: Path) -> None:
    counts = np.zeros(29, int)
    counts[[0, 1, 2]] = (6, 3, 1)  # 1 is outside the draft vocabulary
    head = start_from(read_published(eagle), DraftConfig(steps=3), Target(), counts, (2, 6, 9))
    assert head.vocab.coverage == 0.7

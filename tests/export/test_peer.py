"""The speculators library loads an exported head and computes our logits.

`benchmarks/contenders/install.sh` makes an environment with it; EAGLE3_SPECULATORS_PYTHON names its interpreter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_train.config import Eagle3Config
from eagle3_train.export import export_head
from eagle3_train.export.check import TOLERANCE, compare_with_peer, peer_python
from tests.export.heads import Target, make_source

FP32 = torch.float32
pytestmark = pytest.mark.skipif(peer_python() is None, reason="EAGLE3_SPECULATORS_PYTHON names no interpreter")

SHAPES: dict[str, dict[str, Any]] = {
    "cut vocabulary": {},
    "whole vocabulary": {"ids": list(range(29))},
    "padded target vocabulary": {"target": Target(vocab=64)},
    "two inputs": {"layer_ids": (1, 9)},
    "four inputs, wide heads": {"layer_ids": (0, 3, 6, 11), "target": Target(n_heads=6, n_kv=3, head_dim=8)},
    "two layers": {"options": Eagle3Config(layers=2)},
    "all inputs normed": {"options": Eagle3Config(norm_before_fc=True, norm_before_residual=True)},
    "EAGLE-3.1": {"options": Eagle3Config(fc_norm=True, norm_output=True)},
    "another order of layers": {},
}


def write_verifier(folder: Path, target: Target) -> str:
    """The library looks up the target's configuration, and loads its ends for training."""
    (folder / "config.json").write_text(json.dumps(target.config))
    ends = {"embed_tokens": target.embed_tokens, "norm": target.norm_weight}
    tensors = {f"model.{name}.weight": t for name, t in ends.items()} | {"lm_head.weight": target.lm_head}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """By shape; the library starts once. The last head is not the exported one: columns of `fc` in another order."""
    exports = []
    for shape in SHAPES.values():
        verifier = write_verifier(tmp_path_factory.mktemp("target"), shape.get("target", Target()))
        source = make_source(**shape, name=verifier)
        exports.append((source, export_head(source, tmp_path_factory.mktemp("h") / "head", "speculators", FP32)))
    with torch.no_grad():
        exports[-1][0].head.fc.weight.copy_(exports[-1][0].head.fc.weight.roll(24, 1))
    python = peer_python()
    assert python is not None
    return dict(zip(SHAPES, compare_with_peer(exports, FP32, python), strict=True))


@pytest.mark.parametrize("shape", list(SHAPES)[:-1])
def test_the_library_computes_our_logits(shape: str, differences: dict[str, float]) -> None:
    assert differences[shape] <= TOLERANCE


def test_another_order_of_layers_is_seen(differences: dict[str, float]) -> None:
    assert differences["another order of layers"] > 0.1

"""Heads other than EAGLE-3 in vLLM's formats: names and shapes that its classes have, refusals, and vLLM itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_train.config import DraftConfig, Eagle1Config, MedusaConfig
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.drafts import Draft, DraftBatch, DraftVocab, Eagle1, Medusa, build
from eagle3_train.evaluate.serve.server import ENVIRONMENT, method_of, vllm_python
from eagle3_train.export import HeadSource, check_export, export_head
from tests.alone import chain
from tests.drafts.tiny import H, V
from tests.evaluate.tiny import HardLoss, TinyPart
from tests.export.heads import Target, make_source
from tests.export.vllm_runs import NEW

FP32 = torch.float32
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle1": {"eagle1": Eagle1Config(bias=False)},
    "medusa": {"medusa": MedusaConfig(layers=2)},
}


def source_of(kind: str, ids: list[int] | None = None, **options: Any) -> HeadSource:
    torch.manual_seed(0)
    vocab = DraftVocab(np.array(ids or range(V)), V, 1.0)
    head = build(DraftConfig(kind=kind, steps=3, **(OPTIONS.get(kind, {}) | options)), Target(), vocab, 3)
    assert isinstance(head, Eagle1 | Medusa)
    return HeadSource(head.eval(), Target().config, "org/tiny", (2, 6, 9))


def test_eagle1_has_the_names_of_vllms_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = source_of("eagle1", ids=[1, 4, 7])  # its parameters do not depend on the draft vocabulary
    folder = export_head(source, tmp_path / "head", "auto", FP32)
    layer = {
        "self_attn.q_proj": [H, H], "self_attn.k_proj": [H // 2, H], "self_attn.v_proj": [H // 2, H],
        "self_attn.o_proj": [H, H], "mlp.gate_proj": [40, H], "mlp.up_proj": [40, H], "mlp.down_proj": [H, 40],
        "post_attention_layernorm": [H],
    }  # fmt: skip
    shapes = {name: list(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    assert shapes == {"fc.weight": [H, 2 * H]} | {f"layers.0.{k}.weight": shape for k, shape in layer.items()}
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["num_hidden_layers"], config["vocab_size"], config["head_dim"]) == (1, V, 6)
    assert method_of(folder) == "eagle"
    assert '"method": "eagle"' in (folder / "README.md").read_text()
    check_export(source, folder, FP32)
    assert "bit for bit" in capsys.readouterr().out


def test_medusa_has_the_names_of_vllms_class(tmp_path: Path) -> None:
    source = source_of("medusa")
    folder = export_head(source, tmp_path / "head", "medusa", FP32)
    shapes = {name: list(t.shape) for name, t in load_file(folder / "model.safetensors").items()}
    expected = {f"lm_heads.{i}.weight": [V, H] for i in range(3)}
    expected |= {f"blocks.{i}.layers.{j}.weight": [H, H] for i in range(3) for j in range(2)}
    expected |= {f"blocks.{i}.layers.{j}.bias": [H] for i in range(3) for j in range(2)}
    assert shapes == expected
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == ("medusa", 3, 2)
    assert (config["vocab_size"], config["truncated_vocab_size"], config["medusa_fc_bias"]) == (V, V, True)
    assert method_of(folder) == "medusa"
    export_head(source, folder, "auto", FP32)  # its own folder may be replaced
    check_export(source, folder, FP32)


def test_what_no_engine_reads_is_refused(tmp_path: Path) -> None:
    for source, reason in (
        (source_of("eagle1", eagle1=Eagle1Config()), r"draft\.eagle1\.bias=false"),
        (source_of("eagle1", eagle1=Eagle1Config(bias=False, inputs="fused")), "inputs=fused"),
        (source_of("medusa", ids=[1, 4, 7]), rf"draft\.vocab_size={V}"),
    ):
        with pytest.raises(ValueError, match=reason):
            export_head(source, tmp_path / "head", "auto", FP32)
    with pytest.raises(ValueError, match=r"export\.format=medusa holds no heads of draft\.kind=eagle3"):
        export_head(make_source(), tmp_path / "head", "medusa", FP32)
    assert not (tmp_path / "head").exists()


def fitted(kind: str, model: LlamaForCausalLM, vocab_size: int) -> tuple[Draft, list[list[int]]]:
    """A head fitted to texts of the target's own, so that it is right now and then, and the prompts of these."""
    torch.manual_seed(0)
    text = model.generate(
        torch.randint(vocab_size, (6, 5)), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    states: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    model(input_ids=text)
    hook.remove()
    n, length = text.shape
    hidden = states[0].flatten(0, 1)[:, None].expand(-1, 4, -1)
    mask, starts = np.ones(n * length, bool), list(range(0, n * length + 1, length))
    batch = DraftBatch(text.flatten(), hidden, np.zeros(n * length, np.int32), mask, starts)
    part = TinyPart(
        model.config.to_dict(), model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight,
        model.model.layers[-1].state_dict(),
    )  # fmt: skip
    vocab = DraftVocab(np.arange(vocab_size), vocab_size, 1.0)
    head = build(DraftConfig(kind=kind, steps=3, **OPTIONS[kind]), part, vocab, 3).train()
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    with torch.enable_grad():
        for _ in range(80):
            optimizer.zero_grad()
            head(batch, HardLoss()).backward()
            optimizer.step()
    return head.eval(), text[:, :5].tolist()


@pytest.mark.skipif("EAGLE3_TEST_ENGINES" not in os.environ, reason="starts vLLM: EAGLE3_TEST_ENGINES=1 asks for it")
@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_vllm_drafts_with_the_exported_head_as_we_do(kind: str, tmp_path: Path) -> None:
    """The same outputs, and as many drafts accepted: all but those beyond the ends, which vLLM counts."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(tmp_path / "target")
    head, prompts = fitted(kind, model, 64)
    assert isinstance(head, Eagle1 | Medusa)
    source = HeadSource(head, config.to_dict() | {"dtype": "float32"}, str(tmp_path / "target"), (1, 2, 3))
    folder = export_head(source, tmp_path / "head", "auto", FP32)
    speculative = {"method": method_of(folder), "model": str(folder), "num_speculative_tokens": 3}
    done = subprocess.run(
        [vllm_python(), str(Path(__file__).with_name("vllm_runs.py")), str(tmp_path / "target"),
         json.dumps(speculative), json.dumps(prompts)],
        capture_output=True, text=True, env=ENVIRONMENT | dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    runner = TargetRunner(model, [4])
    ours = [chain(runner, head, torch.tensor(p), NEW, [], 3) for p in prompts]
    assert found["tokens"] == [out.tokens for out in ours]
    accepted = sum(a for out in ours for a in out.accepted)
    assert accepted > len(prompts), "the head is never right: nothing is compared"
    assert found["counters"]["drafts"] == sum(len(out.accepted) for out in ours)
    assert accepted <= found["counters"]["accepted_tokens"] <= accepted + 3 * len(prompts)

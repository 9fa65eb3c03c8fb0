"""The estimator against numbers worked out by hand, and against what a real run counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_train import config
from eagle3_train.capture import capture
from eagle3_train.config import Config, Eagle3Config
from eagle3_train.corpus import prepare
from eagle3_train.files import read_json, write_json
from sweeps import cost
from sweeps.estimate import describe
from sweeps.heads import COSTS, head_cost
from sweeps.points import plan
from tests.capture.test_capture import study, write_chats
from tests.drafts.tiny import TinyTarget, tiny_batch, tiny_draft, tiny_sequence

# SmolLM2-135M-Instruct's own config.json, as far as the estimate reads it.
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config.compose([f"paths.outputs={tmp_path}", "train.epochs=2", "draft.steps=3", "draft.vocab_size=4096"])


def test_parameters_of_the_target() -> None:
    # The file itself has 134,515,008: the norms' 30 * 2 * 576 + 576 are left out.
    assert cost.Shape.of(SMOLLM2).parameters == 134_515_008 - 61 * 576


def test_flops_agree_with_what_a_training_run_counted(cfg: Config) -> None:
    # What training counts row by row, of the corpus of a real run (128 sequences, 2 epochs, K 3, D 4096).
    data = cost.Data(sequences=128, tokens=46_998, supervised=35_693, exact=True)
    assert cost.training_flops(cfg, cost.Shape.of(SMOLLM2), data) == pytest.approx(8_868_522_977_280, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in sorted(COSTS)),
        ("eagle3", {"layers": 2}),
        ("eagle3", {"lm_head": "frozen"}),
        ("eagle3", {"intermediate_size": 10}),
        ("eagle3", {"hidden_size": 12}),
        ("eagle3", {"hidden_size": 48, "layers": 2}),
    ],
)
def test_cost_of_each_kind_agrees_with_what_the_head_itself_counts(
    cfg: Config, kind: str, options: dict[str, Any]
) -> None:
    """On one long turn, where the rows that later steps lose are few."""
    target = TinyTarget()
    sequence = tiny_sequence(120, [(1, 120)], 0)
    cfg.draft.kind, cfg.draft.steps, cfg.draft.vocab_size, cfg.train.epochs = kind, 4, 13, 1
    cfg.draft.eagle3 = Eagle3Config(**options)
    head = tiny_draft(kind, 4, target=target, eagle3=cfg.draft.eagle3)
    shape, data = cost.Shape.of(target.config | {"num_hidden_layers": 1}), cost.Data(1, 120, 119, exact=True)
    own = head_cost(cfg.draft, shape, 3)
    assert own.parameters == sum(p.numel() for p in head.parameters() if p.dim() == 2 and p.requires_grad)
    flops = cost.training_flops(cfg, shape, data)
    assert flops == pytest.approx(head.flops(tiny_batch([sequence])), rel=0.06)


def test_bytes_of_the_store_agree_with_a_real_one(cfg: Config) -> None:
    data = cost.Data(sequences=256, tokens=97529, supervised=72876, exact=True)
    assert cost.store_bytes(cfg, cost.Shape.of(SMOLLM2), data) == pytest.approx(450_637_679, rel=0.01)


def test_states_of_one_byte_have_a_scale_each(cfg: Config) -> None:
    cfg.store.dtype = "fp8"
    data = cost.Data(sequences=1, tokens=100, supervised=50, exact=True)
    assert cost.store_bytes(cfg, cost.Shape.of(SMOLLM2), data) == 100 * 4 * (576 + 4)


def test_a_plan_on_paper(tmp_path: Path) -> None:
    """Of a model that is not here: by hand."""
    text = describe(plan(["study=scale_llama33_70b"]))
    tokens = 8 * 531_000 * 1256
    assert f"4,248,000 sequences, about {tokens:,} tokens" in text
    assert f"disk: about {tokens * 4 * 8192 * 2 / 2**40:.2f} TiB" in text
    parameters = 80 * (2 * 8192 * (8192 + 1024) + 3 * 8192 * 28672) + 128256 * 8192
    assert f"({2 * parameters * tokens / 350e12 / 3600:,.0f} device-hours at plan.capture_tflops=350)" in text
    head = 3 * 8192**2 + 2 * 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672 + 32000 * 8192
    assert f"exchanges {3 * 4 * head * 7 / 8 / 2**30:.2f} GiB a step" in text  # fsdp2 on eight nodes
    assert f"{24 * 4_248_000 / 2**20:.0f} MiB of the store's index" in text
    cfg = config.compose([f"paths.outputs={tmp_path}"])
    assert cost.shape_of(cfg) == cost.Shape.of(SMOLLM2)
    cfg.target.model = "/another"  # of which the sizes in conf/target/ are not
    assert cost.shape_of(cfg) is None
    cfg.target.shape = {"hidden_size": 8}
    with pytest.raises(ValueError, match=r"target\.shape has no 'num_attention_heads'"):
        cost.shape_of(cfg)


def test_a_plan_is_near_what_the_study_then_takes(tmp_path: Path, tiny_target: Path) -> None:
    """The mean length is that of thirty conversations in another order; what follows is real, on a tiny target."""
    write_chats(tmp_path / "chats.json", 200)
    sample = study(tmp_path, tiny_target, "study.name=sample", "corpus.sequences=30", "corpus.seed=1")
    prepare(sample)
    found = cost.data_of(sample)
    mean, share = found.tokens / found.sequences, found.supervised / found.tokens
    assumed = (f"plan.tokens_per_sequence={mean}", f"plan.supervised_share={share}")
    cfg = study(tmp_path, tiny_target, "corpus.sequences=100", *assumed)
    planned, shape = cost.data_of(cfg), cost.Shape.of(read_json(tiny_target / "config.json"))
    before = cost.beside_bytes(cfg, shape, planned)
    prepare(cfg)
    capture(cfg)
    counted = cost.data_of(cfg)
    assert (planned.exact, planned.assumed, counted.exact) == (False, f"plan.tokens_per_sequence={mean:g}", True)
    assert planned.tokens == pytest.approx(counted.tokens, rel=0.25)
    assert planned.supervised == pytest.approx(counted.supervised, rel=0.25)
    on_disk = sum(path.stat().st_size for path in Path(cfg.paths.store).glob("shard-*"))
    assert cost.store_bytes(cfg, shape, planned) == pytest.approx(on_disk, rel=0.25)
    counts = cost.beside_bytes(cfg, shape, counted)
    for part, folder in (("validation", "validation"), ("transcripts", "transcripts"), ("the target's ends", "target")):
        files = (Path(cfg.paths.store) / folder).rglob("*")
        there = sum(p.stat().st_size for p in files if p.suffix in (".parquet", ".safetensors"))
        assert counts[part] == pytest.approx(there, rel=0.2)  # footers and indexes weigh much in files this small
        assert before[part] > 0.7 * there


def test_fixed_steps_are_passes_over_the_data(cfg: Config) -> None:
    cfg.train.regime, cfg.train.steps, cfg.train.batch_tokens = "steps", 100, 2000
    assert cost.epochs(cfg, cost.Data(10, 50_000, 1, exact=True)) == 4.0


def test_what_is_known_grows_from_bounds_to_counts_to_hours(tmp_path: Path) -> None:
    overrides = [f"paths.outputs={tmp_path}", "corpus.sequences=256", "corpus.max_length=512", "target.model=/other"]
    overrides += ["plan.tokens_per_sequence=null"]
    study = plan(overrides)
    assert "at most 131,072 tokens; disk and FLOPs are known once" in describe(study)
    write_json(Path(study.cfg.paths.target) / "config.json", SMOLLM2)
    text = describe(study)
    assert "at most 576 MiB of hidden states" in text
    assert "supervised" not in text  # not known yet
    assert text.count("at most") == 6  # tokens, three sizes, both FLOPs
    with pytest.raises(ValueError, match="between 0 and 29, since the target has 30 layers"):
        plan([*overrides, "capture.layer_ids=[2,99]"])
    part = {"sequences": 256, "tokens": 97529, "supervised_tokens": 72876}
    write_json(Path(study.cfg.paths.corpus) / "report.json", {"parts": {"train": part}})
    text = describe(study)
    assert "256 sequences, 97,529 tokens, 72,876 of them supervised" in text
    assert "disk: 429 MiB of hidden states" in text
    assert " at " not in text.splitlines()[-1].partition("train all points")[2]  # no hours yet
    assert "at launch.tflops=2 a process" in describe(plan([*overrides, "launch.tflops=2"]))
    trained = {"train_flops": 1e12, "wall_seconds": {"train": 2.0}}
    (study.points[0].dir).mkdir(parents=True)
    (study.points[0].dir / "train.json").write_text(json.dumps(trained))
    assert "at the 0.5 TFLOP/s of the points that are trained" in describe(study)

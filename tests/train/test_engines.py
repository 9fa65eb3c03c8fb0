"""Every engine gives the single process's curve, continues what another one left, and is what was asked for."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_train.config import EngineConfig, OptimConfig
from eagle3_train.exits import REQUEUE
from eagle3_train.train import train
from eagle3_train.train.distributed import World
from eagle3_train.train.engines import ENGINES
from eagle3_train.train.engines.deepspeed import DeepSpeed, deepspeed_config
from tests.train.conftest import NewOutputs
from tests.train.ranks import run_ranks, train_tiny, train_with_signal
from tests.train.results import losses, newest, record, rows
from tests.train.tiny_store import tiny_config

pytestmark = pytest.mark.distributed
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
MICRO = {"train__micro_batch_tokens": 30}  # several micro-batches a step: gradients add up
CURVE = {"rtol": 2e-5}


def zero(stage: int, offload: str = "none") -> dict[str, Any]:
    keys = {"stage": stage, "offload_optimizer__device": offload}
    return {"engine": "deepspeed"} | {f"engine__deepspeed__zero_optimization__{k}": v for k, v in keys.items()}


@pytest.fixture(scope="module")
def single(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The curve that all others are held against."""
    folder = tmp_path_factory.mktemp("single")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "store").symlink_to(study / "tiny" / "store")
    torch.set_num_threads(1)
    train(tiny_config(folder))
    return folder


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        pytest.param({"engine": "auto"}, 2, id="ddp"),
        pytest.param({"engine": "fsdp2"}, 2, id="fsdp2"),
        pytest.param({"engine": "hsdp", "engine__shard_size": 2}, 4, id="hsdp"),
        pytest.param({"engine": "accelerate"}, 2, id="accelerate"),
        pytest.param(zero(1), 2, id="zero1", marks=needs_deepspeed),
        pytest.param(zero(2, "cpu"), 2, id="zero2-offload", marks=needs_deepspeed),
        pytest.param(zero(3), 2, id="zero3", marks=needs_deepspeed),
    ],
)
def test_engines_give_the_single_process_curve(
    single: Path, outputs: NewOutputs, keys: dict[str, Any], ranks: int
) -> None:
    folder = outputs("parallel")
    run_ranks(ranks, train_tiny, folder / "log", folder, MICRO | keys)
    np.testing.assert_allclose(losses(folder), losses(single), **CURVE)
    one, several = record(single), record(folder)
    assert one["consumed_tokens"] == several["consumed_tokens"]
    assert one["val_loss"] == pytest.approx(several["val_loss"], rel=1e-4)
    assert one["parameters"] == several["parameters"]
    assert one["train_flops"] == pytest.approx(several["train_flops"], rel=0.01)  # but for what is cut into passes
    norms = [[row["grad_norm"] for row in rows(f) if "grad_norm" in row] for f in (single, folder)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)


def test_a_checkpoint_moves_between_engines_and_world_sizes(single: Path, outputs: NewOutputs) -> None:
    """Several engines take turns on one run; every one continues the same batches and the same curve."""
    folder = outputs("moved")
    turns: list[dict[str, Any]] = [{"engine": "fsdp2"}, {"engine": "accelerate"}]
    turns += [zero(3), zero(1)] if find_spec("deepspeed") else []
    turns.append({"engine": "ddp"})
    for keys in turns:  # three steps each, on two ranks
        run_ranks(2, train_with_signal, folder / "log", folder, keys, 2, signal.SIGTERM, code=REQUEUE)
    assert newest(folder).step == 3 * len(turns)
    train(tiny_config(folder))
    np.testing.assert_allclose(losses(folder), losses(single), **CURVE)
    tokens = [[row["tokens"] for row in rows(f) if "loss" in row] for f in (single, folder)]
    assert tokens[0] == tokens[1]
    weights = newest(folder).weights()
    for name, value in newest(single).weights().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


@needs_deepspeed
def test_gradients_are_summed_over_ranks_in_fp32_whatever_is_computed_in(outputs: NewOutputs) -> None:
    norms = []
    for name, keys in (("ddp", {"engine": "ddp"}), ("zero", zero(1))):
        folder = outputs(name)
        bf16 = {"train__compute_dtype": "bf16", "train__epochs": 1}
        run_ranks(2, train_tiny, folder / "log", folder, bf16 | keys)
        norms.append(next(row["grad_norm"] for row in rows(folder) if "grad_norm" in row))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)  # summed in bf16 they differ by 7e-5


def test_optimizer_state_is_written_where_it_is_sharded(outputs: NewOutputs) -> None:
    folder = outputs("sharded")
    run_ranks(2, train_tiny, folder / "log", folder, {"engine": "fsdp2"})
    shards = sorted((newest(folder).path / "optimizer").glob("*.distcp"))
    assert len(shards) == 2
    assert shards[0].stat().st_size == pytest.approx(shards[1].stat().st_size, rel=0.2)


def test_engines_that_need_several_processes_stop(outputs: NewOutputs) -> None:
    folder = outputs("alone")
    for engine in ("ddp", "fsdp2", "hsdp", "accelerate", "deepspeed"):
        with pytest.raises(ValueError, match=f"engine={engine} needs several processes"):
            train(tiny_config(folder, engine=engine))


def test_single_refuses_several_processes() -> None:
    with pytest.raises(ValueError, match="engine=single was started on 2 processes"):
        ENGINES["single"](EngineConfig(), torch.nn.Linear(1, 1), OptimConfig(), World(0, 2), torch.float32)


@pytest.mark.parametrize(
    ("name", "said"),
    [("FSDP", "asked for FSDP on 2 processes, Accelerate gave DDP"), ("DEEPSPEED", "engine=deepspeed")],
)
def test_accelerate_that_is_silently_plain_stops(name: str, said: str, outputs: NewOutputs) -> None:
    folder = outputs("plain")
    logs = run_ranks(2, accelerate_with, folder / "log", folder, f"ACCELERATE_USE_{name}", code=1)
    assert all(said in log for log in logs)


def accelerate_with(folder: Path, variable: str) -> None:
    os.environ[variable] = "true"
    train_tiny(folder, {"engine": "accelerate"})


def test_deepspeed_is_given_its_own_values_and_ours() -> None:
    cfg = EngineConfig(deepspeed={"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    given = deepspeed_config(cfg, OptimConfig(clip_norm=0.25), torch.bfloat16)
    assert given["zero_optimization"] == cfg.deepspeed["zero_optimization"]
    assert given["gradient_clipping"] == 0.25
    assert given["torch_autocast"].items() >= {"enabled": True, "dtype": "torch.bfloat16"}.items()
    assert "torch_autocast" not in deepspeed_config(cfg, OptimConfig(), torch.float32)
    for key, ours in (("gradient_clipping", "optim.clip_norm"), ("bf16", "train.compute_dtype")):
        with pytest.raises(ValueError, match=f"engine.deepspeed.{key}: set {ours} instead"):
            deepspeed_config(EngineConfig(deepspeed=cfg.deepspeed | {key: 1}), OptimConfig(), torch.float32)
    with pytest.raises(ValueError, match="stage=0: 1, 2 or 3"):
        deepspeed_config(EngineConfig(deepspeed={"zero_optimization": {"stage": 0}}), OptimConfig(), torch.float32)


@pytest.mark.parametrize(
    ("stage", "ranks", "master", "offload", "said"),
    [
        (2, 2, torch.zeros(6), "none", "asked for ZeRO stage 1 on 2 processes and got stage 2 on 2"),
        (1, 1, torch.zeros(6), "none", "got stage 1 on 1"),
        (1, 2, torch.zeros(12), "none", "holds 12 of 12 master weights"),
        (1, 2, torch.zeros(6, dtype=torch.bfloat16), "none", "not what zero_optimization="),
        (1, 2, torch.zeros(6, device="meta"), "cpu", "6 of 12 master weights on meta"),
        (1, 2, torch.zeros(6), "cpu", None),
    ],
)
def test_deepspeed_that_did_something_else_stops(
    stage: int, ranks: int, master: torch.Tensor, offload: str, said: str | None
) -> None:
    engine = DeepSpeed.__new__(DeepSpeed)
    engine.world, engine.head = World(0, 2), torch.nn.Linear(4, 3, bias=False)
    engine.engine = SimpleNamespace(dp_world_size=ranks, zero_optimization_stage=lambda: stage)
    engine.zero = SimpleNamespace(single_partition_of_fp32_groups=[master])
    config = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": offload}}}
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        engine._check(config)

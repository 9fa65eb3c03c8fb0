"""A global batch gives the same loss and gradients to 1e-5, however it is cut into forward passes and processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from eagle3_train.config import Config, EngineConfig, OptimConfig
from eagle3_train.store import Sequence, Store, token_counts
from eagle3_train.train.distributed import World
from eagle3_train.train.engines import make_engine
from eagle3_train.train.setup import build_head
from eagle3_train.train.step import train_step
from tests.train.tiny_store import tiny_config

CPU = torch.device("cpu")
Result = tuple[float, list[float], dict[str, Tensor]]  # loss, cross-entropies by step, gradients
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "keep": {"train__oov": "keep", "train__step_weights": [1, 0.2, 0.7]},
    "padded": {"train__padding": "length"},
    "mix": {"train__objective": "0.5*reverse_kl+0.5*tv", "draft__eagle3__layers": 2, "draft__recompute": True},
}


def gradients(cfg: Config, micro_batches: list[list[Sequence]], world: World) -> Result:
    """Of one step's global batch, as the optimizer would see them."""
    store = Store.open(cfg.paths.store)
    head = build_head(cfg, store, CPU, token_counts(store))
    kind = "single" if world.size == 1 else "ddp"
    engine = make_engine(EngineConfig(kind), head, OptimConfig(), world, torch.float32)
    engine.step = lambda lr: 0.0  # type: ignore[method-assign]
    result = train_step(engine, micro_batches, 0.0, cfg.train, world)
    grads = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    return result.loss, result.loss_steps, grads


def assert_same(found: Result, wanted: Result) -> None:
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5)
    assert found[2].keys() == wanted[2].keys()
    for name, grad in wanted[2].items():
        assert (found[2][name] - grad).norm() <= 1e-5 * grad.norm(), name


def cut(sequences: list[Sequence], size: int) -> list[list[Sequence]]:
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches(study: Path, variant: str) -> None:
    cfg = tiny_config(study, **VARIANTS[variant])
    sequences = list(Store.open(cfg.paths.store).read(range(8)))
    packed = tiny_config(study, **VARIANTS[variant] | {"train__padding": "none"})
    whole = gradients(packed, [sequences], World())
    for size in (1, 2, 4):
        assert_same(gradients(cfg, cut(sequences, size), World()), whole)
    assert_same(gradients(cfg, [sequences[::-1]], World()), whole)


def _rank(cfg: Config, rank: int, size: int, folder: Path) -> None:
    """A rank's share: the first has more than the others, and two forward passes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    sequences = list(Store.open(cfg.paths.store).read(range(8)))
    share = [sequences[:5], *cut(sequences[5:], -(-3 // (size - 1)))][rank]
    result = gradients(cfg, [share[:1], share[1:]], World(rank, size))
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", ["default", "padded", "mix"])
def test_processes(study: Path, tmp_path: Path, variant: str, size: int) -> None:
    cfg = tiny_config(study, **VARIANTS[variant])
    packed = tiny_config(study, **VARIANTS[variant] | {"train__padding": "none"})
    whole = gradients(packed, [list(Store.open(cfg.paths.store).read(range(8)))], World())
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(cfg, rank, size, tmp_path)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    for rank in range(size):
        assert_same(torch.load(tmp_path / f"{rank}.pt", weights_only=True), whole)

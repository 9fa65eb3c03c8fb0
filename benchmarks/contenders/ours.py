"""This project's step: `train.step.train_step` through the engine `single`, as `eagle3 train` calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from workload import Tensors, Workload

from eagle3_train.config import DraftConfig, Eagle3Config, EngineConfig, OptimConfig, TrainConfig
from eagle3_train.drafts import DraftBatch, DraftVocab, build, supervised_counts
from eagle3_train.store import Sequence
from eagle3_train.train.distributed import World
from eagle3_train.train.engines import make_engine
from eagle3_train.train.step import train_step


@dataclass
class Target:
    """drafts.TargetPart of random weights."""

    work: Workload
    tensors: Tensors
    config: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        d = self.work.sizes
        self.config = {
            "hidden_size": d.hidden, "num_attention_heads": d.heads, "num_key_value_heads": d.kv_heads,
            "head_dim": d.head_dim, "intermediate_size": d.intermediate, "rms_norm_eps": 1e-5, "vocab_size": d.vocab,
        }  # fmt: skip

    @property
    def embed_tokens(self) -> Tensor:
        return self.tensors.embed

    @property
    def lm_head(self) -> Tensor:
        return self.tensors.head

    @property
    def norm_weight(self) -> Tensor:
        return torch.ones(self.work.sizes.hidden)

    @property
    def last_layer(self) -> dict[str, Tensor]:
        raise AssertionError("the benchmark starts from random weights")


def sequences_of(work: Workload, tensors: Tensors) -> list[Sequence]:
    """The batch as the store would give it."""
    inputs = tensors.features.unflatten(-1, (3, work.sizes.hidden))
    states = torch.cat([inputs, tensors.final[:, :, None]], 2)
    ids = tensors.input_ids.numpy().astype(np.int32)
    masks = tensors.loss_mask.numpy().astype(np.uint8)
    return [
        Sequence(str(i), "benchmark", ids[i], masks[i], states[i], np.roll(ids[i], -1)) for i in range(work.sequences)
    ]


def make(work: Workload, tensors: Tensors, options: dict[str, Any]) -> tuple[Callable[[], float], dict[str, float]]:
    """One optimizer step a call (it returns the loss), and what the step amounts to."""
    d = work.sizes
    torch.manual_seed(0)
    options = options | {"eagle3": Eagle3Config(**options.get("eagle3", {}))}
    cfg = DraftConfig(steps=work.steps, vocab_size=d.draft_vocab, init_layer="random", **options)
    head = build(cfg, Target(work, tensors), DraftVocab(work.draft_ids(), d.vocab, 1.0), n_inputs=3).to(work.device)
    engine = make_engine(EngineConfig(kind="single"), head, OptimConfig(), World(), work.torch_dtype)
    sequences = sequences_of(work, tensors)
    train = TrainConfig()

    def step() -> float:
        return train_step(engine, [sequences], 1e-4, train, World()).loss

    batch = DraftBatch.collate(sequences, engine.device, work.torch_dtype)
    rows = supervised_counts(batch.loss_mask, batch.starts, work.steps)
    return step, {"flops": head.flops(batch), "supervised_tokens": int(rows[0]), "rows": int(rows.sum())}

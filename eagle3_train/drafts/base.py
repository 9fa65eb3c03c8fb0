"""What every draft head offers, and what it needs of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from eagle3_train.drafts.batch import DraftBatch
from eagle3_train.drafts.vocab import DraftVocab


class TargetPart(Protocol):
    """The target's tensors that training needs; `store.read_target_part` returns one."""

    @property
    def config(self) -> dict[str, Any]: ...  # the target's config.json
    @property
    def embed_tokens(self) -> Tensor: ...  # [V, H]
    @property
    def norm_weight(self) -> Tensor: ...  # [H]
    @property
    def lm_head(self) -> Tensor: ...  # [V, H]
    @property
    def last_layer(self) -> dict[str, Tensor]: ...  # names as in transformers, without the layer's prefix


class StepLoss(Protocol):
    """The objective, given to `forward` by the training loop: a head knows nothing of losses."""

    def select(self, kept: np.ndarray) -> np.ndarray | None:
        """Which target positions may supervise, `[N]` bool; None: all. `kept`: argmax inside the draft vocabulary."""
        ...

    def __call__(self, step: int, hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor) -> Tensor:
        """Scaled loss of one step.

        hidden [R, H] normed rows; lm_head [D, H]; targets [M, D]: the target's distributions over the draft vocabulary;
        target_rows [R] int64: the row of `targets` that supervises each row.
        """
        ...

    def regress(self, step: int, hidden: Tensor, features: Tensor) -> Tensor:
        """Scaled smooth-L1 distance of one step, for heads that predict the target's features too. Both [R, H]."""
        ...

    def steps(
        self, rows_by_step: list[int], hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor
    ) -> Tensor:
        """The sum of all steps' losses under one `lm_head`, their rows end to end; the training objective does it with
        one gradient of `lm_head` in memory."""
        parts = zip(hidden.split(rows_by_step), target_rows.split(rows_by_step), strict=True)
        losses = [self(step, h, lm_head, targets, rows) for step, (h, rows) in enumerate(parts)]
        return torch.stack(losses).sum()


@dataclass
class DraftState:
    """Keys and values of one sequence while decoding: positions `[0, length)` observed, the own chain beyond it."""

    keys: Tensor  # [capacity, n_kv, d]
    values: Tensor
    length: int = 0
    chain: int = 0  # slots taken since the last `observe`: steps of a chain, or expanded nodes of a tree

    def reserve(self, size: int) -> None:
        """Make room for `size` positions; doubling, so that a long generation copies little."""
        if size > len(self.keys):
            grown = max(size, 2 * len(self.keys))
            for name in ("keys", "values"):
                old: Tensor = getattr(self, name)
                new = old.new_empty(grown, *old.shape[1:])
                new[: len(old)] = old
                setattr(self, name, new)


class Draft(nn.Module):
    """A draft head: parameters, the training forward, teacher-forced prediction, and drafting steps for decoding."""

    kind: str  # its name in `drafts.HEADS`
    steps: int  # K
    n_layers: int  # states of the target that a batch carries (inputs and the final one)
    reads: slice = slice(0, -1)  # which of these `observe` takes: all but the final one
    hidden_size: int  # of the target
    vocab: DraftVocab
    frozen_parameters: int  # of the target, used and not trained
    compiled: bool = False  # torch.compile what lies between the matrix products, the objective's part included

    def forward(self, batch: DraftBatch, loss: StepLoss) -> Tensor:
        """Scaled training loss of a batch, a scalar that carries the gradient."""
        raise NotImplementedError

    def kept_targets(self, target_argmax: np.ndarray) -> np.ndarray:
        """[N] bool: where the target's argmax [N], -1 where it is not known, lies inside the draft vocabulary."""
        return (target_argmax >= 0) & self.vocab.t2d[np.maximum(target_argmax, 0)]

    @property
    def is_trained(self) -> bool:
        """Whether the head has anything to train."""
        return any(p.requires_grad for p in self.parameters())

    @torch.no_grad()
    def predict(self, batch: DraftBatch) -> Tensor:
        """[N, K] int64 target token ids: the teacher-forced greedy draft from every supervised anchor; -1 elsewhere."""
        raise NotImplementedError

    def new_state(self) -> Any:
        """State of a new sequence to decode."""
        raise NotImplementedError

    def observe(self, state: Any, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Add positions whose next token is known, forget any chain; step 0 of the last one: (h [H], logits [D])."""
        raise NotImplementedError

    def step(self, state: Any, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """One more step of the chain from the drafted `token` (a target id): (h [H], logits [D])."""
        raise NotImplementedError

    def expand(self, state: Any, tokens: Tensor, h: Tensor, depth: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        """One more level of a draft tree, m nodes at once: (h [m, H], logits [m, D]).

        tokens [m]: drafted at `depth` - 1, counted from 0 for the root's children; h [m, H]: outputs of the steps that
        gave them; visible [m, S + m] bool: which of the S nodes expanded since `observe`, and of these m, lie on each
        node's path, itself included.
        """
        raise NotImplementedError

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary indices to target token ids, any shape."""
        raise NotImplementedError

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by top-level part, `trainable` in all, and `frozen` ones: the head's own and the target's."""
        counts: dict[str, int] = {}
        trainable = 0
        for name, parameter in self.named_parameters():
            part = name.split(".")[0]
            counts[part] = counts.get(part, 0) + parameter.numel()
            trainable += parameter.numel() * parameter.requires_grad
        frozen = sum(counts.values()) - trainable + self.frozen_parameters
        return counts | {"trainable": trainable, "frozen": frozen}

    def flops(self, batch: DraftBatch) -> float:
        """GEMM and attention FLOPs of one forward and backward pass over `batch`."""
        raise NotImplementedError

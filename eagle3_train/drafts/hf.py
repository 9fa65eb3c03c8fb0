"""Any causal language model of transformers as the draft model, as it is: vanilla speculative decoding.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". The model must have the target's
tokenizer (`train.setup` refuses another) and full attention; nothing is trained. It runs in fp32, as all heads do when
they are evaluated, and drafts from its whole vocabulary.

Position t of a head carries x_{t+1}, so that the first token of a text is not shown to it. It is a constant of the
chat template: the model's own beginning-of-text token, if its configuration has one, stands in for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_train.config import DraftConfig
from eagle3_train.device import arg_max
from eagle3_train.drafts.base import Draft, StepLoss, TargetPart
from eagle3_train.drafts.batch import DraftBatch, find_segments, plan_rows
from eagle3_train.drafts.vocab import DraftVocab
from eagle3_train.target import cache_argument, load_target


@dataclass
class HFState:
    """The model's own cache: `length` tokens of known text, then the drafted ones."""

    cache: Any
    length: int = 0
    drafted: int = 0  # tokens of the chain, or nodes of the tree, behind them


class HFDraft(Draft):
    """A causal language model of transformers."""

    reads = slice(0, 0)

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__()
        assert cfg.hf.model is not None
        self.steps = cfg.steps
        self.n_layers, self.hidden_size = n_inputs + 1, int(target.config["hidden_size"])
        self.vocab = DraftVocab(np.arange(vocab.target_size), vocab.target_size, coverage=1.0)
        self.frozen_parameters = 0
        self.model: Any = load_target(cfg.hf.model, torch.float32, torch.device("cpu"))
        self._cache_argument = cache_argument(self.model)
        first = self.model.config.get_text_config().bos_token_id
        self.first: list[int] = [] if first is None else [first]
        _expect_croppable(cfg.hf.model, self._new_cache())

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def forward(self, batch: DraftBatch, loss: StepLoss) -> Tensor:
        raise ValueError(
            "draft=hf is measured as it is: it is neither trained nor replayed on transcripts of a temperature above "
            "0. Replay greedy ones, or decode"
        )

    @torch.no_grad()
    def predict(self, batch: DraftBatch) -> Tensor:
        best = torch.full_like(batch.input_ids, -1)  # [N]: the model's x_{p+1} after x_1 .. x_p
        for start, stop in pairwise(batch.starts):
            ids = batch.input_ids[start + 1 : stop]
            if len(ids):
                logits = self.model(input_ids=self._shown(ids)[None], use_cache=False).logits[0, len(self.first) :]
                best[start + 1 : stop] = arg_max(self._fit(logits))
        drafted = best.new_full((batch.n_tokens, self.steps), -1)
        plan = plan_rows(find_segments(batch.loss_mask, batch.starts), self.steps, best.device)
        for i, rows in enumerate(plan):
            drafted[rows.anchors, i] = best[rows.anchors + 1 + i]
        return drafted

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    # -- decoding -----------------------------------------------------------------------------------------------------

    def new_state(self) -> HFState:
        return HFState(self._new_cache())

    @torch.no_grad()
    def observe(self, state: HFState, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        tokens = next_ids if state.length else self._shown(next_ids)
        if state.drafted:
            state.cache.crop(-state.drafted)
        state.drafted = 0
        state.length += len(tokens)
        return next_ids.new_zeros(1), self._run(state, tokens, logits_to_keep=1)[-1]

    @torch.no_grad()
    def step(self, state: HFState, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        state.drafted += 1
        return h, self._run(state, token.view(1))[0]

    @torch.no_grad()
    def expand(self, state: HFState, tokens: Tensor, h: Tensor, depth: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.cat((visible.new_ones(len(tokens), state.length), visible), 1)
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)
        positions = torch.full((1, len(tokens)), state.length - 1 + depth, device=seen.device)
        state.drafted += len(tokens)
        return h, self._run(state, tokens, attention_mask=mask[None, None], position_ids=positions)

    def _run(self, state: HFState, tokens: Tensor, **more: Any) -> Tensor:
        """Logits [rows, V] of tokens behind what the cache holds."""
        out = self.model(input_ids=tokens[None], use_cache=True, **{self._cache_argument: state.cache}, **more)
        return self._fit(out.logits[0])

    def _shown(self, ids: Tensor) -> Tensor:
        """A text from its second token on, as the model sees it."""
        return torch.cat((ids.new_tensor(self.first), ids))

    def _fit(self, logits: Tensor) -> Tensor:
        """[..., V]: without the rows that pad the model's vocabulary, or with -inf for the target's padding."""
        size = self.vocab.target_size
        return F.pad(logits[..., :size], (0, max(0, size - logits.shape[-1])), value=-torch.inf)

    def flops(self, batch: DraftBatch) -> float:
        return 0.0


def _expect_croppable(name: str, cache: Any) -> None:
    from transformers.cache_utils import DynamicLayer

    kinds = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if kinds:
        raise ValueError(
            f"draft.hf.model={name} has caches of kind {', '.join(sorted(kinds))}, from which rejected drafts cannot "
            "be taken back: use a model with full attention in every layer"
        )

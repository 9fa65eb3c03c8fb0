"""Prompt lookup: the draft copies what followed the latest earlier occurrence of the text's last tokens. No training.

Saxena 2023, "Prompt Lookup Decoding". The longest suffix of at most `max_ngram` tokens that occurred before decides.

Differences: the *latest* earlier occurrence counts, not the first; a copy that reaches the text's end goes on in what
it has drafted itself, and where nothing matches the last token is repeated, so that K tokens are drafted always. The
first token of a sequence is not seen (position t carries x_{t+1}, as for all heads here). The draft vocabulary is the
target's whole one, and the distribution is a point mass.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from eagle3_train.config import DraftConfig
from eagle3_train.drafts.base import Draft, StepLoss, TargetPart
from eagle3_train.drafts.batch import DraftBatch, find_segments
from eagle3_train.drafts.vocab import DraftVocab


class Text:
    """A growing text with an index of its n-grams."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self.chain = 0  # drafted tokens since the last observed one
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> where the token after its latest occurrence is

    def append(self, token: int) -> None:
        for n in range(1, min(self.max_ngram, len(self.tokens)) + 1):
            self._after[tuple(self.tokens[-n:])] = len(self.tokens)
        self.tokens.append(token)

    def guess(self, i: int) -> int:
        """The i-th token of the draft."""
        end = len(self.tokens)
        longest = range(min(self.max_ngram, end), 0, -1)
        found = (self._after.get(tuple(self.tokens[-n:])) for n in longest)
        start = next((at for at in found if at is not None), end - 1)
        return self.tokens[start + i % (end - start)]


class PromptLookup(Draft):
    """N-gram lookup in the prompt and the generated text."""

    reads = slice(0, 0)

    def __init__(self, cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> None:
        super().__init__()
        self.steps, self.max_ngram = cfg.steps, cfg.prompt_lookup.max_ngram
        self.n_layers, self.hidden_size = n_inputs + 1, int(target.config["hidden_size"])
        self.vocab = DraftVocab(np.arange(vocab.target_size), vocab.target_size, coverage=1.0)
        self.frozen_parameters = 0

    def forward(self, batch: DraftBatch, loss: StepLoss) -> Tensor:
        raise ValueError(
            "draft=prompt_lookup has no parameters and no distribution: it is neither trained nor replayed on "
            "transcripts of a temperature above 0; replay greedy ones, or trees"
        )

    @torch.no_grad()
    def predict(self, batch: DraftBatch) -> Tensor:
        drafted = torch.full((batch.n_tokens, self.steps), -1, dtype=torch.int64)
        ids = batch.input_ids.tolist()
        anchors = {t: s for s in find_segments(batch.loss_mask, batch.starts) for t in range(s.first, s.end)}
        for start, stop in pairwise(batch.starts):
            text = Text(self.max_ngram)
            for t in range(start, stop - 1):
                text.append(ids[t + 1])
                if t in anchors:
                    for i in range(min(self.steps, anchors[t].end - t)):
                        drafted[t, i] = text.guess(i)
        return drafted.to(batch.input_ids.device)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def new_state(self) -> Text:
        return Text(self.max_ngram)

    def observe(self, state: Text, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        for token in next_ids.tolist():
            state.append(token)
        state.chain = 0
        return next_ids.new_zeros(1), self._point(state.guess(0), next_ids)

    def step(self, state: Text, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        state.chain += 1
        return h, self._point(state.guess(state.chain), token)

    def expand(self, state: Text, tokens: Tensor, h: Tensor, depth: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Every node continues the copy: a tree of lookups is its one chain and candidates without probability."""
        return h, self._point(state.guess(depth), tokens).expand(len(tokens), -1)

    def _point(self, token: int, like: Tensor) -> Tensor:
        """[V] logits of a point mass."""
        logits = torch.full((self.vocab.target_size,), -torch.inf, device=like.device)
        logits[token] = 0.0
        return logits

    def flops(self, batch: DraftBatch) -> float:
        return 0.0

"""Small targets and draft heads with the real ones' interface, for the tests of decode and evaluate.

`OracleHead` knows the continuation and errs where it is told to, so that every accepted length happens. `RandomHead` is
a fixed random network whose state matters, to test that decoding gives a head what replay gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 24
LAYER_IDS = (0, 2, 3)


@cache
def tiny_target(kind: str = "llama", vocab: int = VOCAB) -> Any:
    """A random causal LM of 4 layers in fp32; its weights are large enough that greedy text does not settle at once."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.35,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    if kind != "gpt_neox":
        sizes["num_key_value_heads"] = 2
    config = transformers.AutoConfig.for_model(kind, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def prompts(count: int, vocab: int = VOCAB) -> list[Tensor]:
    """Random prompts of 1, 2, 3, ... tokens."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(vocab, (1 + i,), generator=generator) for i in range(count)]


class _State:
    def __init__(self) -> None:
        self.position = -1  # last observed
        self.step = 0
        self.total: Tensor | float = 0.0  # of all observed features


class OracleHead:
    """Drafts x_{t+2+i} of the known `text` where `right(t, i)`, another token elsewhere. Beyond the text: 0."""

    reads = slice(0, -1)

    def __init__(self, text: Tensor, right: Callable[[int, int], bool], steps: int, vocab: int = VOCAB) -> None:
        self.text, self.right, self.steps, self.vocab = text, right, steps, vocab
        self.calls: list[str] = []

    def guess(self, t: int, i: int) -> int:
        at = t + 2 + i
        token = int(self.text[at]) if at < len(self.text) else 0
        return token if self.right(t, i) else (token + 1) % self.vocab

    def new_state(self) -> _State:
        return _State()

    def _out(self, state: _State) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(self.vocab)
        logits[self.guess(state.position, state.step)] = 1.0
        return torch.zeros(1), logits

    def observe(self, state: _State, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        assert len(next_ids) == len(features)
        self.calls.append("observe")
        state.position += len(next_ids)
        state.step = 0
        expected = self.text[state.position + 2 - len(next_ids) : state.position + 2]
        assert next_ids.tolist() == expected.tolist(), "observed tokens are not the text's"
        return self._out(state)

    def step(self, state: _State, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append("step")
        assert int(token) == self.guess(state.position, state.step), "the token given is not the one drafted"
        state.step += 1
        return self._out(state)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def predict(self, batch: Any) -> Tensor:
        """Single-document batches alone: the oracle knows one text."""
        assert batch.starts == [0, len(self.text)]
        n = len(self.text)
        guesses = [[self.guess(t, i) if t + 2 + i < n else -1 for i in range(self.steps)] for t in range(n)]
        return torch.tensor(guesses)


class RandomHead:
    """h_t = tanh(W mean of all features up to t + E[x_{t+1}]); step: h = tanh(A h + E[token]); logits = U h.

    Its draft vocabulary is every second token of the target's, so that ids must be mapped.
    """

    reads = slice(0, -1)

    def __init__(self, hidden: int, steps: int, vocab: int = VOCAB, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.steps = steps
        self.vocab_ids = torch.arange(0, vocab, 2)
        self.w = torch.randn(hidden, 16, generator=g)
        self.a = torch.randn(16, 16, generator=g)
        self.e = torch.randn(vocab, 16, generator=g)
        self.u = torch.randn(16, len(self.vocab_ids), generator=g)

    def new_state(self) -> _State:
        return _State()

    def observe(self, state: _State, next_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        state.position += len(next_ids)
        state.total = state.total + features.mean(1).sum(0)
        h = torch.tanh(state.total / (state.position + 1) @ self.w + self.e[next_ids[-1]])
        return h, h @ self.u

    def step(self, state: _State, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ self.a + self.e[token])
        return h, h @ self.u

    def expand(self, state: _State, tokens: Tensor, h: Tensor, depth: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        return self.step(state, tokens, h)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.vocab_ids[draft_ids]

    def predict(self, batch: Any) -> Tensor:
        out = torch.full((batch.starts[-1], self.steps), -1)
        for start, stop in zip(batch.starts[:-1], batch.starts[1:], strict=True):
            ids = batch.input_ids[start:stop]
            state = self.new_state()
            for t in range(stop - start - 2):
                h, logits = self.observe(state, ids[t + 1 : t + 2], batch.hidden[start + t : start + t + 1, :-1])
                for i in range(min(self.steps, stop - start - 2 - t)):
                    if i:
                        h, logits = self.step(state, ids[t + 1 + i], h)
                    out[start + t, i] = self.target_ids(logits.argmax())
        return out

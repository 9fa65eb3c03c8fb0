"""What one forward pass of each kind of draft head costs, from shapes alone (`drafts` counts the same, row by row)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from eagle3_train.config import DraftConfig


class LayerShape(Protocol):
    """Sizes of a decoder layer."""

    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def queries(self) -> int: ...
    @property
    def keys(self) -> int: ...


class TargetShape(LayerShape, Protocol):
    """Sizes of the target (`cost.Shape`)."""

    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class HeadCost:
    """Multiply-adds of a forward pass. A row is a supervised token, counted once for all steps."""

    parameters: float  # trained, norms left out
    token: float = 0.0  # by trained matrices, for every token
    row: float = 0.0  # by trained matrices, for every row
    frozen: float = 0.0  # by a frozen output head, for every row
    passes: float = 0.0  # of attention over the text before, for every row
    token_passes: float = 0.0  # and for every token


def head_cost(draft: DraftConfig, shape: TargetShape, n_inputs: int) -> HeadCost:
    """Of the kind that `draft` names."""
    return COSTS[draft.kind](draft, shape, n_inputs)


def _layer(s: LayerShape, width: int) -> tuple[float, float]:
    """(keys and values, all else) of a decoder layer whose q, k and v read `width` numbers."""
    return 2 * width * s.keys, width * s.queries + s.queries * s.hidden + 3 * s.hidden * s.intermediate


@dataclass(frozen=True)
class _Width:
    """Sizes of a layer."""

    hidden: int
    intermediate: int
    queries: int
    keys: int


def _width(d: DraftConfig, s: TargetShape) -> _Width:
    """Of an EAGLE-3 head: the target's, or as its options say (`drafts.layer.Dims.resized`)."""
    width, heads = d.eagle3.hidden_size or s.hidden, s.keys // s.head_dim
    if width != s.hidden:
        n = width // s.head_dim
        heads = max(k for k in range(1, min(heads, n) + 1) if n % k == 0)
    queries = s.queries if width == s.hidden else width
    intermediate = d.eagle3.intermediate_size or round(s.intermediate * width / s.hidden)
    return _Width(width, intermediate, queries, heads * s.head_dim)


def _eagle3(d: DraftConfig, s: TargetShape, n: int) -> HeadCost:
    """The first layer reads [embedding; hidden]: the embedding's half of q, k and v is computed once a token; nothing
    below `fc` is trained, so it has no gradient of its input: 4 FLOPs a weight, not 6."""
    own = _width(d, s)
    h, steps, layers = own.hidden, d.steps, d.eagle3.layers
    resized = h != s.hidden
    kv, rest = _layer(own, 2 * h)
    upper_kv, upper = _layer(own, h)
    above = (layers - 1) * (upper_kv + upper)
    half_q = h * own.queries
    through = h * s.hidden if resized and d.init_lm_head == "target" else 0  # to the width of the target's rows
    head, fuse = d.vocab_size * (s.hidden if through else h), (n + resized) * s.hidden * h
    trained, frozen = (head, 0) if d.eagle3.lm_head == "trained" else (0, head)
    row = half_q + steps * (rest - half_q + trained + through) + (steps - 1) * (kv / 2 + above)
    token = kv + above + fuse * 4 / 6  # layers below the last run over all tokens at step 0
    passes = steps * layers * own.queries / s.queries
    parameters = fuse + kv + rest + above + trained + through
    return HeadCost(parameters, token=token, row=row, frozen=steps * frozen, passes=passes)


def _eagle1(d: DraftConfig, s: TargetShape, n: int) -> HeadCost:
    h, steps = s.hidden, d.eagle1.trained_steps
    kv, rest = _layer(s, h)
    enter, fuse = 2 * h * h + kv, n * h * h if d.eagle1.inputs == "fused" else 0
    row = steps * rest + (steps - 1) * enter
    frozen = steps * d.vocab_size * h
    return HeadCost(fuse + enter + rest, token=fuse + enter, row=row, frozen=frozen, passes=steps)


def _medusa(d: DraftConfig, s: TargetShape, n: int) -> HeadCost:
    heads = d.steps * (d.medusa.layers * s.hidden**2 + d.vocab_size * s.hidden)
    return HeadCost(heads, row=heads)


def _lm(d: DraftConfig, s: TargetShape, n: int) -> HeadCost:
    layers, head = d.lm.layers * sum(_layer(s, s.hidden)), d.vocab_size * s.hidden
    return HeadCost(layers + head, token=layers, row=head, token_passes=d.lm.layers)


def _mtp(d: DraftConfig, s: TargetShape, n: int) -> HeadCost:
    modules = d.steps * (2 * s.hidden**2 + sum(_layer(s, s.hidden)))
    frozen = d.steps * d.vocab_size * s.hidden
    return HeadCost(modules, token=modules, frozen=frozen, token_passes=d.steps)


def _block(d: DraftConfig, s: TargetShape, n: int) -> HeadCost:
    h = s.hidden
    kv, rest = _layer(s, h)
    head, enter, markov = d.vocab_size * h, (n + 2) * h * h, d.block.rank * (h + d.vocab_size)
    row = d.steps * (rest + head) + (d.steps - 1) * (kv + markov)
    return HeadCost(enter + kv + rest + head + markov, token=enter + kv, row=row, passes=d.steps)


def _nothing(d: DraftConfig, s: TargetShape, n: int) -> HeadCost:
    return HeadCost(0)


COSTS: dict[str, Callable[[DraftConfig, TargetShape, int], HeadCost]] = {
    "eagle3": _eagle3,
    "eagle1": _eagle1,
    "medusa": _medusa,
    "lm": _lm,
    "mtp": _mtp,
    "block": _block,
    "hf": _nothing,
    "prompt_lookup": _nothing,
}

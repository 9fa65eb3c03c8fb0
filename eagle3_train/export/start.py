"""Build our draft head from a published one: to evaluate it as it is, or to train it further."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from eagle3_train.config import DraftConfig
from eagle3_train.drafts import Draft, DraftVocab, TargetPart, build
from eagle3_train.export.layout import LM_HEAD, text_part
from eagle3_train.export.read import Published


@dataclass(frozen=True, eq=False)
class _Part:
    """The target's part as the published head sees it: the layer's own sizes, its own embedding."""

    config: dict[str, Any]
    embed_tokens: Tensor
    norm_weight: Tensor
    lm_head: Tensor
    last_layer: dict[str, Tensor]


def start_from(
    published: Published, cfg: DraftConfig, part: TargetPart, counts: np.ndarray, layer_ids: Sequence[int]
) -> Draft:
    """The published head as ours, for chains of `cfg.steps`. Vocabulary and sizes are the file's.

    Args:
        part: of the target that the head is for.
        counts: int [V], supervised tokens of the store, for the coverage of the draft vocabulary.
        layer_ids: of the states that the store holds for the head's inputs.

    Raises:
        ValueError: the head does not fit the target, the store or our head, naming what differs.
    """
    config = text_part(part.config)
    _expect_fit(published, config, layer_ids)
    ids = published.vocab_ids(len(part.embed_tokens))
    vocab = DraftVocab(ids, len(part.embed_tokens), float(counts[ids].sum() / max(counts.sum(), 1)))
    embedding = published.embedding(part.embed_tokens)
    own = _Part(config | published.layer, embedding, part.norm_weight, part.lm_head, part.last_layer)
    options = replace(published.options, lm_head=cfg.eagle3.lm_head)
    head = build(
        replace(cfg, init_layer="random", init_lm_head="random", eagle3=options), own, vocab, published.n_inputs
    )
    weights = {LM_HEAD: part.lm_head} | published.weights
    _expect_names(published, head, weights)
    head.load_state_dict(weights)
    return head


def _expect_fit(published: Published, config: dict[str, Any], layer_ids: Sequence[int]) -> None:
    n = config["num_hidden_layers"]
    # A head that names no layers reads the ones that every engine takes then.
    wanted = published.layer_ids or (2, n // 2, n - 3)
    if tuple(layer_ids) != wanted:
        raise ValueError(
            f"{published.folder} reads the states entering layers {list(wanted)}, the store holds {list(layer_ids)}: "
            f"capture the head's with capture.layer_ids={list(wanted)} (and another paths.store)"
        )
    eps = config.get("rms_norm_eps", 1e-6)
    if published.layer.get("rms_norm_eps", eps) != eps:
        raise ValueError(
            f"{published.folder} has rms_norm_eps={published.layer['rms_norm_eps']}, the target {eps}: two in one head "
            "are not supported"
        )


def _expect_names(published: Published, head: Draft, weights: dict[str, Tensor]) -> None:
    """The file's tensors are exactly the head's, with its shapes."""
    wanted = {name: list(t.shape) for name, t in head.state_dict().items()}
    found = {name: list(t.shape) for name, t in weights.items()}
    problems = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    problems += [f"{name} is unknown to our EAGLE-3 head" for name in found.keys() - wanted.keys()]
    problems += [
        f"{name} is {found[name]} where {shape} is expected"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise ValueError(f"{published.folder}: {'; '.join(sorted(problems))}")

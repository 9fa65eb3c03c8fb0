"""Small heads and targets in every shape that an export must cover."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_train.config import DraftConfig, Eagle3Config
from eagle3_train.drafts import DraftVocab, Eagle3, build
from eagle3_train.export import HeadSource
from tests.drafts.tiny import TinyTarget

N_LAYERS = 12


@dataclasses.dataclass
class Target(TinyTarget):
    """The tiny target with what an exported configuration takes of it, `vocab` tokens, and tied ends if asked for."""

    vocab: int = 29
    tied: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        g = torch.Generator().manual_seed(7)
        self.embed_tokens = torch.randn(self.vocab, self.config["hidden_size"], generator=g)
        self.lm_head = self.embed_tokens if self.tied else torch.randn(self.embed_tokens.shape, generator=g)
        self.config |= {
            "vocab_size": self.vocab,
            "num_hidden_layers": N_LAYERS,
            "max_position_embeddings": 512,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "tie_word_embeddings": self.tied,
        }


def make_source(
    target: TinyTarget | None = None,
    ids: list[int] | None = None,
    layer_ids: tuple[int, ...] = (2, 6, 9),
    name: str = "org/tiny",
    options: Eagle3Config | None = None,
    **draft: Any,
) -> HeadSource:
    """A random head with all its norms off 1. `ids`: target ids of its vocabulary."""
    target = target or Target()
    torch.manual_seed(3)
    vocab = DraftVocab(np.array(ids or [0, 2, 3, 5, 8, 9, 11, 14, 17, 18, 20, 21, 26]), len(target.embed_tokens), 0.5)
    draft = {"steps": 3, "init_layer": "random", "init_lm_head": "random"} | draft
    draft["eagle3"] = options or Eagle3Config()
    head = build(DraftConfig(**draft), target, vocab, n_inputs=len(layer_ids))
    assert isinstance(head, Eagle3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return HeadSource(head.eval(), target.config, name, layer_ids)


def rebuilt(source: HeadSource, folder: Any, target: TinyTarget, layer_ids: tuple[int, ...] = (2, 6, 9)) -> Eagle3:
    """The head that an import makes of `folder`."""
    from eagle3_train.export import read_published, start_from

    counts = np.ones(len(target.embed_tokens), int)
    head = start_from(read_published(folder), DraftConfig(steps=source.head.steps), target, counts, layer_ids)
    assert isinstance(head, Eagle3)
    return head


def same_weights(a: Eagle3, b: Eagle3) -> bool:
    def all_of(head: Eagle3) -> dict[str, Tensor]:
        return {**head.state_dict(), "embed": head.embed_tokens, "ids": head.vocab_ids}

    ours, theirs = all_of(a), all_of(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)

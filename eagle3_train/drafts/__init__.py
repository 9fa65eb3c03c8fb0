"""Draft heads: one file each, behind the interface of `base.Draft`."""

from __future__ import annotations

from collections.abc import Callable

from eagle3_train.config import DraftConfig
from eagle3_train.drafts.base import Draft, DraftState, StepLoss, TargetPart
from eagle3_train.drafts.batch import DraftBatch, supervised_counts
from eagle3_train.drafts.block import Block
from eagle3_train.drafts.eagle1 import Eagle1
from eagle3_train.drafts.eagle3 import Eagle3
from eagle3_train.drafts.hf import HFDraft
from eagle3_train.drafts.lm import DraftLM
from eagle3_train.drafts.medusa import Medusa
from eagle3_train.drafts.mtp import MTP
from eagle3_train.drafts.prompt_lookup import PromptLookup
from eagle3_train.drafts.vocab import DraftVocab

HEADS: dict[str, Callable[[DraftConfig, TargetPart, DraftVocab, int], Draft]] = {
    "eagle3": Eagle3,
    "eagle1": Eagle1,
    "medusa": Medusa,
    "lm": DraftLM,
    "hf": HFDraft,
    "mtp": MTP,
    "block": Block,
    "prompt_lookup": PromptLookup,
}


def build(cfg: DraftConfig, target: TargetPart, vocab: DraftVocab, n_inputs: int) -> Draft:
    """A new draft head of `cfg.kind` for a target; `n_inputs` is the number of the target's states that it takes in."""
    head = HEADS[cfg.kind](cfg, target, vocab, n_inputs)
    head.kind = cfg.kind
    return head


__all__ = [
    "HEADS",
    "MTP",
    "Block",
    "Draft",
    "DraftBatch",
    "DraftLM",
    "DraftState",
    "DraftVocab",
    "Eagle1",
    "Eagle3",
    "HFDraft",
    "Medusa",
    "PromptLookup",
    "StepLoss",
    "TargetPart",
    "build",
    "supervised_counts",
]

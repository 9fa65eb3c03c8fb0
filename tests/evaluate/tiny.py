"""Transcripts that a tiny target generated, as stores, and a small EAGLE-3 head trained on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_train.config import DraftConfig
from eagle3_train.drafts import Draft, DraftBatch, DraftVocab, StepLoss, build
from eagle3_train.store import Sequence, ShardWriter, StoreSpec, finalize
from tests.heads import LAYER_IDS, VOCAB, tiny_target

N_LAYERS, HIDDEN = 4, 32
STOPS = [3]
NEW = 24
CPU = torch.device("cpu")


def transcript(prompt: Tensor, new: int, stop_ids: list[int], name: str) -> Sequence:
    """The tiny target's greedy continuation."""
    model = tiny_target()
    text = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=stop_ids or None,
    )
    return states_of(text, len(prompt), name)


def states_of(text: Tensor, prompt_length: int, name: str) -> Sequence:
    """A transcript `text [1, T]` with the states that a capture would store."""
    model = tiny_target()
    states: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    out = model(input_ids=text, output_hidden_states=True)
    hook.remove()
    mask = np.ones(text.shape[1], np.uint8)
    mask[:prompt_length] = 0
    hidden = torch.stack([*(out.hidden_states[k][0] for k in LAYER_IDS), states[-1]], 1)
    ids = text[0].numpy().astype(np.int32)
    return Sequence(name, "tiny", ids, mask, hidden, out.logits[0].argmax(-1).numpy().astype(np.int32))


def prompt(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def transcripts(count: int = 8, first_seed: int = 10) -> list[Sequence]:
    """Prompts of 1..count tokens; some end by a stop token, some by length, some are one or two tokens long."""
    return [transcript(prompt(1 + i, first_seed + i), NEW, STOPS, f"prompt-{first_seed + i}") for i in range(count)]


def write_store(folder: Path, sequences: list[Sequence], sampling: dict[str, float] | None = None) -> None:
    """A store of one shard, in fp32."""
    spec = StoreSpec(
        target="tiny", target_hash="0", tokenizer_hash="0", chat_template_hash="0",
        layer_ids=(*LAYER_IDS, N_LAYERS), hidden_size=HIDDEN, n_layers=N_LAYERS, vocab_size=VOCAB,
        dtype="fp32", compute_dtype="fp32", n_rows=len(sequences), n_shards=1, generator="test",
        sampling=sampling or {},
    )  # fmt: skip
    with ShardWriter(folder, 0, spec) as writer:
        for s in sequences:
            writer.add(s)
    finalize(folder, spec)


@dataclass
class TinyPart:
    """drafts.TargetPart of the tiny target."""

    config: dict[str, Any]
    embed_tokens: Tensor
    norm_weight: Tensor
    lm_head: Tensor
    last_layer: dict[str, Tensor]


def tiny_part() -> TinyPart:
    model = tiny_target()
    return TinyPart(
        model.config.to_dict(),
        model.model.embed_tokens.weight,
        model.model.norm.weight,
        model.lm_head.weight,
        model.model.layers[-1].state_dict(),
    )


class HardLoss(StepLoss):
    """Cross-entropy against the target's distribution, summed: enough to fit a few transcripts."""

    def select(self, kept: Tensor) -> None:
        return None

    def __call__(self, step: int, hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor) -> Tensor:
        return F.cross_entropy(hidden @ lm_head.T, targets[target_rows], reduction="sum")

    def steps(
        self, rows_by_step: list[int], hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor
    ) -> Tensor:
        return self(0, hidden, lm_head, targets, target_rows)

    def regress(self, step: int, hidden: Tensor, features: Tensor) -> Tensor:
        return F.smooth_l1_loss(hidden, features, reduction="sum") / hidden.shape[1]


@cache
def trained_head(steps: int = 3) -> Draft:
    """EAGLE-3 on the tiny target, fitted to half of what it is tested on, so that it is sometimes right."""
    return fitted(DraftConfig(steps=steps, init_lm_head="random"))


def fitted(cfg: DraftConfig) -> Draft:
    torch.manual_seed(0)
    vocab = DraftVocab(np.delete(np.arange(VOCAB), [5, 7]), VOCAB, 1.0)
    head = build(cfg, tiny_part(), vocab, len(LAYER_IDS))
    if not head.is_trained:
        return head.eval()
    batch = DraftBatch.collate(transcripts()[::2], CPU, torch.float32)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        head(batch, HardLoss()).backward()
        optimizer.step()
    return head.eval()

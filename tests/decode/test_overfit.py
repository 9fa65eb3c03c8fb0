"""From training to decoding: a head that has one sample by heart drafts it, and the target accepts every token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3_train.config import DraftConfig, Eagle3Config
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.drafts import DraftBatch, DraftVocab, build, supervised_counts
from eagle3_train.train.losses import Objective
from tests.alone import chain, plain
from tests.evaluate.tiny import prompt, states_of, tiny_part
from tests.heads import LAYER_IDS, VOCAB, tiny_target

CPU = torch.device("cpu")
K, NEW = 4, 26  # the first token comes from the prompt's forward, then five cycles of K + 1


@pytest.mark.parametrize(
    "options",
    [Eagle3Config(), Eagle3Config(layers=2, fc_norm=True, norm_output=True), Eagle3Config(hidden_size=48)],
    ids=["default", "two layers, EAGLE-3.1", "wide"],
)
def test_the_whole_chain_is_accepted(options: Eagle3Config) -> None:
    runner = TargetRunner(tiny_target(), LAYER_IDS)
    start = prompt(5, seed=1)
    own = plain(runner, start, NEW, []).tokens
    assert len(set(own)) > 8, "the text is too dull to show an error"
    sample = states_of(torch.cat((start, torch.tensor(own)))[None], len(start), "sample")
    torch.manual_seed(0)
    cfg = DraftConfig(steps=K, init_lm_head="random", init_layer="random", eagle3=options)
    head = build(cfg, tiny_part(), DraftVocab(np.arange(VOCAB), VOCAB, 1.0), len(LAYER_IDS))
    batch = DraftBatch.collate([sample], CPU, torch.float32)
    counts = supervised_counts(batch.loss_mask, batch.starts, K)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        head(batch, Objective(counts, 1.0, "drop", CPU)).backward()
        optimizer.step()
    out = chain(runner, head.eval(), start, NEW, [], K)
    assert out.tokens == own
    assert out.accepted == [K] * 5

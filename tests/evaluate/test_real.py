"""On the embedded real model in fp32: chain and tree give the target's own text, and replay gives their cycles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_train.config import DraftConfig
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer, decode_plain, decode_speculative
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.tree import Tree
from eagle3_train.drafts import DraftVocab, build
from eagle3_train.evaluate.replay import replay, replay_tree
from eagle3_train.evaluate.transcripts import Transcript
from eagle3_train.store import Sequence
from eagle3_train.target import load_target, load_tokenizer, stop_ids
from tests.evaluate.tiny import CPU, TinyPart

LAYER_IDS, NEW, STEPS = (2, 15, 27), 24, 3
PROMPTS = ("Count from one to ten, in words.", "Write a Python function that adds two numbers.")


@pytest.mark.real
@pytest.mark.slow
def test_real_decoding_is_lossless_and_replay_agrees(real_target: Path) -> None:
    tokenizer = load_tokenizer(real_target)
    stops = stop_ids(real_target, tokenizer)
    model = load_target(real_target, torch.float32, CPU)
    inner = model.model
    part = TinyPart(
        model.config.to_dict(),
        inner.embed_tokens.weight,
        inner.norm.weight,
        model.lm_head.weight,
        inner.layers[-1].state_dict(),
    )
    # Untrained, but started from the target's last layer and head, so that some of its drafts are right.
    torch.manual_seed(0)
    cfg = DraftConfig(steps=STEPS, init_lm_head="target", init_layer="target")
    head = build(cfg, part, DraftVocab(np.arange(20_000), model.config.vocab_size, 1.0), len(LAYER_IDS)).eval()
    runner = TargetRunner(model, LAYER_IDS)
    proposers: tuple[Proposer, ...] = (Chain(STEPS), Tree(3, 3, 9))
    for text in PROMPTS:
        encoded = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        prompt = torch.tensor(encoded["input_ids"])
        own = decode_plain(runner, prompt, NEW, stops).tokens
        ids = torch.cat((prompt, torch.tensor(own)))
        runner.reset()
        with torch.inference_mode():
            states = TargetRunner(model, (*LAYER_IDS, model.config.num_hidden_layers)).forward(ids).features
        mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
        int_ids = ids.numpy().astype(np.int32)
        transcript = Transcript.of(Sequence("p", "-", int_ids, mask, states.clone(), np.full(len(ids), -1, np.int32)))
        for proposer in proposers:
            out = decode_speculative(runner, head, proposer, prompt, NEW, stops)
            assert out.tokens == own
            if isinstance(proposer, Tree):
                assert replay_tree(head, proposer, transcript, CPU) == out.accepted
            else:
                assert [c for _, c in replay(head, [transcript], CPU, 4096)] == [out.accepted]

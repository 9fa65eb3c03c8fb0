"""Every kind of head: replay gives decoding's own cycles, chains and trees, and decoding stays the target's own."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from eagle3_train.config import DraftConfig, HFConfig, TaskConfig
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.static import StaticTree
from eagle3_train.decode.tree import Tree
from eagle3_train.drafts import HEADS, Draft
from eagle3_train.evaluate import decode_tasks, replay_tasks
from tests.evaluate.tiny import CPU, NEW, STOPS, fitted, transcripts, write_store
from tests.heads import tiny_target

TASK = TaskConfig(name="tiny", source="file", path="-", new_tokens=NEW)
STATIC = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
KINDS = sorted(HEADS.keys() - {"eagle3"})  # test_replay.py has that one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("transcripts")
    write_store(path / "tiny", transcripts())
    return str(path)


@cache
def head_of(kind: str) -> Draft:
    return fitted(DraftConfig(kind=kind, steps=3, init_layer="random", hf=HFConfig(half_right_model())))


@cache
def half_right_model() -> str:
    """The target itself with noise on its weights, as a draft model; it begins every text with a token of its own."""
    model = copy.deepcopy(tiny_target())
    model.config.bos_token_id = 0
    torch.manual_seed(4)
    for parameter in model.parameters():
        parameter.add_(0.08 * torch.randn_like(parameter))
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", ["chain", "tree", "static tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_and_decode_agree_record_by_record(folder: str, kind: str, shape: str) -> None:
    head = head_of(kind)
    tree = {"tree": Tree(3, 3, 9), "static tree": StaticTree(STATIC)}.get(shape)
    replayed, _ = replay_tasks(head, folder, [TASK], CPU, 50, 0, tree=tree)
    decoded, _ = decode_tasks(head, tiny_target(), folder, [TASK], 8, tree or Chain(3), STOPS, 50, 0)
    measured_alone = {"seconds": None, "plain_seconds": None, "lossless": None, "method": "replay"}
    assert all(r.lossless for r in decoded)
    assert [replace(r, **measured_alone) for r in decoded] == replayed
    assert sum(r.accepted[0] for r in replayed) > 0  # it is sometimes right, so that there is something to agree on
    assert sum(r.accepted[0] for r in replayed) < sum(r.drafted[0] for r in replayed)

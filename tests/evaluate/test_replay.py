"""Replay gives decoding's own cycles, field by field, without the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_train.config import TaskConfig
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.tree import Tree
from eagle3_train.evaluate import Record, decode_tasks, replay_tasks
from eagle3_train.evaluate.replay import accepted_runs, replay, walk
from eagle3_train.evaluate.transcripts import Transcript
from tests.alone import chain
from tests.evaluate.tiny import CPU, HIDDEN, NEW, STOPS, prompt, trained_head, transcript, transcripts, write_store
from tests.heads import LAYER_IDS, OracleHead, RandomHead, tiny_target

TASK = TaskConfig(name="tiny", source="file", path="-", new_tokens=NEW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("transcripts")
    write_store(path / "tiny", transcripts())
    return str(path)


def test_the_transcripts_end_in_every_way() -> None:
    generated = [int(s.loss_mask.sum()) for s in transcripts()]
    assert max(generated) == NEW
    assert len(set(generated)) > 3


@pytest.mark.parametrize("kind", ["trained", "random"])
def test_replay_and_decode_agree_record_by_record(folder: str, kind: str) -> None:
    head = trained_head() if kind == "trained" else RandomHead(HIDDEN, 3)
    replayed, summary = replay_tasks(head, folder, [TASK], CPU, 200, 0)
    decoded, more = decode_tasks(head, tiny_target(), folder, [TASK], 8, Chain(3), STOPS, 200, 0)
    measured_alone = {"seconds": None, "plain_seconds": None, "lossless": None, "method": "replay"}
    assert all(r.lossless for r in decoded)
    assert [replace(r, **measured_alone) for r in decoded] == replayed
    assert summary["tau_replay"] == more["tau_decode"]
    if kind == "trained":
        assert 1.3 < summary["tau_replay"]["tiny"]["tau"] < 3.9
        assert all(0 < a < 1 for a in summary["alpha"])


@pytest.mark.parametrize("tree", [Tree(3, 3, 9), Tree(5, 2, 6), Tree(1, 4, 4)], ids=lambda t: t.shape)
def test_trees_replay_as_they_decode(folder: str, tree: Tree) -> None:
    head = trained_head()
    replayed, keys = replay_tasks(head, folder, [TASK], CPU, 50, 0, tree=tree)
    decoded, _ = decode_tasks(head, tiny_target(), folder, [TASK], 8, tree, STOPS, 50, 0)
    measured_alone = {"seconds": None, "plain_seconds": None, "lossless": None, "method": "replay"}
    assert [replace(r, **measured_alone) for r in decoded] == replayed
    assert {r.shape for r in replayed} == {tree.shape}
    assert len(replayed[0].drafted) == tree.depth
    assert keys == {}  # the result's own keys are of chains


@pytest.mark.parametrize("new", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("prompt_length", [1, 4])
@pytest.mark.parametrize("stop", [False, True])
def test_replay_and_decode_agree_cycle_by_cycle(new: int, prompt_length: int, stop: bool) -> None:
    """Every accepted length, at every kind of end; the oracle errs at random places."""
    start = prompt(prompt_length, 3)
    text = transcript(start, new, [], "free")
    stops = [int(text.input_ids[-1])] if stop else []
    text = transcript(start, new, stops, "text")
    longer = torch.cat((start, torch.from_numpy(transcript(start, new + 9, [], "more").input_ids[prompt_length:])))
    runner = TargetRunner(tiny_target(), LAYER_IDS)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        right = torch.rand(len(longer), 4, generator=generator) < 0.7
        # While decoding the oracle knows what comes after the stop, so that it drafts beyond it.
        ahead = OracleHead(longer, lambda t, i: bool(right[t, i]), 4)  # noqa: B023
        known = OracleHead(torch.from_numpy(text.input_ids.astype(np.int64)), ahead.right, 4)
        decoded = chain(runner, ahead, start, new + 5 if stop else new, stops, 4)
        ((_, replayed),) = replay(known, [Transcript.of(text)], CPU, 100)
        assert decoded.tokens == text.input_ids[prompt_length:].tolist()
        assert replayed == decoded.accepted


def test_batching_changes_nothing(folder: str) -> None:
    head = trained_head()
    records = [replay_tasks(head, folder, [TASK], CPU, 10, 0, batch_tokens=n)[0] for n in (1, 40, 10_000)]
    assert records[0] == records[1] == records[2]


def test_accepted_runs_on_paper() -> None:
    ids = torch.tensor([7, 1, 2, 3, 4])
    drafted = torch.tensor([[2, 3], [3, 9], [9, 9], [-1, -1], [-1, -1]])
    assert accepted_runs(drafted, ids).tolist() == [2, 1, 0, 0, 0]
    # A right guess after a wrong one does not count.
    assert accepted_runs(torch.tensor([[9, 3], [9, 4], [4, -1], [-1, -1], [-1, -1]]), ids).tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("runs", "prompt_length", "cycles"),
    [
        ([3, 3, 3, 3, 3], 4, []),  # one generated token: it came from the prompt's forward
        ([3, 3, 3, 3, 3], 3, [0]),  # two: the second is the cycle's bonus, whatever was drafted
        ([3, 3, 3, 3, 3], 2, [1]),
        ([3, 3, 3, 3, 3], 1, [2]),
        ([2, 0, 0, 1, 0, 0, 0, 0, 0], 1, [2, 1, 0, 0]),
        ([9, 0, 1, 0, 2, 0, 0, 9, 0, 0], 2, [0, 1, 2, 0]),
    ],
)
def test_walk_on_paper(runs: list[int], prompt_length: int, cycles: list[int]) -> None:
    assert walk(np.array(runs), prompt_length) == cycles
    assert sum(cycles) + len(cycles) == len(runs) - prompt_length - 1


def test_record_of_cycles_on_paper() -> None:
    # 6 tokens. Of 3 drafts the first cycle compares all, the second one (it is wrong), the third the one that has
    # a token after it.
    record = Record.of_cycles([2, 0, 1], 3, task="t", method="replay", temperature=0.0, prompt="p")
    assert (record.tokens, record.forwards) == (6, 3)
    assert record.drafted == [3, 1, 1]
    assert record.accepted == [2, 1, 0]


def test_tau_is_one_plus_the_accepted_drafts_a_forward(folder: str) -> None:
    records, summary = replay_tasks(trained_head(), folder, [TASK], CPU, 10, 0)
    forwards = sum(r.forwards for r in records)
    accepted = sum(sum(r.accepted) for r in records)
    assert summary["tau_replay"]["tiny"]["tau"] == pytest.approx(1 + accepted / forwards, abs=1e-12)


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]])
def test_sequences_that_are_no_transcripts_are_refused(mask: list[int]) -> None:
    sequence = replace(transcripts()[2], input_ids=np.arange(3, dtype=np.int32), loss_mask=np.array(mask, np.uint8))
    with pytest.raises(ValueError, match="no transcript"):
        Transcript.of(sequence)


def test_missing_transcripts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        replay_tasks(trained_head(), str(tmp_path), [replace(TASK, name="nowhere")], CPU, 10, 0)

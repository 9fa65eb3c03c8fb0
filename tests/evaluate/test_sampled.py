"""Replay of sampled transcripts: the expectation is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_train.config import TaskConfig
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.sampling import Sampling
from eagle3_train.decode.tree import Tree
from eagle3_train.evaluate import Record, replay_tasks
from eagle3_train.evaluate.sampled import acceptance, expected_counts
from eagle3_train.evaluate.transcripts import Transcript
from eagle3_train.store import Store, write_target_part
from tests.alone import plain, speculative
from tests.evaluate.tiny import CPU, prompt, states_of, tiny_part, trained_head, write_store
from tests.heads import LAYER_IDS, tiny_target
from tests.tables import PROMPT, TableHead, TableRunner, texts


def test_certain_acceptance_counts_like_cycles() -> None:
    rng = np.random.default_rng(0)
    for tokens in (0, 1, 2, 3, 9):
        accept = (rng.random((tokens, 3)) < 0.6).astype(float)
        cycles, r = [], 0
        while r < tokens:
            run = int(np.cumprod(accept[r]).sum())
            cycles.append(min(run, tokens - r - 1))
            r += cycles[-1] + 1
        record = Record.of_cycles(cycles, 3, task="t", method="replay", temperature=0.0, prompt="p")
        forwards, drafted, accepted = expected_counts(accept)
        assert forwards == record.forwards
        assert drafted.tolist() == record.drafted
        assert accepted.tolist() == record.accepted


def test_expectation_equals_the_sum_over_all_ways() -> None:
    """By enumerating which drafts are accepted."""
    accept = np.random.default_rng(1).random((6, 2))

    def ways(r: int, probability: float, drafted: np.ndarray, accepted: np.ndarray, forwards: int) -> np.ndarray:
        if r == 6:
            return probability * np.array([forwards, *drafted, *accepted])
        limit = min(2, 6 - r - 1)
        total = np.zeros(5)
        for a in range(limit + 1):
            p = probability * np.prod(accept[r, :a]) * (1 - accept[r, a] if a < limit else 1)
            more = np.arange(2) < min(a + 1, limit)
            total += ways(r + a + 1, p, drafted + more, accepted + (np.arange(2) < a), forwards + 1)
        return total

    forwards, drafted, accepted = expected_counts(accept)
    expected = ways(0, 1.0, np.zeros(2), np.zeros(2), 0)
    np.testing.assert_allclose([forwards, *drafted, *accepted], expected, rtol=1e-12)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_p=0.9)], ids=["plain", "filtered"])
def test_sampled_decoding_has_the_expected_counts(sampling: Sampling) -> None:
    """Mean counts of real sampled decoding lie where replay, averaged over every transcript, says."""
    runner, head, steps, new, runs = TableRunner(), TableHead(), 2, 4, 1200
    p_table = sampling.probs(runner.table)
    expected = np.zeros(1 + 2 * steps)
    for text in texts(new):
        weight = runner.probability(text, sampling)
        tokens = [*PROMPT.tolist(), *text]
        accept = np.zeros((new - 1, steps))
        for r in range(new - 1):
            for i in range(min(steps, new - 1 - r)):
                before, last, x = tokens[len(PROMPT) + r + i - 1 : len(PROMPT) + r + i + 2]
                if weight:
                    accept[r, i] = min(1.0, float(head.q(i, last, sampling)[x] / p_table[before, last, x]))
        forwards, drafted, accepted = expected_counts(accept)
        expected += weight * np.array([forwards, *drafted, *accepted])
    generator = torch.Generator().manual_seed(3)
    counts = []
    for _ in range(runs):
        out = speculative(runner, head, Chain(steps, sampling), PROMPT, new, [], generator=generator)
        record = Record.of_cycles(out.accepted, steps, task="", method="decode", temperature=1.0, prompt="")
        counts.append([record.forwards, *record.drafted, *record.accepted])
    error = np.std(counts, axis=0) / runs**0.5
    assert (np.abs(np.mean(counts, axis=0) - expected) <= 4 * error + 1e-9).all()
    assert expected[-1] > 0.02


def test_acceptance_is_that_of_the_heads_own_steps() -> None:
    """From the batch pass: q of each step and p of each position, against stepping the head and running the target."""
    sampling = Sampling(0.9, top_p=0.95)
    model, head = tiny_target(), trained_head()
    runner = TargetRunner(model, LAYER_IDS)
    start = prompt(3, 80)
    generated = plain(runner, start, 9, [], sampling=sampling, generator=torch.Generator().manual_seed(1)).tokens
    ids = torch.cat((start, torch.tensor(generated)))
    transcript = Transcript.of(states_of(ids[None], len(start), "p"))
    accept = acceptance(head, tiny_part(), transcript, sampling, CPU)
    assert accept.shape == (8, 3)
    p = sampling.probs(model(input_ids=ids[None]).logits[0])
    features = transcript.sequence.hidden[:, :-1]
    for r in range(8):
        anchor = len(start) - 1 + r
        state = head.new_state()
        h, logits = head.observe(state, ids[1 : anchor + 2], features[: anchor + 1])
        for i in range(min(3, 8 - r)):
            if i:
                h, logits = head.step(state, ids[anchor + 1 + i], h)
            x = int(ids[anchor + 2 + i])
            q = torch.zeros(p.shape[1]).index_copy(
                0, head.target_ids(torch.arange(len(logits))), sampling.probs(logits)
            )
            assert accept[r, i] == pytest.approx(min(1.0, float(q[x] / p[anchor + 1 + i, x])), abs=2e-3)


def test_sampled_transcripts_are_replayed_as_such(tmp_path: Path) -> None:
    runner = TargetRunner(tiny_target(), LAYER_IDS)
    sampling = Sampling(0.9, top_p=0.95)
    sequences = []
    for seed in range(2):
        start = prompt(3, 90 + seed)
        generator = torch.Generator().manual_seed(seed)
        new = plain(runner, start, 6, [], sampling=sampling, generator=generator).tokens
        sequences.append(states_of(torch.cat((start, torch.tensor(new)))[None], 3, f"p{seed}"))
    write_store(tmp_path / "warm", sequences, {"temperature": 0.9, "top_p": 0.95})
    part = tiny_part()
    tensors = {"embed_tokens": part.embed_tokens, "norm_weight": part.norm_weight, "lm_head": part.lm_head}
    write_target_part(tmp_path, Store.open(tmp_path / "warm").spec, tensors, part.config)
    task = TaskConfig(name="warm", source="file", path="-", new_tokens=6)
    head = trained_head()
    records, keys = replay_tasks(head, str(tmp_path), [task], CPU, 20, 0, target_store=str(tmp_path))
    for record, sequence in zip(records, sequences, strict=True):
        accept = acceptance(head, part, Transcript.of(sequence), sampling, CPU)
        assert (record.temperature, record.tokens) == (0.9, 5)
        assert record.forwards == expected_counts(accept)[0]
    assert keys == {}  # the result's own keys are greedy
    with pytest.raises(ValueError, match="target_store"):
        replay_tasks(head, str(tmp_path), [task], CPU, 20, 0)
    # A tree's candidates are deterministic: replayed by the transcript alone.
    records, _ = replay_tasks(head, str(tmp_path), [task], CPU, 20, 0, tree=Tree(2, 3, 6))
    assert [r.tokens for r in records] == [5, 5]

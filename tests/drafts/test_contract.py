"""What the loop, replay and decoding rely on, of every kind of head: one contract, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3_train.config import HEADS as KINDS
from eagle3_train.decode.loop import ancestors
from eagle3_train.drafts import HEADS, DraftBatch, StepLoss, supervised_counts
from eagle3_train.drafts.batch import PAD_TO
from eagle3_train.train.losses import Objective
from tests.drafts.tiny import H, tiny_batch, tiny_draft, tiny_sequence, tiny_sequences

CPU = torch.device("cpu")
ALL = sorted(HEADS)
TRAINED = sorted(HEADS.keys() - {"hf", "prompt_lookup"})


def test_every_kind_of_the_configuration_is_built() -> None:
    assert set(HEADS) == KINDS


class Shown(StepLoss):
    """An objective that keeps the logits of each step's rows."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def select(self, kept: Tensor) -> None:
        return None

    def __call__(self, step: int, hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor) -> Tensor:
        self.logits.append(hidden @ lm_head.T)
        return hidden.new_zeros(())

    def steps(
        self, rows_by_step: list[int], hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor
    ) -> Tensor:
        self.logits += (hidden @ lm_head.T).split(rows_by_step)
        return hidden.new_zeros(())

    def regress(self, step: int, hidden: Tensor, features: Tensor) -> Tensor:
        return hidden.new_zeros(())


@pytest.mark.parametrize("kind", ALL)
def test_drafting_along_the_true_tokens_gives_the_teacher_forced_draft(kind: str) -> None:
    """observe + step, whatever was accepted before: the logits of the unrolled forward, and the guess of `predict`."""
    head = tiny_draft(kind).eval()
    first = 0  # anchor
    batch = tiny_batch([tiny_sequence(30, [(first + 1, 30)], 9)])
    drafted, shown = head.predict(batch), Shown()
    if kind in TRAINED:
        head(batch, shown)
    state, observed = head.new_state(), 0
    for t in (0, 1, 2, 8, 9, 13, 20):  # the first texts are shorter than the draft
        fresh = torch.arange(observed, t + 1)
        h, logits = head.observe(state, batch.input_ids[fresh + 1], batch.hidden[fresh][:, head.reads])
        observed = t + 1
        for i in range(head.steps):
            if i:
                h, logits = head.step(state, batch.input_ids[t + 1 + i], h)
            assert head.target_ids(logits.argmax(-1)) == drafted[t, i]
            if kind in TRAINED:
                torch.testing.assert_close(logits, shown.logits[i][t - first], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ALL)
def test_a_tree_expands_as_steps_along_each_path(kind: str) -> None:
    head = tiny_draft(kind).eval()
    features = torch.randn(5, 4, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[:, head.reads]
    ids = torch.tensor([4, 1, 7, 2, 9])
    levels = [([3, 8], [-1, -1]), ([5, 6, 5], [0, 0, 1]), ([1, 2], [3, 4])]
    state = head.new_state()
    root, _ = head.observe(state, ids, features)
    tokens: list[int] = []
    parents: list[int] = []
    outputs: list[tuple[Tensor, Tensor]] = []
    for depth, (new, above) in enumerate(levels, start=1):
        tokens += new
        parents += above
        visible = ancestors(torch.tensor(parents))[1:, 1:][-len(new) :]
        h_in = torch.stack([root if p < 0 else outputs[p][0] for p in above])
        h, logits = head.expand(state, torch.tensor(new), h_in, depth, visible)
        outputs += list(zip(h, logits, strict=True))
    for row in range(len(tokens)):
        path: list[int] = []
        node = row
        while node >= 0:
            path.insert(0, tokens[node])
            node = parents[node]
        state = head.new_state()
        h, logits = head.observe(state, ids, features)
        for token in path:
            h, logits = head.step(state, torch.tensor(token), h)
        torch.testing.assert_close(outputs[row][1], logits, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", TRAINED)
def test_documents_do_not_see_each_other(kind: str) -> None:
    head, batch = tiny_draft(kind).eval(), tiny_batch()
    assert torch.equal(head.predict(batch), torch.cat([head.predict(tiny_batch([s])) for s in tiny_sequences()]))
    counts = supervised_counts(batch.loss_mask, batch.starts, head.steps)
    parts = sum(head(tiny_batch([s]), Objective(counts, 0.8, "keep", CPU)) for s in tiny_sequences())
    torch.testing.assert_close(parts, head(batch, Objective(counts, 0.8, "keep", CPU)), rtol=1e-11, atol=0)


@pytest.mark.parametrize("kind", ALL)
def test_drafts_are_where_decoding_can_use_them(kind: str) -> None:
    head, batch = tiny_draft(kind).eval(), tiny_batch()
    drafted = head.predict(batch)
    counts = supervised_counts(batch.loss_mask, batch.starts, head.steps)
    assert ((drafted >= 0).sum(0).numpy() == counts).all()
    assert set(drafted.unique().tolist()) <= {-1, *head.vocab.ids.tolist()}


@pytest.mark.parametrize("kind", TRAINED)
def test_a_rank_without_data_takes_part_with_zero_gradients(kind: str) -> None:
    head = tiny_draft(kind)
    batch = DraftBatch.collate_or_placeholder([], head, CPU, torch.float64)
    loss = head(batch, Objective(np.zeros(4, np.int64), 0.8, "drop", CPU))
    grads = torch.autograd.grad(loss, list(head.parameters()))
    assert float(loss) == 0
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("kind", TRAINED)
def test_padding_changes_nothing(kind: str) -> None:
    head = tiny_draft(kind).eval()  # EAGLE-1 adds no noise
    packed, padded = (DraftBatch.collate(tiny_sequences(), CPU, torch.float64, p) for p in (False, True))
    assert padded.n_tokens == len(tiny_sequences()) * PAD_TO
    found = []
    for batch in (packed, padded):
        counts = supervised_counts(batch.loss_mask, batch.starts, head.steps)
        loss = head(batch, Objective(counts, 0.8, "drop", CPU))
        found.append((loss, *torch.autograd.grad(loss, list(head.parameters()))))
    assert packed.loss_mask.any()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", TRAINED)
def test_one_sample_is_learnt_by_heart(kind: str) -> None:
    """The target's own greedy text, so that a right draft is the text; every step of it, drafted teacher-forced."""
    head = tiny_draft(kind, steps=3, dtype=torch.float32)
    sequence = tiny_sequence(20, [(4, 20)], 2)
    sequence.input_ids[1:] = head.vocab.ids[np.arange(19) * 5 % 13]
    states = sequence.hidden
    # The final state at t is such that the target's own most likely token is x_{t+1}.
    states[:-1, -1] = 3 * head_rows(head)[torch.from_numpy(np.searchsorted(head.vocab.ids, sequence.input_ids[1:]))]
    batch = tiny_batch([sequence], torch.float32)
    counts = supervised_counts(batch.loss_mask, batch.starts, head.steps)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        head(batch, Objective(counts, 1.0, "keep", CPU)).backward()
        optimizer.step()
    drafted = head.eval().predict(batch)
    right = [(drafted[t, i] == batch.input_ids[t + 2 + i]).item() for t in range(3, 18) for i in range(3) if t + i < 18]
    assert np.mean(right) > (0.95 if kind not in TEACHER_FORCED else 0.6)
    assert (drafted[3:18, 0] == batch.input_ids[5:20]).all()


TEACHER_FORCED = {"eagle1"}  # later steps are not trained: only the first must be right


def head_rows(head) -> Tensor:
    """Directions that the target's head tells apart best: its rows, normed."""
    return F.normalize(head.target_rows.double(), dim=-1) * H**0.5


@pytest.mark.parametrize("kind", TRAINED)
def test_cost_and_size_are_counted(kind: str) -> None:
    head, batch = tiny_draft(kind), tiny_batch()
    counts = head.parameter_counts()
    assert counts["trainable"] == sum(p.numel() for p in head.parameters())
    assert head.flops(batch) > 6 * counts["trainable"]

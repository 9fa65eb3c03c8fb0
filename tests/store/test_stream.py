"""The room that a rolling store needs and gives out, against a simulation of runs and workers in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_train.store import BatchPlan, Course, Stream, shard_rows
from eagle3_train.store.stream import shards_of

settings.register_profile("store", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("store")


@pytest.mark.parametrize(("rows", "shards"), [(10, 3), (7, 7), (23, 4), (64, 9)])
def test_the_shard_of_a_row_holds_it(rows: int, shards: int) -> None:
    for shard in range(shards):
        for row in shard_rows(rows, shards, shard):
            assert shards_of(np.array([row]), rows, shards) == shard


class Run:
    """A training run as the loop has it: it reads what a step needs, and its checkpoints come late."""

    def __init__(self, plan: BatchPlan, n_rows: int, n_shards: int) -> None:
        self.plan, self.course = plan, Course(plan, n_rows, n_shards)
        self.n_rows, self.n_shards = n_rows, n_shards
        self.step = self.saved = 0
        self.mark = self.course.mark(0)

    def shards(self) -> set[int]:
        return set(shards_of(self.plan.batch(self.step), self.n_rows, self.n_shards).tolist())

    def save(self) -> None:
        self.saved = self.step
        self.mark = self.course.mark(self.step)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Run], np.ndarray]:
    n = draw(st.integers(6, 40))
    lengths = np.array(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)))
    n_shards = draw(st.integers(2, min(n, 12)))
    runs = []
    for _ in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(1, n))
        window = draw(st.one_of(st.none(), st.integers(1, n)))
        length = {"epochs": draw(st.integers(1, 3))} if draw(st.booleans()) else {"steps": draw(st.integers(1, 12))}
        plan = BatchPlan(lengths[:rows], "f", 0, draw(st.integers(9, 40)), window=window, **length)
        runs.append(Run(plan, n, n_shards))
    return runs, np.array(draw(st.lists(st.integers(1, 5), min_size=n_shards, max_size=n_shards)))


@given(worlds(), st.randoms(use_true_random=False), st.booleans())
def test_with_the_least_cap_or_more_all_runs_end_and_it_is_never_exceeded(world, random, extra) -> None:  # type: ignore[no-untyped-def]
    runs, sizes = world
    stream = Stream({str(i): run.course for i, run in enumerate(runs)}, sizes)
    assert stream.least_cap() <= sizes.sum()
    cap = stream.least_cap() + (random.randrange(6) if extra else 0)
    present: set[int] = set()
    known = {str(i): run.mark for i, run in enumerate(runs)}  # by the worker, perhaps of old
    while any(run.step < len(run.plan) for run in runs):
        moved = False
        events = ["work", *range(len(runs))]
        random.shuffle(events)
        for event in events:
            if event == "work":
                if random.random() < 0.7:
                    known = {str(i): run.mark for i, run in enumerate(runs)}
                reach = stream.reach(known, cap)
                ranges, _ = stream.on_disk(known, reach)
                live = {shard for first, behind in ranges for shard in range(first, behind)}
                dead = present - live
                present -= dead
                missing = [shard for shard in stream.order(known, reach) if shard not in present]
                if missing:
                    present.add(missing[0])
                moved |= bool(missing or dead)
                assert sum(sizes[s] for s in present) <= cap
                continue
            run = runs[event]
            while run.step < len(run.plan) and random.random() < 0.8 and run.shards() <= present:
                if run.step and run.course.mark(run.step) != run.course.mark(run.saved):
                    run.save()  # at the latest now: it was begun before the step
                run.step += 1
                moved = True
            if run.step == len(run.plan) or run.course.mark(run.step) != run.course.mark(run.saved):
                moved |= run.mark != run.course.mark(run.step)
                run.save()
        if not moved and known == {str(i): run.mark for i, run in enumerate(runs)}:
            blocked = [run.shards() - present for run in runs if run.step < len(run.plan)]
            assert not all(blocked), "nothing moves any more"


def test_one_byte_less_than_the_least_cap_stops_all_for_good() -> None:
    lengths = np.full(12, 10)
    runs = [Run(BatchPlan(lengths, "f", seed, 20, window=4, epochs=2), 12, 6) for seed in (0, 1)]
    stream = Stream({str(i): run.course for i, run in enumerate(runs)}, np.full(6, 100))
    assert stream.least_cap() == 200  # a window of two shards: batches lie inside the windows
    present: set[int] = set()
    marks = {str(i): run.mark for i, run in enumerate(runs)}
    present.update(stream.order(marks, stream.reach(marks, 199)))
    assert present == {0}
    assert all(run.shards() - present for run in runs)


def test_a_run_that_is_done_or_small_holds_nothing_up() -> None:
    lengths = np.full(40, 10)
    large, small = (
        Course(BatchPlan(lengths[:n], "f", 0, batch, window=4, epochs=2), 40, 20) for n, batch in ((40, 20), (8, 30))
    )
    stream = Stream({"large": large, "small": small}, np.full(20, 1))
    assert (large.end, small.end, stream.captured()) == (40, 24, 40)
    # A batch of the small one holds the end of its first epoch and the beginning of the second: it waits for a pass.
    assert stream.least_cap() == 4
    marks = {"large": large.mark(15), "small": small.end}
    assert stream.reach(marks, 4) == large.mark(15) + 3
    assert list(stream.order(marks, stream.reach(marks, 4))) == [14, 15, 16, 17]


def test_kept_copies_take_the_place_of_later_passes() -> None:
    course = Course(BatchPlan(np.full(40, 10), "f", 0, 20, window=4, epochs=3), 40, 20)
    again = Stream({"run": course}, np.full(20, 4))
    kept = Stream({"run": course}, np.full(20, 4), np.full(20, 2))
    assert (again.captured(), kept.captured()) == (60, 20)
    assert again.least_cap() == 2 * 4
    assert kept.least_cap() == 20 * 2 + 2 * 4  # all copies, and the last window beside them
    marks = {"run": course.mark(10)}  # at the sixth window of the first pass
    assert kept.on_disk(marks, 13) == ([(10, 14)], [(0, 14)])
    marks = {"run": course.mark(len(course._plan) - 2)}
    assert kept.on_disk(marks, kept.end - 1) == ([], [(18, 20)])

"""The room that a rolling store needs and gives out, against a simulation of runs and workers in any order."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from eagle3_train.store import BatchPlan, Course, Stream, shard_rows
from eagle3_train.store.stream import shards_of


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


def random_world(random: Random) -> tuple[list[Run], np.ndarray]:
    """Up to three runs over a small store: prefixes, windows that are no whole shards, epochs or steps."""
    n = random.randint(6, 40)
    lengths = np.array([random.randint(1, 9) for _ in range(n)])
    n_shards = random.randint(2, min(n, 14))
    runs = []
    for _ in range(random.randint(1, 3)):
        rows = random.randint(1, n)
        window = random.choice([None, random.randint(1, 6), random.randint(1, n)])
        length = {"epochs": random.randint(1, 3)} if random.random() < 0.5 else {"steps": random.randint(1, 12)}
        plan = BatchPlan(lengths[:rows], "f", 0, random.randint(9, 30), window=window, **length)
        runs.append(Run(plan, n, n_shards))
    return runs, np.array([random.randint(1, 5) for _ in range(n_shards)])


def test_with_the_least_cap_all_runs_end_and_it_is_never_exceeded() -> None:
    """Each time in another order of events; a worker may look at old marks, and checkpoints come late."""
    for seed in range(400):
        random = Random(seed)
        runs, sizes = random_world(random)
        stream = Stream({str(i): run.course for i, run in enumerate(runs)}, sizes)
        cap = stream.least_cap()
        assert cap <= sizes.sum()
        simulate(random, runs, stream, cap, f"seed {seed}")


def simulate(random: Random, runs: list[Run], stream: Stream, cap: int, name: str) -> None:
    present: set[int] = set()

    def marks() -> dict[str, int]:
        return {str(i): run.mark for i, run in enumerate(runs)}

    def work() -> bool:
        nonlocal present
        reach = stream.reach(known, cap)
        live = {shard for first, behind in stream.on_disk(known, reach)[0] for shard in range(first, behind)}
        dead, present = present - live, present & live
        missing = [shard for shard in stream.order(known, reach) if shard not in present]
        present |= set(missing[:1])
        assert sum(stream.shard_bytes[s] for s in present) <= cap, name
        return bool(missing or dead)

    known, idle = marks(), 0
    while any(run.step < len(run.plan) for run in runs):
        assert idle < 20, f"{name}: nothing moves any more"
        idle += 1
        for event in random.sample(range(-1, len(runs)), len(runs) + 1):
            if event < 0:
                known = marks() if random.random() < 0.7 else known
                idle *= not work()
                continue
            run = runs[event]
            if run.step == len(run.plan) or not run.shards() <= present:
                # It waits, and the checkpoint that was begun before this step gets written in the meantime.
                idle *= run.mark == run.course.mark(run.step)
                run.save()
                continue
            if run.course.mark(run.step) != run.course.mark(run.saved):
                run.save()
            run.step += 1
            idle = 0


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

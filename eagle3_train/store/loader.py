"""Batches of a rank, read ahead by a thread while the rank computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from types import TracebackType

from eagle3_train.console import say
from eagle3_train.exits import Unfinished

from .plan import BatchPlan
from .reader import Store
from .schema import Sequence

GRACE_S = 5.0  # from being told to end: for a batch that comes, after which a checkpoint can be saved
REMOTE_READERS = 8  # requests under way at once
AGAIN_S = (1.0, 5.0, 25.0)  # before a batch that could not be read is read again: a server may be away for a moment
FINAL = (FileNotFoundError, PermissionError, TimeoutError)  # errors of a system that patience does not mend
LOCAL_READERS = 2  # one thread copies out of the page cache at half of what the memory can do


class Loader:
    """Iterator of (step, sequences): `sequences[i]` is row `plan.rank_rows(step, rank, world)[i]` of the store.

    The hidden states of a step lie end to end in one tensor (`concatenate` gives it without a copy).

    A thread keeps at most `prefetch` batches ready; what goes wrong in it is raised where the batch is asked for.
    `waited_s`: seconds that the consumer has waited for data. Memory: `prefetch` + 2 batches of this rank.
    Use it as a context manager, or call `close`: it ends the thread, also in the middle.
    """

    def __init__(
        self,
        store: Store,
        plan: BatchPlan,
        rank: int = 0,
        world: int = 1,
        start_step: int = 0,
        prefetch: int = 2,
        readers: int | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`readers`: threads that read rows at once; None: two from a disk, more from an object store, whose latency
        they hide. `interrupted`: whether this process has been told to end; `Unfinished` where no batch comes then."""
        if len(plan.lengths) > len(store):
            raise ValueError(f"the plan covers {len(plan.lengths)} rows and the store holds {len(store)}")
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}: at least one batch is read ahead")
        self.waited_s = 0.0
        self._store, self._plan, self._interrupted = store, plan, interrupted
        self._rank, self._world, self._start = rank, world, start_step
        self._readers = readers or (LOCAL_READERS if store.folder.is_local else REMOTE_READERS)
        self._queue: queue.Queue[tuple[int, list[Sequence]] | BaseException | None] = queue.Queue(prefetch)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, list[Sequence]]]:
        return self

    def __next__(self) -> tuple[int, list[Sequence]]:
        if self._closed.is_set():
            raise StopIteration
        began = time.perf_counter()
        item = self._get(began)
        self.waited_s += time.perf_counter() - began
        if isinstance(item, tuple):
            return item
        self.close()
        if item is None:
            raise StopIteration
        raise item

    def _get(self, began: float) -> tuple[int, list[Sequence]] | BaseException | None:
        while True:
            try:
                return self._queue.get(timeout=0.5)
            except queue.Empty:
                if self._interrupted() and time.perf_counter() - began > GRACE_S:
                    self.close()
                    raise Unfinished("stopped while it waited for its data") from None

    def close(self) -> None:
        """End the thread and let go of what it has read. May be called twice."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.02)  # it may wait for room
            except queue.Empty:
                continue
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with ThreadPoolExecutor(self._readers, "store-reader") as readers:
                for step in range(self._start, len(self._plan)):
                    sequences = self._read(step, readers)
                    self._queue.put((step, sequences))
                    if self._closed.is_set():
                        return
            self._queue.put(None)
        except BaseException as e:  # raised in the consumer
            self._queue.put(e)

    def _read(self, step: int, readers: Executor) -> list[Sequence]:
        """One error of a network's file system in days, on one of many ranks, is not the end of them all."""
        plan, rank, world, cancelled = self._plan, self._rank, self._world, self._closed.is_set
        for seconds in AGAIN_S:
            try:
                return self._store.read_step(plan, step, rank, world, readers, cancelled)
            except OSError as e:
                if isinstance(e, FINAL):
                    raise
                say(f"rank {rank}: the batch of step {step + 1} could not be read ({e}): again in {seconds:.0f} s")
            self._closed.wait(seconds)
            self._store.reopen()
        return self._store.read_step(plan, step, rank, world, readers, cancelled)

"""Checkpoints: a folder a step, written aside and renamed, so that a folder with the final name is whole.

step-00000200/head.safetensors   full fp32 weights, by name: all that evaluation and export need
step-00000200/optimizer/         optimizer state by parameter name, in torch.distributed.checkpoint's format: every
                                 rank writes its own shards, and any engine and world size reads them
step-00000200/rng.pt             states of the random generators, of every rank
step-00000200/state.json         step, data position, totals, replay tau where it was measured, checksums of the others
                                 and its own
best                             a link to the checkpoint of the highest replay tau, where there is one
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.utils._pytree import tree_map_only

from eagle3_train.config import digest
from eagle3_train.files import file_digest, read_object, write_json
from eagle3_train.tensors import is_finite, save_tensors
from eagle3_train.train.distributed import World
from eagle3_train.trained import checkpoint_name, checkpoint_steps

if TYPE_CHECKING:
    from eagle3_train.train.engines import Engine

# One process needs no group, which torch would remark on at every checkpoint.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")

WEIGHTS = "head.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. Sent to another process it carries its state, where that was read."""

    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name.removeprefix("step-"))

    @cached_property
    def state(self) -> dict[str, Any]:
        with self._named():
            state = read_object(self.path / "state.json")
            parts = (state.get("plan"), state.get("totals"))
            if state.get("step") != self.step or not all(isinstance(part, dict) for part in parts):
                raise ValueError(f"state.json is none of step {self.step}")
            if (written := state.pop("digest", None)) is not None and digest(state) != written:
                raise ValueError("state.json has another checksum than it was written with")
            return state

    def weights(self, shapes: Mapping[str, torch.Size] | None = None) -> dict[str, Tensor]:
        """fp32, on the host. `shapes`: of the head that they are for, by name. ValueError where they are not as they
        were written, or another head's."""
        written = self.state.get("files")
        with self._named():
            self._check([WEIGHTS], written)
            weights = load_file(self.path / WEIGHTS)
            # Checkpoints of before there were checksums.
            if not written and not all(t.dtype == torch.float32 and is_finite(t) for t in weights.values()):
                raise ValueError(f"{WEIGHTS} holds values that are no finite fp32 numbers")
            found = {name: t.shape for name, t in weights.items()}
            if shapes is not None and found != shapes:
                wrong = sorted(n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n))
                raise ValueError(f"{WEIGHTS} is of another head: {', '.join(wrong)}")
            return weights

    def load_into(self, engine: Engine) -> bool:
        """Weights, optimizer state and random generators; False: these are of another number of ranks, and not set. A
        collective. ValueError, on all ranks, where a file is not as it was written; OSError where it cannot be read.

        Rank 0 reads the weights, once for all, and compares the checksums of all files before any rank reads its part.
        """
        world, read = engine.world, dict[str, Tensor]()

        def on_main() -> list[Any]:
            written = self.state.get("files", {})
            with self._named():
                self._check(sorted(written.keys() - {WEIGHTS}), written)
                generators: list[Any] = torch.load(self.path / "rng.pt", weights_only=True)
            read.update(self.weights(engine.shapes))
            return generators

        generators = world.on_main(on_main)
        state = engine.state()  # of the right shapes and shards, to be overwritten
        try:
            dcp.load(state, checkpoint_id=self.path / "optimizer")
        except CheckpointException as e:  # of any rank; no Exception by its class
            if "files" not in self.state:  # of before there were checksums: nothing has looked at them yet
                with self._named():
                    raise
            raise OSError(f"checkpoint {self.path} could not be read, and is as it was written: {e}") from e
        engine.load(world.share(read, engine.shapes), state)
        if len(generators) != world.size:
            return False
        set_random_state(generators[world.rank])
        return True

    def _check(self, names: list[str], written: Mapping[str, str] | None) -> None:
        for name in names:
            if written and file_digest(self.path / name) != written.get(name):
                raise ValueError(f"{name} has another checksum than it was written with")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Whatever a damaged file makes its reader raise, as an error that names the checkpoint and the way out. A file
        that cannot be read at the moment is no damaged one."""
        try:
            yield
        except (Exception, CheckpointException) as e:  # the latter is none of the former
            if isinstance(e, OSError) and not isinstance(e, FileNotFoundError):
                raise
            reason = str(e).strip().splitlines()[-1] if str(e).strip() else ""
            raise ValueError(
                f"checkpoint {self.path} is damaged ({type(e).__name__}: {reason}): delete that folder and run "
                "`eagle3 train` with the same overrides: it continues from the checkpoint before, or begins anew"
            ) from e


def all_in(folder: Path) -> list[Checkpoint]:
    """The whole checkpoints, oldest step first. Half-written ones have other names and are not seen."""
    return [Checkpoint(folder / checkpoint_name(step)) for step in checkpoint_steps(folder)]


def newest(folder: Path) -> Checkpoint | None:
    return next(reversed(all_in(folder)), None)


def best(folder: Path) -> Checkpoint | None:
    """The one of the highest replay tau, among those where it was measured."""
    measured = [c for c in all_in(folder) if c.state.get("tau") is not None]
    return max(measured, key=lambda c: c.state["tau"], default=None)


def newest_and_highest_tau(folder: Path) -> tuple[Checkpoint | None, float]:
    """The newest one, its state read, and the tau of `best`: minus infinity where there is none."""
    last, top = newest(folder), best(folder)
    if last:
        last.state  # noqa: B018 - read here, for whoever it is sent to
    return last, top.state["tau"] if top else -math.inf


class Saver:
    """Writes the checkpoints of a run in a thread, one at a time, while training goes on.

    `save` copies to host memory; what goes wrong in the thread is raised by the next call of any method. A context
    manager: leaving it waits for the last checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        keep_last: int,
        keep_best: bool,
        saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`saved`: called on rank 0, in the thread, when the checkpoint of a step is on disk."""
        self._saved = saved
        self.folder, self.world, self.keep_last, self.keep_best = folder, world, keep_last, keep_best
        # Of its own: collectives of the thread must not meet those of the loop.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        if (folder / "best").is_dir() and not (folder / "best").is_symlink():
            raise ValueError(
                f"{folder / 'best'} is a folder, and the link to the best checkpoint takes its place: move it away"
            )
        if world.is_main:  # the point's lock is ours, so what is half-written was left by a writer that was killed
            for stale in folder.glob(".step-*.tmp"):
                shutil.rmtree(stale)

    def save(self, engine: Engine, state: dict[str, Any]) -> None:
        """Begin to write the checkpoint of `state["step"]`. A collective."""
        self.wait()
        weights, optimizer = _copied(engine.weights()), _copied(engine.state())
        generators = self.world.gather(random_state())
        self.check()

        def write() -> None:
            try:
                self._write(weights, optimizer, generators, state)
            except CheckpointException as e:  # of any rank; no Exception by its class
                self._error = OSError(f"the checkpoint of step {state['step']} could not be written: {e}")
            except Exception as e:
                self._error = e

        if self.world.is_main:
            shutil.rmtree(self._temporary(state["step"]), ignore_errors=True)
            self._temporary(state["step"]).mkdir(parents=True)
        self.world.barrier()
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what has gone wrong, without waiting."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until the checkpoint is written; rank 0 returns when it has its name."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:  # a rank may be gone, and then the thread would wait for it
            self._thread.join(timeout=5)

    def _temporary(self, step: int) -> Path:
        """The same on all ranks, which write it together."""
        return self.folder / f".{checkpoint_name(step)}.tmp"

    def _write(
        self, weights: dict[str, Tensor], optimizer: dict[str, Any], generators: list[Any], state: dict[str, Any]
    ) -> None:
        temporary, final = self._temporary(state["step"]), self.folder / checkpoint_name(state["step"])
        if self.world.is_main:
            save_tensors(weights, temporary / WEIGHTS)
            torch.save(generators, temporary / "rng.pt")
        # Ends on rank 0 when the files of all ranks are on disk: it then writes what describes them.
        saved = dcp.save(optimizer, checkpoint_id=temporary / "optimizer", process_group=self._group)
        if self.world.is_main:
            # By what was written, not by a listing: one may be older than the files of other machines.
            parts = {part.relative_path for part in saved.storage_data.values()} | {".metadata"}
            files = sorted({WEIGHTS, "rng.pt", *(f"optimizer/{part}" for part in parts)})
            state |= {"files": {name: file_digest(temporary / name) for name in files}}
            write_json(temporary / "state.json", state | {"digest": digest(state)})
            for path in (*temporary.iterdir(), temporary):
                _sync(path)
            if final.exists():  # of an earlier attempt, at the same step: the same content
                _remove(final)
            temporary.rename(final)
            _sync(self.folder)
            self._saved(state["step"])
            self._prune()

    def _prune(self) -> None:
        keep = {c.path for c in all_in(self.folder)[-self.keep_last :]}
        link, aside = self.folder / "best", self.folder / ".best.tmp"
        if self.keep_best and (top := best(self.folder)):
            keep.add(top.path)
            aside.unlink(missing_ok=True)
            aside.symlink_to(top.path.name)
            aside.replace(link)
        else:
            link.unlink(missing_ok=True)
        for old in all_in(self.folder):
            if old.path not in keep:
                _remove(old.path)


def _remove(path: Path) -> None:
    """A whole checkpoint, all at once: killed in the middle, this would leave half of one under its name. What it
    leaves now is swept when the next `Saver` starts."""
    aside = path.with_name(f".{path.name}.old.tmp")
    path.rename(aside)
    shutil.rmtree(aside)


def random_state() -> dict[str, Tensor]:
    """Of torch's generators, the only ones that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def _copied(tensors: Any) -> Any:
    """Contiguous copies: the thread must not see what the next step makes of the live tensors."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(memory_format=torch.contiguous_format), tensors)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

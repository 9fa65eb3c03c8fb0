"""Whether an exported folder is the head: read back bit by bit, and run by the library whose format it is."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_train.console import say
from eagle3_train.drafts import DraftBatch, Eagle3
from eagle3_train.export.layout import EMBEDDING, HeadSource, engine_weights
from eagle3_train.export.read import read_published
from eagle3_train.files import read_json

PEER_PYTHON = "EAGLE3_SPECULATORS_PYTHON"
TOLERANCE = 1e-4  # of logits in fp32, relative to the largest
TOKENS = 48


def check_export(source: HeadSource, folder: Path, dtype: torch.dtype) -> None:
    """Read `folder` back and compare; then, for the speculators format, run the library on it where there is one.

    Raises:
        RuntimeError: the folder is not the head, or the library computes something else: a bug.
    """
    check_round_trip(source, folder, dtype)
    say(f"check: {folder} read back is the head, bit for bit ({str(dtype).removeprefix('torch.')})")
    head = source.head
    if not isinstance(head, Eagle3) or "transformer_layer_config" not in read_json(folder / "config.json"):
        say("check: the speculators library reads export.format=speculators alone; not run on this one")
        return
    python = peer_python()
    if python is None:
        say(
            f"check: not run in the speculators library, which is not installed here: {PEER_PYTHON}=PYTHON names the "
            "interpreter of an environment that has it (benchmarks/contenders/install.sh makes one)"
        )
        return
    (worst,) = compare_with_peer([(source, folder)], dtype, python)
    if not worst <= TOLERANCE:
        raise RuntimeError(
            f"{folder}: speculators computes other logits, {worst:.2e} apart: this is a bug of the export"
        )
    say(f"check: speculators computes the same logits of {head.steps} steps (at most {worst:.1e} apart)")


def check_round_trip(source: HeadSource, folder: Path, dtype: torch.dtype) -> None:
    """RuntimeError where a tensor, the vocabulary or the layer ids came back changed."""
    head = source.head
    wanted = {name: t.to("cpu", dtype) for name, t in engine_weights(head).items()}
    found: dict[str, Tensor | None] = {}
    changed = []
    if isinstance(head, Eagle3):
        published = read_published(folder)
        found |= published.weights | {EMBEDDING: published.embed_tokens}
        if not np.array_equal(published.vocab_ids(source.vocab_size), head.vocab.ids):
            changed.append("the draft vocabulary")
        if published.layer_ids != source.layer_ids:
            changed.append("the layer ids")
    else:
        found |= load_file(folder / "model.safetensors")
    changed += [n for n in wanted.keys() | found.keys() if not _equal(wanted.get(n), found.get(n))]
    if changed:
        raise RuntimeError(f"{folder}: {', '.join(sorted(changed))} came back changed: this is a bug of the export")


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


def peer_python() -> str | None:
    """Interpreter that has `speculators`: the one that EAGLE3_SPECULATORS_PYTHON names, or this one."""
    if named := os.environ.get(PEER_PYTHON):
        return named
    return sys.executable if importlib.util.find_spec("speculators") else None


def compare_with_peer(exports: Sequence[tuple[HeadSource, Path]], dtype: torch.dtype, python: str) -> list[float]:
    """Largest difference between our logits and the library's over all steps, relative to the largest logit, for each
    exported head.

    Both compute in fp32 from the weights in `dtype`, on the same random states and tokens.

    Raises:
        RuntimeError: the library does not run a head.
    """
    script = Path(__file__).with_name("peer.py")
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for i, (source, folder) in enumerate(exports):
            inputs, output = Path(scratch, f"inputs-{i}"), Path(scratch, f"output-{i}")
            ids, hidden = _example(source)
            tensors = {
                "hidden_states": hidden[None, :, :-1].flatten(2).contiguous(),
                "input_ids": ids.roll(-1)[None].contiguous(),
                "steps": torch.tensor([source.head.steps]),
            }
            save_file(tensors, inputs)
            runs += [str(folder), str(inputs), str(output)]
        done = subprocess.run([python, str(script), *runs], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"speculators does not run {exports[0][1]}:\n{done.stderr[-4000:]}")
        theirs = [load_file(output)["logits"] for output in runs[2::3]]
    return [_difference(source, dtype, logits) for (source, _), logits in zip(exports, theirs, strict=True)]


def _example(source: HeadSource) -> tuple[Tensor, Tensor]:
    """Random tokens [T] and states [T, n + 1, H]."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(source.vocab_size, (TOKENS,), generator=g)
    return ids, torch.randn(TOKENS, source.head.n_layers, source.head.hidden_size, generator=g)


def _difference(source: HeadSource, dtype: torch.dtype, theirs: Tensor) -> float:
    assert isinstance(source.head, Eagle3)
    ours = our_logits(source.head, dtype, *_example(source))
    return max(float((a - b[: len(a)]).abs().max() / a.abs().max()) for a, b in zip(ours, theirs, strict=True))


class _Logits:
    """An objective that keeps the logits of each step."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def select(self, kept: np.ndarray) -> None:
        return None

    def steps(
        self, rows_by_step: list[int], hidden: Tensor, lm_head: Tensor, targets: Tensor, target_rows: Tensor
    ) -> Tensor:
        self.logits = list(F.linear(hidden, lm_head).split(rows_by_step))
        return hidden.new_zeros(())


@torch.no_grad()
def our_logits(head: Eagle3, dtype: torch.dtype, ids: Tensor, hidden: Tensor) -> list[Tensor]:
    """Logits [T - 2 - i, D] of each step i, teacher-forced on one document, in fp32 from weights rounded to `dtype`."""
    rounded = copy.deepcopy(head).to("cpu").to(dtype).float()
    batch = DraftBatch(ids, hidden, np.full(len(ids), -1, np.int32), np.ones(len(ids), bool), [0, len(ids)])
    kept = _Logits()
    rounded(batch, kept)
    return kept.logits

"""What the code does on a GPU, on a device that is pretended over the CPU's numbers; tests/pretended.py says what that
shows and what it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_train.capture.hf import HiddenStates
from eagle3_train.config import DraftConfig, EngineConfig, OptimConfig
from eagle3_train.corpus import Row
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer, decode_speculative
from eagle3_train.decode.runner import TargetRunner
from eagle3_train.decode.sampling import Sampling
from eagle3_train.decode.schedule import Request
from eagle3_train.decode.tree import DrawnTree, Tree
from eagle3_train.device import peak_tflops, resolve_device
from eagle3_train.drafts import HEADS, DraftBatch, DraftVocab, build, supervised_counts
from eagle3_train.drafts.attention import _Merge, attend
from eagle3_train.evaluate.replay import accepted_runs, replay_tree
from eagle3_train.evaluate.transcripts import Transcript
from eagle3_train.store import Sequence, token_counts
from eagle3_train.train.distributed import World
from eagle3_train.train.engines import Engine
from eagle3_train.train.losses import Objective, _LinearObjective
from eagle3_train.train.setup import build_head, open_store
from eagle3_train.train.step import train_step
from eagle3_train.train.validate import open_validation, validate
from tests.drafts.tiny import TinyTarget, tiny_draft, tiny_sequence, tiny_sequences
from tests.heads import LAYER_IDS, VOCAB, prompts, tiny_target
from tests.pretended import CPU, CUDA, Pretended, is_possible, pretended_device, running
from tests.train.tiny_store import make_study, tiny_config

pytestmark = pytest.mark.skipif(not is_possible(), reason="this build of torch knows GPUs: benchmarks/gpu_check.sh")

TARGET = TinyTarget(head_dim=8)  # which FlashAttention takes
TRAINED = ("block", "eagle1", "eagle3", "lm", "medusa", "mtp")


class Context:
    """What an autograd function is given."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        self.needs_input_grad = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass


def there_and_back(function: Any, *inputs: Any, grad: Tensor | None = None) -> tuple[Any, list[Any]]:
    """Forward and backward of an autograd function, without the engine, which knows no pretended device."""
    ctx = Context(inputs)
    out = function.forward(ctx, *inputs)
    first = out[0] if isinstance(out, tuple) else out
    grads = function.backward(ctx, torch.ones_like(first) if grad is None else grad)
    for x, g in zip(inputs, grads, strict=True):
        if g is not None:
            assert (g.shape, g.dtype, g.device) == (x.shape, x.dtype, x.device)
    return out, list(grads)


@contextmanager
def trains() -> Iterator[list[torch.dtype]]:
    """The functions of our own run as in training, and their backward at once. Gives the dtypes of what the objective
    was given."""
    seen: list[torch.dtype] = []

    def objective(*inputs: Any) -> Any:
        seen.append(inputs[0].dtype)
        *tensors, mix, _, compiled = inputs
        return there_and_back(_LinearObjective, *tensors, mix, True, compiled)[0]

    with (
        mock.patch.object(_Merge, "apply", lambda *inputs: there_and_back(_Merge, *inputs)[0]),
        mock.patch.object(_LinearObjective, "apply", objective),
    ):
        yield seen


@pytest.mark.parametrize("chain", [0, 2])
def test_merge_is_the_reference_forward_and_backward(chain: int) -> None:
    segments = [(0, 0, 5), (8, 10, 4), (8, 16, 3)]
    g = torch.Generator().manual_seed(0)
    n_tokens, n_rows = 20, 12
    shapes = [(n_rows, 4, 8), *2 * [(n_tokens, 2, 8)], *2 * [(chain, n_rows, 2, 8)]]
    inputs = [torch.randn(*s, generator=g).bfloat16() for s in shapes]
    weight = torch.randn(n_rows, 4, 8, generator=g).bfloat16()
    leaves = [x.double().requires_grad_() for x in inputs]
    wanted = attend(*leaves, segments, "reference")
    grads = torch.autograd.grad(wanted, leaves, weight.double())
    with pretended_device() as device:
        on_device = [x.to(CUDA) for x in (*inputs, weight)]
        device.waited.clear()
        out, found = there_and_back(_Merge, *on_device[:-1], segments, grad=on_device[-1])
        assert not device.waited
        for a, b in zip([out, *found], [wanted, *grads], strict=False):
            torch.testing.assert_close(a.cpu().double(), b.detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_training_step_is_the_cpus_and_waits_for_nothing(kind: str) -> None:
    """Loss in bf16; every product of `lm_head` in bf16 too."""
    sequences = tiny_sequences()
    head = tiny_draft(kind, dtype=torch.float32, target=TARGET)
    head.eval()  # no noise

    def loss(device: torch.device) -> Tensor:
        batch = DraftBatch.collate(sequences, device, torch.bfloat16)
        counts = supervised_counts(batch.loss_mask, batch.starts, head.steps)
        with torch.autocast(device.type, torch.bfloat16):
            return head(batch, Objective(counts, 0.8, "drop", device))

    with torch.no_grad():
        wanted = float(loss(CPU))
    with pretended_device() as device, trains() as seen:
        head.to(CUDA)
        loss(CUDA)  # makes the rotary embedding's tables
        device.waited.clear()
        found = loss(CUDA)
        assert not device.waited
        assert set(seen) == {torch.bfloat16}
        assert float(found) == pytest.approx(wanted, rel=1e-2)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs")
    make_study(folder)
    return folder


@pytest.mark.parametrize("objective", ["soft_ce", "0.5*reverse_kl+0.3*tv+0.2*hard_ce"])
def test_an_optimizer_step_waits_for_its_results_alone(study: Path, objective: str) -> None:
    cfg = tiny_config(study, draft__attention="reference", train__objective=objective)
    store = open_store(cfg)
    sequences = list(store.read(range(4)))

    def run(device: torch.device) -> tuple[float, dict[str, Any]]:
        head = build_head(cfg, store, device, token_counts(store))
        engine = Engine(EngineConfig(), head, OptimConfig(), World(), torch.bfloat16)
        measured = validate(cfg.train, engine, open_validation(cfg, head, store.spec, World()))

        def backward(loss: Tensor) -> None:
            for p in head.parameters():
                p.grad = torch.ones_like(p)

        parts = [sequences[:2], sequences[2:]]
        with trains(), mock.patch.object(Tensor, "backward", backward):
            for _ in range(2):
                if isinstance(head.get_parameter("fc.weight"), Pretended):
                    running().waited.clear()
                result = train_step(engine, parts, 1e-3, cfg.train, World())
        return result.loss, measured

    with torch.no_grad():
        loss, measured = run(CPU)
    with pretended_device() as device:
        found, numbers = run(CUDA)
        assert [what.split(":")[0] for what in device.waited] == [
            "item train/engines/base.py", "copy to host train/step.py", "item train/step.py",
        ]  # fmt: skip
    assert found == pytest.approx(loss, rel=1e-2)
    for name, value in measured.items():
        assert numbers[name] == pytest.approx(value, rel=1e-2)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_teacher_forced_drafts_and_replayed_trees_are_the_cpus(kind: str) -> None:
    head = tiny_draft(kind, dtype=torch.float32, target=TARGET).eval().requires_grad_(False)
    sequence = tiny_sequence(21, [(6, 21)], 4)
    transcript = Transcript(Sequence("a", "t", **vars(sequence)), 6)

    def run(device: torch.device) -> tuple[Any, Any]:
        batch = DraftBatch.collate(tiny_sequences(), device, torch.float32)
        runs = accepted_runs(head.predict(batch), batch.input_ids).tolist()
        return runs, replay_tree(head, Tree(3, 2, 5), transcript, device)

    wanted = run(CPU)
    with pretended_device():
        head.to(CUDA)
        assert run(CUDA) == wanted


def decoded(device: torch.device, kind: str, proposer: Proposer, slots: int) -> list[tuple[list[int], list[int]]]:
    model, vocab = copy.deepcopy(tiny_target()).to(device), DraftVocab(np.arange(0, VOCAB, 2), VOCAB, 0.5)
    part = TinyTarget(head_dim=8)
    part.config = model.config.to_dict() | {"head_dim": 8}
    part.embed_tokens, part.lm_head = (m.weight.cpu() for m in (model.get_input_embeddings(), model.lm_head))
    part.norm_weight = model.model.norm.weight.cpu()
    torch.manual_seed(0)
    head = build(DraftConfig(kind=kind, steps=3, init_layer="random"), part, vocab, len(LAYER_IDS)).to(device)
    runner = TargetRunner(model, [*LAYER_IDS, 4][head.reads], slots)
    generators = [None if proposer.sampling.greedy else torch.Generator().manual_seed(i) for i in range(3)]
    requests = [Request(p, 12, g) for p, g in zip(prompts(3), generators, strict=True)]
    found = decode_speculative(runner, head.requires_grad_(False), proposer, requests, [5])
    return [(g.tokens, g.accepted) for g in found]


@pytest.mark.parametrize(
    ("kind", "proposer", "slots"),
    [
        *((kind, Chain(3), 1) for kind in TRAINED),
        ("eagle3", Chain(3, Sampling(1.0, top_p=0.9, top_k=10)), 1),
        ("eagle3", Chain(3), 2),
        ("eagle3", Tree(3, 2, 5), 2),
        ("mtp", Tree(3, 2, 5), 1),
        ("eagle3", DrawnTree(2, 2, 2, Sampling(1.0)), 1),
    ],
)
def test_decoding_is_the_cpus(kind: str, proposer: Proposer, slots: int) -> None:
    with torch.no_grad():
        wanted = decoded(CPU, kind, proposer, slots)
    with pretended_device():
        assert decoded(CUDA, kind, proposer, slots) == wanted


def test_hidden_states_are_the_cpus() -> None:
    rows = [
        Row(str(n), "test", np.arange(n, dtype=np.int32) % VOCAB, np.arange(n).astype(np.uint8) % 2) for n in (9, 4, 12)
    ]

    def run(device: torch.device) -> list[Sequence]:
        model = copy.deepcopy(tiny_target()).to(device)
        with HiddenStates(model, (0, 2, 4), torch.float32, logsumexp=True) as states:
            return states(rows)

    wanted = run(CPU)
    with pretended_device() as device:
        found = run(CUDA)
    assert [n for what, n in device.waited.items() if what.startswith("copy to host capture/hf.py")] == [1]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.hidden, b.hidden, rtol=1e-4, atol=1e-4)
        assert (a.target_argmax == b.target_argmax).all()
        np.testing.assert_allclose(a.target_logsumexp, b.target_logsumexp, rtol=1e-4)


def test_hidden_states_are_copied_from_where_they_were_read_to(study: Path) -> None:
    cfg = tiny_config(study)
    store = open_store(cfg)
    with pretended_device() as device:
        store.pinned = True
        batch = DraftBatch.collate(store.read_batch([0, 1, 2]), CUDA, torch.float32)
        assert batch.hidden.is_cuda
        assert not device.waited
        pinned = {what.split(":")[0]: n for what, n in device.copied.items() if "pinned" in what}
    assert pinned == {"copy of pinned memory drafts/batch.py": 3}


def test_each_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_device():  # which is one
        assert resolve_device("auto") == CUDA
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(ValueError, match="LOCAL_RANK=1, and this process sees 1 GPUs"):
            resolve_device("auto")


def test_the_rate_of_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA L4": 121, "NVIDIA L40S": 362, "GTX": None}
    for name, rate in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_tflops(CUDA, torch.bfloat16) == rate


def test_tensors_of_two_devices_are_refused_as_on_a_gpu() -> None:
    """The pretended device itself."""
    with pretended_device() as device:
        x = torch.ones(3, 2, device=CUDA)
        index = torch.tensor([0, 1])
        refused: list[Callable[[], Any]] = [
            lambda: x + torch.ones(3, 2), lambda: x.index_select(0, index), lambda: torch.ones(3)[x[:, 0].long()],
            lambda: x @ torch.ones(2, 2), x.numpy, lambda: torch.from_numpy(np.asarray(x)),
        ]  # fmt: skip
        for operation in refused:
            with pytest.raises((RuntimeError, TypeError)):
                operation()
        assert not device.waited
        assert (x[index] * torch.tensor(2.0)).is_cuda  # numbers, and indices of the host, are taken
        x[x > 0].sum().item()
        assert [what.split(" tests")[0].removesuffix(" elsewhere") for what in device.waited] == [
            "index of the host", "index by a mask", "item",
        ]  # fmt: skip
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.nn.functional.rms_norm(x.bfloat16(), (2,)).dtype == torch.float32  # what `rms_norm` is for

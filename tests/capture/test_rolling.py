"""Workers of a rolling store beside runs that read it: on a disk and over S3, captured again and from fp8 copies. The
target is a stand-in that makes states of ids."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train.capture import passes, roll, share_passes
from eagle3_train.capture.passes import announce_rolling, cap_bytes, make_stream
from eagle3_train.capture.plan import plan
from eagle3_train.config import Config
from eagle3_train.corpus import prepare, read_rows
from eagle3_train.store import BatchPlan, Rolling, RollingStore, Sequence, plan_of
from eagle3_train.store.folder import Folder
from eagle3_train.store.rolling import KEPT
from tests.capture.test_capture import study, write_chats

KEYS = (
    "corpus.sequences=40", "data.base_sequences=40", "capture.shards=20", "data.window=6", "train.batch_tokens=160",
    "corpus.max_length=128", "train.epochs=2", "eval.tasks=[]", "store.mode=rolling", "store.cap_gib=1",
)  # fmt: skip


def states(ids: Any) -> torch.Tensor:
    return torch.sin(torch.arange(1, 4 * 32 + 1) * torch.tensor(ids)[:, None] / 7).view(len(ids), 4, 32)


class StandIn:
    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def sequences(self, job: Any, rows: Any, progress: Any) -> Iterator[Sequence]:
        for r in rows:
            progress(len(r.input_ids))
            yield Sequence(r.sample_id, r.source, r.input_ids, r.loss_mask, states(r.input_ids), r.input_ids)


@pytest.fixture
def cfg(request: pytest.FixtureRequest, tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    place, *overrides = getattr(request, "param", ("disk",))
    if place == "s3":
        overrides.append(f"paths.store='{request.getfixturevalue('uri')}'")
    write_chats(tmp_path / "chats.json", 100)
    cfg = study(tmp_path, tiny_target, *KEYS, *overrides)
    prepare(cfg)
    monkeypatch.setattr("eagle3_train.capture.rolling.open_backend", lambda *args: StandIn())
    return cfg


def read_all(cfg: Config, store: RollingStore, batches: BatchPlan) -> dict[str, list[torch.Tensor]]:
    """As training does: states of each sample, an epoch after the other."""
    seen: dict[str, list[torch.Tensor]] = {}
    store.follow(cfg.point_name, batches, 0, "", is_main=True)
    saved = 0
    for step in range(len(batches)):
        if store.needs_checkpoint(saved, step):
            saved = step
            store.release(step)
            store.saved(step)
        for sequence in store.read_step(batches, step, 0, 1, None, lambda: False):
            seen.setdefault(sequence.sample_id, []).append(sequence.hidden.clone())
    store.finished(cfg.point_name, "")
    return seen


@pytest.mark.parametrize(
    "cfg", [("disk",), ("disk", "store.later_epochs=fp8"), ("s3",)], ids=["disk", "fp8", "s3"], indirect=True
)
def test_a_run_gets_the_states_of_every_epoch_and_nothing_is_left(cfg: Config) -> None:
    target = Path(cfg.target.model)
    job = plan(cfg, target, torch.device("cpu"))[0]
    announce_rolling(cfg, job, write=True)
    rolling = Rolling.read(Folder(cfg.paths.store))
    runs = {cfg.point_name: cfg.reading}
    cfg.store.cap_gib = make_stream(cfg, rolling, job.lengths, runs).least_cap() / 2**30
    assert cap_bytes(cfg) < sum(rolling.shard_bytes)
    reports: dict[int, Any] = {}
    workers = [threading.Thread(target=lambda i=i: reports.update({i: roll(cfg, i, 2)})) for i in range(2)]
    for worker in workers:
        worker.start()
    store = RollingStore.open(cfg.paths.store, keeps_fp8=cfg.reads_copies)
    batches = plan_of(store.index.n_tokens, store.fingerprint, cfg.reading)
    seen = read_all(cfg, store, batches)
    for worker in workers:
        worker.join(60)
    for row in read_rows(job.rows_file):
        first, second = seen[row.sample_id]
        expected = states(row.input_ids)
        assert torch.equal(first, expected)
        assert torch.equal(second, expected) != cfg.reads_copies
        assert (second - expected).norm() < 0.05 * expected.norm()
    captured = sum(report["shards"] for report in reports.values())
    assert captured == 20 if cfg.reads_copies else 20 < captured <= 40
    store_folder = Folder(cfg.paths.store)
    for folder in (store_folder, store_folder.child(KEPT)):
        assert not [name for name in folder.sizes() if "shard" in name]


def test_points_share_passes_as_far_as_they_fit_the_cap(cfg: Config, capsys: pytest.CaptureFixture[str]) -> None:
    cfg.launch.rolling.points_at_once = 3
    readings = {f"x{rows}": {**cfg.reading, "rows": rows} for rows in (40, 20, 10)}
    assert [list(group) for group in share_passes(cfg, readings)] == [["x40", "x20", "x10"]]
    job = plan(cfg, Path(cfg.target.model), torch.device("cpu"))[0]
    rolling = passes.Rolling.of(job.spec, passes.read_counts(job.rows_file, job.spec.vocab_size)[0])
    two = make_stream(cfg, rolling, job.lengths, {name: readings[name] for name in ("x40", "x20")}).least_cap()
    assert two > make_stream(cfg, rolling, job.lengths, {"x40": readings["x40"]}).least_cap()
    cfg.store.cap_gib = (two - 1) / 2**30
    capsys.readouterr()
    assert len(share_passes(cfg, readings)) > 1
    assert "cannot share the passes of x40: together they exceed store.cap_gib" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_cap_that_is_too_small_is_refused_with_the_cap_and_the_window_that_would_do(cfg: Config) -> None:
    target = Path(cfg.target.model)
    job = plan(cfg, target, torch.device("cpu"))[0]
    cfg.data.window, cfg.store.cap_gib = 20, 0.0005
    ways_out = r"too small for eagle3.*windows of 20 .*store\.cap_gib=0\.00\d.*data\.window=\d"
    with pytest.raises(ValueError, match=ways_out) as e:
        announce_rolling(cfg, job, write=True)
    assert not Path(cfg.paths.store).exists()
    cfg.data.window = int(str(e.value).partition("data.window=")[2].split()[0])
    announce_rolling(cfg, job, write=False)
    cfg.data.window = 3
    with pytest.raises(ValueError, match=r"data\.window=3.*would save a checkpoint a step"):
        announce_rolling(cfg, job, write=False)


def test_shards_of_a_capture_that_has_not_ended_are_not_rolled_over(cfg: Config) -> None:
    job = plan(cfg, Path(cfg.target.model), torch.device("cpu"))[0]
    Folder(cfg.paths.store).write("shard-00000-of-00020.parquet", b"x")
    with pytest.raises(ValueError, match="would delete them"):
        announce_rolling(cfg, job, write=True)

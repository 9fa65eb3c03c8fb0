"""Workers of a rolling store beside runs that read it: on a disk and over S3, captured again and from fp8 copies. The
target is a stand-in that makes states of ids."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train.capture import capture, passes, roll, share_passes
from eagle3_train.capture.passes import announce_rolling, cap_bytes, make_stream
from eagle3_train.capture.plan import plan
from eagle3_train.capture.rolling import Roller
from eagle3_train.capture.run import Worker
from eagle3_train.config import Config, digest
from eagle3_train.corpus import prepare, read_rows
from eagle3_train.files import write_json
from eagle3_train.store import BatchPlan, Rolling, RollingStore, Sequence, ShardWriter, is_rolling, plan_of, signs
from eagle3_train.store.folder import Folder
from eagle3_train.store.rolling import KEPT
from eagle3_train.store.signs import READERS, WORKERS, Sign, read_sign
from tests.capture.test_capture import study, write_chats
from tests.store.helpers import of_reader, of_worker

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
        worker.join(240)
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


def test_groups_that_were_formed_before_the_corpus_was_there_are_checked_before_the_capture(cfg: Config) -> None:
    job = plan(cfg, Path(cfg.target.model), torch.device("cpu"))[0]
    cfg.launch.kind, cfg.launch.rolling.session = "slurm", "all"
    readings = {f"x{rows}": {**cfg.reading, "rows": rows} for rows in (40, 20, 10)}
    write_json(cfg.session_file, readings)
    rolling = Rolling.of(job.spec, passes.read_counts(job.rows_file, job.spec.vocab_size)[0])
    together = make_stream(cfg, rolling, job.lengths, readings).least_cap()
    cfg.store.cap_gib = (together - 1) / 2**30
    announce_rolling(cfg, job, write=False)  # one at a time
    cfg.launch.rolling.points_at_once = 3
    with pytest.raises(ValueError, match=r"too small for x40, x20, x10.*fewer launch\.rolling\.points_at_once"):
        announce_rolling(cfg, job, write=False)


def test_a_session_whose_file_was_removed_is_told_how_to_go_on(cfg: Config) -> None:
    roller = make_roller(cfg)
    cfg.launch.rolling.session = "0-abc"
    write_json(cfg.session_file, {cfg.point_name: cfg.reading, "x8": cfg.reading})
    roller._look()
    assert list(roller.runs) == [cfg.point_name, "x8"]
    cfg.given_up_file("x8").touch()
    roller._look()
    assert list(roller.runs) == [cfg.point_name]
    cfg.session_file.unlink()
    with pytest.raises(ValueError, match=r"0-abc\.json, which names the runs .* is gone: run eagle3 study again"):
        roller._look()


def test_shards_of_a_capture_that_has_not_ended_are_not_rolled_over(cfg: Config) -> None:
    job = plan(cfg, Path(cfg.target.model), torch.device("cpu"))[0]
    Folder(cfg.paths.store).write("shard-00000-of-00020.parquet", b"x")
    with pytest.raises(ValueError, match="would delete them"):
        announce_rolling(cfg, job, write=True)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes as fractions of a second."""
    for name, value in (("SILENT_S", 0.3), ("BEAT_S", 0.05), ("REPEAT_S", 0.4)):
        monkeypatch.setattr(signs, name, value)
    monkeypatch.setattr("eagle3_train.capture.rolling.REMOTE_POLL_S", 0.05)


def make_roller(cfg: Config, rank: int = 0, world: int = 1) -> Roller:
    """One worker of a store that was announced, as `roll` makes it."""
    target, device = Path(cfg.target.model), torch.device("cpu")
    job = plan(cfg, target, device)[0]
    announce_rolling(cfg, job, write=True)
    return Roller(cfg, Worker(cfg, target, device, rank), job, Rolling.read(Folder(job.path)), rank, world)


def test_what_a_run_has_been_past_is_not_captured_again(cfg: Config) -> None:
    """A run reads a shard, saves a checkpoint, and another worker deletes the shard, all while this one looks."""
    roller = make_roller(cfg)
    with ShardWriter(cfg.paths.store, 0, roller.job.spec) as writer:
        for sequence in StandIn().sequences(roller.job, read_rows(roller.job.rows_file, roller.job.rows(0)), abs):
            writer.add(sequence)
    read_marks = roller._marks

    def marks_that_are_old_at_once() -> dict[str, int]:
        marks = read_marks()
        (Path(cfg.paths.store) / "shard-00000-of-00020.parquet").unlink()
        return marks

    roller._marks = marks_that_are_old_at_once  # type: ignore[method-assign]
    assert roller._look().shard == 1


def test_room_that_another_worker_fills_for_a_run_that_was_given_up_is_not_given_out_again(cfg: Config) -> None:
    roller = make_roller(cfg, rank=0, world=2)
    marks = {cfg.point_name: 0}
    roller.cap = sum(roller.rolling.shard_bytes[:6])
    assert roller._reach(marks) == 5
    other = of_worker(world=2, owner=roller.owner)

    def claim(shard: int | None, **changes: Any) -> int:
        text = json.dumps(other | {"claim": shard} | changes)
        roller.shards_in.child(WORKERS).write("1.json", text.encode())
        return roller._reach(marks)

    assert claim(15) < 5
    assert claim(3) == claim(None) == claim(15, owner="a study that has ended") == 5


def test_a_worker_says_what_it_is_to_capture_before_it_begins(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    roller = make_roller(cfg)
    said: list[Any] = []

    def shard(self: Worker, backend: Any, job: Any, number: int, *more: Any) -> None:
        said.append((number, json.loads(roller.shards_in.child(WORKERS).read("0.json"))["claim"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "shard", shard)
    with pytest.raises(KeyboardInterrupt):
        roller.run()
    assert said == [(0, 0)]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("name", "changes"),
    [("1", {"owner": "another study"}), ("0", {}), ("1", {"world": 3})],
    ids=["another study", "the same number", "another number of workers"],
)
def test_workers_that_would_disturb_those_that_are_there_are_refused(
    cfg: Config, name: str, changes: dict[str, Any]
) -> None:
    roller = make_roller(cfg, rank=0, world=2)
    facts = {"owner": roller.owner, "world": 2, "runs": ["x4-s1"], "claim": None, "ended": False, "doing": "capturing"}
    there = Sign(roller.shards_in, WORKERS, name, **(facts | changes))
    friend = Sign(roller.shards_in, WORKERS, "1" if name == "0" else "3", **facts)
    friend.close()
    try:
        with pytest.raises(ValueError, match=rf"is being captured: worker {name} of .* for x4-s1.*paths\.store"):
            roller.run()
        cfg.store.mode = "whole"
        with pytest.raises(ValueError, match="is being captured"):
            capture(cfg)
    finally:
        there.close(ended=True)


@pytest.mark.usefixtures("hurried")
def test_what_workers_that_are_gone_have_left_is_removed(cfg: Config) -> None:
    roller = make_roller(cfg, rank=1, world=2)
    left = {name: of_worker(host="gone", world=4) for name in ("0", "1", "3")}
    for name, sign in left.items():
        roller.shards_in.child(WORKERS).write(f"{name}.json", json.dumps(sign).encode())
    store = Path(cfg.paths.store)
    for number in (2, 3):
        (store / f".shard-0000{number}-of-00020.parquet.gone.0123.tmp").touch()
    roller._take_over()
    assert sorted(signs.read_signs(roller.shards_in, WORKERS)) == ["0", "1"]
    assert [path.name[:12] for path in store.glob(".shard*")] == [".shard-00002"]


@pytest.mark.usefixtures("hurried")
def test_a_run_that_is_silent_is_named_and_given_up_in_the_end(cfg: Config, capsys: pytest.CaptureFixture[str]) -> None:
    cfg.store.silent_minutes = 0.9 / 60
    roller = make_roller(cfg)
    roller.cap = sum(roller.rolling.shard_bytes[:6])
    text = json.dumps(of_reader(host="h", pid=5, mark=0))
    roller.shards_in.child(READERS).write(f"{cfg.point_name}.json", text.encode())
    words = f"waiting for room.*: run {cfg.point_name} .process 5 on h. has given no sign of life.*at step 3.*Start it"
    with pytest.raises(TimeoutError, match=words):
        roller.run()
    assert "run" in capsys.readouterr().out
    assert sum(path.stat().st_size for path in Path(cfg.paths.store).glob("shard*")) <= roller.cap
    sign = read_sign(roller.shards_in, WORKERS, "0")
    assert sign
    assert (sign["ended"], sign["doing"], sign["claim"]) == (True, "ended: TimeoutError", None)


def test_the_end_of_a_run_whose_results_were_removed_is_not_believed(cfg: Config) -> None:
    name, sign = cfg.point_name, of_reader(mark=7, ended=True)
    signs_in = Folder(cfg.paths.store).child(READERS)

    def mark(*, result: dict[str, Any] | None, at_step: int | None, **changes: Any) -> int:
        """Of a worker that begins with these in the point's folder."""
        shutil.rmtree(cfg.point_dir, ignore_errors=True)
        signs_in.write(f"{name}.json", json.dumps(sign | changes).encode())
        if result is not None:
            write_json(cfg.point_dir / "train.json", {"train_identity": digest(cfg.point_identity)} | result)
        if at_step is not None:
            (cfg.point_dir / "checkpoints" / f"step-{at_step:08d}").mkdir(parents=True)
        return make_roller(cfg)._marks()[name]

    end = make_roller(cfg).stream.courses[name].end
    assert mark(result={"steps": 9}, at_step=9) == end > 0
    assert mark(result={"steps": 0}, at_step=None) == end  # nothing to train
    assert mark(result=None, at_step=9) == mark(result={"steps": 9}, at_step=8) == mark(result={}, at_step=9) == 0
    assert mark(result={"steps": 9, "train_identity": "of another"}, at_step=9) == 0
    assert mark(result=None, at_step=None, ended=False) == 7
    roller = make_roller(cfg)
    for changes, found in (({}, 7), ({"ended": True}, end)):  # of now: wherever its results are
        signs_in.write(f"{name}.json", json.dumps(sign | {"generation": 2, "ended": False} | changes).encode())
        assert roller._marks()[name] == found


@pytest.mark.usefixtures("hurried")
def test_a_sign_of_a_run_that_lacks_something_is_named(cfg: Config) -> None:
    Folder(cfg.paths.store).child(READERS).write(f"{cfg.point_name}.json", b'{"beat": 3}')
    with pytest.raises(ValueError, match=r"readers/.*\.json is damaged: delete it"):
        make_roller(cfg).run()


def test_a_worker_whose_unfinished_shard_another_of_its_number_has_removed_says_so(
    cfg: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    roller, is_replaced = make_roller(cfg), True

    class Stopped(StandIn):
        """Meanwhile it seems dead, and another takes its number."""

        def sequences(self, job: Any, rows: Any, progress: Any) -> Iterator[Sequence]:
            yield from super().sequences(job, rows, progress)
            roller.shards_in.remove_temporaries("shard-")
            if is_replaced:
                text = json.dumps(of_worker(generation=2, owner=roller.owner))
                roller.shards_in.child(WORKERS).write("0.json", text.encode())

    monkeypatch.setattr("eagle3_train.capture.rolling.open_backend", lambda *args: Stopped())
    with pytest.raises(ValueError, match="worker 0 seemed dead, and another process has its number now"):
        roller.run()
    (Path(cfg.paths.store) / WORKERS / "0.json").unlink()
    is_replaced = False
    with pytest.raises(FileNotFoundError):
        roller.run()


def test_workers_other_than_the_first_do_not_read_the_corpus(cfg: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_counts(*args: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(passes, "read_counts", read_counts)
    monkeypatch.setattr("eagle3_train.capture.run.open_backend", lambda *args: StandIn())
    capture(cfg, rank=1, world=2)
    assert not is_rolling(cfg.paths.store)
    with pytest.raises(AssertionError):
        capture(cfg, rank=0, world=2)

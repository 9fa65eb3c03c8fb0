"""Whole small runs in one process: learning, what is logged and kept, what stops them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_train.drafts import Draft
from eagle3_train.exits import Unfinished
from eagle3_train.store import Store
from eagle3_train.train import checkpoint, load_head, train
from tests.train.conftest import NewOutputs
from tests.train.ranks import run_ranks, train_tiny
from tests.train.results import losses, newest, point, record, rows, same
from tests.train.tiny_store import make_study, tiny_config

CPU = torch.device("cpu")


def test_a_run_learns_and_leaves_what_others_rely_on(outputs: NewOutputs) -> None:
    cfg = tiny_config(outputs("a"), optim__lr="1e-2")
    train(cfg)
    lines = (cfg.point_dir / "metrics.jsonl").read_bytes()
    curve = losses(cfg.point_dir)
    assert curve[-1] < 0.8 * curve[0]
    trained = record(cfg.point_dir)
    index_tokens = trained["unique_tokens"]
    assert trained["consumed_tokens"] == 3 * index_tokens
    assert trained["supervised_tokens"] < index_tokens
    assert len(trained["val_loss_steps"]) == 3
    loaded = load_head(cfg, CPU)
    assert trained["parameters"]["trainable"] == sum(p.numel() for p in loaded.parameters())
    weights = newest(cfg.point_dir).weights()
    assert all(torch.equal(weights[name], p) for name, p in loaded.named_parameters())
    train(cfg)  # a finished point is not run again
    assert (cfg.point_dir / "metrics.jsonl").read_bytes() == lines


def test_a_trained_head_needs_no_shard(tmp_path: Path) -> None:
    make_study(tmp_path)
    cfg = tiny_config(tmp_path, train__epochs=1)
    train(cfg)
    head = load_head(cfg, CPU)
    store = Store.open(cfg.paths.store)
    (Path(cfg.paths.store) / store.manifest.shards[0].name).unlink()
    train(cfg)
    assert torch.equal(load_head(cfg, CPU).lm_head.weight, head.lm_head.weight)
    with pytest.raises(ValueError, match=r"shard-00000-of-\d+\.parquet is missing: run eagle3 capture again"):
        train(tiny_config(tmp_path, train__epochs=2))


def test_data_may_be_counted_in_tokens(outputs: NewOutputs) -> None:
    """The shortest prefix that holds as many."""
    folder = outputs("a")
    for scale in (1, 2):
        cfg = tiny_config(folder, data__base_tokens=150, data__scale=scale, train__epochs=1)
        train(cfg)
        lengths = Store.open(cfg.paths.store).index.n_tokens
        trained = record(cfg.point_dir)
        rows = trained["unique_sequences"]
        assert lengths[: rows - 1].sum() < 150 * scale <= lengths[:rows].sum() == trained["unique_tokens"]
    with pytest.raises(ValueError, match=r"data\.scale=100 needs 15,000 tokens, .* holds 24 \(.*: capture \d+ more"):
        train(tiny_config(folder, data__base_tokens=150, data__scale=100))
    assert tiny_config(folder, data__base_sequences=5).point_name != tiny_config(folder).point_name
    counted = [tiny_config(folder, data__base_tokens=150, data__base_sequences=n).point_name for n in (5, 6)]
    assert counted[0] == counted[1]  # sequences are not counted


def test_every_line_says_where_the_run_stands(outputs: NewOutputs) -> None:
    folder = outputs("a")
    train(tiny_config(folder, train__log_every=5, train__peak_tflops=1e-3))
    lines = [row for row in rows(folder) if "loss" in row]
    assert [row["step"] for row in lines] == [5, 10, 15, 16]
    for row in lines:
        assert row["steps"] == 16  # `eagle3 study status` shows step/steps
        assert {"lr", "grad_norm", "tokens", "tokens_per_s", "tflops", "data_wait", "peak_rss_mb"} <= row.keys()
        assert row["mfu"] == pytest.approx(row["tflops"] / 1e-3)
        assert 0 <= row["data_wait"] < 1
    assert "mfu" not in next(r for r in rows(trained(outputs("b"))) if "loss" in r)  # no peak is known of a CPU


def trained(folder: Path, **keys: Any) -> Path:
    train(tiny_config(folder, **keys))
    return folder


@pytest.mark.distributed
def test_while_it_trains_the_head_is_evaluated_as_saved_and_the_best_is_kept(outputs: NewOutputs) -> None:
    """Sharded on two ranks; `evaluate` gets a plain whole head, whose weights are those of the checkpoint."""
    folder = outputs("a")
    run_ranks(2, train_and_evaluate, folder / "log", folder)
    assert [(row["step"], row["tau"]) for row in rows(folder) if "tau" in row] == [
        (3, 2.0), (6, 5.0), (9, 4.0), (12, 3.0), (15, 3.0), (16, 3.0)
    ]  # fmt: skip
    assert all({"val_loss", "alpha_0"} <= row.keys() for row in rows(folder) if "tau" in row)
    kept = checkpoint.all_in(point(folder) / "checkpoints")
    assert [c.step for c in kept] == [6, 16]
    assert (point(folder) / "checkpoints" / "best").resolve() == kept[0].path
    seen = torch.load(folder / "seen-2.pt", weights_only=True)
    assert same(seen, kept[0].weights())
    assert same(newest(trained(outputs("b"))).weights(), newest(trained(outputs("c"), train__eval_every=5)).weights())


def train_and_evaluate(folder: Path) -> None:
    taus = [2.0, 5.0, 4.0, 3.0, 3.0, 3.0]
    seen: list[int] = []

    def evaluate(head: Draft) -> dict[str, Any]:
        assert not head.training
        seen.append(1)
        torch.rand(3)  # what an evaluation draws is not the training's
        torch.save(dict(head.state_dict()), folder / f"seen-{len(seen)}.pt")
        return {"tau": taus[len(seen) - 1], "alpha": [0.5, 0.25, 0.1]}

    train(tiny_config(folder, engine="fsdp2", train__eval_every=3, train__keep_last=1), evaluate)


def test_wrong_stores_are_refused_before_work(outputs: NewOutputs) -> None:
    folder = outputs("a")
    with pytest.raises(ValueError, match=r"dtype.*fp32"):
        train(tiny_config(folder, store__dtype="bf16"))
    with pytest.raises(ValueError, match="target"):
        train(tiny_config(folder, target__name="other"))
    with pytest.raises(ValueError, match="capture 6 more"):
        train(tiny_config(folder, corpus__sequences=30, data__scale=5))
    with pytest.raises(ValueError, match="vocabulary"):
        train(tiny_config(folder, draft__vocab_size=1000))
    with pytest.raises(ValueError, match="no supervised row at draft step"):
        train(tiny_config(folder, draft__steps=40))
    assert not list((folder / "tiny").glob("*/checkpoints/step-*"))


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with one damaged sequence."""
    folder = tmp_path_factory.mktemp("damaged")
    make_study(folder, damaged=[5])
    return folder


@pytest.mark.distributed
def test_a_damaged_sample_stops_all_ranks_and_is_named(damaged: Path) -> None:
    logs = run_ranks(2, train_tiny, damaged / "log", damaged, {"engine": "ddp"}, code=1)
    for log in logs:
        assert re.search(r"FloatingPointError: step \d+ of 16: loss nan.*rows \[.*samples by rank: .*\bs5\b", log)
    assert not list((damaged / "tiny").glob("*/train.json"))


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_a_skipped_update_changes_nothing_and_is_counted(engine: str, damaged: Path, tmp_path: Path) -> None:
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    folder = tmp_path
    (folder / "tiny").mkdir()
    (folder / "tiny" / "store").symlink_to(damaged / "tiny" / "store")
    keys = {"engine": engine, "train__nonfinite": "skip", "train__keep_last": 30, "train__checkpoint_every": 1}
    logs = run_ranks(2, train_tiny, folder / "log", folder, keys)
    assert logs[0].count("update skipped: step") == 3  # once an epoch
    bad = [row["step"] for row in rows(folder) if row.get("loss") == "nan"]
    assert len(bad) == 3
    assert record(folder)["skipped_steps"] == rows(folder)[-3]["skipped_steps"] == 3
    by_step = {c.step: c.weights() for c in checkpoint.all_in(point(folder) / "checkpoints")}
    assert same(by_step[bad[1]], by_step[bad[1] - 1])
    assert not same(by_step[bad[1]], by_step[bad[1] + 1])
    assert all(torch.isfinite(w).all() for w in by_step[16].values())


def test_a_run_that_has_diverged_is_not_skipped_for_ever(tmp_path: Path) -> None:
    make_study(tmp_path, damaged=range(24))
    with pytest.raises(FloatingPointError, match="step 11 of 16"):
        train(tiny_config(tmp_path, train__nonfinite="skip"))


def test_a_validation_loss_that_is_no_number_keeps_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_study(tmp_path, damaged_validation=[2])
    train(tiny_config(tmp_path))
    found = record(tmp_path)
    assert found["val_loss"] is None
    assert found["val_loss_steps"] == [None, None, None]
    assert math.isfinite(found["train_flops"])
    assert "val_loss = nan" in capsys.readouterr().out


def test_killed_between_the_last_checkpoint_and_the_record(outputs: NewOutputs) -> None:
    folder = outputs("a")
    train(tiny_config(folder))
    whole, lines = record(folder), rows(folder)
    (point(folder) / "train.json").unlink()
    train(tiny_config(folder))
    assert record(folder)["val_loss"] == whole["val_loss"]
    assert [row for row in rows(folder) if "step" in row] == [row for row in lines if "step" in row]


def test_draws_continue_where_a_run_continues(outputs: NewOutputs) -> None:
    """EAGLE-1 draws noise in every step."""
    keys = {"draft": "eagle1", "draft__vocab_size": 20}
    whole, cut = outputs("whole"), outputs("cut")
    torch.set_num_threads(1)
    train(tiny_config(whole, **keys))
    for _ in range(2):
        with pytest.raises(Unfinished):
            train(tiny_config(cut, **keys, train__max_hours=1e-9))
    torch.rand(7)
    train(tiny_config(cut, **keys))
    assert losses(cut) == losses(whole)

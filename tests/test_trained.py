"""Whether a point is trained: one question, asked of files alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from eagle3_train import config
from eagle3_train.config import digest
from eagle3_train.trained import CHECKPOINTS, RECORD, checkpoint_name, checkpoint_steps, is_trained


def test_a_point_is_trained_with_its_record_and_the_weights_of_its_last_step(tmp_path: Path) -> None:
    cfg = config.compose([f"paths.outputs={tmp_path}"])
    last = cfg.point_dir / CHECKPOINTS / checkpoint_name(16)
    for step in (7, 16):
        last.with_name(checkpoint_name(step)).mkdir(parents=True)
    last.with_name(".step-00000024.tmp").mkdir()
    assert checkpoint_steps(last.parent) == [7, 16]
    assert not is_trained(cfg)
    for steps, identity, trained in ((16, cfg, True), (24, cfg, False), (16, config.compose(["seed=7"]), False)):
        record = {"steps": steps, "train_identity": digest(identity.point_identity)}
        (cfg.point_dir / RECORD).write_text(json.dumps(record))
        assert is_trained(cfg) is trained
    (cfg.point_dir / RECORD).write_text(json.dumps({"steps": 16, "train_identity": digest(cfg.point_identity)}))
    shutil.rmtree(last)
    assert not is_trained(cfg)
    shutil.rmtree(last.parent)
    (cfg.point_dir / RECORD).write_text(json.dumps({"steps": 0, "train_identity": digest(cfg.point_identity)}))
    assert is_trained(cfg)  # a head that has nothing to train

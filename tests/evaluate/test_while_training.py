"""The numbers of a log line are those of the evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_train import config
from eagle3_train.evaluate import replay_tasks, while_training
from tests.evaluate.tiny import CPU, NEW, trained_head, transcripts, write_store

TASK = "{{name:{name},source:held_out,prompts:{prompts},new_tokens:{new}}}"


def configured(folder: Path, tasks: str) -> config.Config:
    return config.compose([f"paths.store={folder}", f"eval.tasks=[{tasks}]", "eval.decode_tasks=[]", "device=cpu"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, sequences in (("a", transcripts()[:5]), ("b", transcripts()[5:])):
        write_store(tmp_path / "transcripts" / name, sequences, {"max_new_tokens": NEW})
    write_store(tmp_path, transcripts())
    return tmp_path


def test_tau_and_alpha_are_those_of_replay(folder: Path) -> None:
    cfg = configured(folder, ",".join(TASK.format(name=n, prompts=p, new=NEW) for n, p in (("a", 5), ("b", 3))))
    numbers = while_training(cfg)(trained_head())
    records, keys = replay_tasks(trained_head(), str(folder / "transcripts"), cfg.eval.tasks, CPU, 20, 0)
    assert numbers["tau"] == sum(r.tokens for r in records) / sum(r.forwards for r in records)
    assert numbers["tau/a"] == keys["tau_replay"]["a"]["tau"] != numbers["tau/b"]
    assert numbers["alpha"] == keys["alpha"]
    assert numbers["tau"] > 1


def test_wrong_transcripts_are_refused_before_training(folder: Path) -> None:
    with pytest.raises(ValueError, match="transcripts of eval task 'a'"):
        while_training(configured(folder, TASK.format(name="a", prompts=5, new=NEW + 1)))


def test_without_tasks_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert while_training(configured(tmp_path, ""))(trained_head()) == {}

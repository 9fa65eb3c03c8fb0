"""Every file in `conf/` is composed; wrong values are refused with the key and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_train import config

GROUPS = sorted(p.relative_to(config.conf_dir()) for p in config.conf_dir().glob("*/*.yaml"))


@pytest.mark.parametrize("path", GROUPS, ids=str)
def test_every_conf_file_composes(path: Path) -> None:
    needed = ["draft.hf.model=FOLDER"] if str(path) == "draft/hf.yaml" else []
    cfg = config.compose([f"{path.parent}={path.stem}", *needed])
    assert cfg.point_name


def test_resolved_configuration_round_trips(tmp_path: Path) -> None:
    cfg = config.compose(["data.scale=2"])
    config.save(cfg, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == cfg


def test_a_configuration_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("optim: {learning_rate: 1}\n")
    with pytest.raises(
        ValueError, match=r"config\.yaml is damaged, or not a configuration of this version.*learning_rate"
    ):
        config.load(tmp_path / "config.yaml")


@pytest.mark.parametrize("text", ["", "a: [1", "- 1\n", "study: {name: x}", None], ids=repr)
def test_a_damaged_or_missing_configuration_is_named(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}(: no such file| is damaged)"):
        config.load(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.scal=2", "data.scal"),
        ("draft.steps=0", "draft.steps"),
        ("draft=hf", "draft.hf.model=FOLDER-OR-HUB-ID"),
        ("train.regime=hours", "epochs, steps"),
        ("data.scale=1000", "corpus.sequences"),
        ("train.batch_tokens=100", "corpus.max_length"),
        ("eval.decode_tasks=[nope]", "nope"),
        ("train.regime=steps", "train.steps"),
        ("train.regime=none", "draft.init_from"),
        ("serve.baseline_url=http://a:1", "needs serve.url"),
        ("serve.concurrency=[0]", "serve.concurrency"),
        ("eval.tasks=[{name: a, source: humaneval, top_p: 0.9}]", "its temperature is 0"),
        ("eval.trees=[{depth: 0}]", "eval.trees"),
        ("eval.tasks=[{name: a, source: humaneval, prompts: 9999999}]", "from 1 to 1,000,000"),
        ("capture.layer_ids=[-1,2]", "layer_ids.*0 or more"),
        ("capture.layer_ids=[2,1]", "ascending"),
        ("tracker.kinds=[mlflow]", "'mlflow', which is not among wandb, tensorboard"),
        ("draft.steps=100000", "draft.steps=100000 is beyond all use: at most 64"),
        ("optim.lr=1e9", "optim.lr"),
        ("seed=99999999999999999999", "seed"),
        ("corpus.format=parquet", "corpus.format"),
        ("launch.slurm.time=43200", "launch.slurm.time=.*between quotes"),
    ],
)
def test_wrong_values_are_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        config.compose([override])


def test_point_name_depends_on_what_defines_the_point_and_on_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = config.compose([]).point_name
    monkeypatch.chdir(tmp_path)
    assert config.compose(["train.log_every=3", "paths.outputs=/elsewhere", "tracker=wandb"]).point_name == name
    assert config.compose(["optim.lr=1e-3"]).point_name != name
    assert config.compose(["seed=7"]).point_name != name


def test_options_of_one_head_rename_no_point_of_another() -> None:
    def name(*overrides: str) -> str:
        return config.compose(list(overrides)).point_name

    assert name("draft.eagle1.noise=0.1", "draft.lm.layers=5") == name()
    assert name("draft=eagle1", "draft.lm.layers=5", "draft.init_layer=random") == name("draft=eagle1")
    assert name("draft=eagle1", "draft.eagle1.noise=0.1") != name("draft=eagle1")
    assert name("draft=prompt_lookup", "draft.vocab_size=9") == name("draft=prompt_lookup")
    assert name("draft.init_layer=random") != name()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["draft=eagle1", "draft.eagle1.trained_steps=4"], "exceeds draft.steps=3"),
        (["draft=eagle1", "draft.eagle1.feature_weight=0", "draft.eagle1.ce_weight=0"], "nothing would be trained"),
        (["draft=block", "draft.steps=1"], "at least 2"),
        (["draft=medusa", "draft.medusa.layers=0"], r"draft\.medusa\.layers"),
        (["draft=lm", "draft.recompute=true"], r"draft\.recompute is of EAGLE-3"),
    ],
)
def test_heads_that_cannot_be_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config.compose(overrides)

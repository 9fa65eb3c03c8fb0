"""Two studies of one head on two stores as one curve."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from configured import configure, replace_in_results
from synthetic_study import write_study

from analysis import load_runs
from analysis.__main__ import main
from analysis.join import join_studies
from analysis.series import group
from analysis.simulate import Design


def write_two(tmp_path: Path, above: tuple[float, ...] = (8, 16)) -> tuple[Path, Path]:
    first = write_study(tmp_path / "small", design=Design(scales=(1, 2, 4), seeds=1))
    second = write_study(tmp_path / "large", design=Design(scales=above, seeds=1), seed=1)
    replace_in_results(second, store_fingerprint="another", draft_vocab_size=5000)
    return first, second


def test_a_curve_goes_through_both_stores_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.reporting.pictures", lambda analysis: [])
    paths = [str(p) for p in write_two(tmp_path)]
    options = ["--out", str(tmp_path / "out"), "--replicates", "30"]
    assert main([*paths, *options]) == 0
    apart = capsys.readouterr().out
    assert "EAGLE-3, small" in apart
    assert "joined" not in apart
    assert main([*paths, *options, "--join"]) == 0
    joined = capsys.readouterr().out
    assert "at 1x and" in joined.splitlines()[0]
    assert "at 16x" in joined.splitlines()[0]
    assert "EAGLE-3, small" not in joined
    note = next(line for line in joined.splitlines() if line.startswith("Note"))
    assert "small and large are joined into one study although their stores differ" in note
    assert "small: a draft vocabulary of 4,096 tokens" in note
    assert "large: a draft vocabulary of 5,000 tokens" in note


def test_1x_is_that_of_the_first_study(tmp_path: Path) -> None:
    first, second = write_two(tmp_path, above=(4, 8))
    configure(second, "*", data={"base_sequences": 64}, corpus={"sequences": 1024})
    for path in sorted(second.glob("*/result.json")):  # 4x of 64 sequences is 8x of 32
        path.write_text(path.read_text().replace('"unique_sequences": 1', '"unique_sequences": 9'))
    runs = join_studies(load_runs([first, second])).finished
    ((label, members),) = group(runs)
    assert label == "EAGLE-3"
    assert sorted(runs.loc[members, "data_scale"]) == [1, 2, 4, 8, 16]


def test_where_a_scale_holds_other_data_the_scale_is_what_was_measured(tmp_path: Path) -> None:
    first, second = write_two(tmp_path, above=(4, 8))
    for path in sorted(second.glob("*/result.json")):
        for scale in (4, 8):
            tokens = round(7600 * scale)
            path.write_text(
                path.read_text().replace(f'"supervised_tokens": {tokens}', f'"supervised_tokens": {2 * tokens}')
            )
    runs = join_studies(load_runs([first, second])).finished
    np.testing.assert_allclose(sorted(runs["data_scale"]), [1, 2, 4, 8, 16])
    assert runs.groupby("data_scale")["supervised_tokens"].nunique().max() == 1


def test_what_else_differs_stays_apart(tmp_path: Path) -> None:
    first, second = write_two(tmp_path)
    configure(second, "*", train={"step_weight": 0.5})
    configure(first, "*", train={"step_weight": 0.8})
    labels = [label for label, _ in group(join_studies(load_runs([first, second])).finished)]
    assert labels == ["EAGLE-3, train.step_weight=0.5", "EAGLE-3, train.step_weight=0.8"]


def test_a_run_that_both_studies_have_counts_once(tmp_path: Path) -> None:
    first, second = write_two(tmp_path)
    shared = next(first.glob("*-x4-*"))
    shutil.copytree(shared, second / shared.name)
    both = load_runs([first, second])
    joined = join_studies(both)
    assert len(both.runs) == 6
    assert len(joined.runs) == 5
    assert set(joined.records["run"]) == set(range(5)) == set(joined.configs)
    assert joined.runs["data_scale"].to_list() == [joined.configs[i]["data"]["scale"] for i in range(5)]
    for i in range(5):
        own = joined.records[(joined.records["run"] == i) & (joined.records["method"] == "replay")]
        assert own["tokens"].sum() / own["forwards"].sum() == pytest.approx(joined.runs.loc[i, "tau"])


def test_one_study_cannot_be_joined(study: Path) -> None:
    with pytest.raises(ValueError, match="two studies or more"):
        join_studies(load_runs(study))

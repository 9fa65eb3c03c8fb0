"""Run folders and tidy files become one table; nothing that failed is dropped silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from analysis import load_runs
from analysis.table import FAILED, FINISHED, TRAINED


def test_tau_is_by_target_forward_over_all_prompts(study: Path) -> None:
    table = load_runs(study)
    run = table.runs.iloc[0]
    lines = (study / run["point"] / "records.jsonl").read_text().splitlines()
    records = [r for line in lines if (r := json.loads(line))["method"] == "replay"]
    assert len(records) < len(lines)  # decoded prompts are recorded too, and do not count
    tokens, forwards = (sum(r[k] for r in records) for k in ("tokens", "forwards"))
    assert run["tau"] == pytest.approx(tokens / forwards)
    counts = table.counts([0])
    assert counts is not None
    assert counts.measure()["tau"][0, 0] == pytest.approx(tokens / forwards)
    accepted, drafted = (sum(r[k][1] for r in records) for k in ("accepted", "drafted"))
    assert counts.measure()["alpha_1"][0, 0] == pytest.approx(accepted / drafted)
    assert run["alpha_1"] == pytest.approx(accepted / drafted)


def test_without_records_tau_is_pooled_from_the_tasks_counts(study: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(study, tmp_path / "copy")
    with_records = load_runs(copy).runs["tau"].to_list()
    for path in copy.glob("*/records.jsonl"):
        path.unlink()
    assert load_runs(copy).runs["tau"].to_list() == pytest.approx(with_records)


def test_points_without_a_result_stay_with_their_reason(study: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(study, tmp_path / "copy")
    first, second, third = sorted(p for p in copy.iterdir() if p.is_dir())[:3]
    (first / "result.json").unlink()
    (first / "log.txt").write_text("step 3\nRuntimeError: out of memory\n")
    (second / "result.json").write_text('{"schema": 1, "draft"')
    result = json.loads((third / "result.json").read_text())
    del result["seed"]
    (third / "result.json").write_text(json.dumps(result))
    table = load_runs(copy)
    assert len(table.runs) == 8
    failed = table.runs[table.runs["status"] == FAILED].set_index("point")["reason"]
    assert "out of memory" in failed[first.name]
    assert "not valid JSON" in failed[second.name]
    assert "lacks seed" in failed[third.name]
    assert len(table.notes) == 3
    assert table.runs.set_index("point").loc[first.name, "data_scale"] == 1  # from its configuration


def test_what_was_trained_alone_is_no_failure(study: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(study, tmp_path / "copy")
    tuned, by_hand, unmeasured = sorted(p for p in copy.iterdir() if p.is_dir())[:3]
    for point, state in ((tuned, "done"), (by_hand, ""), (unmeasured, "failed")):
        (point / "result.json").unlink()
        (point / "train.json").write_text("{}")
        if state:
            (point / "status.json").write_text(json.dumps({"state": state}))
    table = load_runs(copy)
    status = table.runs.set_index("point")["status"]
    assert [status[p.name] for p in (tuned, by_hand, unmeasured)] == [TRAINED, TRAINED, FAILED]
    assert [unmeasured.name in note for note in table.notes] == [True]


def test_a_point_shared_with_another_study_belongs_to_the_one_that_is_read(study: Path, tmp_path: Path) -> None:
    first, *others = sorted(p for p in study.iterdir() if p.is_dir())
    (tmp_path / "wider").mkdir()
    (tmp_path / "wider" / first.name).symlink_to(first)
    for folder in others:
        result = json.loads((folder / "result.json").read_text()) | {"study": "wider"}
        copy = shutil.copytree(folder, tmp_path / "wider" / folder.name)
        (copy / "result.json").write_text(json.dumps(result))
    assert set(load_runs(tmp_path / "wider").runs["study"]) == {"wider"}


def test_another_schema_is_refused(study: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(study, tmp_path / "copy")
    path = next(copy.glob("*/result.json"))
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(ValueError, match="schema 9"):
        load_runs(copy)


def test_a_cut_last_line_is_left_out_and_a_bad_middle_line_is_named(study: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(study, tmp_path / "copy")
    path = sorted(copy.glob("*/metrics.jsonl"))[0]
    whole = len(path.read_text().splitlines())
    path.write_text(path.read_text() + '{"step": 99, "lo')
    assert len(load_runs(copy).metrics[0]) == whole
    path.write_text('{"step": 1, "lo\n' + path.read_text())
    with pytest.raises(ValueError, match="line 1"):
        load_runs(copy)


def test_run_folders_and_a_study_folder_may_be_mixed(study: Path) -> None:
    points = sorted(p for p in study.iterdir() if p.is_dir())
    assert len(load_runs(points[:3]).runs) == 3
    both = load_runs([points[0], study])
    assert len(both.runs) == 9
    assert set(both.records["run"]) == set(range(9))


def test_tidy_file_of_other_people(tmp_path: Path) -> None:
    path = tmp_path / "peer.csv"
    pd.DataFrame({"supervised_tokens": [1e6, 2e6, 4e6], "tau": [2.0, 2.2, 2.4], "draft_steps": 7}).to_csv(path)
    runs = load_runs(path).runs
    assert runs["draft"].unique() == ["peer"]
    assert runs["data_scale"].to_list() == [1, 2, 4]
    assert (runs["status"] == FINISHED).all()
    runs.to_parquet(tmp_path / "peer.parquet")
    assert load_runs(tmp_path / "peer.parquet").runs["tau"].to_list() == [2.0, 2.2, 2.4]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"tau": [2.0]}, "data axis"),
        ({"data_scale": [1.0], "speed": [2.0]}, "nothing measured"),
        ({"data_scale": [1.0], "tau": [2.0]}, "draft_steps"),
    ],
)
def test_tidy_file_that_lacks_columns_says_which(tmp_path: Path, columns: dict[str, list[float]], words: str) -> None:
    path = tmp_path / "peer.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    with pytest.raises(ValueError, match=words):
        load_runs(path)


def test_paths_that_hold_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        load_runs(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere"):
        load_runs(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no runs"):
        load_runs([])

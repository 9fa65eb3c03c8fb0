"""Two studies side by side, and a study beside a peer's published table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from synthetic_study import write_study

from analysis import load_runs, reporting
from analysis.compare import beside_published, main
from analysis.simulate import Truth


def test_two_studies(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "pictures", lambda analysis: [])
    other = write_study(tmp_path / "flatter", Truth(tau_1x=1.3, gain=0.01), seed=2)
    assert main([str(study), str(other), "--replicates", "50", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    table = [line.split("  ") for line in out.splitlines()]
    header = next(row for row in table if row[0] == "data")
    assert {c.strip() for c in header if c} == {"data", "EAGLE-3, quickstart", "EAGLE-3, flatter"}
    assert "the probability that its slope is the larger is above 0.98" in out
    assert (tmp_path / "out" / "report.html").exists()


def test_a_peers_table_without_a_data_axis(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = pd.DataFrame({"model": ["m"], "method": ["eagle"], "task": ["humaneval"], "speedup": [3.0], "tau": [4.0]})
    peer.to_csv(tmp_path / "peer.csv", index=False)
    assert main([str(study), str(tmp_path / "peer.csv")]) == 0
    out = capsys.readouterr().out
    assert "this study" in out
    assert "m, eagle" in out
    ours = load_runs(study)
    table = beside_published(ours, peer, "peer")
    own = table[(table["whose"] == "this study") & (table["task"] == "humaneval")]["tau"].iloc[0]
    top = ours.runs[ours.runs["data_scale"] == 8]["tau.humaneval"].mean()
    assert float(own) == pytest.approx(top, abs=0.006)


def test_a_table_without_tau_is_refused(study: Path) -> None:
    with pytest.raises(ValueError, match="no column tau"):
        beside_published(load_runs(study), pd.DataFrame({"accept_length": [3.0]}), "peer")


def test_a_missing_study_is_a_message(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(study), str(tmp_path / "gone")]) == 2
    assert "gone" in capsys.readouterr().err

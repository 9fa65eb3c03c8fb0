"""The wandb report is built without network or login; publishing asks for a login."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from analysis import Analysis
from analysis import wandb_report as report_module

pytest.importorskip("wandb_workspaces")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_the_report_holds_answer_run_sets_curves_and_fits(analysed: Analysis) -> None:
    spec = report_module.to_json(report_module.build(analysed, "someone", "eagle3-scaling"))
    text = json.dumps(spec)
    assert "Doubling the training data of EAGLE-3" in text
    assert "(chosen)" in text
    assert "not identified" in text
    grid = next(b for b in spec["spec"]["blocks"] if b["type"] == "panel-grid")["metadata"]
    (runset,) = grid["runSets"]
    assert spec["project"] == {"name": "eagle3-scaling", "entityName": "someone"}
    assert runset.get("project") is None  # the report's own
    assert "quickstart" in json.dumps(runset["filters"])
    panels = grid["panelBankSectionConfig"]["panels"]
    metrics = json.dumps(panels)
    for name in ("tau_replay.humaneval.tau", "tau_replay.sharegpt.tau", "val_loss", "supervised_tokens", "loss"):
        assert name in metrics


@pytest.mark.usefixtures("no_network")
def test_command_line_builds_and_does_not_publish(
    study: Path,
    analysed: Analysis,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_module, "analyse", lambda table: analysed)
    path = tmp_path / "wandb.json"
    assert report_module.main([str(study), "--entity", "someone", "--out", str(path)]) == 0
    assert "Not published" in capsys.readouterr().out
    assert json.loads(path.read_text())["project"]["entityName"] == "someone"


@pytest.mark.usefixtures("no_network")
def test_publishing_without_a_login_says_how(
    analysed: Analysis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    report = report_module.build(analysed, "someone", "eagle3-scaling")
    with pytest.raises(ValueError, match="wandb login"):
        report_module.publish(report)

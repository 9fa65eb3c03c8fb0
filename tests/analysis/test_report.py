"""report.html and its neighbours: whole, self-contained, readable by ear, honest, and figures that show something."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from synthetic_study import write_study

from analysis import Analysis, analyse, load_runs, report, reporting, tables, write_report
from analysis.__main__ import main
from analysis.figures import pictures
from analysis.simulate import Design, Truth
from analysis.style import NARROW, THEME, drawing

NAMES = {"tau", "losses", "extrapolation", "alpha", "tasks", "speedup", "training"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def folder(analysed: Analysis, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(analysed, tmp_path_factory.mktemp("report")).parent


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_all_that_belongs_to_a_report_is_there(folder: Path) -> None:
    assert {p.name for p in folder.iterdir()} == {"report.html", "results.csv", "fits.json", "summary.md", "figures"}
    expected = {f"{name}.{kind}" for name in NAMES for kind in ("png", "svg", "pdf")}
    assert {p.name for p in (folder / "figures").iterdir()} == expected


def test_it_opens_with_the_answer(page: str, folder: Path) -> None:
    heading = re.search(r"<h1>(.*?)</h1>", page)
    assert heading is not None
    assert heading[1].startswith("Doubling the training data of EAGLE-3 adds 0.0")
    assert "95 % interval" in heading[1]
    assert "tell a slope, not a ceiling" in page
    assert (folder / "summary.md").read_text().startswith("**Doubling the training data")


def test_the_page_fetches_nothing_and_runs_nothing(page: str) -> None:
    assert "<script" not in page
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"|<!DOCTYPE[^>]*>', "", page)
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|https?://', without_namespaces)


def test_every_link_inside_the_page_has_its_one_target(page: str) -> None:
    ids = Counter(re.findall(r'\bid="([^"]+)"', page))
    assert [i for i, n in ids.items() if n > 1] == []
    links = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    assert {a or b for a, b in links} <= set(ids)


def test_figures_have_text_alternatives_and_their_numbers(page: str) -> None:
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) == len(NAMES)
    for figure in figures:
        labels = re.findall(r'<svg[^>]*role="img" aria-label="([^"]+)"', figure)
        assert len(labels) == 2  # wide and narrow
        assert all(len(label) > 40 for label in labels)
        assert "<figcaption>" in figure
        assert figure.count("<tr>") > 2  # the table behind it


def test_inline_figures_follow_the_theme(page: str) -> None:
    for figure in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        used = set(re.findall(r"#[0-9a-f]{6}\b", figure))
        assert not used & {light for light, _ in THEME.values()}
        assert "var(--ink)" in figure or "var(--muted)" in figure
    assert "prefers-color-scheme: dark" in page


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    bright, dim = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize(("theme", "paper"), [(0, "#fdfcf9"), (1, "#16191d")])
def test_colours_are_legible_on_their_ground(theme: int, paper: str, page: str) -> None:
    assert f"--paper: {paper}" in page
    for name, pair in THEME.items():
        if name != "grid":
            assert contrast(pair[theme], paper) > (4.5 if name in ("ink", "muted") else 3.0), name


def test_standalone_svgs_are_well_formed_and_show_every_run(folder: Path, analysed: Analysis) -> None:
    for path in (folder / "figures").glob("*.svg"):
        ET.fromstring(path.read_text(encoding="utf-8"))
    root = ET.fromstring((folder / "figures" / "tau.svg").read_text(encoding="utf-8"))
    marks = [u for u in root.iter(f"{SVG}use") if "#1f5fa8" in u.get("style", "")]
    assert len(marks) >= 2 * 8  # eight runs, and their residuals
    text = "".join(root.itertext())
    assert "64x" in text
    best = analysed.series[0].fits["tau"].best
    assert best is not None
    assert f"EAGLE-3, {best.form.title}" in text


def test_pngs_are_not_blank(folder: Path) -> None:
    for path in (folder / "figures").glob("*.png"):
        pixels = matplotlib.image.imread(path)[..., :3]
        assert (pixels < 0.9).any(axis=-1).mean() > 0.005, path.name


def test_fits_json_has_statuses_and_methods_and_no_nan(folder: Path) -> None:
    text = (folder / "fits.json").read_text()
    fits = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} in fits.json"))
    assert "bootstrap" in fits["interval_method"]
    tau = fits["series"][0]["quantities"]["tau"]
    assert {f["status"] for f in tau["fits"]} == {"converged", "under-identified"}
    assert tau["chosen"] in tau["tied"]
    assert "broken_power" in tau["skipped"]


def test_results_csv_can_be_analysed_again(folder: Path, analysed: Analysis) -> None:
    again = load_runs(folder / "results.csv")
    assert again.runs["tau"].to_list() == pytest.approx(analysed.table.runs["tau"].to_list())
    assert len(again.finished) == 8


def test_an_unidentified_parameter_never_stands_as_a_number_alone(page: str) -> None:
    row = re.search(r"<tr><td[^>]*>saturating power law</td>.*?</tr>", page[page.index("Equations, parameters") :])
    assert row is not None
    assert "(not identified)" in row[0]
    assert "do not bound E" in row[0]


def test_failed_points_and_heads_side_by_side_are_shown(tmp_path: Path) -> None:
    study = write_study(tmp_path / "both")
    write_study(study, Truth(tau_1x=1.2, gain=0.02), draft="eagle1", seed=1)
    next(study.glob("eagle1-x2-s0-*/result.json")).unlink()
    analysis = analyse(load_runs(study), quantities=["tau"], replicates=40)
    acceptance = [p for p in pictures(analysis) if p.name == "tau"]
    page = reporting.html(analysis, reporting.draw(acceptance, tmp_path))
    assert "failed: no result.json" in page
    assert "failed point" in page  # the legend of the figure
    for s in analysis.series:
        best = s.fits["tau"].best
        assert best is not None
        assert f">{s.label}, {best.form.title}<" in page
    assert "the probability that its slope is the larger" in page


def test_a_study_without_decoding_says_that_speed_up_is_modelled(tmp_path: Path) -> None:
    study = write_study(tmp_path / "replay")
    for path in study.glob("*/result.json"):
        result = json.loads(path.read_text())
        result.pop("speedup", None)
        result.pop("tau_decode", None)
        path.write_text(json.dumps(result))
    analysis = analyse(load_runs(study), quantities=["tau"], replicates=40)
    (picture,) = (p for p in pictures(analysis) if p.name == "speedup")
    page = reporting.html(analysis, reporting.draw([picture], tmp_path))
    assert "No point was decoded, so nothing here is measured" in page
    assert "measured speed-up" not in page


@pytest.mark.parametrize("scales", [(1.0,), (1.0, 4.0), (1.0, 2.0, 4.0)])
def test_thin_studies_still_get_a_report(tmp_path: Path, scales: tuple[float, ...]) -> None:
    study = write_study(tmp_path / "thin", design=Design(scales=scales, seeds=1))
    analysis = analyse(load_runs(study), replicates=40)
    with drawing():
        for picture in pictures(analysis):
            picture.draw(NARROW).clear()
    assert "<h1>" in reporting.html(analysis, {})


def test_a_report_goes_into_the_study_unless_told_otherwise(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "pictures", lambda analysis: [])
    copy = shutil.copytree(study, tmp_path / "copy")
    assert report(copy, replicates=40) == copy / "report" / "report.html"
    assert len(load_runs(copy).runs) == 8  # the report's folder is no run
    with pytest.raises(ValueError, match="--out"):
        report([copy, study], replicates=40)


def test_command_line(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "pictures", lambda analysis: [])
    assert main([str(study), "--out", str(tmp_path / "out"), "--replicates", "40"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Doubling the training data")
    assert out.rstrip().endswith(f"Report: {tmp_path / 'out' / 'report.html'}")
    assert main([str(tmp_path / "nothing"), "--out", str(tmp_path)]) == 2
    assert "nothing" in capsys.readouterr().err
    points = sorted(str(p) for p in study.iterdir() if p.is_dir())[:2]
    assert main(points) == 2
    assert "--out" in capsys.readouterr().err


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
@pytest.mark.parametrize("width", [360, 1280])
def test_in_a_browser_nothing_is_wider_than_the_window(page: str, tmp_path: Path, width: int) -> None:
    """A frame of a phone's width, since a headless window has a least width of its own; measured by a script."""
    assert CHROMIUM is not None
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    measure = (
        "<script>onload=()=>{const d=document.querySelector('iframe').contentDocument;"
        "const svg=[...d.querySelectorAll('figure svg')].filter(s=>s.getBoundingClientRect().width>0);"
        "document.title=JSON.stringify({inner:d.documentElement.scrollWidth,shown:svg.length,"
        "font:Math.min(...svg.flatMap(s=>[...s.querySelectorAll('text')]).map(t=>t.getBoundingClientRect().height))})}"
        "</script>"
    )
    frame = f'<!doctype html><iframe src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
    (tmp_path / "frame.html").write_text(frame + measure, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--allow-file-access-from-files", "--virtual-time-budget=4000"]
    done = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path}/frame.html"],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    seen = json.loads(title[1])
    assert seen["inner"] <= width
    assert seen["shown"] == len(NAMES)  # of each figure, the drawing for this width
    assert seen["font"] >= 9  # px: labels stay legible on a phone


def test_decoding_stands_beside_replay_of_the_same_prompts(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", design=Design(scales=(1.0, 2.0), seeds=1))
    analysis = analyse(load_runs(study), quantities=["tau"], replicates=40)
    records = analysis.table.records
    table = tables.decoded_table(analysis)
    assert len(table) == 2
    for (_, row), run in zip(table.iterrows(), analysis.table.runs.sort_values("data_scale").index, strict=True):
        own = records[(records["run"] == run) & (records["task"] == row["task"])]
        decoded = set(own.loc[own["method"] == "decode", "prompt"])
        same = own[(own["method"] == "replay") & own["prompt"].isin(decoded)]
        assert 0 < len(same) < (own["method"] == "replay").sum()
        assert row["tau replay"] == f"{same['tokens'].sum() / same['forwards'].sum():.3f}"
        assert row["tau replay"] != row["tau replay, whole task"]


def test_several_heads_are_drawn_against_flops_too(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", trainable=12_000_000)
    write_study(study, Truth(tau_1x=1.2, gain=0.02), draft="eagle1", seed=1, trainable=8_000_000)
    analysis = analyse(load_runs(study), quantities=["tau"], replicates=40)
    (picture,) = (p for p in pictures(analysis) if p.name == "flops")
    costs = picture.data.groupby("draft head")["training FLOPs"].apply(lambda x: x.astype(float).to_numpy())
    np.testing.assert_allclose(costs["EAGLE-3"] / costs["EAGLE-1"], 1.5, rtol=0.01)
    with drawing():
        (axes,) = picture.draw(NARROW).axes
    assert axes.get_xscale() == "log"
    assert {line.get_label() for line in axes.get_lines()} >= {"EAGLE-3", "EAGLE-1"}
    assert "tau against training FLOPs" in reporting.html(analysis, reporting.draw([picture], tmp_path))

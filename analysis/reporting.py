"""report.html and what lies beside it: figures, results.csv, fits.json, summary.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import findings, tables
from analysis.export import clean, fits_json
from analysis.figures import Picture, pictures
from analysis.pipeline import analyse
from analysis.speedup import speedup_model
from analysis.study import REPLICATES, Analysis
from analysis.style import NARROW, WIDE, css_variables, drawing, inline_svg, save, svg_text
from analysis.table import load_runs


@dataclass(frozen=True)
class Drawn:
    """A picture ready for the page: its two SVGs and its words and numbers."""

    picture: Picture
    wide: str
    narrow: str


@dataclass(frozen=True)
class Part:
    """A piece of a section; what is empty is not shown. `folded`: the table behind a summary of that name."""

    heading: str = ""
    text: str = ""
    bullets: tuple[str, ...] = ()
    drawn: Drawn | None = None
    table: pd.DataFrame | None = None
    folded: str = ""
    pre: str = ""


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    parts: list[Part]


@dataclass(frozen=True)
class Fact:
    name: str
    value: str
    note: str


def report(
    runs: str | Path | Iterable[str | Path],
    out_dir: str | Path | None = None,
    axis: str | None = None,
    replicates: int = REPLICATES,
) -> Path:
    """Analyse run folders, a study folder or tidy files and write the report; returns the path of report.html.

    `out_dir`: default `<study>/report` for one study folder.

    Raises:
        ValueError: nothing to read, no finished run, or no `out_dir` where it cannot be derived.
    """
    paths = [Path(runs)] if isinstance(runs, str | Path) else [Path(r) for r in runs]
    folder = default_folder(paths) if out_dir is None else Path(out_dir)
    return write_report(analyse(load_runs(paths), axis=axis, replicates=replicates), folder)


def default_folder(paths: list[Path]) -> Path:
    """`<study>/report` of the one study folder."""
    if len(paths) != 1 or not paths[0].is_dir():
        raise ValueError("say where the report goes (--out DIR): there is not exactly one study folder to put it in")
    return paths[0] / "report"


def write_report(analysis: Analysis, out_dir: Path) -> Path:
    """Write figures/, results.csv, fits.json, summary.md and, last, report.html."""
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn = draw(pictures(analysis), out_dir / "figures")
    _write(out_dir / "results.csv", analysis.table.runs.drop(columns="folder", errors="ignore").to_csv(index=False))
    _write(out_dir / "fits.json", json.dumps(clean(fits_json(analysis)), indent=1, allow_nan=False) + "\n")
    _write(out_dir / "summary.md", findings.summary_markdown(analysis))
    path = out_dir / "report.html"
    _write(path, html(analysis, drawn))
    return path


def draw(chosen: list[Picture], folder: Path) -> dict[str, Drawn]:
    """Draw every picture wide (files and page) and narrow (page)."""
    from matplotlib import pyplot as plt

    out = {}
    with drawing():
        for p in chosen:
            inline = {}
            for size in (WIDE, NARROW):
                figure = p.draw(size)
                svg = svg_text(figure, f"{p.name}-{size}")
                if size == WIDE:
                    save(figure, svg, folder / p.name)
                inline[size] = inline_svg(svg, f"{p.name}-{size}", p.alt, size)
                plt.close(figure)
            out[p.name] = Drawn(p, inline[WIDE], inline[NARROW])
    return out


def html(analysis: Analysis, drawn: dict[str, Drawn]) -> str:
    """The page: one file, no script, nothing fetched."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    light, dark = css_variables()
    study = _distinct(analysis, "study")
    target = _distinct(analysis, "target")
    return environment.get_template("report.html.j2").render(
        title=f"{study}: how acceptance scales with draft training data",
        kicker=f"Scaling study {study}" + (f", target model {target}" if target else ""),
        headline=findings.headline(analysis),
        certainty=findings.certainty(analysis),
        facts=facts(analysis),
        warnings=analysis.warnings,
        sections=sections(analysis, drawn),
        light=light,
        dark=dark,
        column_kinds=column_kinds,
    )


def _distinct(analysis: Analysis, column: str) -> str:
    if not analysis.table.has(column):
        return ""
    return ", ".join(sorted(set(analysis.table.runs[column].dropna().astype(str))))


def column_kinds(table: pd.DataFrame) -> list[str]:
    """How each column is set: numbers to the right, long text wrapped, the rest on one line."""
    kinds = []
    for column in table:
        cells = [str(v) for v in table[column]]
        figures = [c for c in cells if c not in ("", tables.DASH)]
        if figures and all(c.lstrip("+-").replace(",", "")[:1].isdigit() and len(c) < 28 for c in figures):
            kinds.append("num")
        else:
            kinds.append("text" if max(map(len, cells), default=0) > 34 else "word")
    return kinds


def facts(analysis: Analysis) -> list[Fact]:
    """The few numbers at the top: of the first series, or the gains of the first three."""
    with_gain = [s for s in analysis.series if "tau" in s.fits and s.fits["tau"].gain is not None]
    out = []
    for s in with_gain[:3]:
        gain = s.fits["tau"].gain
        assert gain is not None
        who = "" if len(analysis.series) == 1 else f", {s.label}"
        note = findings.gain_interval(s.fits["tau"])
        out.append(Fact(f"tau gained per doubling{who}", f"{gain.value:+.3f}", note))
    if len(with_gain) == 1:
        s = with_gain[0]
        fitted = s.fits["tau"]
        means = tables.point_means(fitted)["value"]
        note = f"from {means.iloc[0]:.2f} at {s.scales[0]:g}x; at most {s.draft_steps + 1}"
        out.append(Fact(f"tau at {s.scales[-1]:g}x", f"{means.iloc[-1]:.2f}", note))
        if fitted.best is not None:
            nearest = s.beyond[0]
            p = fitted.predict([s.base * nearest])
            ends = "no interval" if p.lo is None or p.hi is None else tables.interval(p.lo[0], p.hi[0])
            count = len(fitted.tied)
            by = f"by {count} tied forms" if count > 1 else f"by the {fitted.best.form.title}"
            out.append(Fact(f"tau predicted at {nearest:g}x", f"{p.value[0]:.2f}", f"{ends}, {by}"))
        model = speedup_model(analysis, s)
        if model is not None:
            top = model.measured.sort_values("scale").iloc[-1]
            note = f"at {top['scale']:g}x on {model.task}: {tables.interval(top['lo'], top['hi'])}"
            out.append(Fact("measured speed-up", f"{top['speedup']:.2f}x", note))
    return out


def sections(analysis: Analysis, drawn: dict[str, Drawn]) -> list[Section]:
    """The report below its head."""
    measured = (
        "Means over seeds, 95 % intervals in brackets. tau counts the bonus token and is averaged over target "
        "forwards, all tasks together; alpha_i is acceptance at draft position i given that the earlier ones were. "
        "tau decode is of the few prompts that were decoded for real."
    )
    curves = [Part(heading=drawn[n].picture.title, drawn=drawn[n]) for n in ("tau", "losses", "flops") if n in drawn]
    out = [
        Section(
            "results", "Measured", [Part(text=measured, table=tables.results_table(analysis)), *_decoded(analysis)]
        ),
        Section("curves", "Acceptance and loss against data", curves),
        Section("fits", "Fits, and what they predict", _fit_parts(analysis, drawn)),
    ]
    for name in ("alpha", "tasks", "speedup", "training"):
        if name in drawn:
            out.append(Section(name, drawn[name].picture.title, [Part(drawn=drawn[name])]))
    out.append(Section("budget", "Budget spent", [Part(table=tables.budget_table(analysis))]))
    out.append(Section("provenance", "Provenance", _provenance(analysis)))
    out.append(Section("limits", "Limits", [Part(bullets=tuple(findings.limits(analysis)))]))
    return out


def _decoded(analysis: Analysis) -> list[Part]:
    table = tables.decoded_table(analysis)
    if table.empty:
        return []
    about = (
        "Greedy decoding with the real target, against plain decoding in the same process; beside it replay, of the "
        "same prompts and of the whole task, which has more."
    )
    return [Part(heading="Decoded with the target", text=about, table=table)]


def _fit_parts(analysis: Analysis, drawn: dict[str, Drawn]) -> list[Part]:
    about = (
        "All forms of a quantity are fitted on the same residual, the logarithm of the loss-like quantity, with "
        "Huber's loss, so their errors compare. Held-out error: predicted minus measured at the largest scale, fitted "
        "without it; leave-one-out: the root mean square of the same over every scale. Best in: share of bootstrap "
        "replicates with the smallest held-out error. Under-identified: the data do not bound every parameter, so its "
        "values mean nothing alone."
    )
    parts = [Part(text=about)]
    for s in analysis.series:
        for name in ("tau", "val_loss"):
            if name in s.fits:
                fitted = s.fits[name]
                parts.append(Part(heading=f"{s.label}: {fitted.quantity.title}", table=tables.forms_table(fitted)))
                parts.append(Part(folded="Equations, parameters and intervals", table=tables.parameters_table(fitted)))
    if "extrapolation" in drawn:
        parts.append(Part(heading=drawn["extrapolation"].picture.title, drawn=drawn["extrapolation"]))
    for s in analysis.series:
        needed = tables.needed_table(s, analysis.wanted) if "tau" in s.fits else pd.DataFrame()
        if not needed.empty:
            parts.append(Part(heading=f"{s.label}: data that a wanted tau needs", table=needed))
    if analysis.comparisons:
        parts.append(Part(heading="Gains per doubling compared", table=tables.comparisons_table(analysis)))
    for draft, name, result in analysis.joint:
        parts.append(Part(heading=f"{draft}, {name}: {result.form.title}", table=tables.joint_table(result)))
    return parts


def _provenance(analysis: Analysis) -> list[Part]:
    table = tables.provenance_table(analysis)
    parts = [] if table.empty else [Part(table=table)]
    if analysis.table.configs:
        import yaml

        run, config = next(iter(analysis.table.configs.items()))
        title = f"Configuration of {analysis.table.runs['point'][run]}"
        parts.append(Part(folded=title, pre=yaml.safe_dump(config, sort_keys=False)))
    return parts


def _write(path: Path, text: str) -> None:
    """Whole or not there: written aside, then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)

"""report.html and what lies beside it: figures, results.csv, fits.json, summary.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import findings
from analysis.figures import NARROW, WIDE, Picture, pictures
from analysis.style import css_variables, drawing, inline_svg, save, svg_text
from analysis.study import Analysis, analyse
from analysis.table import FAILED, load_runs


@dataclass(frozen=True)
class Drawn:
    """A picture ready for the page: its two SVGs, caption and data."""

    name: str
    title: str
    caption: str
    wide: str
    narrow: str
    data: pd.DataFrame


@dataclass(frozen=True)
class Part:
    """A piece of a section; what is empty is not shown."""

    heading: str = ""
    text: str = ""
    bullets: tuple[str, ...] = ()
    picture: Drawn | None = None
    table: pd.DataFrame | None = None
    pre: str = ""
    pre_title: str = ""


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    parts: list[Part]


def report(
    runs: str | Path | Iterable[str | Path],
    out_dir: str | Path | None = None,
    axis: str | None = None,
    replicates: int | None = None,
) -> Path:
    """Analyse run folders (or tidy files) and write the report; returns the path of report.html.

    `out_dir`: default `<study>/report` for one study folder.

    Raises:
        ValueError: nothing to read, no finished run, or no `out_dir` where it cannot be derived.
    """
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    if out_dir is None:
        if len(paths) != 1 or not Path(paths[0]).is_dir():
            raise ValueError("say where the report goes (out_dir, or --out): there is not exactly one study folder")
        out_dir = Path(paths[0]) / "report"
    table = load_runs(paths)
    analysis = analyse(table, axis=axis) if replicates is None else analyse(table, axis=axis, replicates=replicates)
    return write_report(analysis, Path(out_dir))


def write_report(analysis: Analysis, out_dir: Path) -> Path:
    """Write figures/, results.csv, fits.json, summary.md and, last, report.html."""
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn = draw(pictures(analysis), out_dir / "figures")
    _write(out_dir / "results.csv", analysis.table.runs.drop(columns="folder", errors="ignore").to_csv(index=False))
    _write(out_dir / "fits.json", json.dumps(clean(fits_json(analysis)), indent=1, allow_nan=False) + "\n")
    _write(out_dir / "summary.md", summary_markdown(analysis))
    path = out_dir / "report.html"
    _write(path, html(analysis, drawn))
    return path


def draw(chosen: list[Picture], folder: Path) -> list[Drawn]:
    """Draw every picture wide (files and page) and narrow (page)."""
    from matplotlib import pyplot as plt

    out = []
    with drawing():
        for p in chosen:
            svg = {}
            for size in (WIDE, NARROW):
                figure = p.draw(size)
                if size == WIDE:
                    save(figure, folder / p.name)
                name = f"{p.name}-{size}"
                svg[size] = inline_svg(svg_text(figure, name), name, p.alt).replace("<svg", f'<svg class="{size}"', 1)
                plt.close(figure)
            out.append(Drawn(p.name, p.title, p.caption, svg[WIDE], svg[NARROW], p.data))
    return out


def html(analysis: Analysis, drawn: list[Drawn]) -> str:
    import jinja2

    template = jinja2.Environment(
        loader=jinja2.PackageLoader("analysis", ""), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    ).get_template("report.html.j2")
    light, dark = css_variables()
    runs = analysis.table.runs
    study = ", ".join(sorted(set(runs["study"].dropna().astype(str))))
    target = ", ".join(sorted(set(runs["target"].dropna().astype(str)))) if "target" in runs else ""
    return template.render(
        title=f"{study}: draft-head scaling report",
        kicker=f"Scaling study {study}" + (f", target model {target}" if target else ""),
        headline=findings.headline(analysis),
        certainty=findings.certainty(analysis),
        facts=facts(analysis),
        warnings=analysis.warnings,
        sections=sections(analysis, {d.name: d for d in drawn}),
        light=light,
        dark=dark,
    )


def facts(analysis: Analysis) -> list[dict[str, str]]:
    """The few numbers at the top."""
    out = []
    for s in analysis.series[:2]:
        fitted = s.fits.get("tau")
        if fitted is None or fitted.gain is None:
            continue
        means = findings.point_means(fitted)
        who = "" if len(analysis.series) == 1 else f", {s.label}"
        out.append(
            {
                "name": f"tau gained by a doubling{who}",
                "value": f"{fitted.gain.value:+.3f}",
                "note": f"95 % interval {findings.interval(fitted.gain.lo, fitted.gain.hi, 3)}",
            }
        )
        out.append(
            {
                "name": f"tau at {s.scales[-1]:g}x{who}",
                "value": f"{means['value'].iloc[-1]:.2f}",
                "note": f"{means['value'].iloc[0]:.2f} at {s.scales[0]:g}x; ceiling {s.draft_steps + 1}",
            }
        )
        if fitted.best is not None and s.scales[-1] < 16:
            p = fitted.best.predict([s.base * 16])
            note = (
                "no interval"
                if p.lo is None or p.hi is None
                else f"{p.lo[0]:.2f} to {p.hi[0]:.2f}, {fitted.best.form.title}"
            )
            out.append({"name": f"tau predicted at 16x{who}", "value": f"{p.value[0]:.2f}", "note": note})
    return out


def sections(analysis: Analysis, drawn: dict[str, Drawn]) -> list[Section]:
    """The report below its head."""
    curves = [Part(heading=drawn[n].title, picture=drawn[n]) for n in ("tau", "val_loss", "val_kl") if n in drawn]
    out = [
        Section(
            "results",
            "Measured",
            [
                Part(
                    text="Means over seeds; tau counts the bonus token and is averaged over target forwards, all tasks together.",
                    table=findings.results_table(analysis),
                )
            ],
        ),
        Section("curves", "Acceptance and loss against data", curves),
        Section("fits", "Fits and what they predict", _fit_parts(analysis, drawn)),
    ]
    for identity, title, name in (
        ("positions", "Acceptance by draft position", "alpha"),
        ("tasks", "tau by task", "tasks"),
        ("speedup", "Speed-up", "speedup"),
        ("training", "Training curves", "training"),
    ):
        if name in drawn:
            out.append(Section(identity, title, [Part(picture=drawn[name])]))
    out.append(Section("budget", "Budget spent", [Part(table=budget_table(analysis))]))
    out.append(Section("provenance", "Provenance", _provenance(analysis)))
    out.append(Section("limits", "Limits", [Part(bullets=tuple(limits(analysis)))]))
    return out


def _fit_parts(analysis: Analysis, drawn: dict[str, Drawn]) -> list[Part]:
    parts = [
        Part(
            text="All forms of a quantity are fitted to the same residual (the logarithm of the loss-like quantity, Huber), so their errors compare. Held-out error: predicted minus measured at the largest scale, fitted without it."
        )
    ]
    for s in analysis.series:
        for name in ("tau", "val_loss"):
            if name in s.fits:
                parts.append(
                    Part(heading=f"{s.label}: {s.fits[name].quantity.title}", table=findings.forms_table(s.fits[name]))
                )
    if "extrapolation" in drawn:
        parts.append(Part(heading=drawn["extrapolation"].title, picture=drawn["extrapolation"]))
    for s in analysis.series:
        if "tau" in s.fits:
            parts.append(Part(heading=f"{s.label}: predictions of tau", table=findings.extrapolation_table(s)))
            needed = findings.needed_table(s)
            if not needed.empty:
                parts.append(Part(heading=f"{s.label}: data that a wanted tau needs", table=needed))
    if analysis.comparisons:
        parts.append(
            Part(
                heading="Slopes compared",
                bullets=tuple(
                    findings.comparison_sentence(c.first, c.second, c.difference, c.probability)
                    for c in analysis.comparisons
                ),
            )
        )
    return parts


def budget_table(analysis: Analysis) -> pd.DataFrame:
    """A row a point: status, time by part, FLOPs, rate, memory."""
    rows = []
    for _, run in analysis.table.runs.iterrows():
        row = {
            "point": str(run["point"]),
            "status": str(run["status"]) + (f": {run['reason']}" if run["status"] == FAILED else ""),
        }
        for column, title, digits in (
            ("wall_seconds.train", "train, s", 0),
            ("wall_seconds.replay", "replay, s", 0),
            ("wall_seconds.decode", "decode, s", 0),
            ("train_tokens_per_s", "train tokens/s", 0),
            ("peak_rss_mb", "peak memory, MB", 0),
        ):
            if column in run:
                row[title] = findings.number(run[column], digits)
        if "train_flops" in run:
            row["train FLOPs"] = findings.significant(float(run["train_flops"]))
        rows.append(row)
    return pd.DataFrame(rows).fillna(findings.DASH)


def _provenance(analysis: Analysis) -> list[Part]:
    runs = analysis.table.runs
    rows = []
    for column, title in (
        ("target", "target model"),
        ("store_fingerprint", "store fingerprint"),
        ("code_version", "code version"),
        ("draft_steps", "draft steps K"),
        ("draft_vocab_size", "draft vocabulary"),
        ("vocab_coverage", "its coverage of the supervised tokens"),
        ("parameters.trainable", "trainable parameters"),
        ("epochs", "epochs"),
    ):
        if column in runs and runs[column].notna().any():
            values = sorted(
                {
                    str(v) if isinstance(v, str) else f"{v:,g}" if abs(v) < 1e6 else f"{v:,.0f}"
                    for v in runs[column].dropna()
                }
            )
            rows.append({"what": title, "value": ", ".join(values)})
    parts = [Part(table=pd.DataFrame(rows))] if rows else []
    if analysis.table.configs:
        run, config = next(iter(analysis.table.configs.items()))
        import yaml

        parts.append(
            Part(pre=yaml.safe_dump(config, sort_keys=False), pre_title=f"Configuration of {runs.loc[run, 'point']}")
        )
    return parts


def limits(analysis: Analysis) -> list[str]:
    """What the numbers do not say."""
    out = [
        "Intervals cover the choice of prompts and the training seed. They do not cover the choice of the training subset (scales are nested prefixes of one shuffled store), of the tasks, or of the hyper-parameters.",
        "Predictions beyond the data hold only if the form does; the table shows how much the forms differ.",
    ]
    for s in analysis.series:
        out.append(
            f"{s.label}: {len(s.scales)} data scales from {s.scales[0]:g}x to {s.scales[-1]:g}x, {len(s.runs)} runs."
        )
    if analysis.table.tasks:
        out.append(
            "tau is by replay on the target's own greedy transcripts, equal to greedy decoding; sampling at other temperatures accepts differently."
        )
    out.append(f"Every interval is a 95 % interval by {analysis.method}, except where a profile interval is named.")
    return out


def fits_json(analysis: Analysis) -> dict[str, Any]:
    return {
        "schema": 1,
        "axis": analysis.axis,
        "interval_method": analysis.method,
        "warnings": analysis.warnings,
        "series": [
            {
                "label": s.label,
                "draft": s.draft,
                "base": s.base,
                "scales": s.scales,
                "quantities": {
                    name: {
                        "chosen": f.selection.best if f.selection else None,
                        "tied": f.selection.tied if f.selection else [],
                        "reason": f.selection.reason if f.selection else "too few scales to hold one out",
                        "gain_per_doubling": f.gain.to_json() if f.gain else None,
                        "seed_sd_of_log_loss": float(np.sqrt(f.seeds.seed)),
                        "fits": [r.to_json() for r in f.results.values()],
                        "skipped": f.skipped,
                    }
                    for name, f in s.fits.items()
                },
            }
            for s in analysis.series
        ],
        "joint": [{"draft": d, "quantity": q, **r.to_json()} for d, q, r in analysis.joint],
    }


def clean(value: Any) -> Any:
    """JSON values without NaN and infinity (null), and without numpy types."""
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def summary_markdown(analysis: Analysis) -> str:
    """The answer and a table ready for a paper."""
    lines = [
        f"**{findings.headline(analysis)}**",
        "",
        *findings.certainty(analysis),
        "",
        findings.text_table(findings.results_table(analysis), markdown=True),
        "",
    ]
    lines += [f"Intervals are 95 % intervals by {analysis.method}.", ""]
    lines += [f"- {w}" for w in analysis.warnings]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    """Whole or not there: written aside, then renamed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)

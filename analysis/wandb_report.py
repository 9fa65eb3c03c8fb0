"""A wandb report of the scaling law: `python -m analysis.wandb_report RUNS --entity E --project P [--publish]`.

Building is apart from publishing: the report is built from the local analysis without network, and without `--publish`
its JSON goes to a file. Publishing needs a login (`wandb login`) and runs that were logged with `tracker=wandb`, synced
where they were offline (`wandb sync`): curves are drawn by wandb from those runs, the fits are written as text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from analysis import findings, tables
from analysis.pipeline import analyse
from analysis.reporting import default_folder
from analysis.study import Analysis
from analysis.table import load_runs

INSTALL = "the report needs wandb-workspaces: pip install 'eagle3-train[wandb]'"


def build(analysis: Analysis, entity: str, project: str) -> Any:
    """A `wandb_workspaces.reports.v2.Report` of this analysis. No network, no login.

    Raises:
        ValueError: wandb-workspaces is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
    except ImportError as e:
        raise ValueError(INSTALL) from e
    studies = sorted(set(analysis.table.runs["study"].dropna().astype(str)))
    blocks: list[Any] = [wr.P(findings.headline(analysis))]
    blocks += [wr.P(text) for text in findings.certainty(analysis)]
    blocks += [wr.H2("Measured"), _markdown(wr, tables.results_table(analysis)), wr.H2("Runs")]
    # A run set without a project is of the report's own; with one, wandb looks it up, which takes network and login.
    runsets = [
        wr.Runset(
            name=study,
            filters=f"Metric('Group') = '{study}'",
            groupby=["config.target.name", "config.draft.kind", "config.data.scale"],
        )
        for study in studies
    ]
    blocks.append(wr.PanelGrid(runsets=runsets, panels=_panels(wr, analysis)))
    blocks.append(wr.H2("Fits"))
    for s in analysis.series:
        for name in ("tau", "val_loss"):
            if name in s.fits:
                fitted = s.fits[name]
                blocks += [wr.H3(f"{s.label}: {fitted.quantity.title}"), _markdown(wr, tables.forms_table(fitted))]
                blocks.append(_markdown(wr, tables.parameters_table(fitted)))
        if "tau" in s.fits:
            blocks += [wr.H3(f"{s.label}: beyond the data"), _markdown(wr, tables.extrapolation_table(s))]
    notes = [*analysis.warnings, *findings.limits(analysis)]
    blocks += [wr.H2("Limits"), wr.UnorderedList(items=[n.rstrip(".") + "." for n in notes])]
    return wr.Report(
        entity=entity,
        project=project,
        title=f"Draft-head scaling: {', '.join(studies)}"[:128],
        description="How acceptance scales with draft training data: curves, fits, intervals.",
        blocks=blocks,
        width="fixed",
    )


def _markdown(wr: Any, table: Any) -> Any:
    return wr.MarkdownBlock(text=tables.text_table(table, markdown=True))


def _panels(wr: Any, analysis: Analysis) -> list[Any]:
    """Summary metrics against the data axis, and the training curves, as the runs log them."""
    axis = wr.SummaryMetric(analysis.axis)
    metrics = [(f"tau on {t}", f"tau_replay.{t}.tau") for t in analysis.table.tasks]
    metrics += [("validation loss", "val_loss")] if analysis.table.has("val_loss") else []
    panels: list[Any] = [
        wr.ScatterPlot(title=title, x=axis, y=wr.SummaryMetric(name), log_x=True) for title, name in metrics
    ]
    return [*panels, wr.LinePlot(title="training loss", x="Step", y=["loss"], log_x=True)]


def to_json(report: Any) -> dict[str, Any]:
    """The report as wandb stores it: what publishing would send."""
    spec: dict[str, Any] = json.loads(report._to_model().model_dump_json(by_alias=True, exclude_none=True))
    return spec


def publish(report: Any) -> str:
    """Save the report to wandb and return its address.

    Raises:
        ValueError: there is no login.
    """
    import wandb

    if not wandb.api.api_key:
        raise ValueError(
            "publishing needs a login: run `wandb login` (or set WANDB_API_KEY), then the same command again"
        )
    report.save()
    return str(report.url)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 built (and published), 2 a user's mistake (said on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m analysis.wandb_report", description="Build a wandb report.")
    parser.add_argument("runs", nargs="+", type=Path, help="a study folder, run folders, or tidy .csv/.parquet files")
    parser.add_argument("--entity", required=True, help="wandb entity (a user or a team) that owns the runs")
    parser.add_argument("--project", default="eagle3-scaling", help="wandb project (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the JSON's path (default: RUNS/report/wandb_report.json)")
    parser.add_argument("--publish", action="store_true", help="save it to wandb; needs a login")
    options = parser.parse_args(arguments)
    try:
        path = options.out or default_folder(options.runs) / "wandb_report.json"
        report = build(analyse(load_runs(options.runs)), options.entity, options.project)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(report), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"Report: {path}")
        print(f"Published: {publish(report)}" if options.publish else "Not published: add --publish, with a login.")
    except ValueError as e:
        print(f"python -m analysis.wandb_report: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

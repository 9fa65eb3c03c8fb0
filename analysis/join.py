"""Several studies as one: the same head for the same target, on stores that were captured apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis.quantities import AXES
from analysis.settings import setting_columns
from analysis.table import FINISHED, Table

BASES = ("base_tokens", "base_sequences")  # data at 1x in a configuration: the first that is set counts


def join_studies(table: Table) -> Table:
    """One study of all runs of a table: a series goes through several stores where head, target, K and settings agree.

    1x is that of the first study. A run that several studies share counts once. A note says what is joined.

    Raises:
        ValueError: the runs are all of one study.
    """
    names = [str(name) for name in table.runs["study"].dropna().unique()]
    if len(names) < 2:
        raise ValueError(f"runs of two studies or more can be joined; these are all of {', '.join(names) or 'none'}")
    table = _once(table)
    note = _note(table.runs, names)
    runs = table.runs.assign(study=" + ".join(names), data_scale=_scales(table))
    # The amount at 1x is settled, however each study counted it.
    runs = runs.drop(columns=[c for c in setting_columns(runs) if c in {f"data.{base}" for base in BASES}])
    return Table(runs, table.records, table.metrics, table.configs, [note, *table.notes])


def _once(table: Table) -> Table:
    """Without the second of two runs that are the same: a link, or a copy."""
    runs = table.runs
    of_a_run = ["train_identity", "store_fingerprint"]
    if not set(of_a_run) <= set(runs):
        return table
    kept = runs[~runs.duplicated(of_a_run) | runs[of_a_run].isna().any(axis=1)]
    place = {int(old): new for new, old in enumerate(kept.index)}
    records = table.records
    if not records.empty:
        records = records[records["run"].isin(place)]
        records = records.assign(run=records["run"].map(place)).reset_index(drop=True)
    metrics = {place[i]: m for i, m in table.metrics.items() if i in place}
    configs = {place[i]: c for i, c in table.configs.items() if i in place}
    return Table(kept.reset_index(drop=True), records, metrics, configs, table.notes)


def _scales(table: Table) -> pd.Series:
    """Data scale of every run in multiples of the first study's 1x: as configured where that is known and means the
    same amount of data in all stores, else as measured on the first data axis that all finished runs have."""
    runs = table.runs
    bases = [_base(table.configs.get(i, {})) for i in range(len(runs))]
    scales = runs["data_scale"].astype(float)
    finished = runs["status"] == FINISHED
    axes = [a for a in AXES if a in runs and a != "data_scale" and runs.loc[finished, a].notna().all()]
    configured = bases[0][0] != "" and len({name for name, _ in bases}) == 1
    if configured:
        scales = scales * np.array([amount / bases[0][1] for _, amount in bases])
    if not axes:
        return scales
    targets = runs["target"].fillna("") if "target" in runs else pd.Series("", runs.index)
    x = runs[axes[0]].where(finished).astype(float)
    if configured and x.groupby([targets, scales]).nunique().max() < 2:
        return scales
    for _, own in x.dropna().groupby(targets):
        studies = runs.loc[own.index, "study"]
        of_first = own[studies == studies.iloc[0]]
        at = of_first.index[int(of_first.to_numpy().argmin())]
        scales[own.index] = own / own[at] * scales[at]
    return scales


def _base(config: dict[str, Any]) -> tuple[str, float]:
    """What counts the data at 1x, and how much of it; ("", 0) where that is not known."""
    data = config.get("data") or {}
    return next(((name, float(data[name])) for name in BASES if data.get(name)), ("", 0.0))


def _note(runs: pd.DataFrame, names: list[str]) -> str:
    finished = runs[runs["status"] == FINISHED]
    stores = []
    for name, own in finished.groupby("study", sort=False):
        known = [
            words.format(own[column].max())
            for column, words in (
                ("draft_vocab_size", "a draft vocabulary of {:,.0f} tokens"),
                ("vocab_coverage", "which covers {:.1%} of the supervised ones"),
                ("unique_sequences", "up to {:,.0f} sequences"),
                ("unique_tokens", "{:,.0f} tokens"),
            )
            if column in own and own[column].notna().any()
        ]
        stores.append(f"{name}: {', '.join(known) or 'nothing is known of its store'}")
    both = " and ".join(names)
    if "store_fingerprint" in finished and finished["store_fingerprint"].nunique(dropna=False) == 1:
        return f"{both} are joined into one study; they share a store"
    return (
        f"{both} are joined into one study although their stores differ ({'; '.join(stores)}): a store has its own "
        "draft vocabulary, so a step from the scales of one to those of the other may be the store's, not the data's"
    )

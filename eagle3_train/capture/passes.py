"""Planning the passes over a rolling store: what is known before the capture, which runs share a pass, and the room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from eagle3_train.config import Config
from eagle3_train.console import say, size
from eagle3_train.corpus import read_counts
from eagle3_train.device import resolve_device
from eagle3_train.files import read_json
from eagle3_train.store import (
    MAY_DIFFER,
    Course,
    Rolling,
    Stream,
    check_spec,
    claim,
    is_rolling,
    plan_of,
    rows_of,
    shard_number,
    write_rolling,
)
from eagle3_train.store.folder import Folder
from eagle3_train.store.signs import WORKERS, living, read_signs
from eagle3_train.target import prepare_target

from .plan import Job, plan, state_of

Reading = Mapping[str, Any]  # Config.reading


def announce_rolling(cfg: Config, job: Job, write: bool) -> int:
    """Say how the training store of `job` will roll; `write` what is known of it into its folder, unless it is there.

    Returns the bytes that it will take at most.

    Raises:
        ValueError: the runs do not fit the cap, or something else lies in the folder.
    """
    folder = Folder(job.path)
    is_known = is_rolling(job.path)
    if is_known:
        rolling = read_rolling(job)
    else:
        is_there = any(shard_number(name) is not None for name in folder.sizes())
        if is_there and not read_signs(folder, WORKERS):  # of workers, whose shards may be rolled over
            raise ValueError(
                f"{job.path} holds shards of a capture that has not ended, and rolling would delete them: finish it "
                "(store.mode=whole), remove them, or take another paths.store"
            )
        rows, counts = read_counts(job.rows_file, job.spec.vocab_size)
        rolling = Rolling.of(job.spec, rows)
    runs = expected_runs(cfg)
    for name, reading in runs.items():
        check_room(cfg, rolling, job.lengths, {name: reading})
    if cfg.launch.kind == "slurm":  # which has formed its groups before the corpus was there (sweeps.study)
        size_of_group = cfg.launch.rolling.points_at_once
        for start in range(0, len(runs), size_of_group):
            check_room(cfg, rolling, job.lengths, dict(list(runs.items())[start : start + size_of_group]))
    if write and not is_known:
        with claim(job.path, job.spec, partial(state_of, job.path, job.spec)):
            if is_rolling(job.path):  # by now
                read_rolling(job)
            write_rolling(job.path, rolling, rows, counts)
    if write:
        say(
            f"capture train: it rolls: {size(sum(rolling.shard_bytes))} in {rolling.spec.n_shards} shards, at most "
            f"{size(cap_bytes(cfg))} of them at a time"
        )
    copies = sum(rolling.kept_bytes) if cfg.reads_copies else 0
    return min(cap_bytes(cfg), sum(rolling.shard_bytes) + copies)


def read_rolling(job: Job) -> Rolling:
    """What is known of the training store of `job`. ValueError where there is none, or one of another spec."""
    folder = Folder(job.path)
    rolling = Rolling.read(folder)
    check_spec(rolling.spec, job.spec, folder.show("rolling.json"), MAY_DIFFER)
    return rolling


def refuse_while_captured(
    folder: Folder, is_friend: Callable[[str, Mapping[str, Any]], bool] = lambda name, sign: False
) -> dict[str, dict[str, Any]]:
    """ValueError where workers live that roll the store in `folder`, other than friends (by name and sign). Returns the
    signs of all workers that there have been."""
    signs = read_signs(folder, WORKERS)
    if alive := living(folder, WORKERS, [name for name, sign in signs.items() if not is_friend(name, sign)]):
        it = signs[alive[0]]
        raise ValueError(
            f"{folder.uri} is being captured: worker {alive[0]} of {it.get('world')} (process {it['pid']} on "
            f"{it['host']}) for {', '.join(it.get('runs', []))}. Wait for its end, or end it; two studies at the same "
            "time need a store each (paths.store)"
        )
    return signs


def cap_bytes(cfg: Config) -> int:
    assert cfg.store.cap_gib is not None
    return int(cfg.store.cap_gib * 2**30)


def expected_runs(cfg: Config) -> dict[str, Reading]:
    """The runs that share the passes of this session of a study, all its points while their data are captured, or the
    one run that the command describes."""
    if cfg.launch.rolling.session:
        try:
            runs: dict[str, Reading] = read_json(cfg.session_file)
        except FileNotFoundError as e:
            raise ValueError(
                f"{cfg.session_file}, which names the runs that read the store, is gone: run eagle3 study again, which "
                "writes it; every point continues at its checkpoint"
            ) from e
        return {name: reading for name, reading in runs.items() if not cfg.given_up_file(name).exists()}
    return {} if cfg.train.regime == "none" else {cfg.point_name: cfg.reading}


def make_stream(cfg: Config, rolling: Rolling, lengths: np.ndarray, runs: Mapping[str, Reading]) -> Stream:
    """What `runs` need of the store, pass by pass. `lengths`: tokens of all its rows."""
    courses = {}
    for name, reading in runs.items():
        courses[name] = Course(plan_of(lengths, rolling.fingerprint, reading), len(lengths), rolling.spec.n_shards)
    kept = np.array(rolling.kept_bytes) if cfg.reads_copies else None
    return Stream(courses, np.array(rolling.shard_bytes), kept)


def check_room(cfg: Config, rolling: Rolling, lengths: np.ndarray, runs: Mapping[str, Reading]) -> None:
    """ValueError where the runs together need more than the cap, with the ways out; before any work."""
    cap = cap_bytes(cfg)
    for name, reading in runs.items():
        rows = rows_of(lengths, reading)
        window = np.add.reduceat(lengths[:rows], np.arange(0, rows, reading["window"] or 2**62))
        if reading["window"] and len(window) > 1 and window[:-1].min() < reading["batch_tokens"]:
            raise ValueError(
                f"data.window={reading['window']}: {name} reads windows of {window[:-1].min():,} tokens in batches of "
                f"train.batch_tokens={reading['batch_tokens']:,}, and would save a checkpoint a step: widen the window"
            )
    least = make_stream(cfg, rolling, lengths, runs).least_cap()
    if least <= cap:
        return
    names = ", ".join(runs)
    widest = _widest_window(cfg, rolling, lengths, runs, cap)
    narrower = f"data.window={widest} at most" if widest else "more, hence smaller, shards (capture.shards)"
    windows = " and ".join(sorted({str(reading["window"] or "all") for reading in runs.values()}))
    together = ", fewer launch.rolling.points_at_once" if len(runs) > 1 else ""
    raise ValueError(
        f"store.cap_gib={cfg.store.cap_gib:g} is too small for {names}: with windows of {windows} sequences "
        f"{size(least)} must be there at once. The ways out: store.cap_gib="
        f"{np.ceil(least / 2**30 * 1000) / 1000:g}, {narrower}{together}; docs/rolling.md"
    )


def _widest_window(
    cfg: Config, rolling: Rolling, lengths: np.ndarray, runs: Mapping[str, Reading], cap: int
) -> int | None:
    """Sequences of the widest window with which the runs fit; None: not even with the narrowest that holds a batch."""

    def fits(window: int) -> bool:
        changed = {name: {**reading, "window": window} for name, reading in runs.items()}
        return make_stream(cfg, rolling, lengths, changed).least_cap() <= cap

    longest_batch = max(reading["batch_tokens"] for reading in runs.values())
    low, high = int(np.ceil(longest_batch / lengths.mean())), len(lengths)
    if not fits(low):
        return None
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def share_passes(cfg: Config, runs: Mapping[str, Reading]) -> list[dict[str, Reading]]:
    """Runs of a study in groups, each of which shares the passes over the store: at most
    `launch.rolling.points_at_once`, fewer where more would not fit the cap together; said aloud.

    Raises:
        ValueError: a run that does not fit the cap alone.
    """
    target = prepare_target(cfg.target, cfg.paths.target)
    job = plan(cfg, target, resolve_device(cfg.device))[0]
    if job.finished or not runs:
        return []
    rolling = Rolling.of(job.spec, read_counts(job.rows_file, job.spec.vocab_size)[0])
    groups: list[dict[str, Reading]] = []
    for name, reading in runs.items():
        check_room(cfg, rolling, job.lengths, {name: reading})
        if groups and len(groups[-1]) < cfg.launch.rolling.points_at_once:
            together = {**groups[-1], name: reading}
            if make_stream(cfg, rolling, job.lengths, together).least_cap() <= cap_bytes(cfg):
                groups[-1] = together
                continue
            say(f"{name} cannot share the passes of {', '.join(groups[-1])}: together they exceed store.cap_gib")
        groups.append({name: reading})
    for number, group in enumerate(groups, 1):
        stream = make_stream(cfg, rolling, job.lengths, group)
        captured = stream.captured()
        sharing = "share their passes" if len(group) > 1 else "alone"
        say(
            f"group {number} of {len(groups)}: {', '.join(group)} {sharing}: {captured} shards to capture, "
            f"{captured / rolling.spec.n_shards:.2g} times the store's {rolling.spec.n_shards}"
        )
    return groups

"""Evaluate one trained point: replay, and decoding where a target is given; write `records.jsonl` and `result.json`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from eagle3_train.config import SAMPLING, Config, TaskConfig, digest
from eagle3_train.console import console
from eagle3_train.decode.cache import check_rollback
from eagle3_train.decode.chain import Chain
from eagle3_train.decode.loop import Proposer
from eagle3_train.decode.sampling import Sampling
from eagle3_train.decode.static import StaticTree
from eagle3_train.decode.tree import Tree
from eagle3_train.device import resolve_device, tune_allocator
from eagle3_train.drafts import Draft
from eagle3_train.evaluate.decode import decode_tasks
from eagle3_train.evaluate.records import write_records
from eagle3_train.evaluate.replay import replay_tasks
from eagle3_train.evaluate.summary import summary_rows
from eagle3_train.evaluate.table import evaluation_tables
from eagle3_train.files import read_json, require_writable, write_json
from eagle3_train.store import Store, inside, read_origin, spec_at
from eagle3_train.target import load_tokenizer, prepare_target, stop_ids, weight_hash

SCHEMA = 1


def measure(cfg: Config, head: Draft, target_model: PreTrainedModel | None) -> dict[str, Any]:
    """Evaluate `head` on the transcripts of `cfg.eval.tasks` and complete the point's result.

    Args:
        head: on `cfg.device`, in fp32.
        target_model: the target in `cfg.eval.decode_dtype`, to decode `cfg.eval.decode_tasks`; None: replay alone.

    Returns:
        What `result.json` now holds: what training wrote to `train.json`, and the evaluation.

    Raises:
        ValueError: the point is not trained, the target cannot be decoded, or transcripts are missing or not such.
    """
    trained = cfg.point_dir / "train.json"
    if not trained.is_file():
        raise ValueError(f"{trained} is missing: train the point first (eagle3 train)")
    result = read_json(trained)
    if not isinstance(result, dict) or result.get("train_identity") != digest(cfg.point_identity):
        raise ValueError(
            f"{trained} is damaged or of another configuration: delete it and run eagle3 train again (it keeps the "
            "checkpoints)"
        )
    require_writable(cfg.point_dir)
    fingerprints = check_transcripts(cfg)
    tune_allocator()
    device = resolve_device(cfg.device)
    transcripts = inside(cfg.paths.store, "transcripts")
    tasks = cfg.eval.tasks
    bootstrap, seed = cfg.eval.bootstrap, cfg.seed

    if target_model is not None:
        check_rollback(target_model.config)
    trees = [
        StaticTree(tuple(map(tuple, t.choices))) if t.choices else Tree(t.depth, t.top_k, t.total)
        for t in cfg.eval.trees
    ]
    started = time.perf_counter()
    records, keys = replay_tasks(
        head, transcripts, tasks, device, bootstrap, seed, target_store=cfg.paths.store, show=True
    )
    for tree in trees:
        records += replay_tasks(head, transcripts, tasks, device, bootstrap, seed, tree=tree, show=True)[0]
    seconds = {"replay": time.perf_counter() - started}
    result |= keys
    if target_model is not None:
        started = time.perf_counter()
        decoded = [t for t in tasks if t.name in cfg.eval.decode_tasks]
        folder = prepare_target(cfg.target, cfg.paths.target)
        tokenizer = load_tokenizer(folder, cfg.target.chat_template, cfg.target.trust_remote_code)
        stops = stop_ids(folder, tokenizer)
        for sampling, group in _by_sampling(decoded).items():
            proposers: list[Proposer] = [Chain(head.steps, sampling), *(replace(t, sampling=sampling) for t in trees)]
            for proposer in proposers:
                more, keys = decode_tasks(
                    head, target_model, transcripts, group, cfg.eval.decode_prompts, proposer, stops, bootstrap, seed,
                    batch=cfg.eval.decode_batch, show=True,
                )  # fmt: skip
                records += more
                result |= keys
        seconds["decode"] = time.perf_counter() - started
        result["decode_identity"] = digest(cfg.decode_identity)
    rows = summary_rows(records, bootstrap, seed)
    result |= {
        "schema": SCHEMA,
        "wall_seconds": result.get("wall_seconds", {}) | seconds,
        "eval_identity": digest(cfg.eval_identity),
        "transcripts": fingerprints,
        "evaluation": rows,
    }
    write_records(cfg.point_dir / "records.jsonl", records)
    # Last: a point with a result is one whose evaluation is whole.
    write_json(cfg.point_dir / "result.json", result)
    console.print(*evaluation_tables(rows, console.width))
    return result


def _by_sampling(tasks: list[TaskConfig]) -> dict[Sampling, list[TaskConfig]]:
    """Tasks that are decoded in one way, greedy ones first."""
    groups: dict[Sampling, list[TaskConfig]] = {}
    for task in sorted(tasks, key=lambda t: t.temperature):
        groups.setdefault(Sampling(task.temperature, task.top_p, task.top_k), []).append(task)
    return groups


def check_target(cfg: Config, folder: Path) -> None:
    """ValueError, before it is loaded, where the target in `folder` has not made the transcripts to be decoded."""
    weights = weight_hash(folder)
    for name in cfg.eval.decode_tasks:
        Store.open(inside(cfg.paths.store, f"transcripts/{name}")).expect(target_hash=weights)


def check_transcripts(cfg: Config) -> dict[str, str]:
    """Fingerprints of the tasks' transcripts. ValueError where they are not whole, of another target than the training
    store, or were made for other prompts, lengths or in another dtype than the task now asks for."""
    fingerprints: dict[str, str] = {}
    if not cfg.eval.tasks:
        return fingerprints
    training = spec_at(cfg.paths.store)
    for task in cfg.eval.tasks:
        store = Store.open(inside(cfg.paths.store, f"transcripts/{task.name}"))
        store.require_whole()
        store.expect_same_target(training)
        store.expect(dtype=cfg.store.transcript_dtype)
        how = store.spec.sampling
        made = {"prompts": len(store), "new_tokens": how.get("max_new_tokens")}
        made |= {key: how.get(key, getattr(TaskConfig(), key)) for key in SAMPLING}
        asked = {key: getattr(task, key) for key in made}
        chosen = {key: value for key, value in task.prompt_identity.items() if value is not None}
        made |= {key: value for key, value in read_origin(store.folder).items() if key in chosen}
        asked |= {key: value for key, value in chosen.items() if key in made}
        if made != asked:
            differences = ", ".join(f"{key}={made[key]}, now {asked[key]}" for key in made if made[key] != asked[key])
            raise ValueError(
                f"the transcripts of eval task {task.name!r} were made with {differences}: restore these values, give "
                f"the task another name, or run eagle3 prepare and eagle3 capture again without {store.folder.uri}"
            )
        fingerprints[task.name] = store.fingerprint
    return fingerprints

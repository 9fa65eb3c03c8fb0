"""Training of one point, from the store to the last checkpoint. Reads top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from eagle3_train.config import Config, digest, save
from eagle3_train.console import progress_bar, say
from eagle3_train.device import peak_rss_mb, resolve_device, resolve_dtype, tune_allocator
from eagle3_train.drafts import Draft
from eagle3_train.files import code_version, read_json, write_json
from eagle3_train.store import BatchPlan, Loader, Store
from eagle3_train.tracking import make_tracker
from eagle3_train.train import checkpoint
from eagle3_train.train.distributed import World, world_from_environment
from eagle3_train.train.engines import make_engine
from eagle3_train.train.optim import learning_rate
from eagle3_train.train.setup import build_head, load_head, open_store
from eagle3_train.train.step import split, train_step
from eagle3_train.train.validate import validate

Evaluate = Callable[[Draft], dict[str, Any]]
NOTHING = {"rows": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0}


def train(cfg: Config, evaluate: Evaluate | None = None) -> Draft:
    """Train the point that `cfg` describes, or continue it, or return at once where it is done.

    Writes config.yaml, metrics.jsonl, checkpoints/ and at the end train.json into the point's folder.
    `evaluate(head)` is called every `train.eval_every` steps on rank 0 and its numbers are logged.
    """
    device = resolve_device(cfg.device)
    tune_allocator()
    with world_from_environment(device) as world:
        if _is_done(cfg):
            if world.is_main:
                say(f"{cfg.point_name}: trained already")
            return load_head(cfg, device)
        return _train(cfg, evaluate, device, world)


def _is_done(cfg: Config) -> bool:
    """With its weights: a head whose checkpoints were removed is trained anew."""
    path = cfg.point_dir / "train.json"
    if not path.exists() or checkpoint.newest(cfg.point_dir / "checkpoints") is None:
        return False
    return read_json(path).get("train_identity") == digest(cfg.point_identity)


def make_plan(cfg: Config, store: Store) -> BatchPlan:
    """Global batches of the point's prefix of the store."""
    fixed: dict[str, int | None] = (
        {"epochs": cfg.train.epochs} if cfg.train.regime == "epochs" else {"steps": cfg.train.steps}
    )
    lengths = store.index.n_tokens[: cfg.data.sequences]
    return BatchPlan(lengths, store.fingerprint, cfg.seed, cfg.train.batch_tokens, **fixed)


def _train(cfg: Config, evaluate: Evaluate | None, device: torch.device, world: World) -> Draft:
    store = open_store(cfg)
    validation = Store.open(f"{cfg.paths.store}/validation")
    plan = make_plan(cfg, store)
    head = build_head(cfg, store, device)
    if not head.is_trained:
        return _without_training(cfg, head, store, plan, world)
    dtype = resolve_dtype(cfg.train.compute_dtype, device)
    engine = make_engine(cfg.engine, head, cfg.optim, world, dtype)

    # Where were we? All ranks read the same newest whole checkpoint.
    first, totals = 0, dict(NOTHING)
    if found := checkpoint.newest(cfg.point_dir / "checkpoints"):
        state = found.state
        first, totals = plan.resume(state["plan"]), state["totals"]
        engine.load(found.weights(), found.engine_state())
    tracker = make_tracker(cfg, cfg.point_dir, resume_step=first, active=world.is_main)
    if world.is_main:
        save(cfg, cfg.point_dir / "config.yaml")
        say(
            f"{cfg.point_name}: {cfg.data.sequences} sequences, {plan.epoch_tokens:,} tokens, {len(plan)} steps"
            + (f", continuing at step {first}" if first else "")
        )

    def save_checkpoint(step: int) -> None:
        weights, engine_state = engine.weights(), engine.state()
        if world.is_main:
            state = {"step": step, "plan": plan.state(step), "totals": totals}
            checkpoint.save(cfg.point_dir / "checkpoints", weights, engine_state, state, cfg.train.keep_last)
        world.barrier()

    log_since, log_tokens, log_wait = time.monotonic(), 0, 0.0
    with (
        progress_bar(cfg.point_name, len(plan), "steps", done=first, show=world.is_main) as bar,
        Loader(store, plan, world.rank, world.size, first) as loader,
    ):
        for step, sequences in loader:
            started = time.monotonic()
            micro_batches = split(sequences, plan, step, world, cfg.train.micro_batch_tokens)
            lr = learning_rate(cfg.optim, step, len(plan))
            result = train_step(engine, micro_batches, lr, cfg.train, world)
            if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
                ids = [s.sample_id for s in sequences]
                raise FloatingPointError(
                    f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; rank {world.rank} had samples "
                    f"{ids}. Look at them with `eagle3 store verify`, or lower optim.lr"
                )
            totals["rows"] += result.rows
            totals["tokens"] += result.tokens
            totals["flops"] += result.flops
            totals["seconds"] += time.monotonic() - started
            done = step + 1
            log_tokens += result.tokens
            if done % cfg.train.log_every == 0 or done == len(plan):
                elapsed = time.monotonic() - log_since
                tracker.log(
                    {
                        "loss": result.loss,
                        **by_step("loss", result.loss_steps),
                        "lr": lr,
                        "grad_norm": result.grad_norm,
                        "tokens": totals["tokens"],
                        "tokens_per_s": log_tokens / elapsed,
                        "data_wait": (loader.waited_s - log_wait) / elapsed,
                        "peak_rss_mb": peak_rss_mb(),
                    },
                    step=done,
                )
                log_since, log_tokens, log_wait = time.monotonic(), 0, loader.waited_s
            if cfg.train.eval_every and done % cfg.train.eval_every == 0 and done < len(plan):
                numbers = validate(cfg.train, engine, validation)
                if evaluate and world.is_main:
                    numbers |= evaluate(head)
                tracker.log(scalars(numbers), step=done)
            if done == len(plan) or (cfg.train.checkpoint_every and done % cfg.train.checkpoint_every == 0):
                save_checkpoint(done)
            bar.update(1, note=f"loss {result.loss:.3f}")

    numbers = validate(cfg.train, engine, validation)
    record = _record(cfg, head, store, plan, totals, len(plan)) | numbers
    record["train_tokens_per_s"] = totals["tokens"] / totals["seconds"]
    tracker.log(scalars(numbers), step=len(plan))
    tracker.summary({k: v for k, v in record.items() if isinstance(v, int | float)})
    tracker.close()
    if world.is_main:
        write_json(cfg.point_dir / "train.json", record)
    world.barrier()
    return load_head(cfg, device)  # plain and whole, whatever the engine has made of `head`


def _without_training(cfg: Config, head: Draft, store: Store, plan: BatchPlan, world: World) -> Draft:
    """A head without parameters is a point too: its record says that it has consumed nothing."""
    if world.is_main:
        save(cfg, cfg.point_dir / "config.yaml")
        write_json(cfg.point_dir / "train.json", _record(cfg, head, store, plan, NOTHING, steps=0))
        say(f"{cfg.point_name}: draft={cfg.draft.kind} has nothing to train")
    world.barrier()
    return head.eval()


def by_step(name: str, values: list[float]) -> dict[str, float]:
    """Trackers take scalars: `loss` of three draft steps becomes `loss_0`, `loss_1`, `loss_2`."""
    return {f"{name}_{i}": value for i, value in enumerate(values)}


def scalars(numbers: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in numbers.items():
        flat |= by_step(name.removesuffix("_steps"), value) if isinstance(value, list) else {name: value}
    return flat


def _record(
    cfg: Config, head: Draft, store: Store, plan: BatchPlan, totals: dict[str, Any], steps: int
) -> dict[str, Any]:
    """What training knows of the Result contract (docs/architecture.md)."""
    rows = slice(0, cfg.data.sequences)
    return {
        "schema": 1,
        "study": cfg.study.name,
        "point": cfg.point_name,
        "target": cfg.target.name,
        "draft": cfg.draft.kind,
        "data_scale": cfg.data.scale,
        "seed": cfg.seed,
        "unique_sequences": cfg.data.sequences,
        "unique_tokens": int(store.index.n_tokens[rows].sum(dtype=np.int64)),
        "supervised_tokens": int(store.index.n_supervised[rows].sum(dtype=np.int64)),
        "consumed_tokens": totals["tokens"],
        "consumed_supervised_tokens": totals["rows"],
        "epochs": totals["tokens"] / plan.epoch_tokens,
        "steps": steps,
        "draft_steps": head.steps,
        "draft_vocab_size": cfg.draft.vocab_size,
        "vocab_coverage": head.vocab.coverage,
        "parameters": head.parameter_counts(),
        "train_flops": totals["flops"],
        "wall_seconds": {"train": totals["seconds"]},
        "peak_rss_mb": peak_rss_mb(),
        "optim": asdict(cfg.optim),
        "store_fingerprint": store.fingerprint,
        "code_version": code_version(),
        "train_identity": digest(cfg.point_identity),
    }

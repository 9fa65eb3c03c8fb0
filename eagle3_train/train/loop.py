"""Training of one point, from the store to the last checkpoint. Reads top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eagle3_train.config import Config, save
from eagle3_train.console import progress_bar, say
from eagle3_train.device import peak_tflops, resolve_device, resolve_dtype, tune_allocator
from eagle3_train.drafts import Draft
from eagle3_train.exits import Unfinished
from eagle3_train.files import write_json
from eagle3_train.store import BatchPlan, Loader, Sequence, Store, plan_of, token_counts
from eagle3_train.tracking import make_tracker
from eagle3_train.train import checkpoint
from eagle3_train.train.checkpoint import Saver
from eagle3_train.train.distributed import World, world_from_environment
from eagle3_train.train.engines import check_engine, make_engine
from eagle3_train.train.meter import Meter
from eagle3_train.train.optim import learning_rate
from eagle3_train.train.record import make_record, without_nan
from eagle3_train.train.setup import (
    build_head,
    copy_sharing_buffers,
    open_store,
    seed_rank,
    trains,
)
from eagle3_train.train.step import StepResult, split, train_step
from eagle3_train.train.stopping import Stop
from eagle3_train.train.validate import open_validation, validate
from eagle3_train.trained import CHECKPOINTS, RECORD, is_trained

Evaluate = Callable[[Draft], dict[str, Any]]
NOTHING = {"rows": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "waited": 0.0, "skipped_steps": 0}
SKIPPED_IN_A_ROW = 10  # updates; more is no accident but a run that has diverged


def train(cfg: Config, evaluate: Evaluate | None = None, is_lost: Callable[[], bool] = lambda: False) -> None:
    """Train the point that `cfg` describes, or continue it, or return at once where it is done.

    Writes config.yaml, metrics.jsonl, checkpoints/ and at the end train.json into the point's folder; `load_head` gives
    the head. What is there already is for rank 0 to see: on a shared file system others may see it later.
    `evaluate(head)` is called every `train.eval_every` steps on rank 0, with a plain head on `cfg.device`; its numbers
    are logged, and its `tau` chooses the best checkpoint. `is_lost()`: asked once a step on rank 0, whether another
    process has taken the point over; nothing is written then.

    Raises:
        Lost: it has.
        FloatingPointError: a loss or gradient that is not finite, naming the step, the batch and its samples.
        Unfinished: a signal or the time limit ended it before its last step; called again, it continues.
    """
    device = resolve_device(cfg.device)
    tune_allocator()
    with world_from_environment(device, cfg.engine.timeout_minutes) as world, _told_where(cfg, world):
        check_engine(cfg.engine, world)
        store = open_store(cfg)
        if not world.on_main(lambda: is_trained(cfg)):
            world.on_main(store.require_whole)
            _train(cfg, store, evaluate, is_lost, device, world)
        elif world.is_main:
            say(f"{cfg.point_name}: trained already")
        if world.is_main:
            store.finished(cfg.point_name, cfg.launch.rolling.session)


@contextmanager
def _told_where(cfg: Config, world: World) -> Iterator[None]:
    """Ctrl-C does not wait for a checkpoint: say from which one the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if world.is_main:
            last = checkpoint.newest(cfg.point_dir / CHECKPOINTS)
            where = f"its last checkpoint is of step {last.step}" if last else "it has no checkpoint yet"
            say(f"{cfg.point_name}: {where} (train.checkpoint_every={cfg.train.checkpoint_every})")
        raise


def make_plan(cfg: Config, store: Store) -> BatchPlan:
    """Global batches of the point's prefix of the store."""
    reading = cfg.reading
    if cfg.train.regime == "none":  # a plan that nobody follows
        reading["epochs"] = cfg.train.epochs
    return plan_of(store.index.n_tokens, store.fingerprint, reading)


def _train(
    cfg: Config,
    store: Store,
    evaluate: Evaluate | None,
    is_lost: Callable[[], bool],
    device: torch.device,
    world: World,
) -> None:
    plan = make_plan(cfg, store)
    head = build_head(cfg, store, device, world.on_main(lambda: token_counts(store)))
    if not trains(cfg, head):
        _without_training(cfg, head, store, plan, world)
        return
    validation = open_validation(cfg, head, store.spec, world)
    plain = copy_sharing_buffers(head) if evaluate and cfg.train.eval_every and world.is_main else None
    dtype = resolve_dtype(cfg.train.compute_dtype, device)
    engine = make_engine(cfg.engine, head, cfg.optim, world, dtype)
    store.pinned = device.type == "cuda"
    folder = cfg.point_dir / CHECKPOINTS
    saver = Saver(folder, world, cfg.train.keep_last, cfg.train.keep_best, store.saved)
    meter = Meter(world.size, cfg.train.peak_tflops or peak_tflops(device, dtype))

    # Where were we? At the newest whole checkpoint that rank 0 sees.
    first, totals = 0, dict(NOTHING)
    found, highest = world.on_main(lambda: checkpoint.newest_and_highest_tau(folder))
    seed_rank(cfg.seed, world.rank, first)
    if found:
        first, totals = plan.resume(found.state["plan"]), totals | found.state["totals"]
        if not found.load_into(engine):
            seed_rank(cfg.seed, world.rank, first)
    store.follow(cfg.point_name, plan, first, cfg.launch.rolling.session, world.is_main)
    tracker = make_tracker(cfg, cfg.point_dir, resume_step=first, active=world.is_main)
    if world.is_main:
        save(cfg, cfg.point_dir / "config.yaml")
        say(
            f"{cfg.point_name}: {len(plan.lengths)} sequences, {plan.epoch_tokens:,} tokens, {len(plan)} steps"
            + (f", continuing at step {first}" if first else "")
        )

    def replay(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        assert plain is not None
        assert evaluate is not None
        plain.load_state_dict(weights)
        return evaluate(plain)

    def measure() -> dict[str, Any]:
        """Validation loss, and what `evaluate` says of the weights as a checkpoint would hold them."""
        numbers = validate(cfg.train, engine, validation)
        if evaluate and cfg.train.eval_every:
            weights = engine.weights()
            numbers |= world.on_main(lambda: replay(weights))
        return numbers

    numbers: dict[str, Any] = {}
    skipped_in_a_row, saved = 0, first
    with (
        progress_bar(cfg.point_name, len(plan), "steps", done=first, show=world.is_main) as bar,
        Stop(cfg.train.max_hours, is_lost) as stop,
        Loader(store, plan, world.rank, world.size, first, interrupted=lambda: stop.is_told) as loader,
        saver,
    ):
        waited = 0.0
        for step, sequences in loader:
            started = time.monotonic()
            micro_batches = split(sequences, plan, step, world, cfg.train)
            lr = learning_rate(cfg.optim, step, len(plan))
            result = train_step(engine, micro_batches, lr, cfg.train, world)
            seconds = time.monotonic() - started
            finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
            skipped_in_a_row = 0 if finite else skipped_in_a_row + 1
            if not finite:
                problem = _describe(step, plan, result, sequences, world)
                if cfg.train.nonfinite == "stop" or skipped_in_a_row > SKIPPED_IN_A_ROW:
                    raise FloatingPointError(problem)
                if world.is_main:
                    say(f"update skipped: {problem}")
            totals["rows"] += result.rows
            totals["tokens"] += result.tokens
            totals["flops"] += result.flops
            totals["seconds"] += seconds
            totals["skipped_steps"] += not finite
            totals["waited"] += loader.waited_s - waited
            meter.add(result, seconds, loader.waited_s - waited)
            waited = loader.waited_s
            done, last = step + 1, step + 1 == len(plan)
            bar.update(1, note=f"loss {result.loss:.3f}  {meter.tokens_per_s:,.0f} tokens/s")
            if last or done % cfg.train.log_every == 0:
                line = {"loss": result.loss, **by_step("loss", result.loss_steps), "lr": lr, "steps": len(plan)}
                line |= {"grad_norm": result.grad_norm, "tokens": totals["tokens"]} | meter.read()
                tracker.log(line | {"skipped_steps": totals["skipped_steps"]}, step=done)
            tau, is_best = None, False
            if last or (cfg.train.eval_every and done % cfg.train.eval_every == 0):
                numbers = measure()
                tracker.log(scalars(numbers), step=done)
                tau = numbers.get("tau")
                if cfg.train.keep_best and tau is not None and tau > highest:
                    is_best, highest = True, tau
            is_due = last or (cfg.train.checkpoint_every and done % cfg.train.checkpoint_every == 0)
            reason = stop.reason(world)
            if is_due or is_best or reason or store.needs_checkpoint(saved, done):
                saved = done
                store.release(done)
                saver.save(engine, {"step": done, "plan": plan.state(done), "totals": dict(totals), "tau": tau})
            saver.check()
            if reason and not last:
                saver.wait()
                world.barrier()  # a rank that leaves takes the others with it: rank 0 has saved
                if world.is_main:
                    say(
                        f"{cfg.point_name}: stopped by {reason} after step {done} of {len(plan)}, which is saved; the "
                        "same command continues"
                    )
                tracker.close()
                raise Unfinished()

    # Killed between the last checkpoint and train.json, it comes here without a step.
    numbers = numbers or measure()
    record = make_record(cfg, engine.outline, store, plan, totals, len(plan))
    record |= {k: v for k, v in numbers.items() if k.startswith("val_")}
    record |= {"train_tokens_per_s": totals["tokens"] / totals["seconds"], "skipped_steps": totals["skipped_steps"]}
    record["wall_seconds"]["data"] = totals["waited"]
    tracker.summary({k: v for k, v in record.items() if isinstance(v, int | float)})
    tracker.close()
    if world.is_main:
        write_json(cfg.point_dir / RECORD, without_nan(record, cfg.point_name))
    world.barrier()


def _describe(step: int, plan: BatchPlan, result: StepResult, sequences: list[Sequence], world: World) -> str:
    """A step whose loss or gradient is not finite, with all that was in it. The same on all ranks; a collective."""
    samples = world.gather([s.sample_id for s in sequences])
    return (
        f"step {step + 1} of {len(plan)}: loss {result.loss}, gradient norm {result.grad_norm}; its batch is rows "
        f"{plan.batch(step).tolist()} of the store, samples by rank: {'; '.join(' '.join(ids) for ids in samples)}. "
        "Look at them with `eagle3 store verify`, or lower optim.lr"
    )


def _without_training(cfg: Config, head: Draft, store: Store, plan: BatchPlan, world: World) -> None:
    """A head as it starts is a point too: its record says that it has consumed nothing."""
    if world.is_main:
        save(cfg, cfg.point_dir / "config.yaml")
        write_json(cfg.point_dir / RECORD, make_record(cfg, head, store, plan, NOTHING, steps=0))
        why = "train.regime=none" if head.is_trained else f"draft={cfg.draft.kind} has nothing to train"
        say(f"{cfg.point_name}: not trained, {why}")
    world.barrier()


def by_step(name: str, values: list[float]) -> dict[str, float]:
    """Trackers take scalars: `loss` of three draft steps becomes `loss_0`, `loss_1`, `loss_2`."""
    return {f"{name}_{i}": value for i, value in enumerate(values)}


def scalars(numbers: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for name, value in numbers.items():
        flat |= by_step(name.removesuffix("_steps"), value) if isinstance(value, list) else {name: value}
    return flat

"""The steps of `eagle3 STEP ...`: what each reads, writes and calls.

Rooms are imported inside a step, so that the command line itself starts quickly.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import config
from eagle3_train.config import Config
from eagle3_train.console import say
from eagle3_train.files import inside, is_file

if TYPE_CHECKING:
    from sweeps.cost import Data


@dataclass(frozen=True)
class Call:
    """What stands after the step's name: Hydra overrides, or the file of a resolved configuration; and other words."""

    overrides: list[str]
    words: list[str]
    resolved: Path | None = None

    def config(self) -> Config:
        if self.resolved is None:
            return config.compose(self.overrides)
        if self.overrides:
            raise ValueError(f"--resolved takes no overrides beside it, but got {' '.join(self.overrides)}")
        return config.load(self.resolved)


@dataclass(frozen=True)
class Step:
    """`run` returns the exit code. `sets`: overrides that the step's name stands for. `is_job`: the step is work that a
    launcher may do in processes of its own.
    `commands`: words that may follow, and what they do. `takes_words`: arguments that are no overrides are the step's
    own; `parses_itself`: all are."""

    run: Callable[[Call], int]
    summary: str
    reads: str
    writes: str
    keys: tuple[str, ...]
    examples: tuple[str, ...]
    commands: dict[str, str] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    is_job: bool = False
    takes_words: bool = False
    parses_itself: bool = False


WITHOUT_DRY_RUN = ("prepare", "evaluate", "export", "report", "serve-bench")


def run_step(name: str, call: Call) -> int:
    """Run a step here, or hand it to a launcher where it takes more than this process. Ranks, which a launcher started,
    run it themselves."""
    step = STEPS[name]
    if call.resolved is None and name != "study" and _rank() == 0:  # the points of a study may have several heads
        _note_unread(call)
    if step.sets and call.resolved is None:
        call = replace(call, overrides=[*call.overrides, *step.sets])
    if step.is_job and call.resolved is None and "RANK" not in os.environ:
        cfg = call.config()
        if cfg.launch.kind != "local" or cfg.launch.nproc_per_node > 1:
            from launch.single import launch

            if cfg.dry_run and name in ("train", "point"):
                _estimate(cfg)
            return launch(name, cfg)
    if name in WITHOUT_DRY_RUN and call.resolved is None and call.config().dry_run:
        raise ValueError(f"dry_run=true: {name} has no plan to show; `eagle3 study dry_run=true` plans the whole study")
    return step.run(call)


def _note_unread(call: Call) -> None:
    if any(word.lstrip("+").startswith("draft.") for word in call.overrides):
        kind = call.config().draft.kind
        if keys := config.unread(call.overrides, kind):
            say(f"note: {', '.join(keys)}: not read by draft heads of kind {kind}")


def prepare(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.capture import captured_rows
    from eagle3_train.corpus import prepare as prepare_corpus
    from eagle3_train.target import prepare_target

    prepare_target(cfg.target, folder=cfg.paths.target)
    prepare_corpus(cfg, captured_rows(cfg))
    return 0


def regenerate(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.capture import open_writer
    from eagle3_train.corpus import regenerate as regenerate_turns

    world = int(os.environ.get("WORLD_SIZE", "1"))
    regenerate_turns(cfg, lambda: open_writer(cfg), rank=_rank(), world=world)
    return 0


def capture(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.capture import capture as capture_states

    capture_states(cfg, rank=_rank(), world=int(os.environ.get("WORLD_SIZE", "1")))
    return 0


def roll(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.capture import roll as roll_store

    roll_store(cfg, rank=_rank(), world=int(os.environ.get("WORLD_SIZE", "1")))
    return 0


def train(call: Call) -> int:
    cfg = call.config()
    if cfg.dry_run:
        return _estimate(cfg)
    with _alone(cfg, call) as is_lost:
        _train(cfg, is_lost)
    return 0


def evaluate(call: Call) -> int:
    cfg = call.config()
    if not cfg.eval.tasks:
        raise ValueError("eval.tasks is empty, so there is nothing to evaluate on: name a task (docs/evaluate.md)")
    _refuse_another_store(cfg)
    _load_and_measure(cfg)
    return 0


def point(call: Call) -> int:
    cfg = call.config()
    if cfg.dry_run:
        return _estimate(cfg)
    with _alone(cfg, call) as is_lost:
        _train(cfg, is_lost)
        if _rank() == 0:
            _load_and_measure(cfg)
    return 0


def _train(cfg: Config, is_lost: Callable[[], bool]) -> None:
    from eagle3_train.tracking import check
    from eagle3_train.train import train as train_head

    check(cfg.tracker)
    _refuse_another_store(cfg)
    if not cfg.train.eval_every:
        train_head(cfg, None, is_lost)
        return
    from eagle3_train.evaluate import while_training

    train_head(cfg, while_training(cfg), is_lost)


def _refuse_another_store(cfg: Config) -> None:
    """A launcher, which holds the point's lock, has set such a head aside; several ranks cannot agree on that."""
    from launch.jobs import is_of_another_store

    if is_of_another_store(cfg, cfg.point_dir):
        raise ValueError(
            f"{cfg.point_dir} was trained on another store than {cfg.paths.store} holds now: remove it to train anew "
            f"(rm -r {cfg.point_dir}), restore the store, or take another study.name; `eagle3 study` sets it aside"
        )


def _estimate(cfg: Config) -> int:
    from sweeps.estimate import describe_point

    parameters = counted = None
    if is_file(inside(cfg.paths.store, "manifest.json")):
        from eagle3_train.train import parameter_counts

        parameters, counted = parameter_counts(cfg), _counted(cfg)
    say(describe_point(cfg, parameters, counted))
    return 0


def _counted(cfg: Config) -> Data | None:
    """The rows of the store that a point trains on; None where it needs more than are there."""
    from eagle3_train.store import Store, rows_of
    from sweeps.cost import Data

    index = Store.open(cfg.paths.store).index
    rows = rows_of(index.n_tokens, cfg.reading)
    if rows > len(index):
        return None
    tokens, supervised = (int(column[:rows].sum()) for column in (index.n_tokens, index.n_supervised))
    return Data(rows, tokens, supervised, exact=True)


@contextmanager
def _alone(cfg: Config, call: Call) -> Iterator[Callable[[], bool]]:
    """Hold the point's lock, as a study does for the points that it runs: two processes never write one point. Gives
    a function that says whether another process has taken it, since this one had seemed dead.

    A launcher holds it already: it gives `--resolved`. Of several ranks, rank 0 holds it for all.
    """
    if call.resolved is not None or _rank() != 0:
        yield lambda: False
        return
    from launch.lock import Lock, holder_of

    lock = Lock(cfg.point_dir / ".lock")
    if not lock.try_acquire():
        if holder := holder_of(lock.folder):
            say(f"{cfg.point_name}: process {holder.pid} on {holder.host} works on it; waiting for its end")
        # The other ranks wait too, to meet this one, and not for ever; a holder that is dead is known long before.
        patience = 30 * cfg.engine.timeout_minutes if int(os.environ.get("WORLD_SIZE", "1")) > 1 else math.inf
        if not lock.acquire(patience=patience):
            raise ValueError(f"{cfg.point_name}: another process works on it: wait for its end, and run this again")
    try:
        yield lock.is_lost
    finally:
        lock.release()


def _load_and_measure(cfg: Config) -> None:
    """Evaluate the trained head; the target model is loaded only where it is decoded with."""
    from eagle3_train.device import resolve_device, resolve_dtype
    from eagle3_train.evaluate import check_target, measure
    from eagle3_train.train import load_head

    device = resolve_device(cfg.device)
    head = load_head(cfg, device)  # plain and whole, whatever the engine that trained it has made of its own
    target_model = None
    if cfg.eval.decode and cfg.eval.decode_tasks:
        from eagle3_train.target import load_target, prepare_target

        folder = prepare_target(cfg.target, folder=cfg.paths.target)
        check_target(cfg, folder)
        dtype = resolve_dtype(cfg.eval.decode_dtype, device)
        target_model = load_target(folder, dtype, device, trust_remote_code=cfg.target.trust_remote_code)
    measure(cfg, head, target_model)


def export(call: Call) -> int:
    _export(call.config())
    return 0


def _export(cfg: Config) -> Path:
    """The folder of the exported head."""
    from eagle3_train.device import DTYPES
    from eagle3_train.export import check_export, export_head, format_of
    from eagle3_train.files import read_object
    from eagle3_train.train import head_source

    source = head_source(cfg)
    format = format_of(source.head, cfg.export.format)
    folder = Path(cfg.export.path) if cfg.export.path else cfg.point_dir / "export" / format
    dtype = source.target_dtype if cfg.export.dtype == "auto" else DTYPES[cfg.export.dtype]
    measured = cfg.point_dir / "result.json"
    result = read_object(measured if measured.is_file() else cfg.point_dir / "train.json")
    export_head(source, folder, format, dtype, result)
    say(f"{folder}: {cfg.point_name} as {format}, {str(dtype).removeprefix('torch.')}")
    if cfg.export.check:
        check_export(source, folder, dtype)
    return folder


def serve_bench(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.evaluate import serve
    from eagle3_train.target import load_tokenizer, prepare_target, stop_ids

    folder = prepare_target(cfg.target, cfg.paths.target)
    if cfg.serve.head is not None:
        head = Path(cfg.serve.head).expanduser()
    elif cfg.serve.url is None:
        head = _export(cfg)
    else:
        head = cfg.point_dir  # in the record: the servers that run have some head of theirs
    tokenizer = load_tokenizer(folder, cfg.target.chat_template, cfg.target.trust_remote_code)
    steps = cfg.serve.steps or cfg.draft.steps
    serve.serve_bench(cfg, folder, head, steps, stop_ids(folder, tokenizer), lambda: _explainer(cfg, folder))
    return 0


def _explainer(cfg: Config, folder: Path) -> Any:
    """Says why two greedy outputs differ, with the target's own logits in fp32."""
    import torch

    from eagle3_train.decode.runner import TargetRunner
    from eagle3_train.device import resolve_device
    from eagle3_train.evaluate.difference import first_gap
    from eagle3_train.evaluate.serve.client import Prompt
    from eagle3_train.target import load_target

    model = load_target(folder, torch.float32, resolve_device(cfg.device), cfg.target.trust_remote_code)
    runner = TargetRunner(model, [])

    def explain(prompt: Prompt, plain: list[int], drafted: list[int]) -> dict[str, Any]:
        return first_gap(runner, torch.tensor(prompt.ids, device=runner.device), plain, drafted)

    return explain


def study(call: Call) -> int:
    from sweeps import commands

    if call.words[:1] == ["power"]:
        return _power(call)
    if call.words == ["tune"]:
        from sweeps.tune import tune

        tune(call.overrides)
        return 0
    if call.words:
        return commands.run(call.words, call.overrides, STEPS["study"].commands)
    from sweeps.study import run_study

    done = run_study(call.overrides, verify=_check_trackers, share=_share_passes)
    if not done.study.cfg.dry_run and not done.submitted and done.begun:
        _report(done.begun, done.study.dir)
    return bool(done.failed)


def _share_passes(cfg: Config, readings: dict[str, dict[str, Any]]) -> list[list[str]]:
    from eagle3_train.capture import share_passes

    return [list(group) for group in share_passes(cfg, readings)]


def _check_trackers(cfg: Config) -> None:
    """Packages that are missing here are missing in the points' processes too, except on a cluster's nodes."""
    from eagle3_train.tracking import check

    if cfg.launch.kind != "slurm":
        check(cfg.tracker)


def _power(call: Call) -> int:
    """Before anything is run: the smallest gain that the study's design would find."""
    from analysis import load_runs, power
    from sweeps.points import plan

    if len(call.words) > 2:
        raise ValueError("eagle3 study power takes one word: the folder of a pilot study whose noise is used")
    planned = plan(call.overrides)
    cfg, points = planned.cfg, [point.cfg for point in planned.points]
    if not cfg.eval.tasks:
        raise ValueError("eagle3 study power: eval.tasks is empty, so there is nothing to find a gain on")
    scales = sorted({p.data.scale for p in points})
    seeds = len({p.seed for p in points})
    task = min(cfg.eval.tasks, key=lambda t: t.prompts * t.new_tokens)
    pilot = load_runs(call.words[1]) if len(call.words) == 2 else None
    sizes = {"tasks": len(cfg.eval.tasks), "prompts": task.prompts, "tokens": task.new_tokens}
    say(power(scales, seeds, **sizes, draft_steps=cfg.draft.steps, pilot=pilot, seed=cfg.seed).text())
    return 0


def report(call: Call) -> int:
    folder = Path(call.config().paths.study)
    _report([folder], folder)
    return 0


def _report(runs: list[Path], study: Path) -> None:
    from analysis import analyse, load_runs, summary_text, write_report

    analysis = analyse(load_runs(runs))
    path = write_report(analysis, study / "report")
    say(f"{summary_text(analysis)}\n\nReport: {path}")


def store(call: Call) -> int:
    from eagle3_train.store.commands import main

    return main(call.words)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


# Keys that several steps explain.
LAUNCH = ("launch.kind", "launch.nodes", "launch.nproc_per_node")
TRAINING = (
    "data.scale", "data.base_sequences", "data.base_tokens", "seed",
    "draft.kind", "draft.steps", "draft.vocab_size", "draft.init_layer",
    "train.regime", "train.epochs", "train.steps", "train.batch_tokens", "train.micro_batch_tokens", "train.padding",
    "train.oov", "train.compute_dtype", "train.checkpoint_every", "train.keep_last", "train.keep_best",
    "train.eval_every", "train.max_hours", "train.nonfinite", "train.log_every", "optim.lr", "optim.warmup_fraction",
    "optim.decay", "engine.kind", "tracker.kinds", "device", "dry_run",
)  # fmt: skip
EVALUATION = (
    "eval.tasks", "eval.trees", "eval.decode", "eval.decode_tasks", "eval.decode_prompts", "eval.decode_batch",
    "eval.decode_dtype", "eval.bootstrap",
)  # fmt: skip

STEPS: dict[str, Step] = {
    "prepare": Step(
        prepare,
        "target model and conversations: chats to token ids and loss masks",
        "the target model (target.model) and the conversations (corpus.path)",
        "<study>/target-model/ and <study>/corpus/",
        (
            "target.model",
            "target.chat_template",
            "corpus.format",
            "corpus.path",
            "corpus.sources",
            "corpus.sequences",
            "corpus.validation_sequences",
            "corpus.held_out_fraction",
            "corpus.max_length",
            "corpus.min_supervised",
            "corpus.near_duplicates",
            "corpus.contamination_words",
            "corpus.seed",
        ),
        ("eagle3 prepare", "eagle3 prepare corpus.sequences=1000 corpus.max_length=1024"),
        is_job=True,
    ),
    "regenerate": Step(
        regenerate,
        "conversations again, their assistant turns written by the target: on-policy data; a killed run continues",
        "the target model (target.model) and the conversations (corpus.path, corpus.sources)",
        "<study>/regenerated/<source>.jsonl: a source for `prepare`, with the ids it had",
        (
            "regenerate.conversations",
            "regenerate.temperature",
            "regenerate.top_p",
            "regenerate.seed",
            "regenerate.max_new_tokens",
            "regenerate.batch",
            "capture.backend",
            "paths.regenerated",
        ),
        (
            "eagle3 regenerate dry_run=true               how much there is to write",
            "eagle3 regenerate regenerate.conversations=2000 regenerate.temperature=0.8 regenerate.top_p=0.95",
            "eagle3 regenerate capture=vllm               by vLLM",
            "eagle3 prepare corpus.format=jsonl corpus.path=outputs/quickstart/regenerated/sharegpt.jsonl",
        ),
        is_job=True,
    ),
    "capture": Step(
        capture,
        "the target's hidden states of the corpus, and its own greedy transcripts of the tasks",
        "what `prepare` wrote",
        "<study>/store/",
        (
            "capture.backend",
            "capture.compute_dtype",
            "capture.batch_tokens",
            "capture.layer_ids",
            "capture.shards",
            "capture.device_map",
            "capture.tensor_parallel",
            "capture.cache_gib",
            "capture.eager",
            "store.dtype",
            "store.transcript_dtype",
            "eval.generate_batch",
            "device",
            *LAUNCH,
        ),
        (
            "eagle3 capture",
            "eagle3 capture capture=vllm                  by vLLM, at the speed of its prefill",
            "eagle3 capture capture.batch_tokens=16384 device=cuda",
            "eagle3 capture launch.nproc_per_node=2       by two processes of this machine",
            "RANK=0 WORLD_SIZE=2 eagle3 capture           worker 0 of 2, which may run on different machines",
        ),
        is_job=True,
    ),
    "roll": Step(
        roll,
        "with store.mode=rolling: capture shards while points train on them, and delete what no point needs any more",
        "what `prepare` and `capture` wrote, and the marks that the points leave in the store",
        "<study>/store/shard-*.parquet, at most store.cap_gib of them at any time",
        (
            "store.mode",
            "store.cap_gib",
            "store.later_epochs",
            "store.silent_minutes",
            "data.window",
            "capture.shards",
            "capture.backend",
            "launch.nproc_per_node",
        ),
        ("eagle3 roll store.mode=rolling store.cap_gib=2 data.window=16    while `eagle3 train` runs with the same",),
        is_job=True,
    ),
    "train": Step(
        train,
        "one draft head on a prefix of the store: data.scale * data.base_sequences sequences, or * data.base_tokens",
        "what `capture` wrote",
        "<study>/<point>/: config.yaml, metrics.jsonl, checkpoints/, train.json",
        (*TRAINING, *LAUNCH),
        (
            "eagle3 train data.scale=4 seed=1",
            "eagle3 train dry_run=true                    parameters, steps, FLOPs, memory and time, nothing done",
            "eagle3 train tracker=wandb train.eval_every=100",
            "torchrun --nproc-per-node 2 -m eagle3_train.train data.scale=4",
            "torchrun --nproc-per-node 8 -m eagle3_train.train engine=fsdp2",
        ),
        is_job=True,
    ),
    "evaluate": Step(
        evaluate,
        "acceptance of a trained head: validation loss, replay, and decoding with the real target",
        "what `train` and `capture` wrote; the same overrides as for `train` find the head",
        "<study>/<point>/: records.jsonl, result.json",
        ("data.scale", "seed", *EVALUATION, *LAUNCH),
        ("eagle3 evaluate data.scale=4 seed=1", "eagle3 evaluate eval.decode=false"),
        is_job=True,
    ),
    "point": Step(
        point,
        "train, then evaluate, in one process: what a study runs for each of its points",
        "what `capture` wrote",
        "<study>/<point>/",
        (*TRAINING, *EVALUATION, *LAUNCH),
        ("eagle3 point data.scale=4 seed=1",),
        is_job=True,
    ),
    "export": Step(
        export,
        "a trained head as a folder that vLLM, SGLang and the speculators library load",
        "what `train` wrote; the same overrides as for `train` find the head",
        "export.path, or <point>/export/<format>/: config.json, model.safetensors, README.md",
        ("export.format", "export.path", "export.dtype", "export.check"),
        ("eagle3 export data.scale=8 export.check=true", "eagle3 export export.format=eagle export.path=/models/head"),
        is_job=True,
    ),
    "import": Step(
        point,
        "a published EAGLE-3 head, of either format, measured as it is",
        "draft.init_from: a folder or a hub id; and what `capture` wrote",
        "<study>/<point>/: train.json, records.jsonl, result.json",
        ("draft.init_from", "draft.steps", "capture.layer_ids", "eval.decode"),
        (
            "eagle3 import draft.init_from=yuhuili/EAGLE3-LLaMA3.1-Instruct-8B draft.steps=5",
            "eagle3 train draft.init_from=/models/head optim.lr=1e-4      train it further",
        ),
        sets=("train.regime=none",),  # what it is trained further as is another point
        is_job=True,
    ),
    "serve-bench": Step(
        serve_bench,
        "a trained head in vLLM: acceptance, latency and throughput beside plain serving, replay and decoding",
        "what `train` and `capture` wrote; the same overrides as for `train` find the head",
        "<point>/: serve.json, serve.jsonl, vllm-*.log",
        ("serve.prompts", "serve.concurrency", "serve.temperatures", "serve.dtype", "serve.url", "serve.baseline_url"),
        (
            "eagle3 serve-bench data.scale=8 serve.prompts=8 serve.concurrency=[1,4]",
            "eagle3 serve-bench serve.url=http://host:8000 serve.baseline_url=http://host:8001",
        ),
        is_job=True,
    ),
    "study": Step(
        study,
        "everything: prepare, capture, all points of a study, report; run again, it continues",
        "conf/study/NAME.yaml: the axes and what is held fixed",
        "outputs/<study>/, with report/report.html at the end",
        (
            "study.name",
            "study.axes",
            "study.exclude",
            "study.decode_points",
            "dry_run",
            "paths.outputs",
            "data.scale",
            "data.base_sequences",
            "data.base_tokens",
            "seed",
            "tracker.kinds",
            *LAUNCH,
            "launch.tflops",
        ),
        (
            "eagle3 study study=quickstart",
            "eagle3 study dry_run=true                    the plan and its estimates, nothing done",
            "eagle3 study data.scale=1,2,4 seed=0         other values of an axis",
            "eagle3 study 'study.axes={optim.lr: [1e-3, 2e-3]}'   other axes",
            "eagle3 study status study=quickstart",
        ),
        commands={
            "status [--json | --watch]": "how its points stand",
            "logs JOB": "the end of a job's log; the beginning of its name will do",
            "retry [JOB...]": "run the named jobs again, or all that failed or were stopped",
            "cancel": "end what runs, on whatever machine",
            "tune": "the learning rate: several optim.lr at the smallest scale, and whether the choice transfers",
            "power [PILOT]": "the smallest gain that this design would find; noise as in the study PILOT, or assumed",
        },
        takes_words=True,
    ),
    "report": Step(
        report,
        "curves, fits and the report of a study from the results that are there",
        "<study>/*/result.json and records.jsonl; several studies: python -m analysis A B --out DIR [--join]",
        "<study>/report/: report.html, results.csv, fits.json, summary.md, figures/",
        ("study.name", "paths.study"),
        ("eagle3 report study=quickstart",),
        is_job=True,
    ),
    "store": Step(
        store,
        "look after a hidden-state store: info, verify, sample, finalize, merge, prune",
        "a store: <study>/store, or any other by its path or URI",
        "`finalize`: the manifest and the index of a store that lost them; `merge` and `prune`: a new store (--out)",
        (),
        (
            "eagle3 store info outputs/quickstart/store",
            "eagle3 store sample outputs/quickstart/store --rows 0 5",
            "eagle3 store prune outputs/quickstart/store --rows 64 --out outputs/small",
            "eagle3 store merge STORE STORE --out outputs/both",
            "eagle3 store prune --help                    options of a command",
        ),
        commands={
            "info PATH": "what a store holds, from its manifest and index",
            "verify PATH": "check every byte and every value; name what is damaged and what repairs it",
            "sample PATH [--rows N...]": "print some sequences",
            "finalize PATH [--allow FIELD...]": "write index and manifest of a store whose shards are all there",
            "merge PATH... --out PATH [--seed N] [--shards N]": "one store of the sequences of several",
            "prune PATH --out PATH [OPTION...]": "a smaller store: fewer rows, or a smaller dtype",
        },
        parses_itself=True,
    ),
}

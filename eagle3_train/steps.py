"""The steps of `eagle3 STEP ...`: what each reads, writes and calls.

Rooms are imported inside a step, so that the command line itself starts quickly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_train import config
from eagle3_train.config import Config
from eagle3_train.console import say

if TYPE_CHECKING:
    from eagle3_train.drafts import Draft


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
    """`run` returns the exit code. `is_job`: the step is work that a launcher may do in processes of its own.
    `takes_words`: arguments that are no overrides are the step's own; `parses_itself`: all are."""

    run: Callable[[Call], int]
    summary: str
    reads: str
    writes: str
    keys: tuple[str, ...]
    examples: tuple[str, ...]
    is_job: bool = False
    takes_words: bool = False
    parses_itself: bool = False


def run_step(name: str, call: Call) -> int:
    """Run a step here, or hand it to a launcher where it takes more than this process. Ranks, which a launcher started,
    run it themselves."""
    step = STEPS[name]
    if step.is_job and call.resolved is None and "RANK" not in os.environ:
        cfg = call.config()
        if cfg.launch.kind != "local" or cfg.launch.nproc_per_node > 1:
            from launch.single import launch

            return launch(name, cfg)
    return step.run(call)


def prepare(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.corpus import prepare as prepare_corpus
    from eagle3_train.target import prepare_target

    prepare_target(cfg.target, folder=cfg.paths.target)
    prepare_corpus(cfg)
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


def train(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.tracking import check
    from eagle3_train.train import train as train_head

    check(cfg.tracker)
    train_head(cfg)
    return 0


def evaluate(call: Call) -> int:
    cfg = call.config()
    if not (cfg.point_dir / "train.json").is_file():
        raise ValueError(f"{cfg.point_dir} holds no trained head: run `eagle3 train` with the same overrides first")
    from eagle3_train.device import resolve_device
    from eagle3_train.train import load_head

    _measure(cfg, load_head(cfg, resolve_device(cfg.device)))
    return 0


def point(call: Call) -> int:
    cfg = call.config()
    from eagle3_train.tracking import check
    from eagle3_train.train import train as train_head

    check(cfg.tracker)
    head = train_head(cfg)
    if _rank() == 0:
        _measure(cfg, head)
    return 0


def _measure(cfg: Config, head: Draft) -> None:
    """Evaluate a head; the target model is loaded only where it is decoded with."""
    from eagle3_train.evaluate import measure

    target_model = None
    if cfg.eval.decode and cfg.eval.decode_tasks:
        from eagle3_train.device import resolve_device, resolve_dtype
        from eagle3_train.target import load_target, prepare_target

        device = resolve_device(cfg.device)
        folder = prepare_target(cfg.target, folder=cfg.paths.target)
        dtype = resolve_dtype(cfg.eval.decode_dtype, device)
        target_model = load_target(folder, dtype, device, trust_remote_code=cfg.target.trust_remote_code)
    measure(cfg, head, target_model)


def study(call: Call) -> int:
    from sweeps import commands

    if call.words:
        return commands.run(call.words, call.overrides)
    from sweeps.study import run_study

    done = run_study(call.overrides)
    if not done.study.cfg.dry_run and not done.submitted and len(done.failed) < len(done.study.points):
        _report([point.dir for point in done.study.points], done.study.dir)
    return bool(done.failed)


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


STEPS: dict[str, Step] = {
    "prepare": Step(
        prepare,
        "target model and conversations: chats to token ids and loss masks",
        "the target model (target.model) and the conversations (corpus.path)",
        "<study>/target-model/ and <study>/corpus/",
        ("target.model", "corpus.path", "corpus.sequences", "corpus.max_length", "corpus.held_out_fraction"),
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
        ("capture.backend", "capture.compute_dtype", "capture.batch_tokens", "capture.layer_ids", "store.dtype"),
        ("eagle3 capture", "eagle3 capture capture.batch_tokens=16384 device=cuda"),
        is_job=True,
    ),
    "train": Step(
        train,
        "one draft head on the first data.scale * data.base_sequences sequences of the store",
        "what `capture` wrote",
        "<study>/<point>/: config.yaml, metrics.jsonl, checkpoints/, train.json",
        ("data.scale", "data.base_sequences", "seed", "draft.steps", "train.epochs", "optim.lr", "engine.kind"),
        (
            "eagle3 train data.scale=4 seed=1",
            "eagle3 train tracker=wandb",
            "torchrun --nproc-per-node 2 -m eagle3_train.train data.scale=4",
        ),
        is_job=True,
    ),
    "evaluate": Step(
        evaluate,
        "acceptance of a trained head: validation loss, replay, and decoding with the real target",
        "what `train` and `capture` wrote; the same overrides as for `train` find the head",
        "<study>/<point>/: records.jsonl, result.json",
        ("eval.decode", "eval.decode_tasks", "eval.decode_prompts", "eval.decode_dtype", "eval.bootstrap"),
        ("eagle3 evaluate data.scale=4 seed=1", "eagle3 evaluate eval.decode=false"),
        is_job=True,
    ),
    "point": Step(
        point,
        "train, then evaluate, in one process: what a study runs for each of its points",
        "what `capture` wrote",
        "<study>/<point>/",
        ("data.scale", "seed", "train.epochs", "eval.decode"),
        ("eagle3 point data.scale=4 seed=1",),
        is_job=True,
    ),
    "study": Step(
        study,
        "everything: prepare, capture, all points of a study, report; run again, it continues",
        "conf/study/NAME.yaml: the axes and what is held fixed",
        "outputs/<study>/, with report/report.html at the end",
        ("study.name", "study.axes", "study.exclude", "study.decode_points", "launch.kind", "launch.nproc_per_node"),
        (
            "eagle3 study study=quickstart",
            "eagle3 study dry_run=true                    the plan and its estimates, nothing done",
            "eagle3 study data.scale=1,2,4 seed=0         other values of an axis",
            "eagle3 study status [--json]                 how its points stand",
            "eagle3 study logs POINT                      the end of a point's log",
            "eagle3 study retry [POINT...]                run failed points again",
            "eagle3 study cancel                          end what runs",
        ),
        takes_words=True,
    ),
    "report": Step(
        report,
        "curves, fits and the report of a study from the results that are there",
        "<study>/*/result.json and records.jsonl",
        "<study>/report/: report.html, results.csv, fits.json, summary.md, figures/",
        ("study.name", "paths.study"),
        ("eagle3 report study=quickstart",),
    ),
    "store": Step(
        store,
        "look after a hidden-state store: finalize, info, verify, sample",
        "a store: <study>/store, or any other by its path",
        "nothing; `finalize` writes the manifest and the index of a store that lost them",
        (),
        (
            "eagle3 store info outputs/quickstart/store",
            "eagle3 store verify outputs/quickstart/store",
            "eagle3 store COMMAND --help",
        ),
        parses_itself=True,
    ),
}

"""Values that make no sense are refused once, before any work, with the key and the way out."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from typing import Any

from eagle3_train.config.schema import HEADS, CaptureConfig, Config

OBJECTIVES = ("soft_ce", "reverse_kl", "tv", "hard_ce")


def parse_objective(text: str) -> dict[str, float]:
    """`tv`, or a weighted sum such as `0.9*soft_ce+0.1*tv`, as {name: weight}. ValueError where it is neither."""
    mix: dict[str, float] = {}
    for term in text.replace(" ", "").split("+"):
        weight, _, name = term.rpartition("*")
        if name not in OBJECTIVES or name in mix or not re.fullmatch(r"(\d+\.?\d*|\.\d+)?", weight) or "*" in weight:
            raise ValueError(
                f"train.objective={text!r}: {term!r} is not a weighted {', '.join(OBJECTIVES)}, each once; "
                "for example soft_ce, or 0.9*soft_ce+0.1*tv"
            )
        mix[name] = float(weight or 1)
    return mix


DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
SOURCE_FORMATS = ("sharegpt", "jsonl", "dataset")
TRACKERS = ("wandb", "tensorboard")

CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "corpus.format": SOURCE_FORMATS,
    "capture.backend": ("hf", "vllm"),
    "capture.compute_dtype": ("auto", "bf16", "fp32"),
    "store.dtype": ("bf16", "fp16", "fp32", "fp8"),
    "store.mode": ("whole", "rolling"),
    "store.later_epochs": ("recapture", "fp8"),
    "store.transcript_dtype": ("bf16", "fp16", "fp32"),
    "draft.kind": tuple(sorted(HEADS)),
    "draft.eagle1.inputs": ("final", "fused"),
    "draft.init_lm_head": ("target", "random"),
    "draft.init_layer": ("target", "random"),
    "draft.attention": ("auto", "merge", "flex", "reference"),
    "draft.eagle3.lm_head": ("trained", "frozen"),
    "serve.dtype": ("auto", "bf16", "fp16", "fp32"),
    "export.format": ("auto", "speculators", "eagle", "medusa"),
    "export.dtype": ("auto", "bf16", "fp16", "fp32"),
    "train.regime": ("epochs", "steps", "none"),
    "train.oov": ("drop", "keep"),
    "train.padding": ("none", "length"),
    "train.compute_dtype": ("auto", "bf16", "fp32"),
    "optim.kind": ("adamw",),
    "optim.decay": ("cosine", "linear", "constant"),
    "train.nonfinite": ("stop", "skip"),
    "engine.kind": ("auto", "single", "ddp", "fsdp2", "hsdp", "deepspeed", "accelerate"),
    "eval.decode_dtype": ("fp32", "bf16"),
    "tracker.mode": ("online", "offline"),
    "launch.kind": ("local", "torchrun", "slurm"),
}

POSITIVE = (
    "corpus.max_length",
    "corpus.validation_sequences",
    "capture.batch_tokens",
    "capture.shards",
    "capture.tensor_parallel",
    "capture.cache_gib",
    "regenerate.batch",
    "store.row_group_mib",
    "store.silent_minutes",
    "data.base_sequences",
    "data.scale",
    "draft.steps",
    "draft.vocab_size",
    "draft.eagle3.layers",
    "train.epochs",
    "train.batch_tokens",
    "train.log_every",
    "train.keep_last",
    "optim.lr",
    "optim.clip_norm",
    "optim.eps",
    "engine.timeout_minutes",
    "draft.eagle1.trained_steps",
    "draft.medusa.layers",
    "draft.lm.layers",
    "draft.block.rank",
    "draft.prompt_lookup.max_ngram",
    "eval.bootstrap",
    "eval.generate_batch",
    "eval.decode_prompts",
    "eval.decode_batch",
    "serve.prompts",
    "serve.start_minutes",
    "launch.nproc_per_node",
    "launch.nodes",
    "launch.slurm.points_at_once",
    "launch.slurm.capture_jobs",
    "launch.slurm.attempts",
    "launch.rolling.workers",
    "launch.rolling.points_at_once",
)


POSITIVE_IF_SET = (
    "corpus.sequences",
    "store.cap_gib",
    "data.window",
    "corpus.near_duplicates",
    "corpus.contamination_words",
    "regenerate.conversations",
    "regenerate.max_new_tokens",
    "data.base_tokens",
    "train.steps",
    "train.micro_batch_tokens",
    "train.checkpoint_every",
    "train.eval_every",
    "train.max_hours",
    "train.peak_tflops",
    "engine.shard_size",
    "launch.tflops",
    "launch.rolling.capture_threads",
    "launch.rolling.train_threads",
    "plan.tokens_per_sequence",
    "plan.capture_tflops",
    "serve.steps",
)
NOT_NEGATIVE = (
    "seed",
    "regenerate.seed",
    "regenerate.temperature",
    "corpus.seed",
    "corpus.min_supervised",
    "optim.weight_decay",
    "train.step_weight",  # 0: the first step alone is trained
    "draft.eagle1.feature_weight",
    "draft.eagle1.ce_weight",
    "draft.eagle1.noise",
)
FRACTIONS = ("optim.warmup_fraction", "optim.final_lr_fraction", "plan.supervised_share")
# Far above all that is of use: beyond, a slip of the fingers would fill a memory, a disk or a cluster.
AT_MOST: dict[str, float] = {
    "seed": 2**63 - 1,  # torch's
    "corpus.sequences": 10**9,
    "corpus.validation_sequences": 10**6,
    "corpus.max_length": 2**22,
    "capture.batch_tokens": 2**24,
    "capture.shards": 99_999,  # five digits in their names
    "store.row_group_mib": 1024,  # Parquet's pages end at 2 GiB
    "data.base_sequences": 10**9,
    "data.base_tokens": 10**14,
    "data.scale": 10**9,
    "draft.steps": 64,
    "draft.vocab_size": 2**24,
    "train.epochs": 10**5,
    "train.steps": 10**9,
    "train.batch_tokens": 2**30,
    "train.micro_batch_tokens": 2**30,
    "train.step_weight": 10,
    "train.keep_last": 10**4,
    "optim.lr": 1,
    "optim.eps": 1,
    "optim.weight_decay": 100,
    "eval.bootstrap": 10**5,
    "eval.decode_prompts": 10**6,
    "eval.decode_batch": 10**4,
    "eval.generate_batch": 10**5,
    "engine.shard_size": 10**5,
    "launch.nproc_per_node": 1024,
    "launch.nodes": 10**5,
    "launch.slurm.points_at_once": 10**5,
    "launch.slurm.capture_jobs": 10**4,
    "launch.slurm.attempts": 10**4,
}


def check(cfg: Config) -> None:
    """Cross-checks, once, before any work. Raises ValueError naming the key and the way out."""
    for part in (_values, _names, _corpus, _capture, _data, _draft, _training, _evaluation, _launch):
        part(cfg)


def _values(cfg: Config) -> None:
    """Of single keys."""

    def value(key: str) -> Any:
        node: Any = cfg
        for part in key.split("."):
            node = getattr(node, part)
        return node

    for key, allowed in CHOICES.items():
        if value(key) not in allowed:
            raise ValueError(f"{key}={value(key)!r} is not one of {', '.join(allowed)}")
    for key in POSITIVE:
        if not 0 < value(key) < math.inf:
            raise ValueError(f"{key}={value(key)} must be greater than 0, and finite")
    for key in POSITIVE_IF_SET:
        if value(key) is not None and not 0 < value(key) < math.inf:
            raise ValueError(f"{key}={value(key)} must be greater than 0 and finite, or null")
    for key in NOT_NEGATIVE:
        if not 0 <= value(key) < math.inf:
            raise ValueError(f"{key}={value(key)} must not be negative, and finite")
    for key, most in AT_MOST.items():
        if value(key) is not None and value(key) > most:
            raise ValueError(f"{key}={value(key)} is beyond all use: at most {most:,}")
    for key in FRACTIONS:
        if not 0 <= value(key) <= 1:
            raise ValueError(f"{key}={value(key)} must lie between 0 and 1")
    if len(cfg.optim.betas) != 2 or not all(0 <= b < 1 for b in cfg.optim.betas):
        raise ValueError(f"optim.betas={cfg.optim.betas} must be two numbers from 0 to below 1")


def _names(cfg: Config) -> None:
    folders = [("study.name", cfg.study.name), *((f"eval task {t.name!r}", t.name) for t in cfg.eval.tasks)]
    for key, name in (*folders, *([("target.name", cfg.data_name)] if cfg.data_name else [])):
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"{key}: {name!r} becomes the name of a folder: letters, digits, '_', '-' and '.' only")
    if unknown := [kind for kind in cfg.tracker.kinds if kind not in TRACKERS]:
        raise ValueError(f"tracker.kinds names {unknown[0]!r}, which is not among {', '.join(TRACKERS)}")


def _corpus(cfg: Config) -> None:
    if cfg.corpus.min_supervised >= cfg.corpus.max_length:
        raise ValueError(
            f"corpus.min_supervised={cfg.corpus.min_supervised} leaves nothing of sequences of corpus.max_length="
            f"{cfg.corpus.max_length} tokens: lower it"
        )
    if not 0 < cfg.corpus.held_out_fraction < 1:
        raise ValueError(f"corpus.held_out_fraction={cfg.corpus.held_out_fraction} must lie between 0 and 1")
    if cfg.corpus.near_duplicates is not None and not 0 < cfg.corpus.near_duplicates <= 1:
        raise ValueError(f"corpus.near_duplicates={cfg.corpus.near_duplicates} must lie between 0 and 1, or be null")
    if cfg.corpus.contamination_words is not None and cfg.corpus.contamination_words < 1:
        raise ValueError(f"corpus.contamination_words={cfg.corpus.contamination_words} must be at least 1, or null")
    if (cfg.corpus.path is None) == (not cfg.corpus.sources):
        raise ValueError("give either corpus.path=FILE, or corpus.sources=[{name: ..., path: ...}, ...], not both")
    for key, name in [("corpus.name", cfg.corpus.name), *(("corpus.sources", s.name) for s in cfg.corpus.sources)]:
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)*", name):
            raise ValueError(
                f"{key}: the name {name!r} must be of letters, digits, '_', '-', '.' and '/' between words"
            )
    for source in cfg.corpus.sources:
        if source.format not in SOURCE_FORMATS:
            raise ValueError(
                f"corpus source {source.name!r}: format={source.format!r} is not {', '.join(SOURCE_FORMATS)} "
                "(dataset reads Parquet)"
            )
        if source.limit is not None and source.limit < 1:
            raise ValueError(f"corpus source {source.name!r}: limit={source.limit} must be at least 1, or null")
        if not 0 < source.weight < math.inf:
            raise ValueError(
                f"corpus source {source.name!r}: weight={source.weight} must be greater than 0, and finite"
            )
    if len({s.name for s in cfg.corpus.sources}) != len(cfg.corpus.sources):
        raise ValueError(f"corpus.sources has a name twice: {[s.name for s in cfg.corpus.sources]}")
    if not 0 < cfg.regenerate.top_p <= 1:
        raise ValueError(f"regenerate.top_p={cfg.regenerate.top_p} must lie between 0 and 1, or be 1")


def _capture(cfg: Config) -> None:
    layers = cfg.capture.layer_ids
    if layers is not None and (not layers or layers != sorted(set(layers)) or layers[0] < 0):
        raise ValueError(
            f"capture.layer_ids={layers} must be different, ascending, and 0 or more: ids count the decoder layers of "
            "the target from its first; null takes (2, n//2, n-3)"
        )
    if cfg.capture.device_map not in (None, *DEVICE_MAPS):
        raise ValueError(
            f"capture.device_map={cfg.capture.device_map!r} is not null or one of {', '.join(DEVICE_MAPS)}"
        )
    if cfg.capture.max_memory and cfg.capture.device_map is None:
        raise ValueError("capture.max_memory bounds what capture.device_map places: set capture.device_map=auto")
    if cfg.rolls and cfg.store.cap_gib is None:
        raise ValueError("store.mode=rolling needs a cap: store.cap_gib=GIB of training states on disk at any time")
    if cfg.reads_copies and cfg.store.dtype == "fp8":
        raise ValueError("store.later_epochs=fp8 keeps fp8 copies, and store.dtype is fp8 already: raise store.cap_gib")


def _data(cfg: Config) -> None:
    if cfg.data.sequences == 0:
        raise ValueError(f"data.scale={cfg.data.scale} of data.base_sequences={cfg.data.base_sequences} is no sequence")
    if cfg.corpus.sequences is not None and (cfg.data.sequences or 0) > cfg.corpus.sequences:
        raise ValueError(
            f"data.scale={cfg.data.scale:g} needs {cfg.data.sequences} sequences, but corpus.sequences="
            f"{cfg.corpus.sequences}: lower data.scale, or raise corpus.sequences (a captured store does not "
            "grow: docs/study.md, More later)"
        )


def _draft(cfg: Config) -> None:
    own = cfg.draft.eagle1
    if cfg.draft.kind == "eagle1" and own.feature_weight == own.ce_weight == 0:
        raise ValueError("draft.eagle1.feature_weight and draft.eagle1.ce_weight are both 0: nothing would be trained")
    if cfg.draft.kind == "eagle1" and own.trained_steps > cfg.draft.steps:
        raise ValueError(
            f"draft.eagle1.trained_steps={own.trained_steps} exceeds draft.steps={cfg.draft.steps}: lower it, or "
            "draft more"
        )
    if cfg.draft.kind == "block" and cfg.draft.steps < 2:
        raise ValueError(f"draft=block drafts a block: draft.steps={cfg.draft.steps} must be at least 2")
    if cfg.draft.eagle3.norm_before_fc and cfg.draft.eagle3.fc_norm:
        raise ValueError("draft.eagle3: norm_before_fc and fc_norm both norm what goes into fc: choose one")
    if cfg.draft.kind == "hf" and cfg.draft.hf.model is None:
        raise ValueError("draft=hf needs the draft model: draft.hf.model=FOLDER-OR-HUB-ID")
    for option in ("recompute", "compile"):
        if getattr(cfg.draft, option) and cfg.draft.kind != "eagle3":
            raise ValueError(f"draft.{option} is of EAGLE-3 heads alone, and draft.kind is {cfg.draft.kind}")
    if cfg.draft.init_from is not None and cfg.draft.kind != "eagle3":
        raise ValueError(f"draft.init_from reads EAGLE-3 heads alone, and draft.kind is {cfg.draft.kind}")


def _training(cfg: Config) -> None:
    if sum(parse_objective(cfg.train.objective).values()) == 0:
        raise ValueError(f"train.objective={cfg.train.objective!r} has no weight above 0")
    if (weights := cfg.train.step_weights) is not None and (
        len(weights) != cfg.draft.steps or not all(0 <= w < math.inf for w in weights) or not any(weights)
    ):
        raise ValueError(
            f"train.step_weights={weights} must be draft.steps={cfg.draft.steps} numbers, none negative and one above 0"
        )
    if cfg.train.regime == "steps" and not cfg.train.steps:
        raise ValueError("train.regime=steps needs train.steps=N")
    if cfg.train.batch_tokens < cfg.corpus.max_length:
        raise ValueError(
            f"train.batch_tokens={cfg.train.batch_tokens} is below corpus.max_length={cfg.corpus.max_length}: "
            "one sequence would not fit a batch; raise the former or lower the latter"
        )
    if cfg.train.regime == "none" and cfg.train.steps:
        raise ValueError("train.regime=none takes no train.steps: leave it null")
    if cfg.train.regime == "none" and cfg.draft.init_from is None:
        raise ValueError("train.regime=none is for a head that is trained already: name it with draft.init_from=FOLDER")


def _evaluation(cfg: Config) -> None:
    names = [t.name for t in cfg.eval.tasks]
    if len(set(names)) != len(names):
        raise ValueError(f"eval.tasks has a name twice: {names}")
    for task in cfg.eval.tasks:
        if task.source not in ("humaneval", "held_out", "file"):
            raise ValueError(f"eval task {task.name!r}: source={task.source!r} is not humaneval, held_out or file")
        sizes = (task.prompts, task.new_tokens, task.max_prompt_tokens)
        if min(sizes) < 1 or max(sizes) > 10**6:
            raise ValueError(
                f"eval task {task.name!r}: prompts, new_tokens and max_prompt_tokens must be from 1 to 1,000,000"
            )
        if not 0 <= task.temperature < math.inf or not 0 < task.top_p <= 1 or task.top_k < 0:
            raise ValueError(
                f"eval task {task.name!r}: a finite temperature >= 0, 0 < top_p <= 1 and top_k >= 0 are needed"
            )
        if task.temperature == 0 and (task.top_p, task.top_k) != (1.0, 0):
            raise ValueError(f"eval task {task.name!r}: top_p and top_k are of sampling, and its temperature is 0")
        if task.source == "file" and not task.path:
            raise ValueError(f"eval task {task.name!r}: source=file needs path=FILE.jsonl")
    for tree in cfg.eval.trees:
        if min(tree.depth, tree.top_k, tree.total) < 1 or max(tree.depth, tree.top_k, tree.total) > 4096:
            raise ValueError(f"eval.trees: {asdict(tree)}: depth, top_k and total must be from 1 to 4,096")
        for node in tree.choices:
            if not node or min(node) < 0 or tree.choices.count(node) > 1 or node[:-1] not in ([], *tree.choices):
                raise ValueError(
                    f"eval.trees: node {node} of a static tree: ranks from 0, each node once, its parent {node[:-1]} "
                    "a node too"
                )
    for key, chosen in (("eval.decode_tasks", cfg.eval.decode_tasks), ("serve.tasks", cfg.serve.tasks)):
        for name in chosen:
            if name not in names:
                raise ValueError(
                    f"{key} names {name!r}, which is not among eval.tasks: give {key}=[{','.join(names)}] or {key}=[]"
                )
    if cfg.export.path == "":
        raise ValueError("export.path is empty: give a folder, or null for the point's own")
    if not cfg.serve.concurrency or min(cfg.serve.concurrency) < 1:
        raise ValueError(f"serve.concurrency={cfg.serve.concurrency} must be numbers of at least 1")
    if not cfg.serve.temperatures or min(cfg.serve.temperatures) < 0:
        raise ValueError(f"serve.temperatures={cfg.serve.temperatures} must be numbers, none negative")
    if cfg.serve.baseline_url is not None and cfg.serve.url is None:
        raise ValueError("serve.baseline_url needs serve.url, the server with the head that is compared with it")


def _launch(cfg: Config) -> None:
    launch = cfg.launch
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){1,2}|\d+-\d+|infinite|unlimited", launch.slurm.time, re.IGNORECASE):
        raise ValueError(
            f"launch.slurm.time={launch.slurm.time!r}: write HOURS:MINUTES:SECONDS, and in a YAML file between quotes: "
            "without them it reads 12:00:00 as the number 43200"
        )
    if launch.kind == "torchrun" and launch.rendezvous is None:
        raise ValueError("launch=torchrun needs launch.rendezvous=HOST:PORT of one of the nodes, the same on all nodes")
    if launch.kind == "local" and launch.nodes > 1:
        raise ValueError(
            f"launch.nodes={launch.nodes}: launch=local is one machine; use launch=torchrun or launch=slurm"
        )


def layer_ids(cfg: CaptureConfig, n_layers: int) -> tuple[int, ...]:
    """Layer ids to capture of a target of `n_layers` decoder layers: the draft head's inputs, ascending, then
    `n_layers`, the final state.

    Raises:
        ValueError: ids that the target has not.
    """
    ids = cfg.layer_ids if cfg.layer_ids is not None else [2, n_layers // 2, n_layers - 3]
    if ids != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] >= n_layers:
        asked = "capture.layer_ids" if cfg.layer_ids is not None else "the default layers (2, n//2, n-3)"
        raise ValueError(
            f"{asked}: {list(ids)} must be different, ascending and between 0 and {n_layers - 1}, since the target has "
            f"{n_layers} layers: set capture.layer_ids=[...]"
        )
    return (*ids, n_layers)

"""Structured configuration: types and cross-checks here, values in `conf/`.

Hydra composes `conf/config.yaml` over these dataclasses, so an unknown key or a wrong type is refused before any work.
Every package may import this module; it imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle3_train.files import write_text


@dataclass
class PathsConfig:
    """Where things lie. Nothing here defines a result: names and identities never contain a path."""

    outputs: str = "outputs"  # all studies; a relative path counts from the folder the command was given in
    study: str = MISSING  # one study: <outputs>/<study name>
    # what the points of a study share; below <study>/targets/<target name> where the study has several targets
    data: str = "${paths.study}"
    corpus: str = MISSING  # tokenised conversations, shared by the points of a study
    store: str = MISSING  # captured hidden states, shared by the points of a study
    target: str = MISSING  # the target model as a plain Hugging Face folder (converted once)
    # conversations whose assistant turns the target wrote: a JSONL file a source
    regenerated: str = "${paths.data}/regenerated"


@dataclass
class TargetConfig:
    """The target model: the large model whose decoding the draft head speeds up."""

    name: str = MISSING  # short name, used in reports and identities
    # A folder, a hub id, or `package:NAME/FILE.gguf` for a file that an installed Python package carries.
    model: str = MISSING
    revision: str | None = None
    chat_template: str | None = None  # a Jinja file that replaces the tokenizer's own template
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # for the template, e.g. {enable_thinking: false}
    trust_remote_code: bool = False
    # sizes, as its config.json has them, for plans on a machine where the model is not; with `model`: of that one alone
    shape: dict[str, Any] = field(default_factory=dict)


@dataclass
class SourceConfig:
    """One source of conversations, or of rows that are tokenised already (`input_ids` with `loss_mask` or `labels`)."""

    name: str = MISSING
    format: str = "sharegpt"  # sharegpt (JSON, in any state) | jsonl | dataset (Hugging Face, Parquet)
    path: str = MISSING  # a file, `package:NAME/FILE`, or a data set's folder or hub id
    subset: str | None = None  # of a data set
    split: str = "train"  # of a data set
    revision: str | None = None  # of a data set on the hub
    limit: int | None = None  # conversations to read at most, from its start; null: all
    weight: float = 1.0  # share of this source among the sequences, relative to the others'


@dataclass
class CorpusConfig:
    """Conversations to token ids and loss masks."""

    name: str = MISSING
    format: str = "sharegpt"  # of `path`: sharegpt (JSON, in any state) | jsonl | dataset (Hugging Face, Parquet)
    path: str | None = None  # a file, `package:NAME/FILE`, or a data set's folder or hub id
    sources: list[SourceConfig] = field(default_factory=list)  # several, mixed by weight, in place of the one `path`
    sequences: int | None = None  # training sequences to prepare, in the shuffled order; null: all
    validation_sequences: int = 32  # held-out conversations for the validation loss
    held_out_fraction: float = 0.05  # of all conversations, by a hash of the id: never trained on
    max_length: int = 512  # tokens a sequence; whole turns are kept where that is possible
    min_supervised: int = 16  # a sequence with fewer supervised tokens is left out
    near_duplicates: float | None = 0.8  # Jaccard similarity of word 5-grams from which one is left out; null: keep
    # left out: what shares so many words in a row with a task's prompt; null: keep
    contamination_words: int | None = 13
    seed: int = 0  # of the global shuffle


@dataclass
class CaptureConfig:
    """Target model to hidden states."""

    backend: str = "hf"  # hf (transformers, any device) | vllm (needs vLLM: pip install eagle3-train[vllm])
    # dtype of the target's weights and activations; auto: bf16 where the device has fast bf16, fp32 elsewhere
    compute_dtype: str = "auto"
    # input layers of the draft head, in the convention of docs/store.md; null: (2, n//2, n-3)
    layer_ids: list[int] | None = None
    batch_tokens: int = 4096  # tokens a forward pass, at most (padding included)
    shards: int = 8  # files of the training store: what an interrupted capture redoes at most is one of them a process
    logsumexp: bool = False  # also write the target's log-sum-exp over the full vocabulary
    # hf: where the target's layers lie, as accelerate places them: auto | balanced | sequential; null: all on `device`
    device_map: str | None = None
    # with device_map, of each device: `+capture.max_memory.0=70GiB +capture.max_memory.cpu=200GiB`; the rest is on disk
    max_memory: dict[str, str] = field(default_factory=dict)
    tensor_parallel: int = 1  # vllm: devices that share one copy of the target
    cache_gib: float = 4.0  # vllm: memory of a device for keys, values and states of what is in flight
    eager: bool | None = None  # vllm: run without compiling; null: on a CPU, where compiling takes minutes


@dataclass
class RegenerateConfig:
    """Assistant turns of the corpus's conversations, written by the target itself. Backend: `capture.backend`."""

    conversations: int | None = None  # the first ones in the global order, held-out ones included; null: all
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # of the sampling: the likeliest tokens of so much probability; 1: all
    seed: int = 0  # of the sampling; every turn of every conversation has its own random numbers
    max_new_tokens: int | None = None  # a turn; null: up to corpus.max_length
    batch: int = 32  # conversations at a time; what a kill loses at most


@dataclass
class StoreConfig:
    # whole: captured before training; rolling: while it trains, in a bounded room (docs/rolling.md)
    mode: str = "whole"
    dtype: str = "bf16"  # of the training and validation states: bf16 | fp16 | fp32 | fp8
    transcript_dtype: str = "fp32"  # of the evaluation transcripts: fp32 makes replay equal fp32 decoding exactly
    row_group_mib: int = 32
    # rolling:
    cap_gib: float | None = None  # training states on disk at any time, at most
    later_epochs: str = "recapture"  # recapture | fp8: they read fp8 copies, which stay within the cap
    silent_minutes: float = 30.0  # of the other side, while this one waits for it: then it gives up


@dataclass
class DataConfig:
    """How much of the store a point trains on: the first `scale * base_sequences` rows of its shuffled order, or as few
    of them as hold `scale * base_tokens` tokens."""

    scale: float = 1.0  # multiple of data.base_sequences, or of data.base_tokens
    base_sequences: int = 32  # sequences at 1x
    # Sequences shuffled together: windows of so many neighbours, one after the other; null: all of a whole store
    window: int | None = None
    base_tokens: int | None = None  # tokens at 1x; null: data.base_sequences counts

    @property
    def sequences(self) -> int | None:
        """None where tokens are counted."""
        return None if self.base_tokens is not None else round(self.scale * self.base_sequences)

    @property
    def tokens(self) -> int | None:
        """None where sequences are counted."""
        return None if self.base_tokens is None else round(self.scale * self.base_tokens)

    @property
    def identity(self) -> dict[str, Any]:
        """What defines the data; `base_tokens` and `window` came later: points without them keep their names."""
        base = "base_sequences" if self.base_tokens is None else "base_tokens"
        window = {} if self.window is None else {"window": self.window}
        return {"scale": self.scale, base: getattr(self, base), **window}

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens" if self.sequences is None else f"{self.sequences} sequences"


HEADS = {"eagle3", "eagle1", "medusa", "lm", "hf", "mtp", "block", "prompt_lookup"}  # kinds of draft heads
# Options of all heads that a kind has no use for.
UNUSED_BY: dict[str, tuple[str, ...]] = {
    "eagle1": ("init_lm_head", "init_layer"),
    "medusa": ("init_lm_head", "init_layer"),
    "mtp": ("init_lm_head",),
    "hf": ("init_lm_head", "init_layer", "vocab_size"),
    "prompt_lookup": ("init_lm_head", "init_layer", "vocab_size"),
}


@dataclass
class Eagle1Config:
    """EAGLE-1, and the steps from it to EAGLE-3."""

    inputs: str = "final"  # final: the target's last state; fused: fc over the input layers, as in EAGLE-3
    feature_weight: float = 1.0  # of the feature regression
    ce_weight: float = 0.1  # of the cross-entropy
    noise: float = 0.2  # width of the uniform noise on the features of a document of 512 tokens; 0: none
    trained_steps: int = 1  # steps that the loss unrolls; draft.steps: training-time test
    bias: bool = True  # of fc


@dataclass
class MedusaConfig:
    """Medusa."""

    layers: int = 1  # residual blocks a head


@dataclass
class LMConfig:
    """An independent draft model."""

    layers: int = 2


@dataclass
class HFConfig:
    """A causal language model of transformers as the draft model."""

    model: str | None = None  # folder or hub id; with the target's tokenizer


@dataclass
class BlockConfig:
    """The parallel block drafter."""

    rank: int = 64  # of the Markov correction


@dataclass
class PromptLookupConfig:
    """Prompt lookup."""

    max_ngram: int = 3  # longest suffix that is looked up


@dataclass
class Eagle3Config:
    """What EAGLE-3 heads may differ in (docs/mathematics.md says how each acts)."""

    hidden_size: int | None = None  # width of the head; null: the target's
    intermediate_size: int | None = None  # of its MLP; null: the target's, in proportion to the width
    layers: int = 1
    lm_head: str = "trained"  # trained | frozen: as `init_lm_head` made it
    norm_before_fc: bool = False  # one RMSNorm over all fused target states
    fc_norm: bool = False  # an RMSNorm for each of them (EAGLE-3.1)
    norm_before_residual: bool = False  # the first layer's residual is the normed hidden state
    norm_output: bool = False  # the next step takes in the normed output (EAGLE-3.1)


@dataclass
class DraftConfig:
    """The draft head. What one kind alone has is in a part of its name."""

    kind: str = "eagle3"  # the draft head: one of eagle3_train/drafts
    steps: int = 3  # K: training-time-test steps, and the chain length that is drafted
    vocab_size: int = 4096  # draft vocabulary D: the most frequent supervised tokens of the whole store
    init_lm_head: str = "target"  # target: the target's rows; random
    init_layer: str = "target"  # target: the target's last layer, fc passing the top state through; random
    # A published EAGLE-3 head (a folder or a hub id, docs/export.md) to start from, in place of init_*: its vocabulary
    # and its sizes hold then.
    init_from: str | None = None
    # How it is computed, which does not define a result. attention: merge (fused kernel, log-sum-exp merge), flex
    # (FlexAttention, needs a GPU to train), reference (explicit mask, slow), auto (flex on GPUs, merge on CPUs)
    attention: str = "auto"
    recompute: bool = False  # gradient checkpointing: less memory, one more forward pass of the layers
    compile: bool = False  # torch.compile of what lies between the matrix products
    eagle3: Eagle3Config = field(default_factory=Eagle3Config)
    eagle1: Eagle1Config = field(default_factory=Eagle1Config)
    medusa: MedusaConfig = field(default_factory=MedusaConfig)
    lm: LMConfig = field(default_factory=LMConfig)
    hf: HFConfig = field(default_factory=HFConfig)
    block: BlockConfig = field(default_factory=BlockConfig)
    prompt_lookup: PromptLookupConfig = field(default_factory=PromptLookupConfig)

    @property
    def identity(self) -> dict[str, Any]:
        """What defines the head. Options that its kind does not have are left out, and newer ones count where they are
        set, so that new kinds and their options rename no point that was there before."""
        draft = asdict(self)
        how = {"attention", "recompute", "compile"}
        unused = {*how, *(HEADS - {self.kind}), *UNUSED_BY.get(self.kind, ())}
        _drop_defaults(draft, DraftConfig(), ("init_from",))
        _drop_defaults(draft["eagle3"], Eagle3Config(), tuple(draft["eagle3"]))
        _drop_defaults(draft, None, ("eagle3",))
        return {key: value for key, value in draft.items() if key not in unused}


@dataclass
class ExportConfig:
    """A trained head as files that inference engines load."""

    # auto: what vLLM reads of the head's kind; else, of EAGLE-3, speculators (vLLM) | eagle (SGLang, vLLM)
    format: str = "auto"
    path: str | None = None  # the folder to write; null: <point>/export/<format>
    dtype: str = "auto"  # of the weights: fp32 | bf16 | fp16; auto: the target's own
    check: bool = False  # read it back bit by bit, and run it in the speculators library where that is installed


@dataclass
class TrainConfig:
    # epochs: steps grow with the data; steps: compute is held, unique data grows; none: the head as it starts
    regime: str = "epochs"
    epochs: int = 2  # passes over the point's data, with regime=epochs
    steps: int | None = None  # with regime=steps
    batch_tokens: int = 2048  # tokens a global batch, the same for every world size
    micro_batch_tokens: int | None = None  # tokens a forward pass on a rank; null: the rank's whole share
    # none: sequences lie end to end; length: a forward pass takes sequences of like lengths, each filled up to the
    # longest of them (few shapes, for compiled kernels). The same loss and gradients.
    padding: str = "none"
    # What is minimised: soft_ce (its gradient is the forward KL's) | reverse_kl | tv | hard_ce, or a mix of them:
    # 0.9*soft_ce+0.1*tv
    objective: str = "soft_ce"
    step_weight: float = 0.8  # w: step i counts w^i
    step_weights: list[float] | None = None  # a weight a step, in place of w^i
    oov: str = "drop"  # rows whose target argmax is outside the draft vocabulary: drop | keep
    compute_dtype: str = "auto"  # auto | bf16 | fp32; weights and optimizer state are fp32 always
    log_every: int = 10  # steps
    checkpoint_every: int | None = 200  # steps; the last step always
    keep_last: int = 2  # checkpoints
    keep_best: bool = True  # with eval_every: also keep the checkpoint of the highest replay tau
    eval_every: int | None = None  # steps; validation loss, alpha and replay tau while it trains
    max_hours: float | None = None  # of one attempt: then save, and exit with code 143, which means requeue
    nonfinite: str = "stop"  # a loss or gradient that is NaN or infinite: stop | skip (drop the update, count it)
    peak_tflops: float | None = None  # of one process's device, for MFU; null: as known for the GPU, none for CPUs


@dataclass
class OptimConfig:
    kind: str = "adamw"
    lr: float = 2e-3  # peak learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    warmup_fraction: float = 0.1  # of the run's own steps: every data scale has its own full schedule
    decay: str = "cosine"  # cosine | linear | constant
    final_lr_fraction: float = 0.05


@dataclass
class EngineConfig:
    """How a training step is spread over processes."""

    # auto (single; ddp on several processes) | single | ddp | fsdp2 | hsdp | deepspeed | accelerate
    kind: str = "auto"
    shard_size: int | None = None  # hsdp: ranks that share one copy of the weights, e.g. those of a node
    # kind=deepspeed: DeepSpeed's own configuration; batch, clipping, optimizer and precision are filled in from ours
    deepspeed: dict[str, Any] = field(default_factory=dict)
    timeout_minutes: float = 10.0  # a collective that takes longer ends the job: a rank hangs


@dataclass
class TaskConfig:
    """One evaluation task: prompts with the continuation that the target itself generated."""

    name: str = MISSING
    source: str = MISSING  # humaneval | held_out | file
    path: str | None = None  # with source=file: JSONL with `turns` or `prompt`
    prompts: int = 32
    new_tokens: int = 64
    max_prompt_tokens: int = 384
    temperature: float = 0.0  # at which the target generates, and is decoded with; 0: greedy
    top_p: float = 1.0  # of sampling: the fewest tokens that hold so much probability
    top_k: int = 0  # of sampling: so many tokens at most; 0: all


@dataclass
class TreeConfig:
    """EAGLE-2's dynamic draft tree, or with `choices` a static one, Medusa's."""

    depth: int = 5  # levels
    top_k: int = 4  # nodes expanded a level, and children each
    total: int = 16  # drafted tokens that are verified
    # Static: every node as the ranks (0: the most likely) of the tokens on its path; the three above have no say then.
    choices: list[list[int]] = field(default_factory=list)


@dataclass
class EvalConfig:
    tasks: list[TaskConfig] = field(default_factory=list)  # name, source, prompts, new_tokens, max_prompt_tokens each
    decode_tasks: list[str] = field(default_factory=list)  # tasks that `evaluate` also decodes for real
    decode_prompts: int = 16  # prompts a decoded task, the first ones
    decode_batch: int = 1  # prompts decoded at once, plainly and with drafts: the speed-up is at this batch size
    decode: bool = True  # decode with the real target besides the replay
    decode_dtype: str = "fp32"  # fp32 | bf16; in fp32, greedy decoding equals the target token for token
    trees: list[TreeConfig] = field(default_factory=list)  # draft trees to measure besides the chain
    bootstrap: int = 1000  # resamples of the intervals
    generate_batch: int = 32  # prompts generated at once when transcripts are made


@dataclass
class ServeConfig:
    """A draft head in an inference server."""

    tasks: list[str] = field(default_factory=list)  # of eval.tasks, whose prompts are sent; empty: eval.decode_tasks
    prompts: int = 32  # of each task, the first ones
    steps: int | None = None  # drafts of a chain; null: draft.steps
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16, 64])  # requests at any time
    temperatures: list[float] = field(default_factory=lambda: [0.0])  # of the requests; 0: greedy
    head: str | None = None  # an exported head; null: the point's, exported as `eagle3 export` does
    dtype: str = "auto"  # of target and head in vLLM: fp32 | bf16 | fp16; auto: the target's own
    url: str | None = None  # a server that runs already, with the head, in place of our own vLLM: http://HOST:PORT
    baseline_url: str | None = None  # with url: one without the head, to compare with
    arguments: list[str] = field(default_factory=list)  # more of vLLM's: ["--tensor-parallel-size", "2"]
    start_minutes: float = 15.0  # for vLLM to load and compile


@dataclass
class TrackerConfig:
    kinds: list[str] = field(default_factory=list)  # besides jsonl, which is always on: wandb, tensorboard
    project: str = "eagle3-scaling"  # wandb's
    entity: str | None = None
    mode: str = "offline"  # wandb: online | offline


@dataclass
class SlurmConfig:
    """What a cluster wants to know of a job; null leaves it to the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str = "04:00:00"  # limit of one attempt; a job that needs longer is requeued and continues
    memory: str | None = None  # of a node
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    options: list[str] = field(default_factory=list)  # any other options of sbatch: ["--exclusive"]
    setup: list[str] = field(default_factory=list)  # shell lines before a step: ["module load cuda"]
    srun: list[str] = field(default_factory=list)  # options of srun: ["--container-image=..."]
    env: dict[str, str] = field(default_factory=dict)  # environment of the steps
    python: str | None = None  # interpreter on the nodes; null: the one that submits
    points_at_once: int = 8  # points of a study that run at the same time, at most
    capture_jobs: int = 1  # jobs that capture the shards between them
    signal_seconds: int = 120  # before the time limit: stop, and be requeued
    attempts: int = 20  # of one job, requeued ones included


@dataclass
class CoupledConfig:
    """store.mode=rolling: capture and training at the same time, and what each has of a machine."""

    workers: int = 1  # processes that capture
    points_at_once: int = 1  # points that train at the same time, and share the passes over the store
    # threads of all capture workers, and of all points; null: each process takes what torch finds
    capture_threads: int | None = None
    train_threads: int | None = None
    # GPUs of the workers and of the points, by number, shared out evenly; empty: all of them see all
    capture_gpus: list[int] = field(default_factory=list)
    train_gpus: list[int] = field(default_factory=list)
    restarts: int = 10  # of a process that was killed from outside
    session: str = ""  # set by a study: which runs share a pass; by hand, the one run that the command describes


@dataclass
class LaunchConfig:
    kind: str = "local"  # local | torchrun | slurm
    nproc_per_node: int = 1  # processes on each node
    nodes: int = 1  # machines
    rendezvous: str | None = None  # with kind=torchrun: HOST:PORT on one of the nodes, the same on all
    tflops: float | None = None  # sustained by one process, for the hours in the plan; null: as measured, once it is
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    rolling: CoupledConfig = field(default_factory=CoupledConfig)


@dataclass
class PlanConfig:
    """What the plan of a study assumes until it is counted or measured. Nothing here defines a result."""

    tokens_per_sequence: float | None = None  # mean; null: corpus.max_length, which makes the plan an upper bound
    supervised_share: float = 1.0  # of the tokens
    capture_tflops: float | None = None  # sustained by one device that captures, for the hours; training: launch.tflops


@dataclass
class StudyConfig:
    """A study: the points are the product of `axes`, less `exclude`."""

    name: str = MISSING  # its folder, below paths.outputs
    axes: dict[str, list[Any]] = field(default_factory=dict)  # config key -> values
    exclude: list[dict[str, Any]] = field(default_factory=list)  # points left out: all values of an item
    # points that are also decoded with the real target: those that match any of these; empty: every point
    decode_points: list[dict[str, Any]] = field(default_factory=list)

    @property
    def varies_target(self) -> bool:
        """Whether an axis sets the target: then each target has its own data."""
        return any(is_of_target(key) for key in self.axes)


@dataclass
class Config:
    seed: int = 0  # of initialisation, order of the data, and bootstrap
    device: str = "auto"  # auto | cpu | cuda
    dry_run: bool = False  # print the plan and the estimates, do nothing
    paths: PathsConfig = field(default_factory=PathsConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    data: DataConfig = field(default_factory=DataConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    study: StudyConfig = field(default_factory=StudyConfig)

    @property
    def point_identity(self) -> dict[str, Any]:
        """What defines a trained draft head. Paths, logging, engines and launchers do not; all data choices do."""
        train = asdict(self.train)
        for irrelevant in NOT_OF_A_POINT:
            del train[irrelevant]
        corpus = asdict(self.corpus)
        for source in (corpus, *corpus["sources"]):
            del source["path"]
        del corpus["validation_sequences"]
        capture = {k: getattr(self.capture, k) for k in ("compute_dtype", "layer_ids")}
        # Options that came after the first points count where they are set, so that those points keep their names.
        _drop_defaults(train, TrainConfig(), ("objective", "step_weights"))
        # What is read in a rolling store is what is read in a whole one, but for copies that are rounded.
        copies = {"later_epochs": "fp8"} if self.reads_copies else {}
        return {
            "target": {"name": self.target.name, "model": self.target.model, "revision": self.target.revision},
            "corpus": corpus,
            "capture": capture,
            "store_dtype": self.store.dtype,
            "data": self.data.identity | copies,
            "draft": self.draft.identity,
            "train": train,
            "optim": asdict(self.optim),
            "seed": self.seed,
        }

    @property
    def data_name(self) -> str:
        """What tells the data of this configuration from others of its study: the target's name where the study has
        several targets, else nothing."""
        return self.target.name if self.study.varies_target else ""

    @property
    def rolls(self) -> bool:
        return self.store.mode == "rolling"

    @property
    def reads_copies(self) -> bool:
        """Whether later epochs read fp8 copies of what the first reads."""
        return self.rolls and self.store.later_epochs == "fp8"

    @property
    def reading(self) -> dict[str, int | None]:
        """What decides when a point reads which rows of a store: what `store.plan_of` takes."""
        return {
            "rows": self.data.sequences,
            "tokens": self.data.tokens,
            "seed": self.seed,
            "batch_tokens": self.train.batch_tokens,
            "epochs": self.train.epochs if self.train.regime == "epochs" else None,
            "steps": self.train.steps if self.train.regime == "steps" else None,
            "window": self.data.window,
        }

    @property
    def session_file(self) -> Path:
        """The runs that share the passes of a session over a rolling store: name -> `reading`."""
        return Path(self.paths.study) / "rolling" / f"{self.launch.rolling.session}.json"

    def given_up_file(self, run: str) -> Path:
        """Says by being there that `run` of the session has failed for good, and is waited for no more."""
        return self.session_file.with_name(f"{self.launch.rolling.session}-without-{run}")

    @property
    def data_identity(self) -> dict[str, Any]:
        """What the rows of the store depend on, flat, so that a difference has a name; paths do not define them."""
        corpus = {f"corpus.{k}": v for k, v in asdict(self.corpus).items() if k not in ("path", "validation_sequences")}
        target = {f"target.{k}": getattr(self.target, k) for k in ("name", "model", "revision", "chat_template_args")}
        capture = {f"capture.{k}": getattr(self.capture, k) for k in ("compute_dtype", "layer_ids")}
        return target | corpus | capture

    @property
    def point_name(self) -> str:
        """Folder of the point: readable, and unique by a hash of what defines it. All ranks agree on it."""
        return f"{self.draft.kind}-x{self.data.scale:g}-s{self.seed}-{digest(self.point_identity)}"

    @property
    def point_dir(self) -> Path:
        return Path(self.paths.study) / self.point_name

    @property
    def eval_identity(self) -> dict[str, Any]:
        """What defines an evaluation of a trained head: a change of it re-evaluates, and does not retrain."""
        identity: dict[str, Any] = {"tasks": [asdict(t) for t in self.eval.tasks], "bootstrap": self.eval.bootstrap}
        for task in identity["tasks"]:
            del task["path"]  # what the file holds shows in the transcripts
            _drop_defaults(task, TaskConfig(), SAMPLING)
        if self.eval.trees:
            identity["trees"] = [asdict(t) for t in self.eval.trees]
            for tree in identity["trees"]:
                _drop_defaults(tree, TreeConfig(), ("choices",))
        return identity | {"transcript_dtype": self.store.transcript_dtype}

    @property
    def decode_identity(self) -> dict[str, Any]:
        """What defines decoding with the real target, where it is asked for, besides `eval_identity`."""
        identity = {
            "prompts": self.eval.decode_prompts,
            "dtype": self.eval.decode_dtype,
            "decode_batch": self.eval.decode_batch,
        }
        _drop_defaults(identity, EvalConfig(), ("decode_batch",))
        return identity


def _drop_defaults(identity: dict[str, Any], defaults: Any, keys: tuple[str, ...]) -> None:
    """Remove those of `keys` that have their default, or without `defaults` those that are empty."""
    for key in keys:
        if identity[key] == getattr(defaults, key, {}):
            del identity[key]


def is_of_target(key: str) -> bool:
    """Whether a key or config group sets the target, or something of it."""
    return key.partition(".")[0] == "target"


SAMPLING = ("temperature", "top_p", "top_k")  # keys of a task
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


def digest(value: Any, length: int = 8) -> str:
    """Short hex digest of a JSON-able value, the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


NOT_OF_A_POINT = (  # keys of train that do not define the trained head
    "log_every", "checkpoint_every", "keep_last", "keep_best", "eval_every", "max_hours", "nonfinite", "peak_tflops",
    "micro_batch_tokens", "padding",
)  # fmt: skip

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
    folders = [("study.name", cfg.study.name), *((f"eval task {t.name!r}", t.name) for t in cfg.eval.tasks)]
    for key, name in (*folders, *([("target.name", cfg.data_name)] if cfg.data_name else [])):
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"{key}: {name!r} becomes the name of a folder: letters, digits, '_', '-' and '.' only")
    if unknown := [kind for kind in cfg.tracker.kinds if kind not in TRACKERS]:
        raise ValueError(f"tracker.kinds names {unknown[0]!r}, which is not among {', '.join(TRACKERS)}")
    layers = cfg.capture.layer_ids
    if layers is not None and (not layers or layers != sorted(set(layers)) or layers[0] < 0):
        raise ValueError(
            f"capture.layer_ids={layers} must be different, ascending, and 0 or more: ids count the decoder layers of "
            "the target from its first; null takes (2, n//2, n-3)"
        )
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
    for source in cfg.corpus.sources:
        if source.format not in SOURCE_FORMATS:
            raise ValueError(
                f"corpus source {source.name!r}: format={source.format!r} is not {', '.join(SOURCE_FORMATS)} "
                "(dataset reads Parquet)"
            )
        if not source.weight > 0:
            raise ValueError(f"corpus source {source.name!r}: weight={source.weight} must be greater than 0")
    if len({s.name for s in cfg.corpus.sources}) != len(cfg.corpus.sources):
        raise ValueError(f"corpus.sources has a name twice: {[s.name for s in cfg.corpus.sources]}")
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
    if sum(parse_objective(cfg.train.objective).values()) == 0:
        raise ValueError(f"train.objective={cfg.train.objective!r} has no weight above 0")
    if (weights := cfg.train.step_weights) is not None and (
        len(weights) != cfg.draft.steps or not all(0 <= w < math.inf for w in weights) or not any(weights)
    ):
        raise ValueError(
            f"train.step_weights={weights} must be draft.steps={cfg.draft.steps} numbers, none negative and one above 0"
        )
    if not 0 < cfg.regenerate.top_p <= 1:
        raise ValueError(f"regenerate.top_p={cfg.regenerate.top_p} must lie between 0 and 1, or be 1")
    if cfg.capture.device_map not in (None, *DEVICE_MAPS):
        raise ValueError(
            f"capture.device_map={cfg.capture.device_map!r} is not null or one of {', '.join(DEVICE_MAPS)}"
        )
    if cfg.capture.max_memory and cfg.capture.device_map is None:
        raise ValueError("capture.max_memory bounds what capture.device_map places: set capture.device_map=auto")
    if cfg.train.regime == "steps" and not cfg.train.steps:
        raise ValueError("train.regime=steps needs train.steps=N")
    if cfg.data.sequences == 0:
        raise ValueError(f"data.scale={cfg.data.scale} of data.base_sequences={cfg.data.base_sequences} is no sequence")
    if cfg.corpus.sequences is not None and (cfg.data.sequences or 0) > cfg.corpus.sequences:
        raise ValueError(
            f"data.scale={cfg.data.scale:g} needs {cfg.data.sequences} sequences, but corpus.sequences="
            f"{cfg.corpus.sequences}: raise corpus.sequences (and run prepare and capture again) or lower data.scale"
        )
    if cfg.train.batch_tokens < cfg.corpus.max_length:
        raise ValueError(
            f"train.batch_tokens={cfg.train.batch_tokens} is below corpus.max_length={cfg.corpus.max_length}: "
            "one sequence would not fit a batch; raise the former or lower the latter"
        )
    if cfg.rolls and cfg.store.cap_gib is None:
        raise ValueError("store.mode=rolling needs a cap: store.cap_gib=GIB of training states on disk at any time")
    if cfg.reads_copies and cfg.store.dtype == "fp8":
        raise ValueError("store.later_epochs=fp8 keeps fp8 copies, and store.dtype is fp8 already: raise store.cap_gib")
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
        if task.temperature < 0 or not 0 < task.top_p <= 1 or task.top_k < 0:
            raise ValueError(f"eval task {task.name!r}: temperature >= 0, 0 < top_p <= 1 and top_k >= 0 are needed")
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
                raise ValueError(f"{key} names {name!r}, which is not among eval.tasks {names}")
    if cfg.draft.kind == "hf" and cfg.draft.hf.model is None:
        raise ValueError("draft=hf needs the draft model: draft.hf.model=FOLDER-OR-HUB-ID")
    for option in ("recompute", "compile"):
        if getattr(cfg.draft, option) and cfg.draft.kind != "eagle3":
            raise ValueError(f"draft.{option} is of EAGLE-3 heads alone, and draft.kind is {cfg.draft.kind}")
    if cfg.train.regime == "none" and cfg.train.steps:
        raise ValueError("train.regime=none takes no train.steps: leave it null")
    if cfg.train.regime == "none" and cfg.draft.init_from is None:
        raise ValueError("train.regime=none is for a head that is trained already: name it with draft.init_from=FOLDER")
    if cfg.draft.init_from is not None and cfg.draft.kind != "eagle3":
        raise ValueError(f"draft.init_from reads EAGLE-3 heads alone, and draft.kind is {cfg.draft.kind}")
    if not cfg.serve.concurrency or min(cfg.serve.concurrency) < 1:
        raise ValueError(f"serve.concurrency={cfg.serve.concurrency} must be numbers of at least 1")
    if not cfg.serve.temperatures or min(cfg.serve.temperatures) < 0:
        raise ValueError(f"serve.temperatures={cfg.serve.temperatures} must be numbers, none negative")
    if cfg.serve.baseline_url is not None and cfg.serve.url is None:
        raise ValueError("serve.baseline_url needs serve.url, the server with the head that is compared with it")


def check_layer_ids(ids: list[int] | None, n_layers: int) -> None:
    """ValueError where the target, of `n_layers` decoder layers, has no such layers. Once its config.json is there."""
    if ids and ids[-1] >= n_layers:
        raise ValueError(
            f"capture.layer_ids={ids}: the target has {n_layers} layers, so the highest id is {n_layers - 1}"
        )


def resolve(cfg: DictConfig) -> Config:
    """A composed Hydra configuration as a checked `Config`; every interpolation resolved, paths made absolute."""
    paths = OmegaConf.to_container(cfg.paths, resolve=False)
    assert isinstance(paths, dict)
    if any(is_of_target(str(key)) for key in cfg.study.axes) and paths["data"] == PathsConfig.data:
        cfg.paths.data = "${paths.study}/targets/${target.name}"
    OmegaConf.resolve(cfg)
    config: Config = OmegaConf.to_object(cfg)  # type: ignore[assignment]
    for name in ("outputs", "study", "data", "corpus", "store", "target", "regenerated"):
        path = getattr(config.paths, name)
        if "://" not in path:
            setattr(config.paths, name, str(Path(path).absolute()))
    check(config)
    return config


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration; written aside and renamed, so that a reader never sees half of it."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(config)))


def load(path: str | Path) -> Config:
    """Read a resolved configuration back. ValueError, which names the file, where it is missing, damaged or empty, or
    has keys or values that this version does not know."""
    try:
        found = OmegaConf.load(path)
        if not isinstance(found, DictConfig) or not found:
            raise ValueError("it is empty, or no mapping of keys to values")
        return resolve(OmegaConf.merge(OmegaConf.structured(Config), found))  # type: ignore[arg-type]
    except FileNotFoundError as e:
        raise ValueError(f"{path}: no such file; the step that runs there writes it") from e
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as e:
        reason = " ".join(str(e).partition("full_key:")[0].split())
        raise ValueError(
            f"{path} is damaged, or not a configuration of this version of the code ({reason}): delete it and give the "
            "command that wrote it again"
        ) from e


def relocated(config: Config, study: Path) -> Config:
    """The configuration of a study whose folder was moved or copied to `study` since: what lay in it lies there now."""
    paths, old, new = config.paths, Path(config.paths.study), Path(study).absolute()
    for name in ("data", "corpus", "store", "target", "regenerated", "study"):
        path = Path(getattr(paths, name))
        if "://" not in getattr(paths, name) and path.is_relative_to(old):
            setattr(paths, name, str(new / path.relative_to(old)))
    return config


def conf_dir() -> Path:
    """The folder `conf`: beside the package in a clone, inside it in a wheel."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "conf"


OPEN = (
    "study.axes",
    "target.chat_template_args",
    "target.shape",
    "launch.slurm.env",
)  # keys whose value is a mapping of any keys


def compose_raw(overrides: list[str]) -> DictConfig:
    """Compose `conf/config.yaml` with Hydra overrides, from anywhere; interpolations are left as they are. Of several
    overrides of one key the last holds, of a config group too."""
    import hydra

    last: dict[str, str] = {}
    for text, override in zip(overrides, parse_overrides(overrides), strict=True):
        # The keys of such a mapping are the user's own, and Hydra would take them for slips of the fingers.
        is_open = override.type is OverrideType.CHANGE and override.key_or_group in OPEN
        if override.type is OverrideType.CHANGE:
            last.pop(override.key_or_group, None)
            last[override.key_or_group] = f"++{text}" if is_open else text
        else:
            last[text] = text
    with hydra.initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        return hydra.compose("config", overrides=list(last.values()))


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Hydra's overrides as it reads them. Its own exception names the one that it cannot read."""
    return OverridesParser.create().parse_overrides(overrides)


def compose(overrides: list[str]) -> Config:
    """Compose `conf/config.yaml` with Hydra overrides, from anywhere, and check it."""
    return resolve(compose_raw(overrides))


def register() -> None:
    """Put the schema where `conf/config.yaml` finds it (`defaults: [schema, ...]`)."""
    ConfigStore.instance().store(name="schema", node=Config)


register()

"""The configuration's types; values are in `conf/`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from eagle3_train.files import content_fingerprint

SAMPLING = ("temperature", "top_p", "top_k")  # keys of a task

NOT_OF_A_POINT = (  # keys of train that do not define the trained head
    "log_every", "checkpoint_every", "keep_last", "keep_best", "eval_every", "max_hours", "nonfinite", "peak_tflops",
    "micro_batch_tokens", "padding",
)  # fmt: skip


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
    # (FlexAttention, needs a GPU to train), reference (explicit mask, slow), auto (merge where the device has a kernel
    # for it, else flex)
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
    path: str | None = None  # with source=file: JSONL with `turns`, `prompt`, `question` or `messages`
    prompts: int = 32
    new_tokens: int = 64
    max_prompt_tokens: int = 384
    temperature: float = 0.0  # at which the target generates, and is decoded with; 0: greedy
    top_p: float = 1.0  # of sampling: the fewest tokens that hold so much probability
    top_k: int = 0  # of sampling: so many tokens at most; 0: all

    @property
    def prompt_identity(self) -> dict[str, Any]:
        """What decides which prompts it has. Of a file it is the content; None where it is not on this machine."""
        chosen = {key: getattr(self, key) for key in ("source", "prompts", "max_prompt_tokens")}
        return chosen | {"file": content_fingerprint(self.path) if self.path else None}


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
    attempts: int = 5  # of one job, in a row, that get nowhere (no checkpoint, no shard): then it is not requeued


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


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Keys of `now` whose values differ from those of `then`, which was read from JSON: key -> what to say of it."""
    now = json.loads(json.dumps(now))
    return {k: f"{k}={then.get(k)!r}, now {value!r}" for k, value in now.items() if then.get(k) != value}


def is_of_target(key: str) -> bool:
    """Whether a key or config group sets the target, or something of it."""
    return key.partition(".")[0] == "target"


def digest(value: Any, length: int = 8) -> str:
    """Short hex digest of a JSON-able value, the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]

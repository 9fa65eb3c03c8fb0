"""What training, capture and storage of a study take, from shapes alone: the arithmetic behind `dry_run=true`.

Numbers of tokens are those of the corpus once it is prepared; before, as `plan.tokens_per_sequence` says; without it,
every sequence counts as long as it may be, and the estimate is an upper bound. FLOPs count a multiply-add twice, a
backward pass as two forward ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3_train.config import Config, differences
from eagle3_train.files import inside, is_file, read_json
from launch.jobs import training_manifest
from sweeps.heads import head_cost

BYTES = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
INDEX_BYTES = 24  # a sequence in a process that trains: its length, and where it lies
SEQUENCES = "corpus.sequences"
TRAINING_BYTES = 12  # a parameter in a checkpoint: fp32 weight and AdamW's two moments


@dataclass(frozen=True)
class Shape:
    """Dimensions of a target model, which are those of its draft head's layer too."""

    hidden: int
    intermediate: int
    layers: int
    queries: int  # width of all query heads together
    keys: int  # width of all key heads together
    vocab: int
    head_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a config.json as Hugging Face models have it."""
        config = config.get("text_config", config)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        keys = (config.get("num_key_value_heads") or heads) * width
        intermediate, layers = config["intermediate_size"], config["num_hidden_layers"]
        return cls(hidden, intermediate, layers, heads * width, keys, config["vocab_size"], width)

    @property
    def parameters(self) -> int:
        """Of the target, embeddings counted once."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden


@dataclass(frozen=True)
class Data:
    """Of `sequences` sequences. `exact`: counted. `assumed`: which mean length they are taken to have, in words; "":
    none, the greatest bounds them."""

    sequences: int
    tokens: float
    supervised: float
    exact: bool
    assumed: str = ""

    def first(self, sequences: int) -> Data:
        """The first ones, which are a random sample."""
        share = sequences / self.sequences
        return replace(self, sequences=sequences, tokens=self.tokens * share, supervised=self.supervised * share)

    def of(self, point: Config) -> Data:
        """Those that a point trains on."""
        if (wanted := point.data.tokens) is not None:
            return self.first(math.ceil(self.sequences * wanted / self.tokens))
        return self.first(point.data.sequences or 0)

    @property
    def sure(self) -> str:
        """What to say before a number that follows from it."""
        return "" if self.exact else "about " if self.assumed else "at most "


def shape_of(cfg: Config) -> Shape | None:
    """The target's shape: from its config.json, where that is on this machine already, or as `target.shape` says."""
    for folder in (cfg.paths.target, inside(cfg.paths.store, "target"), cfg.target.model):
        if is_file(path := inside(folder, "config.json")):
            return Shape.of(read_json(path))
    given = cfg.target.shape
    if not given or given.get("model", cfg.target.model) != cfg.target.model:
        return None
    try:
        return Shape.of(given)
    except KeyError as e:
        raise ValueError(f"target.shape has no {e}: give the sizes as the model's config.json has them") from e


def data_of(cfg: Config) -> Data:
    """The training corpus: as it was captured or prepared under these settings; or as many sequences as are asked for,
    as long as those that are there, or as `plan` assumes, or of the greatest length; where nothing says how many, as
    many as the point `cfg` needs."""
    longest, mean, share = cfg.corpus.max_length, cfg.plan.tokens_per_sequence, cfg.plan.supervised_share
    assumed = ""
    if mean is not None and mean > longest:
        assumed = f"all of corpus.max_length={longest} tokens, below plan.tokens_per_sequence={mean:g}"
    elif mean is not None:
        assumed = f"plan.tokens_per_sequence={mean:g}"
    for found, changed in _counted(cfg):
        if not changed:
            return found
        if [*changed] == [SEQUENCES]:
            mean, share = found.tokens / found.sequences, found.supervised / found.tokens
            assumed = f"as long as the {found.sequences:,} that are there"
    length = longest if mean is None else min(mean, longest)
    sequences = cfg.corpus.sequences or cfg.data.sequences or math.ceil((cfg.data.tokens or 0) / length)
    tokens = float(sequences * length)
    return Data(sequences, tokens, tokens * share, exact=False, assumed=assumed)


def _counted(cfg: Config) -> Iterator[tuple[Data, dict[str, str]]]:
    """The training rows of the corpus and of the store that are there, and which settings they were made under that are
    others now. First what was captured: a corpus may have been prepared anew since."""
    if is_file(path := inside(cfg.paths.store, "manifest.json")):
        found = read_json(path)
        yield Data(found["rows"], found["tokens"], found["supervised_tokens"], exact=True), captured_otherwise(cfg)
    parts, changed = _prepared(cfg)
    if found := parts.get("train"):
        yield Data(found["sequences"], found["tokens"], found["supervised_tokens"], exact=True), changed


def _prepared(cfg: Config) -> tuple[dict[str, Any], dict[str, str]]:
    """The parts of the corpus that is there (of its report), and which settings it was prepared under that are others
    now; nothing where there is none."""
    path = inside(cfg.paths.corpus, "report.json")
    if not is_file(path):
        return {}, {}
    report = read_json(path)
    then = report.get("identity", {})
    return report["parts"], differences(then, {k: v for k, v in cfg.data_identity.items() if k in then})


def captured_otherwise(cfg: Config) -> dict[str, str]:
    """Settings that the training store which is there was captured under and that are others now: key -> what to say of
    it. One that came without its origin is compared by the capture alone."""
    path = inside(cfg.paths.store, "origin.json")
    then = read_json(path) if is_file(training_manifest(cfg)) and is_file(path) else {}
    return differences(then, cfg.data_identity) if then else {}


def epochs(cfg: Config, data: Data) -> float:
    """Passes over the data of a point."""
    if cfg.train.regime == "epochs":
        return cfg.train.epochs
    return (cfg.train.steps or 0) * cfg.train.batch_tokens / data.tokens


def training_flops(cfg: Config, shape: Shape, data: Data) -> float:
    """Of one point, all its epochs. Rows that later steps lose at the ends of turns are not taken off, so this is
    slightly too much."""
    head = head_cost(cfg.draft, shape, n_inputs(cfg))
    if not head.parameters:
        return 0.0
    # Multiply-adds of a row's attention: half its document in the mean, once for the scores and once for the values.
    seen = data.tokens / data.sequences * shape.queries
    trained = data.tokens * (head.token + head.token_passes * seen) + data.supervised * (head.row + head.passes * seen)
    # A frozen output head passes a gradient on and gets none; the target's own distribution is a forward only.
    frozen = data.supervised * (4 * head.frozen + 2 * cfg.draft.vocab_size * shape.hidden)
    return epochs(cfg, data) * (6 * trained + frozen)


def capture_flops(shape: Shape, tokens: float) -> float:
    return 2.0 * shape.parameters * tokens


def store_bytes(cfg: Config, shape: Shape, data: Data, dtype: str | None = None) -> float:
    """Hidden states of the training store: the head's inputs and the final state. `dtype`: in place of the store's."""
    return data.tokens * token_bytes(cfg, shape, dtype)


def beside_bytes(cfg: Config, shape: Shape, data: Data) -> dict[str, float]:
    """What a store holds beside the training states, by what it is: bounds, since transcripts may end before their
    limit, and the dtype that the target computes in is known on its device only. Ends of the target: embeddings, head,
    last layer."""
    parts, changed = _prepared(cfg)
    counted = {} if changed else parts
    mean = data.tokens / data.sequences
    validation = counted.get("validation", {}).get("tokens", cfg.corpus.validation_sequences * mean)
    transcripts = 0
    for task in cfg.eval.tasks:
        part = counted.get(f"tasks/{task.name}", {})
        prompts = part.get("sequences", task.prompts)
        transcripts += part.get("tokens", prompts * task.max_prompt_tokens) + prompts * task.new_tokens
    compute = "fp32" if cfg.capture.compute_dtype == "auto" else cfg.capture.compute_dtype
    layer = 2 * shape.hidden * (shape.queries + shape.keys) + 3 * shape.hidden * shape.intermediate
    return {
        "validation": validation * token_bytes(cfg, shape),
        "transcripts": float(transcripts * token_bytes(cfg, shape, cfg.store.transcript_dtype)),
        "the target's ends": float(BYTES[compute] * (2 * shape.vocab * shape.hidden + layer)),
    }


def token_bytes(cfg: Config, shape: Shape, dtype: str | None = None) -> int:
    """Hidden states of one token in the store."""
    dtype = dtype or cfg.store.dtype
    scale = 4 if dtype == "fp8" else 0  # of a layer's state
    return (n_inputs(cfg) + 1) * (shape.hidden * BYTES[dtype] + scale)


def captured_tokens(points: Sequence[Config], data: Data, later_epochs: str) -> float:
    """Tokens that a rolling store's workers capture for all points: those that train at the same time share their
    passes, each as long as the longest of them needs; fp8 copies take the place of all but the first."""
    reading = [cfg for cfg in points if cfg.train.regime != "none"]
    if not reading:
        return 0.0
    at_once = reading[0].launch.rolling.points_at_once
    total = 0.0
    for start in range(0, len(reading), at_once):
        group = reading[start : start + at_once]
        needs = [(part.tokens, epochs(cfg, part)) for cfg in group for part in [data.of(cfg)]]
        passes = math.ceil(max(n for _, n in needs)) if later_epochs == "recapture" else 1
        total += sum(max(tokens * min(1.0, max(0.0, n - i)) for tokens, n in needs) for i in range(passes))
    return total


def exchanged_bytes(cfg: Config, shape: Shape) -> float:
    """What a node sends to others in an optimizer step, and receives: gradients in fp32, summed around a ring; sharded
    weights are gathered besides, once forward and once backward, in place of one of the ring's two rounds."""
    nodes = cfg.launch.nodes
    rounds = 3 if cfg.engine.kind == "fsdp2" or _zero_stage(cfg) == 3 else 2
    return rounds * 4 * head_cost(cfg.draft, shape, n_inputs(cfg)).parameters * (nodes - 1) / nodes


def checkpoint_bytes(points: Iterable[Config], shape: Shape) -> float:
    """The last ones of every point, and the best."""
    kept = [(cfg, cfg.train.keep_last + (cfg.train.keep_best and cfg.train.eval_every is not None)) for cfg in points]
    return sum(head_cost(cfg.draft, shape, n_inputs(cfg)).parameters * TRAINING_BYTES * n for cfg, n in kept)


def optimizer_steps(cfg: Config, data: Data) -> int:
    """Of a point."""
    if cfg.train.regime != "epochs":
        return cfg.train.steps or 0
    return math.ceil(cfg.train.epochs * data.tokens / cfg.train.batch_tokens)


def training_bytes(cfg: Config, shape: Shape) -> dict[str, float]:
    """Tensors of one process while it trains, by what they are. Activations are an estimate: what the backward pass
    needs of each token and step of a forward pass, in the compute dtype."""
    processes = cfg.launch.nodes * cfg.launch.nproc_per_node
    tokens = cfg.train.micro_batch_tokens or cfg.train.batch_tokens / processes
    width = 4 if cfg.train.compute_dtype == "fp32" else 2
    per_step = 8 * shape.hidden + 2 * (shape.queries + shape.keys) + 4 * shape.intermediate
    inputs = (n_inputs(cfg) + 1) * shape.hidden + cfg.draft.vocab_size  # states of the target, and its distribution
    return {
        "weights, gradients and optimizer state": head_cost(cfg.draft, shape, n_inputs(cfg)).parameters
        * _bytes_of_a_parameter(cfg, processes),
        "the target's embeddings and head": 4.0 * (shape.vocab + cfg.draft.vocab_size) * shape.hidden,
        "activations": float(width * tokens * (inputs + cfg.draft.steps * per_step)),
    }


def _bytes_of_a_parameter(cfg: Config, processes: int) -> float:
    """On one process: weight, gradient and AdamW's two moments in fp32, as far as its engine does not shard them."""
    if cfg.engine.kind == "deepspeed":  # which keeps masters besides the weights
        stage = _zero_stage(cfg)
        return 4 / (processes if stage == 3 else 1) + 4 / (processes if stage >= 2 else 1) + 12 / processes
    return 16 / {"fsdp2": processes, "hsdp": cfg.engine.shard_size or 1}.get(cfg.engine.kind, 1)


def _zero_stage(cfg: Config) -> int:
    """Of DeepSpeed; 0 for other engines."""
    return int(cfg.engine.deepspeed.get("zero_optimization", {}).get("stage", 0))


def n_inputs(cfg: Config) -> int:
    """Layers whose states the draft head takes."""
    return len(cfg.capture.layer_ids) if cfg.capture.layer_ids else 3

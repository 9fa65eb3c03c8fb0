"""What a store holds: a sequence, the facts of its capture, and the Parquet columns. Format: docs/store.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from eagle3_train.config import digest

from .codec import DTYPES

SCHEMA_VERSION = 1
CONVENTION = (
    "Layer id k is the residual stream entering decoder layer k (hidden_states[k] in transformers); "
    "id n_layers is the output of the last decoder layer before the final norm."
)
SPEC_KEY, CONTENT_KEY = b"eagle3.spec", b"eagle3.content"  # of a shard's Parquet metadata
HIDDEN, SCALE = "hidden_states", "hidden_scale"
# A Parquet page holds fewer than 2^31 bytes; a row group is one page of the hidden column (see `writer`).
MAX_ROW_BYTES = 2**31 - 2**20
# Not in the fingerprint: none of them changes what a sequence holds.
LAYOUT_FIELDS = ("n_shards", "row_group_mib", "generator")
MAY_DIFFER = ("generator",)  # within a store: a shard that another version of the code wrote is a shard of this capture


@dataclass(frozen=True, eq=False)
class Sequence:
    """One sequence of the store. T tokens; `hidden` follows `StoreSpec.layer_ids`, the final pre-norm state last."""

    sample_id: str
    source: str
    input_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] uint8; 1: a token that the target would generate
    hidden: torch.Tensor  # [T, len(layer_ids), H]
    target_argmax: np.ndarray  # [T] int32, the target's most likely x_{t+1}; -1: not computed
    target_logsumexp: np.ndarray | None = None  # [T] float32, over the full vocabulary

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def n_supervised(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True)
class StoreSpec:
    """What a capture decides before it starts. Every shard carries it, so a shard of another capture is recognised."""

    target: str  # name of the target model
    target_hash: str  # of its weights
    tokenizer_hash: str
    chat_template_hash: str
    layer_ids: tuple[int, ...]  # inputs of the draft head, ascending, then n_layers
    hidden_size: int  # H
    n_layers: int  # decoder layers of the target
    vocab_size: int  # of the target
    dtype: str  # of the stored states: bf16 | fp16 | fp32 | fp8
    compute_dtype: str  # of the target's forward pass
    n_rows: int
    n_shards: int
    generator: str  # version of the code that captured
    logsumexp: bool = False  # whether `target_logsumexp` is written
    row_group_mib: int = 32
    convention: str = CONVENTION
    sampling: dict[str, Any] = field(default_factory=dict)  # of transcripts; empty: the text is the corpus's own
    config: dict[str, Any] = field(default_factory=dict)  # whatever else defines the rows, e.g. the corpus

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(int(i) for i in self.layer_ids))
        ids = self.layer_ids
        if len(ids) < 2 or ids[-1] != self.n_layers or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(
                f"layer_ids={list(ids)}: at least one input layer, ascending, each between 0 and {self.n_layers - 1}, "
                f"then n_layers={self.n_layers} for the final state"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"store.dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.n_rows < 1:
            raise ValueError("a store without rows: the corpus is empty, see its report")
        if not 1 <= self.n_shards <= self.n_rows:
            raise ValueError(f"capture.shards={self.n_shards} for {self.n_rows} rows: choose 1 to {self.n_rows}")
        if not 1 <= self.row_group_mib <= 1024:
            raise ValueError(f"store.row_group_mib={self.row_group_mib}: choose 1 to 1024, 32 to 128 is usual")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the hidden column."""
        return len(self.layer_ids) * self.hidden_size * DTYPES[self.dtype].itemsize

    def estimate_bytes(self, n_tokens: int) -> int:
        """Bytes on disk of `n_tokens` tokens (the small columns included, the index and the footers not)."""
        scales = 4 * len(self.layer_ids) if self.dtype == "fp8" else 0
        return n_tokens * (self.token_bytes + scales + 4 + 1 + 4 + 4 * self.logsumexp)

    @property
    def identity(self) -> dict[str, Any]:
        """What the stored numbers depend on; the number of shards, for one, is not among it."""
        return {k: v for k, v in self.to_json().items() if k not in LAYOUT_FIELDS}

    def to_json(self) -> dict[str, Any]:
        """JSON values only: what `from_json(json.loads(...))` gives is equal."""
        return json.loads(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}))

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str) -> StoreSpec:
        """`where` names the file in an error."""
        version = value.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{where} has store schema version {version}, this code reads version {SCHEMA_VERSION}: "
                "use the version of eagle3-train that wrote it, or capture again"
            )
        return cls(**typed_fields(cls, value))

    def differences(self, other: StoreSpec, ignore: tuple[str, ...] = ()) -> list[str]:
        """Fields that differ, in words: `dtype: 'bf16', not 'fp32'` (self's value, not the other's)."""
        mine, theirs = self.to_json(), other.to_json()
        return [f"{k}: {mine[k]!r}, not {theirs[k]!r}" for k in mine if mine[k] != theirs[k] and k not in ignore]

    def fingerprint(self, rows_digest: str) -> str:
        """Of a store with this spec and these rows (sample ids and lengths)."""
        return digest({"spec": self.identity, "rows": rows_digest}, 16)


# Of a dataclass's annotations, as JSON has them.
JSON_KINDS: dict[Any, type] = {"str": str, "int": int, "bool": bool, "dict[str, Any]": dict, "tuple[int, ...]": list}


def typed_fields(cls: Any, value: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for the dataclass `cls` of JSON `value`. KeyError or TypeError where one is missing or is of
    another type."""
    for f in fields(cls):
        if not isinstance(value[f.name], JSON_KINDS[f.type]):
            raise TypeError(f"{f.name} is {value[f.name]!r}")
    return {f.name: value[f.name] for f in fields(cls)}


def arrow_schema(spec: StoreSpec) -> pa.Schema:
    """Parquet columns. Nothing may be null, so the hidden column's page is the plain values and nothing else."""

    def tokens(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, pa.list_(pa.field("element", kind, nullable=False)), nullable=False)

    columns = [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int32(), nullable=False),
        pa.field("n_supervised", pa.int32(), nullable=False),
        tokens("input_ids", pa.int32()),
        tokens("loss_mask", pa.uint8()),
        tokens("target_argmax", pa.int32()),
    ]
    if spec.logsumexp:
        columns.append(tokens("target_logsumexp", pa.float32()))
    if spec.dtype == "fp8":
        columns.append(tokens(SCALE, pa.float32()))  # T * layers of them
    # Last, so that the small columns of a row group lie together: one request fetches them from an object store.
    columns.append(pa.field(HIDDEN, pa.large_binary(), nullable=False))
    return pa.schema(columns, metadata={SPEC_KEY: json.dumps(spec.to_json(), sort_keys=True)})

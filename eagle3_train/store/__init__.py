"""The hidden-state store: sharded Parquet that is verified, elastic and read row by row. Format: docs/store.md."""

from eagle3_train.files import inside

from .counts import token_counts
from .index import Index
from .loader import Loader
from .manifest import Manifest, ShardEntry, finalize
from .origin import expect_origin, write_origin
from .plan import BatchPlan, prefix_for_tokens
from .reader import Store, concatenate
from .schema import CONVENTION, Sequence, StoreSpec
from .target import TargetPart, read_target_part, write_target_part
from .transform import merge, prune
from .verify import Problem
from .writer import ShardWriter, missing_shards, shard_name, shard_rows

__all__ = [
    "CONVENTION",
    "BatchPlan",
    "Index",
    "Loader",
    "Manifest",
    "Problem",
    "Sequence",
    "ShardEntry",
    "ShardWriter",
    "Store",
    "StoreSpec",
    "TargetPart",
    "concatenate",
    "expect_origin",
    "finalize",
    "inside",
    "merge",
    "missing_shards",
    "prefix_for_tokens",
    "prune",
    "read_target_part",
    "shard_name",
    "shard_rows",
    "token_counts",
    "write_origin",
    "write_target_part",
]

"""The hidden-state store: sharded Parquet that is verified, elastic and read row by row. Format: docs/store.md."""

from eagle3_train.files import inside

from .claim import claim, expect_claim
from .counts import token_counts
from .index import Index
from .loader import Loader
from .manifest import Manifest, ShardEntry, finalize
from .origin import expect_origin, read_origin, write_origin
from .plan import BatchPlan, plan_of, prefix_for_tokens, rows_of
from .reader import Store, concatenate
from .rolling import Rolling, RollingStore, is_rolling, spec_at, write_rolling
from .schema import CONVENTION, MAY_DIFFER, Sequence, StoreSpec
from .stream import Course, Stream
from .target import TargetPart, holds_target_part, read_target_part, write_target_part
from .transform import merge, prune
from .verify import Problem
from .writer import ShardWriter, check_spec, missing_shards, shard_name, shard_number, shard_rows

__all__ = [
    "CONVENTION",
    "MAY_DIFFER",
    "BatchPlan",
    "Course",
    "Index",
    "Loader",
    "Manifest",
    "Problem",
    "Rolling",
    "RollingStore",
    "Sequence",
    "ShardEntry",
    "ShardWriter",
    "Store",
    "StoreSpec",
    "Stream",
    "TargetPart",
    "check_spec",
    "claim",
    "concatenate",
    "expect_claim",
    "expect_origin",
    "finalize",
    "holds_target_part",
    "inside",
    "is_rolling",
    "merge",
    "missing_shards",
    "plan_of",
    "prefix_for_tokens",
    "prune",
    "read_origin",
    "read_target_part",
    "rows_of",
    "shard_name",
    "shard_number",
    "shard_rows",
    "spec_at",
    "token_counts",
    "write_origin",
    "write_rolling",
    "write_target_part",
]

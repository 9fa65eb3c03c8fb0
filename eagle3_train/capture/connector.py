"""vLLM's side of the capture: a KV connector that hands the states of finished requests to the writer of the store.

vLLM's method `extract_hidden_states` keeps the asked layers of every token in a paged cache beside the keys and values.
When a request ends, the scheduler's half of this connector names its blocks; the worker's half gathers them, on CUDA by
a side stream into pinned memory, and queues them for the socket of `link.py`. With tensor parallelism every rank has
all states, and rank 0 sends. A request carries its key in `kv_transfer_params`; requests without one are left alone.

Written against the connector interface of vLLM 0.32. On CUDA this has not been run yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from .link import Sender

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

KEY, OUTPUTS = "eagle3_key", "include_output_tokens"  # in a request's `kv_transfer_params`


@dataclass(frozen=True)
class Ended:
    """A request whose states are complete: the first `n_tokens` slots of its blocks."""

    request_id: str
    key: int
    n_tokens: int
    blocks: list[int]


@dataclass
class EndedRequests(KVConnectorMetadata):
    """What the scheduler tells the workers in one step."""

    requests: list[Ended] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """`extra_config`: `address`, the socket of a `link.Receiver`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group = _states_group(kv_cache_config)
        self._address: str = self._kv_transfer_config.get_from_extra_config("address", None)
        self._ended: list[Ended] = []  # the scheduler's
        self._cache = torch.empty(0)  # the worker's, [blocks, layers, block size, H]
        self._sender: Sender | None = None  # on rank 0
        self._stream: torch.cuda.Stream | None = None
        self._copies: dict[str, torch.cuda.Event | None] = {}  # request -> its copy to the host; None: it is done

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # it loads nothing

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._group >= len(block_ids):  # ended before it was ever scheduled
            return False, None
        return self.request_finished(request, block_ids[self._group])

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """True: the blocks are ours until `get_finished` returns them."""
        asked = request.kv_transfer_params or {}
        if KEY not in asked:
            return False, None
        # The last generated token was never an input, so that it has no state.
        n_tokens = len(request.all_token_ids) - 1 if asked.get(OUTPUTS) else len(request.prompt_token_ids or ())
        self._ended.append(Ended(request.request_id, asked[KEY], n_tokens, list(block_ids)))
        return True, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EndedRequests:
        ended, self._ended = self._ended, []
        return EndedRequests(ended)

    def get_finished_count(self) -> int:
        return 1  # rank 0 alone reports

    # The workers' half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        (name,) = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self._cache = kv_caches[name]
        if get_tensor_model_parallel_rank() == 0:
            self._sender = Sender(self._address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # the cache is read once a request, when it is complete

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Send what ended; returns the requests whose blocks are free again."""
        if self._sender is None:
            return None, None
        if self.has_connector_metadata():
            metadata = self._get_connector_metadata()
            assert isinstance(metadata, EndedRequests)
            for ended in metadata.requests:
                states, self._copies[ended.request_id] = self._to_host(ended)
                self._sender.send(ended.key, states, self._copies[ended.request_id])
        free = {name for name, copy in self._copies.items() if copy is None or copy.query()}
        for name in free:
            del self._copies[name]
        return free or None, None

    def _to_host(self, ended: Ended) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """States [T, layers, H] in host memory, and the event after which they are there."""
        size = self._cache.shape[2]
        slots = torch.arange(ended.n_tokens)
        blocks, offsets = torch.tensor(ended.blocks)[slots // size], slots % size
        if self._cache.device.type == "cpu":
            return self._cache[blocks, :, offsets], None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # the cache is written there
        with torch.cuda.stream(self._stream):
            at = [i.pin_memory().to(self._cache.device, non_blocking=True) for i in (blocks, offsets)]
            states = self._cache[at[0], :, at[1]]
            host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
            host.copy_(states, non_blocking=True)
            return host, self._stream.record_event()

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        from vllm.platforms import current_platform

        # A token's layers lie together: gathering a request reads few large pieces. CPU attention has one of its own.
        return None if current_platform.is_cpu() else "LBNHC"


def _states_group(kv_cache_config: KVCacheConfig | None) -> int:
    """Number of the cache group that holds the states."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
    found = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(found) == 1 or len(groups) <= 1:
        return found[0] if found else 0
    raise ValueError(
        f"vLLM keeps the states in {len(found)} of {len(groups)} cache groups: this target is not supported"
    )

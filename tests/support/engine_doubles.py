"""What memserve.integrations takes from the engines that load it: their own where they are installed, else doubles.

A double has the names and signatures of LMCache 0.5.6, SGLang 0.5.23 and vLLM 0.33, and as much behind them as the
contract says. Within ``engines()`` they stand where the engines' modules would be.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, NamedTuple


@contextmanager
def engines() -> Iterator[None]:
    """While what loads them is imported."""
    doubled = []
    for engine, modules in (("lmcache", _LMCACHE), ("sglang", _SGLANG), ("vllm", _VLLM)):
        if importlib.util.find_spec(engine) is not None:
            continue
        for name, members in modules.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                parent = ".".join(parts[:end])
                if parent not in sys.modules:
                    sys.modules[parent] = types.ModuleType(parent)
                    doubled.append(parent)
            vars(sys.modules[name]).update({member.__name__: member for member in members})
    try:
        yield
    finally:
        for name in doubled:  # other tests ask whether the engines are installed
            del sys.modules[name]


# -- LMCache


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, at: int) -> None:
        self._bits[at] = True

    def test(self, at: int) -> bool:
        return self._bits[at]


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return int(self) >= 0


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._listeners: list[Any] = []

    def register_listener(self, listener: Any) -> None:
        self._listeners.append(listener)

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_stored(keys, sizes)

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_accessed(keys)

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        for listener in self._listeners:
            listener.on_l2_keys_deleted(keys)


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


class EventNotifier:
    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


def create_event_notifier() -> EventNotifier:
    return EventNotifier()


_LMCACHE = {
    "lmcache.lmcache_native": [Bitmap],
    "lmcache.v1.distributed.api": [ObjectKey],
    "lmcache.v1.distributed.internal_api": [L2StoreResult],
    "lmcache.v1.distributed.l2_adapters.base": [L2AdapterInterface],
    "lmcache.v1.platform": [create_event_notifier],
}

# -- SGLang


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


class PoolName(StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools[host_pool_name] = host_pool


class UnifiedCacheLinker:
    pass


class LayerWiseLoadCounter:
    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.producer_index = self.consumer_index = -1
        self.futures: dict[int, list[Future[None]]] = {}

    def update_producer(self) -> int:
        self.producer_index += 1
        self.futures[self.producer_index] = [Future() for _ in range(self.num_layers)]
        return self.producer_index

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def complete(self, index: int, layer: int) -> None:
        self.futures[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.futures.get(index, ()):
            if not future.done():
                future.set_exception(error)

    def wait_until(self, threshold: int) -> None:
        if self.consumer_index in self.futures:
            self.futures[self.consumer_index][threshold].exception()

    def finish(self, index: int) -> bool:
        return all(future.exception() is None for future in self.futures.pop(index, ()))

    def reset(self) -> None:
        self.producer_index = self.consumer_index = -1
        self.futures.clear()


class DevicePoolEntry:
    """Of pages that are contiguous in each buffer."""

    packed = True

    def __init__(
        self, *, name: Any, indices_from_pool: Any, device_pool: Any, components: Any, layer_mapping: Any,
        page_size: int, rows_are_pages: bool,
    ) -> None:  # fmt: skip
        self.name, self.indices_from_pool, self.components = name, indices_from_pool, components
        self.layer_mapping, self.page_size = layer_mapping, page_size
        self._row_span = 1 if rows_are_pages else page_size
        self.buffer_meta = [
            [
                (one.data_ptr(), one.stride(0) * one.element_size(), one.nbytes // one.shape[0] * self._row_span)
                for one in component
            ]
            for component in components
        ]

    def get_hybrid_pool_buffer(self) -> list[Any]:
        return [one for component in self.components for one in component]

    def prepare_locations(self, indices: Any) -> list[int]:
        return [at // self.page_size if self._row_span == 1 else at for at in indices.tolist()[:: self.page_size]]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        found = [
            (base + row * stride, nbytes)
            for row in self.prepare_locations(indices)
            for component in self.buffer_meta
            for base, stride, nbytes in component
        ]
        return [at for at, _ in found], [nbytes for _, nbytes in found]

    def get_prepared_layer_range_meta(self, locations: list[int], layer: int) -> Any:
        mapped = self.layer_mapping.get(layer)
        if mapped is None:
            return None
        items, first = [], 0
        for component in self.buffer_meta:
            starts = [first + sum(nbytes for _, _, nbytes in component[:at]) for at in range(len(component))]
            items += [(*component[at], starts[at]) for at in ([mapped] if isinstance(mapped, int) else mapped)]
            first += sum(nbytes for _, _, nbytes in component)
        return (
            [[base + row * stride for base, stride, _, _ in items] for row in locations],
            [[nbytes for _, _, nbytes, _ in items] for _ in locations],
            [[start for _, _, _, start in items] for _ in locations],
        )


class DevicePoolGroup:
    def __init__(self, entries: Any, num_layers: int, page_size: int, *, rank_replicated: bool = False) -> None:
        self.entry_map = {entry.name: entry for entry in entries}
        self.num_layers, self.page_size, self.rank_replicated = num_layers, page_size, rank_replicated

    def resolve_transfers(
        self, transfers: Any, *, allow_partial: bool = False, allow_missing_kv: bool = False
    ) -> list[PoolTransfer]:
        by_name = {one.name: one for one in transfers}
        sources = {name: entry.indices_from_pool for name, entry in self.entry_map.items()}
        has_kv = PoolName.KV in by_name and by_name[PoolName.KV].keys
        if not any(one.keys for one in transfers) or not (allow_missing_kv or has_kv):
            return []
        if not allow_partial and not set(sources.values()) <= set(by_name):
            return []
        found = []
        for name, source in sources.items():
            one = by_name.get(source)
            if one is not None and one.keys:
                policy = PoolHitPolicy.ALL_PAGES if source == PoolName.KV else one.hit_policy
                found.append(replace(one, name=name, host_indices=one.device_indices, hit_policy=policy))
        return found


def resolve_hybrid_device_pool_group(**given: Any) -> DevicePoolGroup:
    raise AssertionError("a test has its own pools")


_SGLANG = {
    "sglang.srt.mem_cache.hicache_storage": [
        HiCacheStorage, HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult,
    ],
    "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler": [
        DevicePoolEntry, DevicePoolGroup, resolve_hybrid_device_pool_group,
    ],
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker": [LayerWiseLoadCounter, UnifiedCacheLinker],
}  # fmt: skip

# -- vLLM


class LookupResult(Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class ReqContext:
    req_id: str


class ScheduleEndContext(NamedTuple):
    new_req_ids: tuple[str, ...]
    preempted_req_ids: tuple[str, ...]


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, detector: Any = None) -> None:
        self._block_size_bytes = primary_kv_view.strides[0]

    @property
    def block_size_bytes(self) -> int:
        return self._block_size_bytes


class FileMapper:
    """Only what says what may share."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def from_offloading_spec(
        cls, root_dir: str, offloading_spec: Any, blocks_per_file: int = 1, parallel_agnostic: bool = False
    ) -> FileMapper:
        told = json.loads(json.dumps(offloading_spec.config, default=vars))
        return cls({"blocks_per_file": blocks_per_file, **told})

    def get_run_config(self) -> dict[str, Any]:
        return dict(self._fields)


class AsyncLookupManager:
    """Answers at the end of a step what was asked in it."""

    def __init__(self, tier_type: str) -> None:
        self._asked: list[tuple[bytes, ReqContext]] = []
        self._known: dict[bytes, bool] = {}
        self._of: dict[str, set[bytes]] = {}

    def lookup(self, key: bytes, req_context: ReqContext) -> bool | None:
        if key not in self._known:
            self._asked.append((key, req_context))
        self._of.setdefault(req_context.req_id, set()).add(key)
        return self._known.get(key)

    def flush(self) -> None:
        asked, self._asked = self._asked, []
        if asked:
            keys = [key for key, _ in asked]
            self._known.update(zip(keys, self.batch_lookup(keys, asked[0][1]), strict=True))

    def mark_miss(self, keys: Any) -> None:
        self._known.update({key: False for key in keys if key in self._known})

    def cleanup(self, req_id: str) -> None:
        for key in self._of.pop(req_id, ()):
            self._known.pop(key, None)

    def shutdown(self) -> None:
        pass


_VLLM = {
    "vllm.v1.kv_offload.base": [
        Locality, LookupResult, Medium, ReqContext, RequestOffloadingContext, ScheduleEndContext,
    ],
    "vllm.v1.kv_offload.file_mapper": [FileMapper],
    "vllm.v1.kv_offload.tiering.async_lookup": [AsyncLookupManager],
    "vllm.v1.kv_offload.tiering.base": [JobResult, SecondaryTierManager, TransferJob],
}  # fmt: skip

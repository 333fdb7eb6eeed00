"""MemserveConnector: vLLM's interface in front of the scheduler's and the worker's side. Loaded by vLLM."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from memserve.errors import UserError
from memserve.integrations.pool import PoolOptions
from memserve.integrations.vllm.block_pool import BlockPool
from memserve.integrations.vllm.lookups import Lookups, RankNames
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.names import prefix_of
from memserve.integrations.vllm.orders import Orders
from memserve.integrations.vllm.scheduler_side import SchedulerSide
from memserve.integrations.vllm.worker_side import WorkerSide
from memserve.units import NS_PER_S

log = logging.getLogger("vllm.memserve")

_KEPT_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


@dataclass
class MemserveMetadata(KVConnectorMetadata):
    """Of one step."""

    orders: Orders


@dataclass
class MemserveHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler when its memory is known."""

    names: RankNames


class MemserveConnector(KVConnectorBase_V1, SupportsHMA):
    """KV of vLLM's in a store of memserve. For a model or device that it cannot keep it warns once and does nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises :class:`memserve.errors.UserError` for options that cannot be, and when the store refuses this
        client."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            hint = '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
            raise UserError("a block that the store has lost would end its request", hint=hint)
        self._options = PoolOptions.of(transfer.kv_connector_extra_config)
        self._why_not = _why_not(vllm_config, kv_cache_config)
        self._pool: BlockPool | None = None
        self._lookups: Lookups | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if self._why_not:
            log.warning("memserve keeps no KV here: %s", self._why_not)
            return
        self._pool = BlockPool(self._options)
        if role == KVConnectorRole.SCHEDULER:
            group = kv_cache_config.kv_cache_groups[0].kv_cache_spec
            self._lookups = Lookups(self._pool)
            wait_ns = int(self._options.timeout_s * NS_PER_S)
            every = group.block_size // _hash_tokens(vllm_config, kv_cache_config)
            self._scheduler = SchedulerSide(
                self._lookups,
                group.block_size,
                every,
                wait_ns,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's memory is known."""
        if self._pool is None:
            return
        try:
            memory = HostMemory(kv_caches, self._kv_cache_config.num_blocks)
        except UserError as error:
            log.warning("memserve keeps no KV here: %s", error)
            return
        backends = _backends(self._vllm_config, kv_caches)
        given = self._options.namespace
        prefix = prefix_of(self._vllm_config, given, backends, vllm.__version__, memory.layout)
        self._worker = WorkerSide(self._pool, memory, prefix)

    def get_handshake_metadata(self) -> MemserveHandshake | None:
        """For the scheduler; None: this worker keeps nothing."""
        return MemserveHandshake(self._worker.names) if self._worker is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads run beside the forward, into blocks that no request of the forward uses."""
        if self._worker is not None:
            self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request runs before all of its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved with all of their layers, at the end of the step."""

    def wait_for_save(self) -> None:
        """Copy the step's full blocks."""
        if self._worker is not None:
            self._worker.save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        return None, (self._worker.take_received() or None) if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded: vLLM computes them."""
        return self._worker.take_failed() if self._worker is not None else set()

    def _orders(self) -> Orders:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, MemserveMetadata) else Orders()

    # -- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What the workers keep; by rank."""
        self._set_ranks([metadata[rank] for rank in sorted(metadata)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the workers keep; by pipeline stage and rank."""
        self._set_ranks([metadata[rank] for rank in sorted(metadata)])

    def _set_ranks(self, told: list[Any]) -> None:
        ranks = [one.names for one in told if isinstance(one, MemserveHandshake)]
        if self._lookups is not None and len(ranks) == self._vllm_config.parallel_config.world_size:
            self._lookups.set_ranks(ranks)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that are held for the request, beyond those that vLLM has."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens, time.monotonic_ns())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> MemserveMetadata:
        """The step's loads and saves."""
        if self._scheduler is None:
            return MemserveMetadata(Orders())
        return MemserveMetadata(self._scheduler.step(scheduler_output, time.monotonic_ns()))

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads are over in all workers."""
        if self._scheduler is not None:
            failed = getattr(connector_output, "invalid_block_ids", None) or set()
            self._scheduler.received(connector_output.finished_recving or (), failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """No copy uses the request's blocks: vLLM frees them. Of a prompt that was computed for another engine, what
        that one is to be told."""
        if self._scheduler is None:
            return False, None
        params = getattr(request, "kv_transfer_params", None) or {}
        kept_tokens = self._scheduler.kept_tokens(request) if params.get("do_remote_decode") else 0
        self._scheduler.finished(request.request_id)
        if not kept_tokens:
            return False, None
        return False, {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": kept_tokens}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Forget what is kept, as after a change of weights. False: the store was away."""
        if self._scheduler is None or self._lookups is None:
            return True
        self._scheduler.forget_offers()
        return self._lookups.forget_everything()

    def shutdown(self) -> None:
        """Finish what is under way, by its deadlines."""
        if self._worker is not None:
            self._worker.close()
        elif self._lookups is not None:
            self._lookups.close()
        elif self._pool is not None:
            self._pool.close()


def _why_not(config: Any, caches: Any) -> str:
    """Why this engine's KV is not kept. Empty: it is."""
    groups = caches.kv_cache_groups if caches is not None else []
    if len(groups) != 1:
        return f"the model has {len(groups)} groups of KV, and one is understood"
    kind = type(groups[0].kv_cache_spec).__name__
    if kind not in _KEPT_SPECS:
        return f"KV of {kind} is not understood"
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
        return "decode context parallelism spreads a block over workers"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off, so that blocks have no hashes (--enable-prefix-caching)"
    if groups[0].kv_cache_spec.block_size % _hash_tokens(config, caches):
        return "blocks do not end where hashes do"
    return ""


def _hash_tokens(config: Any, caches: Any) -> int:
    """Tokens of one of vLLM's block hashes."""
    found = getattr(caches, "hash_block_size", None) or getattr(config.cache_config, "hash_block_size", None)
    return int(found or caches.kv_cache_groups[0].kv_cache_spec.block_size)


def _backends(config: Any, layers: dict[str, Any]) -> tuple[str, ...]:
    """Names of the attention backends that these layers use."""
    context = config.compilation_config.static_forward_context
    found = {getattr(context.get(name), "attn_backend", None) for name in layers}
    return tuple(sorted(backend.get_name() for backend in found if backend is not None))

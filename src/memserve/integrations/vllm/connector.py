"""MemserveConnector: vLLM's interface in front of the scheduler's and the worker's side. Loaded by vLLM."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from memserve.base.errors import UserError
from memserve.base.units import NS_PER_S
from memserve.integrations.block_cache import BlockCache
from memserve.integrations.store_cache import PoolOptions
from memserve.integrations.vllm.lookups import GroupOfKv, Lookups, RankNames
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.scheduler import EngineBlocks, Orders, SchedulerSide
from memserve.integrations.vllm.shared_kv import (
    Identities,
    KvNames,
    KvPool,
    Sharing,
    check_layout,
    hash_tokens_of,
    is_plain,
    model_of,
    prefix_of,
    tails_of,
    why_not_kept,
)
from memserve.integrations.vllm.worker import HostMover, Mover, WorkerSide
from memserve.kv.identity import identity_key
from memserve.protocol.store import KvModel
from memserve.store.client.arguments import secret_in

log = logging.getLogger("vllm.memserve")

_RESULTS = getattr(base, "KVConnectorTransferResults", None)
"""How vLLM is told of requests whose loads failed. None: this version has no word for it."""
_NOT_SHARED = 'leave "share_with_memserve" out'


@dataclass
class MemserveMetadata(KVConnectorMetadata):
    """Of one step."""

    orders: tuple[Orders, ...]
    """Of each part."""


@dataclass
class MemserveHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler when its memory is known."""

    names: tuple[tuple[RankNames, ...], ...]
    """Of each part, its groups of KV."""


@dataclass
class _Part:
    """Blocks under one kind of names: vLLM's own, or those of memserve's instances. One of its sides is here."""

    pool: BlockCache
    lookups: Lookups | None = None
    scheduler: SchedulerSide | None = None
    identities: Identities | None = None
    worker: WorkerSide | None = None
    names: tuple[RankNames, ...] = ()
    """Of its groups of KV."""


class MemserveConnector(KVConnectorBase_V1, SupportsHMA):
    """KV of vLLM's in a store of memserve. For a model or device that it cannot keep it warns once and does nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises :class:`memserve.base.errors.UserError` for options that cannot be, and when the store refuses this
        client."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            hint = '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
            raise UserError("a block that the store has lost would end its request", hint=hint)
        self._sharing = Sharing.from_config(transfer.kv_connector_extra_config)
        self._options = PoolOptions.from_mapping(self._sharing.other_options)
        self._model: KvModel | None = None
        self._parts: list[_Part] = []
        why_not = why_not_kept(vllm_config, kv_cache_config, tells_requests=_RESULTS is not None)
        if why_not and self._sharing.is_on:
            raise UserError(f"no KV to share with memserve: {why_not}", hint='leave "share_with_memserve" out')
        if why_not:
            log.warning("memserve keeps no KV here: %s", why_not)
            return
        self._parts.append(_Part(BlockCache(self._options)))
        if self._sharing.is_on:
            self._model = model_of(vllm_config, kv_cache_config)
            self._parts.append(_Part(KvPool(self._options, self._model)))
        self._tails = tails_of(kv_cache_config.kv_cache_groups)
        if role == KVConnectorRole.SCHEDULER:
            for part in self._parts:
                self._open_scheduler_side(part, self._model if isinstance(part.pool, KvPool) else None)

    def _open_scheduler_side(self, part: _Part, model: KvModel | None) -> None:
        """Give ``part`` its scheduler's side. ``model``: its blocks are those of instances with this model."""
        config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        tokens = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if model is not None:
            key = identity_key(secret_in(self._options.secret_file).initial_value)
            part.identities = Identities(self._sharing.tenant, model, key)
        part.lookups = Lookups(part.pool, [GroupOfKv(tail) for tail in self._tails])
        blocks = EngineBlocks(
            tokens,
            tokens // hash_tokens_of(config, self._kv_cache_config),
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
        )
        hashes = part.identities.identities_of if part.identities is not None else None
        part.scheduler = SchedulerSide(part.lookups, blocks, int(self._options.timeout_s * NS_PER_S), hashes=hashes)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is computed again."""
        return False

    # -- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's memory is known. Raises :class:`UserError` where it is to be shared and cannot be."""
        if not self._parts:
            return
        groups = self._kv_cache_config.kv_cache_groups
        of_groups = [kv_caches]
        if len(groups) > 1:
            of_groups = [{name: kv_caches[name] for name in group.layer_names if name in kv_caches} for group in groups]
        for part in self._parts:
            try:
                part.worker, part.names = self._open_worker_side(part.pool, of_groups)
            except UserError as error:
                if self._model is not None:
                    raise
                log.warning("memserve keeps no KV here: %s", error)

    def _open_worker_side(
        self, pool: BlockCache, of_groups: list[dict[str, Any]]
    ) -> tuple[WorkerSide, tuple[RankNames, ...]]:
        """The worker's side, and how it names the blocks of each group."""
        blocks, user_namespace = self._kv_cache_config.num_blocks, self._options.namespace
        gpu = _gpu_of(of_groups)
        memories = [HostMemory(caches, blocks) for caches in of_groups] if gpu is None else []
        on_device = [] if gpu is None else _device_memories(of_groups, blocks, gpu, int(self._options.staging_bytes))
        names = list[RankNames]()
        for caches, memory in zip(of_groups, on_device or memories, strict=True):
            backends = _backends(self._vllm_config, caches)
            if isinstance(pool, KvPool) and self._model is not None:
                if gpu is not None:
                    raise UserError("memserve's instances lay KV of a GPU out in their own way", hint=_NOT_SHARED)
                check_layout(caches, blocks, self._model.geometry, _packing(self._model, backends))
                names.append(KvNames(b"", memory.layout))
            else:
                prefix = prefix_of(self._vllm_config, user_namespace, backends, vllm.__version__, memory.layout)
                names.append(RankNames(prefix, memory.layout))
        mover: Mover = HostMover(pool, memories, names)
        if gpu is not None:
            from memserve.integrations.vllm.device_mover import DeviceMover

            mover = DeviceMover(pool, on_device, names, by_layer=not _replays_whole(self._vllm_config))
        return WorkerSide(pool, mover, fails_whole=any(tail is not None for tail in self._tails)), tuple(names)

    def get_handshake_metadata(self) -> MemserveHandshake | None:
        """For the scheduler; None: this worker keeps nothing."""
        names = tuple(part.names for part in self._parts if part.worker is not None)
        return MemserveHandshake(names) if names else None

    def _worker_sides(self) -> list[WorkerSide]:
        return [part.worker for part in self._parts if part.worker is not None]

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        for worker, orders in zip(self._worker_sides(), self._step_commands(), strict=False):
            worker.begin_step(orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads run beside the forward, into blocks that no request of the forward uses."""
        for worker, orders in zip(self._worker_sides(), self._step_commands(), strict=False):
            worker.start_loads(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """On a device, copies into this layer for a request that runs for the first time come before its attention. On
        the host no request runs before all of its layers are loaded."""
        for worker in self._worker_sides():
            worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The layer is computed: a device begins to copy the step's full blocks of it."""
        for worker in self._worker_sides():
            worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Copy what no layer has brought. On a device, what vLLM enqueues from now on waits for the copies."""
        for worker in self._worker_sides():
            worker.finish_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        received: set[str] = set().union(*(worker.take_received() for worker in self._worker_sides()))
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose loads are over, and those of them that vLLM computes as a whole."""
        received = self.get_finished(finished_req_ids)[1] or set()
        failed: set[str] = set().union(*(worker.take_failed_requests(received) for worker in self._worker_sides()))
        assert _RESULTS is not None
        return _RESULTS(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded: vLLM computes them."""
        return set().union(*(worker.take_failed() for worker in self._worker_sides()))

    def _step_commands(self) -> tuple[Orders, ...]:
        metadata = self._get_connector_metadata()
        return metadata.orders if isinstance(metadata, MemserveMetadata) else ()

    # -- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What the workers keep; by rank."""
        self._set_ranks([metadata[rank] for rank in sorted(metadata)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the workers keep; by pipeline stage and rank."""
        self._set_ranks([metadata[rank] for rank in sorted(metadata)])

    def _set_ranks(self, handshakes: list[Any]) -> None:
        ranks = [handshake.names for handshake in handshakes if isinstance(handshake, MemserveHandshake)]
        if len(ranks) != self._vllm_config.parallel_config.world_size:
            return
        for index, part in enumerate(self._parts):
            if part.lookups is not None:
                part.lookups.set_ranks([names[index] for names in ranks if index < len(names)])

    def _scheduler_of(self, request: Any) -> SchedulerSide | None:
        """What cares for the request: it is the same one as long as the request lives."""
        if not self._parts:
            return None
        return self._parts[-1 if is_plain(request) else 0].scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that are held for the request, beyond those that vLLM has."""
        scheduler = self._scheduler_of(request)
        if scheduler is None:
            return 0, False
        return scheduler.match_request(request, num_computed_tokens, time.monotonic_ns())

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks."""
        scheduler = self._scheduler_of(request)
        if scheduler is not None:
            scheduler.on_blocks_allocated(request, blocks.get_block_ids(), num_external_tokens)

    def _scheduler_sides(self) -> list[SchedulerSide]:
        return [part.scheduler for part in self._parts if part.scheduler is not None]

    def build_connector_meta(self, scheduler_output: Any) -> MemserveMetadata:
        """The step's loads and saves."""
        now = time.monotonic_ns()
        return MemserveMetadata(
            tuple(scheduler.plan_step(scheduler_output, now) for scheduler in self._scheduler_sides())
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads are over in all workers."""
        failed = getattr(connector_output, "invalid_block_ids", None) or set()
        requests = getattr(connector_output, "failed_recving", None) or ()
        for scheduler in self._scheduler_sides():
            scheduler.on_loads_received(connector_output.finished_recving or (), failed, requests)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """No copy uses the request's blocks: vLLM frees them. Of a prompt that was computed for another engine, what
        that one is to be told."""
        scheduler = self._scheduler_of(request)
        if scheduler is None:
            return False, None
        params = getattr(request, "kv_transfer_params", None) or {}
        kept_tokens = scheduler.stored_tokens(request) if params.get("do_remote_decode") else 0
        for part in self._parts:
            if part.scheduler is not None:
                part.scheduler.on_request_finished(request.request_id)
            if part.identities is not None:
                part.identities.forget_request(request.request_id)
        if not kept_tokens:
            return False, None
        return False, {"do_remote_prefill": True, "do_remote_decode": False, "remote_num_tokens": kept_tokens}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As :meth:`request_finished`."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Forget what is kept, as after a change of weights; of KV that is shared with instances, all. False: the store
        was away."""
        forgotten = True
        for part in self._parts:
            if part.scheduler is not None and part.lookups is not None:
                part.scheduler.forget_offers()
                forgotten = part.lookups.forget_everything() and forgotten
        return forgotten

    def shutdown(self) -> None:
        """Finish what is under way, by its deadlines."""
        for part in self._parts:
            (part.worker or part.lookups or part.pool).close()


def _backends(config: Any, layers: dict[str, Any]) -> tuple[str, ...]:
    """Names of the attention backends that these layers use."""
    context = config.compilation_config.static_forward_context
    backend_classes = {getattr(context.get(name), "attn_backend", None) for name in layers}
    return tuple(sorted(backend.get_name() for backend in backend_classes if backend is not None))


def _packing(model: KvModel, backends: tuple[str, ...]) -> str:
    """vLLM's name for the way in which its CPU backend packs KV. Raises :class:`UserError` for another backend."""
    if backends != ("CPU_ATTN",):
        raise UserError(f"KV of {', '.join(backends)} is not laid out as memserve's", hint="CPU_ATTN is")
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    geometry = model.geometry
    return str(_get_attn_isa(getattr(torch, geometry.dtype), geometry.block_tokens, geometry.head_dim_k))


def _gpu_of(of_groups: list[dict[str, Any]]) -> Any:
    """The device that all KV lies on; None: it is in host memory. Raises :class:`UserError` for KV on several."""
    import torch

    devices = {tensor.device for caches in of_groups for tensor in caches.values()}
    if all(device.type != "cuda" for device in devices):
        return None
    if len(devices) > 1:
        raise UserError("vLLM's KV is spread over several devices", hint="one device for each worker")
    from memserve.model.gpu.streams import Cuda

    return Cuda(torch.device(devices.pop()))


def _device_memories(of_groups: list[dict[str, Any]], blocks: int, gpu: Any, staging_bytes: int) -> list[Any]:
    """Of each group, with an equal share of the pinned memory."""
    from memserve.integrations.vllm.device_memory import DeviceMemory

    return [DeviceMemory(caches, blocks, gpu, staging_bytes // len(of_groups)) for caches in of_groups]


def _replays_whole(config: Any) -> bool:
    """Whether vLLM may replay a whole forward as one graph: its layers then say nothing."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    return mode is None or bool(mode.has_full_cudagraphs())

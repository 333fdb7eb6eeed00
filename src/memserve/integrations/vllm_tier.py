"""A store of memserve as a tier behind vLLM's own offloading: vLLM moves KV between device and CPU, this the rest.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "MemserveTier", "module_path": "memserve.integrations.vllm_tier",
                             "pool": "127.0.0.1:7100", "secret_file": "secret"}]}}

It lives in vLLM's scheduler, which never waits: look-ups are asked in a thread of vLLM's, transfers run in threads of
the tier.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from memserve.integrations.block_cache import CacheJobs
from memserve.integrations.store_cache import EnginePool, PoolOptions, Value, name_in, namespace

_THREADS = 4
_JOBS_MAX = 256
"""Transfers under way; further ones fail at once, and vLLM goes on without them."""


class _Lookups(AsyncLookupManager):
    """Asks the store in a thread of vLLM's, all keys of a step at once."""

    def __init__(self, tier: MemserveTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        return self._tier.pool.exists([self._tier.name_of(key) for key in keys])


class MemserveTier(SecondaryTierManager):
    """Loaded by vLLM. A chunk that is damaged, or not read in time, is one that its request computes."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        """``options``: the other keys of the tier's configuration, fields of :class:`PoolOptions`. Raises
        :class:`memserve.base.errors.UserError` for what cannot be."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        pool_options = PoolOptions.from_mapping(options)
        facts = FileMapper.from_offloading_spec(
            "", offloading_spec, blocks_per_file=offloading_spec.blocks_per_chunk, parallel_agnostic=True
        ).get_run_config()
        layout_facts = {"layout": offloading_spec.config.kv_cache_layout, "bytes": self.block_size_bytes, "vllm": facts}
        self._prefix = namespace("vllm-tier", given=pool_options.namespace, **layout_facts)
        self._memory = np.frombuffer(primary_kv_view.cast("B"), np.uint8)
        self.pool = EnginePool(pool_options)
        self._jobs = CacheJobs(_THREADS, _JOBS_MAX)
        self._done: deque[tuple[Any, list[bool]]] = deque()
        self._lookups = _Lookups(self, tier_type)

    def name_of(self, key: bytes) -> bytes:
        """The name of a chunk: vLLM's hash, which has tokens, salt and LoRA in it, and the group."""
        return name_in(self._prefix, key)

    # -- requests

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        is_hit = self._lookups.lookup(key, req_context)
        if is_hit is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_hit else LookupResult.MISS

    # -- transfers

    def submit_store(self, job_metadata: Any) -> None:
        self._start_transfer(job_metadata, self.pool.put_values)

    def submit_load(self, job_metadata: Any) -> None:
        self._start_transfer(job_metadata, self.pool.get_values)

    def _start_transfer(self, job: Any, move: Any) -> None:
        values = self._chunk_values(job)

        def run() -> None:
            moved = [False] * len(values)
            try:
                moved = move(values)
            finally:
                self._done.append((job, moved))

        if not self._jobs.start(run):
            self._done.append((job, [False] * len(values)))

    def _chunk_values(self, job: Any) -> Sequence[Value]:
        """Raises ``ValueError`` for a chunk outside of vLLM's memory."""
        nbytes, values = self.block_size_bytes, list[Value]()
        first = self._memory.ctypes.data
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            offset = int(chunk) * nbytes
            if not 0 <= offset <= self._memory.nbytes - nbytes:
                raise ValueError(f"chunk {chunk} lies outside of {self._memory.nbytes} bytes")
            values.append(Value(self.name_of(key), [(first + offset, nbytes)]))
        return values

    def get_finished_jobs(self) -> Iterable[Any]:
        finished = []
        while self._done:
            job, moved = self._done.popleft()
            keys = list(job.keys)
            if job.is_promotion and not all(moved):  # else its request would ask for them again and again
                self._lookups.mark_miss([key for key, is_moved in zip(keys, moved, strict=True) if not is_moved])
            right = tuple(key for key, is_moved in zip(keys, moved, strict=True) if is_moved)
            finished.append(
                JobResult(
                    job_id=job.job_id,
                    success=all(moved),
                    successful_keys=right if right and job.is_promotion and not all(moved) else None,
                    transfer_time=time.monotonic() - job.submit_time,
                    transfer_bytes=sum(moved) * self.block_size_bytes,
                )
            )
        return finished

    def drain_jobs(self) -> None:
        self._jobs.wait_until_idle()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._jobs.close()
        self.pool.close()

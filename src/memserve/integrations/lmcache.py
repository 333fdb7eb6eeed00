"""A store of memserve as an L2 adapter of LMCache (MP mode): `--l2-adapter '{"type": "plugin", ...}'`.

    {"type": "plugin", "module_path": "memserve.integrations.lmcache", "class_name": "MemserveL2",
     "adapter_params": {"pool": "127.0.0.1:7100", "secret_file": "secret"}}

LMCache's threads hand tasks over and look at event descriptors; threads of the adapter do the work. LMCache's keys name
model, rank, group and salt, and not how the bytes lie: each value carries shapes, dtypes and format of its object, and
one that is read into another object is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from memserve.base.errors import UserError
from memserve.integrations.block_cache import CacheJobs
from memserve.integrations.store_cache import EnginePool, PoolOptions, Value, name_in, namespace

_THREADS = 4
_TASKS_MAX = 256
"""Tasks under way; further ones end at once without a result: nothing was stored, found or loaded."""
_KINDS_MAX = 4096
"""Models, ranks and groups whose objects' sizes are remembered, for LMCache's accounts of what is deleted."""


class MemserveL2(L2AdapterInterface):
    """Loaded by LMCache. Thread-safe. The store evicts by itself: LMCache is told of no capacity."""

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """``config``: LMCache's ``adapter_params``, the fields of :class:`PoolOptions`. Raises
        :class:`memserve.base.errors.UserError` for what cannot be."""
        super().__init__()
        if not isinstance(config, Mapping):
            raise UserError("adapter_params is no object", hint='{"pool": "HOST:PORT"}', param="adapter_params")
        options = PoolOptions.from_mapping(config)
        self._prefix = namespace("lmcache", given=options.namespace)
        self._pool = EnginePool(options)
        self._jobs = CacheJobs(_THREADS, _TASKS_MAX)
        self._events = {kind: create_event_notifier() for kind in ("store", "lookup", "load")}
        self._results: dict[str, dict[int, Any]] = {kind: {} for kind in self._events}
        self._lock = threading.Lock()
        self._numbers = count()
        self._sizes: dict[tuple[str, int, int], int] = {}

    # -- tasks

    def _start_task(self, kind: str, work: Callable[[], Any], nothing: Callable[[], Any]) -> int:
        """Start ``work``; its result, or ``nothing`` if it could not be done, is told under the number."""
        number = next(self._numbers)

        def run() -> None:
            result = nothing()
            try:
                result = work()
            finally:
                self._set_result(kind, number, result)

        if not self._jobs.start(run):
            self._set_result(kind, number, nothing())
        return number

    def _set_result(self, kind: str, number: int, result: Any) -> None:
        with self._lock:
            self._results[kind][number] = result
        self._events[kind].notify()

    def _pop_result(self, kind: str, number: int) -> Any:
        with self._lock:
            return self._results[kind].pop(number, None)

    def get_store_event_fd(self) -> int:
        return int(self._events["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._events["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._events["load"].fileno())

    # -- store

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._start_task("store", lambda: self._store_objects(keys, objects), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        with self._lock:
            results, self._results["store"] = self._results["store"], {}
        return results

    def _store_objects(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        """A task succeeds when the store has all its objects; LMCache is told of each one that it has."""
        values = [self._object_value(key, thing) for key, thing in zip(keys, objects, strict=True)]
        before = self._pool.exists([value.name for value in values])
        stored = self._pool.put_values(values)
        new = [index for index, has in enumerate(stored) if has and not before[index]]
        stored_indices = [index for index, has in enumerate(stored) if has]
        for index in new[:1] if len(self._sizes) < _KINDS_MAX else []:
            self._sizes[_kind(keys[index])] = values[index].payload_bytes
        if stored_indices:
            sizes = [0 if before[index] else values[index].payload_bytes for index in stored_indices]
            self._notify_keys_stored([keys[index] for index in stored_indices], sizes)
        return L2StoreResult(all(stored), sum(values[index].payload_bytes for index in new))

    # -- look up

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        return self._start_task("lookup", lambda: self._look_up(keys), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._pop_result("lookup", task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing: what was looked up is not held in the store, and a load of what it has given up since is a miss."""

    def _look_up(self, keys: Sequence[Any]) -> Any:
        return _bitmap(self._pool.exists([self._value_name(key) for key in keys]))

    # -- load

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        return self._start_task("load", lambda: self._load_objects(keys, objects), lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._pop_result("load", task_id)

    def _load_objects(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        hits = self._pool.get_values([self._object_value(key, thing) for key, thing in zip(keys, objects, strict=True)])
        read = [key for key, is_there in zip(keys, hits, strict=True) if is_there]
        if read:
            self._notify_keys_accessed(read)
        return _bitmap(hits)

    # -- the rest

    def delete(self, keys: list[Any]) -> None:
        names = [self._value_name(key) for key in keys]
        presence = self._pool.exists(names)
        if self._pool.delete(names):
            deleted_keys = [key for key, was in zip(keys, presence, strict=True) if was]
            self._notify_keys_deleted(deleted_keys, [self._sizes.get(_kind(key), 0) for key in deleted_keys])

    def report_status(self) -> dict[str, Any]:
        return {"type": type(self).__name__, **self._pool.status()}

    def close(self) -> None:
        self._jobs.close()
        self._pool.close()
        for event in self._events.values():
            event.close()

    def _value_name(self, key: Any) -> bytes:
        """No field but the hash can hold an ``@``: LMCache refuses it in names of models and in salts."""
        text = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id}@{key.cache_salt}@{key.chunk_hash.hex()}"
        return name_in(self._prefix, text.encode())

    def _object_value(self, key: Any, thing: Any) -> Value:
        has = thing.metadata
        shapes = [tuple(shape) for shape in (has.shapes or [has.shape])]  # of objects with one group, not all are told
        layout = f"{shapes} {has.dtypes or [has.dtype]} {has.fmt}"
        return Value(self._value_name(key), [(thing.data_ptr, thing.get_size())], layout.encode(), at_most=True)


def _kind(key: Any) -> tuple[str, int, int]:
    return key.model_name, key.kv_rank, key.object_group_id


def _bitmap(flags: Sequence[bool]) -> Any:
    bitmap = Bitmap(len(flags))
    for index, is_there in enumerate(flags):
        if is_there:
            bitmap.set(index)
    return bitmap

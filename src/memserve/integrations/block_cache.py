"""A store as a cache of blocks: the pool of all engines, and what vLLM's two sides ask of it apart from one another.

The scheduler looks blocks up, has them held and compared before it promises them. A worker copies what is to be saved
out of vLLM's memory at once, so that vLLM may reuse it, and lets the store take the copies later.

Work that an engine's thread hands over and does not wait for: a bounded number of jobs, each of which ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import UserError
from memserve.integrations.store_cache import EnginePool, Value, address_of, copy_pieces, piece_places
from memserve.store.client.client import StoreClient
from memserve.store.client.memory import Staged, View

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Values that are read from disks side by side, and compared, at a time."""

Collected = list[tuple[bytes, Staged]]


class BlockCache(EnginePool):
    """As :class:`EnginePool`: no call raises, each ends by ``timeout_s``."""

    # -- at once: without a word to the store

    def prefix_at_once(self, names: Sequence[bytes]) -> int | None:
        """How many have a value, from the first on. None: that is not known without asking the store."""
        client = self._mapped_client()
        if client is None:
            return None if self.is_up else 0
        return self._call_store(lambda mapped, end_s: mapped.match_last_index(names, timeout_s=0.0) + 1, 0)

    def exists_at_once(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each has a value; False: that is not known without asking the store."""
        if self._mapped_client() is None:
            return [False] * len(names)
        return self._call_store(lambda mapped, end_s: mapped.exists(names, timeout_s=0.0), [False] * len(names))

    def may_hold(self, count: int, nbytes: int) -> bool:
        """Whether so many values of so many bytes altogether can be held at once."""
        client = self._mapped_client()
        limits = None if client is None else client.holds_max
        return limits is None or (count <= limits[0] and nbytes <= limits[1])

    def _mapped_client(self) -> StoreClient | None:
        client = self._client
        return client if client is not None and self.is_up and client.is_mapped else None

    # -- held and compared

    def hold_values(self, values: Sequence[Value]) -> tuple[int, list[View]]:
        """How many are there and as they were stored, from the first on, and what holds them in the store's memory.

        The views are the caller's to drop. From a store on another host nothing is held: values are compared when they
        are read. ``pieces`` of the values say lengths; their addresses are not used.
        """
        views: list[View] = []
        count = self._call_store(lambda client, end_s: self._hold_compared(client, values, views, end_s), -1)
        if count < 0:
            drop_views(views)
            return 0, []
        return count, views

    def _hold_compared(self, client: StoreClient, values: Sequence[Value], views: list[View], end_s: float) -> int:
        if not client.is_mapped:
            names = [value.name for value in values]
            return client.match_last_index(names, timeout_s=end_s - time.monotonic()) + 1
        for first in range(0, len(values), AT_ONCE):
            batch = values[first : first + AT_ONCE]
            for index, view in enumerate(self._views_of(client, batch, end_s)):
                if view is not None:
                    views.append(view)
                if view is None or not self._is_whole(client, batch[index], view, end_s):
                    if view is not None:
                        drop_views([views.pop()])
                    return first + index
        return len(values)

    @staticmethod
    def _views_of(client: StoreClient, values: Sequence[Value], end_s: float) -> list[View | None]:
        """Up to the first that is not there, or that this client may not hold beside all that it holds."""
        views = [client.get_held(value.name) for value in values]
        absent = [index for index, view in enumerate(views) if view is None]
        if absent:
            client.bring([values[index].name for index in absent], timeout_s=max(0.0, end_s - time.monotonic()))
            for index in absent:
                views[index] = client.get_held(values[index].name)
        count = next((index for index, view in enumerate(views) if view is None), len(views))
        drop_views([view for view in views[count:] if view is not None])
        return [*views[:count], *([None] if count < len(views) else [])]

    def _is_whole(self, client: StoreClient, value: Value, view: View, end_s: float) -> bool:
        data = view.data
        if value.fit_to_stored(len(data)) is not None:
            seals = _checksums_of(address_of(data), [nbytes for _, nbytes in value.pieces], int(self.options.threads))
            if bytes(data[value.payload_bytes :]) == value.encode_tail(seals):
                return True
        self._delete_damaged(client, [value.name], end_s)
        return False

    # -- copied now, stored later

    def collect_copies(self, values: Sequence[Value]) -> Collected:
        """Copies of the values that :meth:`put_collected` stores; the memory of the values is free when this returns.

        What has no room in the staging memory is left out: it is not waited for.
        """
        client = self._client
        if client is None or not self.is_up:
            return []
        copied_values, staged = list[Value](), list[Staged]()
        try:
            for value in values:
                staged.append(client.allocate(value.stored_bytes, timeout_s=0.0))
                copied_values.append(value)
        except UserError:
            self.counts["refused"] += len(values) - len(copied_values)
        moves = [
            (place, source, nbytes)
            for value, memory in zip(copied_values, staged, strict=True)
            for place, (source, nbytes) in piece_places(value, address_of(memory.data))
        ]
        seals, first = copy_pieces(moves, int(self.options.threads)), 0
        for value, memory in zip(copied_values, staged, strict=True):
            memory.data[value.payload_bytes :] = value.encode_tail(seals[first : first + len(value.pieces)])
            first += len(value.pieces)
        return [(value.name, memory) for value, memory in zip(copied_values, staged, strict=True)]

    def put_collected(self, collected: Collected) -> None:
        """Have the store take them; waits for it."""

        def put(client: StoreClient, end_s: float) -> int:
            return sum(client.put_many(collected, overwrite=False, timeout_s=end_s - time.monotonic()))

        try:
            stored = self._call_store(put, 0)
        finally:
            for _, memory in collected:
                memory.release()
        self.counts["stored"] += stored
        self.counts["refused"] += len(collected) - stored


def drop_views(views: Sequence[View]) -> None:
    """The store may use their memory again."""
    for view in views:
        view.drop()


def _checksums_of(first: int, sizes: Sequence[int], threads: int) -> NDArray[np.uint64]:
    """Checksums of pieces that lie one behind the other from address ``first`` on."""
    seals, start = list[NDArray[np.uint64]](), first
    for nbytes, group in groupby(sizes):
        count = len(list(group))
        seals.append(_core.seal_ranges(start, np.arange(count, dtype=np.int64) * nbytes, nbytes, threads))
        start += count * nbytes
    return np.concatenate(seals)


class CacheJobs:
    """Threads for jobs that end by a deadline of their own."""

    def __init__(self, threads: int, waiting_max: int) -> None:
        """``waiting_max``: jobs that are under way or wait, more are refused."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="memserve-engine-job")
        self._waiting_max = waiting_max
        self._changed = threading.Condition()
        self._waiting = 0
        self._closed = False

    def start(self, job: Callable[[], None]) -> bool:
        """Run it in one of the threads. False: too many wait, and it will not be run."""
        with self._changed:
            if self._closed or self._waiting >= self._waiting_max:
                return False
            self._waiting += 1
        self._threads.submit(self._run_job, job)
        return True

    def _run_job(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:
            log.exception("a job for the store failed")
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until no job is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)

    def close(self) -> None:
        """Refuse further jobs and wait for those that are left."""
        with self._changed:
            self._closed = True
        self._threads.shutdown(wait=True)

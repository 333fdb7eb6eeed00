"""What the connector does in a worker of vLLM: blocks are copied between vLLM's memory and the store's.

Loads run in threads of their own, into blocks that vLLM keeps for them. What is saved is copied out of vLLM's memory
before the step is over, from a device layer by layer as each has been computed, so that no block is in use by a copy
when vLLM frees or preempts it; the store takes the copies later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from memserve.integrations.block_cache import BlockCache, CacheJobs
from memserve.integrations.store_cache import Value
from memserve.integrations.vllm.lookups import RankNames
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.scheduler import KvLoad, Orders, Save

_LOADERS = 2
_LOADS_MAX = 4096
_SAVES_MAX = 256
"""Steps whose copies wait for the store; those of further steps are not saved."""

Block = tuple[int, bytes, int]
"""Group, hash and number of a block of vLLM's."""


class Mover(Protocol):
    """How blocks come out of vLLM's memory, and into it: on the host, or on a device (``device_mover.py``)."""

    def begin_saves(self, blocks: Sequence[Block]) -> Saving | None:
        """Copies of a step's blocks, none of which is complete yet. None: there is room for none."""

    def load_blocks(
        self, request_id: str, blocks: Sequence[Block], end_s: float, over: Callable[[list[bool]], None]
    ) -> None:
        """Tell ``over`` whether each block was found: those that were are in place for what a later step computes. It
        is told once, unless this raises. In any thread."""

    def before_loads(self) -> None:
        """The step's loads are about to begin. In vLLM's thread."""

    def before_step(self, started_ids: Sequence[str]) -> None:
        """A forward is about to begin. ``started_ids``: as in :class:`Orders`. In vLLM's thread."""

    def wait_for_layer(self, layer: str) -> None:
        """What is loaded into this layer is there for what vLLM does next in its thread."""

    def after_step(self) -> None:
        """The forward is over. In vLLM's thread."""


class Saving(Protocol):
    """A step's blocks on their way out of vLLM's memory. In vLLM's thread."""

    def save_layer(self, layer: str) -> None:
        """This layer of the blocks is complete, unless it is told again: micro-batches and drafts run a layer several
        times in a step. Unknown ones are left for the end."""

    def finish_save(self, savers: CacheJobs) -> None:
        """The step has run: copy the rest, and have ``savers`` give them to the store."""

    def drop_save(self) -> None:
        """The step has come to no end: its blocks hold anything."""


class HostMover:
    """The KV of all groups in memory of the host: one copy, into memory out of which the store takes values."""

    def __init__(self, pool: BlockCache, memories: Sequence[HostMemory], names: Sequence[RankNames]) -> None:
        self._pool, self._memories, self._names = pool, memories, names

    def block_values(self, blocks: Sequence[Block]) -> list[Value]:
        """Where the blocks lie, and what they are called."""
        return [
            self._names[group].value_of(block, self._memories[group].block_pieces(block_id))
            for group, block, block_id in blocks
        ]

    def begin_saves(self, blocks: Sequence[Block]) -> _HostSaving | None:
        """See :class:`Mover`."""
        return _HostSaving(self._pool, self.block_values(blocks))

    def load_blocks(
        self, request_id: str, blocks: Sequence[Block], end_s: float, over: Callable[[list[bool]], None]
    ) -> None:
        """See :class:`Mover`."""
        over(self._pool.get_values(self.block_values(blocks)))

    def before_loads(self) -> None:
        """Nothing to do: a block is whole before its load is reported."""

    def before_step(self, started_ids: Sequence[str]) -> None:
        """As :meth:`before_loads`."""

    def wait_for_layer(self, layer: str) -> None:
        """As :meth:`before_loads`."""

    def after_step(self) -> None:
        """As :meth:`before_loads`."""


class _HostSaving:
    """All layers at once: a copy competes with the next layer for the same cores, and thirty take longer than one
    (``bench/vllm_prefill.py``)."""

    def __init__(self, pool: BlockCache, values: Sequence[Value]) -> None:
        self._pool, self._values = pool, values

    def save_layer(self, layer: str) -> None:
        pass

    def finish_save(self, savers: CacheJobs) -> None:
        collected = self._pool.collect_copies(self._values)
        if collected and not savers.start(partial(self._pool.put_collected, collected)):
            for _, memory in collected:
                memory.release()

    def drop_save(self) -> None:
        pass


class WorkerSide:
    """One object per worker, used by one thread, and by its own."""

    def __init__(self, pool: BlockCache, mover: Mover, *, fails_whole: bool = False) -> None:
        """``fails_whole``: a failed load is told of the request, and not of blocks (:meth:`take_failed_requests`)."""
        self._pool = pool
        self._mover = mover
        self._fails_whole = fails_whole
        self._loaders = CacheJobs(_LOADERS, _LOADS_MAX)
        self._savers = CacheJobs(1, _SAVES_MAX)
        self._saving: Saving | None = None
        self._changed = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()

    # -- loads

    def start_loads(self, orders: Orders) -> None:
        """Begin with the step's loads; each ends by the pool's ``timeout_s`` from now."""
        if not orders.loads:
            return
        self._mover.before_loads()
        end_s = time.monotonic() + self._pool.options.timeout_s
        for load in orders.loads:
            if not self._loaders.start(partial(self._load_request, load, end_s)):
                self._on_load_over(load, [False] * len(load.hashes))

    def _load_request(self, load: KvLoad, end_s: float) -> None:
        reports = list[list[bool]]()

        def over(hits: list[bool]) -> None:
            reports.append(hits)
            self._on_load_over(load, hits)

        try:
            if time.monotonic() < end_s:
                self._mover.load_blocks(load.request_id, _blocks_of(load), end_s, over)
        finally:
            if not reports:
                over([False] * len(load.hashes))

    def _on_load_over(self, load: KvLoad, hits: Iterable[bool]) -> None:
        with self._changed:
            failed = {block_id for block_id, ok in zip(load.block_ids, hits, strict=True) if not ok}
            if failed and self._fails_whole:
                self._failed_requests.add(load.request_id)
            else:
                self._failed |= failed
            self._received.add(load.request_id)

    def take_received(self) -> set[str]:
        """Requests whose loads are over, well or not, since the last call; call :meth:`take_failed` after it."""
        with self._changed:
            received, self._received = self._received, set()
        return received

    def take_failed(self) -> set[int]:
        """Blocks that hold anything since their loads failed; of the requests that were taken, and maybe of others."""
        with self._changed:
            failed, self._failed = self._failed, set()
        return failed

    def take_failed_requests(self, received: set[str]) -> set[str]:
        """Those of the requests that were taken whose loads failed."""
        with self._changed:
            failed = self._failed_requests & received
            self._failed_requests -= failed
        return failed

    def wait_for_layer(self, layer: str) -> None:
        """What is loaded into this layer is there for what vLLM does next in this thread."""
        self._mover.wait_for_layer(layer)

    # -- saves

    def begin_step(self, orders: Orders) -> None:
        """A step begins that fills blocks to be saved."""
        if self._saving is not None:
            self._saving.drop_save()
        self._mover.before_step(orders.begun)
        blocks = [block for save in orders.saves for block in _blocks_of(save)]
        self._saving = self._mover.begin_saves(blocks) if blocks else None

    def save_layer(self, layer: str) -> None:
        """The step has computed this layer: begin to copy the blocks' pages of it."""
        if self._saving is not None:
            self._saving.save_layer(layer)

    def finish_step(self) -> None:
        """Copy what no layer has brought. The step has run; vLLM may use the blocks for others afterwards."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish_save(self._savers)
        self._mover.after_step()

    def close(self) -> None:
        """Finish what is under way, by its deadlines, and leave the store."""
        self._loaders.close()
        self._savers.close()
        self._pool.close()


def _blocks_of(transfer: KvLoad | Save) -> list[Block]:
    groups = transfer.groups or (0,) * len(transfer.hashes)
    return list(zip(groups, transfer.hashes, transfer.block_ids, strict=True))

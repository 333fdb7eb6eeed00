"""What the connector does in a worker of vLLM: blocks are copied between vLLM's memory and the store's.

Loads run in threads of their own, into blocks that vLLM keeps for them. What is saved is copied out of vLLM's memory
before the step is over, so that no block is in use by a copy when vLLM frees or preempts it; the store takes the copies
later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from functools import partial

from memserve.integrations.block_pool import BlockPool
from memserve.integrations.jobs import Jobs
from memserve.integrations.values import Value
from memserve.integrations.vllm.lookups import RankNames
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.orders import Load, Orders, Save

_LOADERS = 2
_LOADS_MAX = 4096
_SAVES_MAX = 256
"""Steps whose copies wait for the store; those of further steps are not saved."""


class WorkerSide:
    """One object per worker, used by one thread, and by its own."""

    def __init__(self, pool: BlockPool, memory: HostMemory, names: RankNames) -> None:
        self._pool = pool
        self._memory = memory
        self.names = names
        self._loaders = Jobs(_LOADERS, _LOADS_MAX)
        self._savers = Jobs(1, _SAVES_MAX)
        self._changed = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[int] = set()

    # -- loads

    def start_loads(self, orders: Orders) -> None:
        """Begin with the step's loads; each ends by the pool's ``timeout_s`` from now."""
        end_s = time.monotonic() + self._pool.options.timeout_s
        for load in orders.loads:
            if not self._loaders.start(partial(self._load, load, end_s)):
                self._over(load, [False] * len(load.hashes))

    def _load(self, load: Load, end_s: float) -> None:
        found = [False] * len(load.hashes)
        try:
            if time.monotonic() < end_s:
                found = self._pool.get(self._values(load))
        finally:
            self._over(load, found)

    def _over(self, load: Load, found: Iterable[bool]) -> None:
        with self._changed:
            self._failed.update(block_id for block_id, ok in zip(load.block_ids, found, strict=True) if not ok)
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

    # -- saves

    def save(self, orders: Orders) -> None:
        """Copy the step's full blocks. The step has written them; vLLM may use them for others afterwards."""
        values = [value for save in orders.saves for value in self._values(save)]
        if not values:
            return
        collected = self._pool.collect(values)
        if collected and not self._savers.start(partial(self._pool.put_collected, collected)):
            for _, memory in collected:
                memory.release()

    def _values(self, blocks: Load | Save) -> list[Value]:
        pairs = zip(blocks.hashes, blocks.block_ids, strict=True)
        return [self.names.value(block_hash, self._memory.pieces(block_id)) for block_hash, block_id in pairs]

    def close(self) -> None:
        """Finish what is under way, by its deadlines, and leave the store."""
        self._loaders.close()
        self._savers.close()
        self._pool.close()

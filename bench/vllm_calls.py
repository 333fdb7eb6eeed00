"""The part *calls* of ``vllm_connector.py``: what vLLM's own threads spend in the connector's calls, without vLLM."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.engines import ServedStore
from harness.processes import cpu_s
from harness.rounds import median

from memserve.integrations.block_cache import BlockCache
from memserve.integrations.store_cache import PoolOptions
from memserve.integrations.vllm.lookups import Lookups, RankNames
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.scheduler import EngineBlocks, SchedulerSide
from memserve.integrations.vllm.worker import HostMover, WorkerSide

BLOCKS = 64
"""That a step fills: 84 MiB of SmolLM2-135M in float32."""
WATCHED_S = 10.0
NOTICED_S = 120.0


class Calls:
    """Both sides of the connector at one store."""

    def __init__(self, store: ServedStore) -> None:
        import torch

        caches = {f"layers.{place}": torch.rand(160, 3, 32, 128) for place in range(30)}
        pool_options = PoolOptions.from_mapping(
            {"pool": store.address, "secret_file": str(store.secret_file), "timeout_s": 30.0}
        )
        memory = HostMemory(caches, 160)
        self._pool = BlockCache(pool_options)
        names = RankNames(b"vllm/bench/", memory.layout)
        self._mover = HostMover(self._pool, [memory], [names])
        self._worker = WorkerSide(self._pool, self._mover)
        self._layers = list(caches)
        self._lookups = Lookups(BlockCache(pool_options))
        self._lookups.set_ranks([(names,)])
        self._side = SchedulerSide(self._lookups, EngineBlocks(32, 1), 10**10)
        self._state = SimpleNamespace(get_block_ids=lambda request_id: (list(range(1, BLOCKS + 1)),))
        self.record: dict[str, float] = {}

    def timed(self, name: str, work: Callable[[int], object], times: int) -> None:
        """CPU time of this thread, which other programs do not change: the median of ``times`` calls."""
        spent = []
        for number in range(times + 2):
            begin = time.thread_time()
            work(number)
            spent.append(time.thread_time() - begin)
        self.record[name] = median(spent[2:])
        print(f"  {name:<66} {self.record[name] * 1e6:10.1f} us", flush=True)

    def look_up_and_decode(self, suffix: str = "") -> None:
        """What happens all the time."""
        side = self._side
        misses = [_request(f"miss {number}{suffix}") for number in range(102)]
        self.timed(
            f"look-up of 2,048 tokens that are nowhere{suffix}",
            lambda place: side.match_request(misses[place], 0, 0),
            100,
        )
        decoding = [_request(f"decoding {number}{suffix}") for number in range(64)]
        for item in decoding:
            side.on_blocks_allocated(item, [[]], 0)
            side._saved[item.request_id], item.num_computed_tokens = BLOCKS, BLOCKS * 32 + 3
        output = self._step({item.request_id: 1 for item in decoding})
        self.timed(f"a step of 64 requests that fill no block{suffix}", lambda place: side.plan_step(output, 0), 100)

    def without_its_store(self, store: ServedStore) -> None:
        """What is left of the cost when the store is dead, and what looking for it takes."""
        moment = ", store dead"
        prompts = [_request(f"prompt {number}{moment}") for number in range(13)]
        for item in prompts:
            self._side.on_blocks_allocated(item, [[]], 0)
        orders = [self._side.plan_step(self._step({item.request_id: BLOCKS * 32}), 0) for item in prompts]
        store.kill()
        self._save(orders[0])  # the first that asks waits for an answer, in a thread of its own
        deadline_s = time.monotonic() + NOTICED_S
        while self._pool.is_up:
            if time.monotonic() > deadline_s:
                raise SystemExit("a dead store was not noticed")
            time.sleep(0.01)
        self.look_up_and_decode(moment)
        self.timed(f"a step that fills 64 blocks{moment}", lambda place: self._save(orders[place + 1]), 10)
        begin_s, spent_s = time.monotonic(), time.process_time()
        time.sleep(WATCHED_S)
        name = f"all other threads, a second{moment}"
        self.record[name] = (time.process_time() - spent_s) / (time.monotonic() - begin_s)
        print(f"  {name:<66} {self.record[name] * 1e6:10.1f} us")

    def save(self, store: ServedStore) -> None:
        """What a long prompt costs."""
        worker, side, orders = self._worker, self._side, []
        prompts = [_request(f"prompt {number}") for number in range(12)]

        def ordered(place: int) -> None:
            side.on_blocks_allocated(prompts[place], [[]], 0)
            orders.append(side.plan_step(self._step({prompts[place].request_id: BLOCKS * 32}), 0))

        self.timed("a step that fills 64 blocks: what to save", ordered, 10)
        # copies run in two threads, and the other one's time does not count here: wall time beside memcpy
        begin_s, spent_s = time.perf_counter(), time.process_time() + cpu_s(store.pid)
        for order in orders:
            self._save(order)
            worker._savers.wait_until_idle()
        self.record["64 blocks to the store, wall"] = (time.perf_counter() - begin_s) / len(orders)
        name = "64 blocks to the store: CPU time of all threads, and of the store"
        self.record[name] = (time.process_time() + cpu_s(store.pid) - spent_s) / len(orders)
        print(f"  {name:<66} {self.record[name] * 1e6:10.1f} us")
        name = "a step that fills 64 blocks (84 MiB): the copies, this thread's half"
        self.timed(name, lambda place: self._collected(orders[place % len(orders)]), 10)
        waited_ms = self.record["64 blocks to the store, wall"] * 1e3
        print(f"  {worker._pool.counts['stored']} blocks stored, 64 of them after {waited_ms:.0f} ms")

    def _step(self, scheduled: dict[str, int]) -> Any:
        return SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=self._state)

    def _collected(self, orders: Any) -> None:
        values = [
            value
            for save in orders.saves
            for value in self._mover.block_values(
                [(0, *item) for item in zip(save.hashes, save.block_ids, strict=True)]
            )
        ]
        for _, memory in self._pool.collect_copies(values):
            memory.release()

    def _save(self, orders: Any) -> None:
        self._worker.begin_step(orders)
        for layer in self._layers:
            self._worker.save_layer(layer)
        self._worker.finish_step()

    def close(self) -> None:
        """Finish what is under way."""
        self._worker.close()
        self._lookups.close()


def _request(name: str) -> Any:
    hashes = [f"{name}/{place}".encode() for place in range(BLOCKS)]
    return SimpleNamespace(request_id=name, block_hashes=hashes, num_tokens=BLOCKS * 32 + 5, num_computed_tokens=0)


def calls(options: Namespace, folder: Path) -> dict[str, float]:
    """Seconds of CPU time, by call."""
    with ServedStore(folder, dram="4GiB") as store:
        calls = Calls(store)
        calls.look_up_and_decode()
        calls.save(store)
        calls.without_its_store(store)
        calls.close()
    return calls.record

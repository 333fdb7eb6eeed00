"""MemserveTier as vLLM's tiering manager uses it: steps, jobs over one view of CPU memory; beside a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine_doubles import engines
from engine_world import PAGE_BYTES, flip_byte, options_of, pages
from memserve import UserError
from served_store import ServedStore
from waiting import eventually

with engines():
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from memserve.integrations.vllm_tier import MemserveTier

CHUNKS = 64


def spec(**changed: Any) -> Any:
    """What the tier and vLLM's `FileMapper` read of an `OffloadingSpec`."""
    parallel = SimpleNamespace(
        rank=0, world_size=1, tp_size=changed.get("tp_size", 1), pp_size=1, pcp_size=1, dcp_size=1,
        is_parallelism_agnostic=False,
    )  # fmt: skip
    config = SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=16, layer_names=("model.layers.0",)),),
        model=SimpleNamespace(name=changed.get("model", "m"), dtype=changed.get("dtype", "bfloat16")),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=changed.get("layout", "LBHNC"),
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


class Engine:
    """vLLM's scheduler with a tier over ``CHUNKS`` chunks of CPU memory."""

    def __init__(self, store: ServedStore, changed: dict[str, Any] | None = None, **options: Any) -> None:
        self.memory = np.zeros((CHUNKS, PAGE_BYTES), np.uint8)
        given = options_of(store, **options)
        self.tier = MemserveTier(spec(**(changed or {})), memoryview(self.memory), "MemserveTier", **given)
        self._job = 0

    def look_up(self, keys: list[bytes], request: str = "r") -> list[bool]:
        """Steps until all are known."""
        context, found = ReqContext(request), []

        def known() -> bool:
            found[:] = [self.tier.lookup(key, context) for key in keys]
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            return LookupResult.RETRY not in found

        self.tier.on_new_request(context)
        eventually(known)
        return [result is LookupResult.HIT for result in found]

    def finish(self, request: str = "r") -> None:
        self.tier.on_request_finished(ReqContext(request))

    def start(self, keys: list[bytes], chunks: list[int], is_promotion: bool) -> int:
        self._job += 1
        job = TransferJob(self._job, keys, np.array(chunks, np.int32), is_promotion, ReqContext("r"))
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        return self._job

    def move(self, keys: list[bytes], chunks: list[int], is_promotion: bool) -> Any:
        number, done = self.start(keys, chunks, is_promotion), []
        eventually(lambda: done.extend(self.tier.get_finished_jobs()) or done)
        assert [result.job_id for result in done] == [number]
        return done[0]

    def store(self, keys: list[bytes], chunks: list[int]) -> Any:
        return self.move(keys, chunks, False)

    def load(self, keys: list[bytes], chunks: list[int]) -> Any:
        return self.move(keys, chunks, True)

    def close(self) -> None:
        self.tier.shutdown()


def keys_of(count: int, group: int = 0) -> list[bytes]:
    """vLLM's `OffloadKey`: a hash and the group."""
    return [at.to_bytes(32, "big") + group.to_bytes(4, "big") for at in range(count)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB") as store:
        yield store


@pytest.fixture
def engine(store: ServedStore) -> Iterator[Engine]:
    engine = Engine(store)
    yield engine
    engine.close()
    with store.client() as client:
        client.purge(everything=True)


def test_chunks_go_and_come_back_elsewhere(engine: Engine) -> None:
    keys, engine.memory[:20] = keys_of(20), pages(20)
    assert engine.look_up(keys) == [False] * 20
    engine.finish()
    stored = engine.store(keys, list(range(20)))
    assert stored.success and stored.transfer_bytes == 20 * PAGE_BYTES and stored.successful_keys is None
    assert engine.look_up([*keys, *keys_of(1, group=1)], "s") == [True] * 20 + [False]
    assert engine.load(keys, list(range(40, 60))).success
    assert (engine.memory[40:60] == engine.memory[:20]).all()


def test_a_chunk_that_went_meanwhile_is_a_miss(engine: Engine) -> None:
    """Else vLLM would ask for it in each step."""
    keys, engine.memory[:4] = keys_of(4), pages(4)
    assert engine.store(keys, [0, 1, 2, 3]).success and engine.look_up(keys) == [True] * 4
    assert engine.tier.pool.delete([engine.tier.name_of(keys[2])]) == 1
    loaded = engine.load(keys, [10, 11, 12, 13])
    assert not loaded.success and loaded.successful_keys == (keys[0], keys[1], keys[3])
    assert engine.look_up(keys) == [True, True, False, True]
    assert (engine.memory[13] == engine.memory[3]).all() and not engine.memory[12].any()


def test_a_damaged_chunk_is_a_miss(store: ServedStore, engine: Engine) -> None:
    keys, engine.memory[:3] = keys_of(3), pages(3, seed=21)
    assert engine.store(keys, [0, 1, 2]).success
    assert engine.look_up(keys) == [True] * 3
    assert flip_byte(store, engine.memory[1, 100:164].tobytes())
    loaded = engine.load(keys, [7, 8, 9])
    assert not loaded.success and loaded.successful_keys == (keys[0], keys[2])
    engine.finish()
    assert engine.look_up(keys, "later") == [True, False, True]


@pytest.mark.parametrize("changed", [{"model": "n"}, {"dtype": "float16"}, {"tp_size": 2}, {"layout": "BLHNC"}])
def test_models_and_layouts_do_not_meet(store: ServedStore, engine: Engine, changed: dict[str, Any]) -> None:
    other = Engine(store, changed)
    engine.memory[:2] = pages(2)
    assert engine.store(keys_of(2), [0, 1]).success and other.look_up(keys_of(2)) == [False] * 2
    assert not other.load(keys_of(2), [0, 1]).success and not other.memory.any()
    other.close()


def test_tenants_do_not_meet(store: ServedStore, engine: Engine) -> None:
    other = Engine(store, tenant="another")
    engine.memory[:2] = pages(2)
    assert engine.store(keys_of(2), [0, 1]).success and other.look_up(keys_of(2)) == [False] * 2
    other.close()


def test_many_jobs_and_a_drain(engine: Engine) -> None:
    """After it nothing touches vLLM's memory, and each job has its result."""
    engine.memory[:32] = pages(32)
    numbers = [engine.start(keys_of(32)[at : at + 4], list(range(at, at + 4)), False) for at in range(0, 32, 4)]
    engine.tier.drain_jobs()
    numbers += [engine.start(keys_of(32)[at : at + 4], list(range(32 + at, 36 + at)), True) for at in range(0, 32, 4)]
    engine.tier.drain_jobs()
    done = list(engine.tier.get_finished_jobs())
    assert sorted(result.job_id for result in done) == numbers and all(result.success for result in done)
    assert (engine.memory[32:] == engine.memory[:32]).all()
    with pytest.raises(ValueError, match="outside"):
        engine.start(keys_of(1), [CHUNKS], True)


def test_a_store_that_dies_in_between(tmp_path: Path) -> None:
    with ServedStore(tmp_path, dram="64MiB") as store:
        engine = Engine(store, timeout_s=1.0)
        engine.memory[:3] = pages(3)
        assert engine.store(keys_of(3), [0, 1, 2]).success
        store.kill()
        assert not engine.store(keys_of(3, group=1), [0, 1, 2]).success
        assert engine.look_up(keys_of(3), "while it is away") == [False] * 3
        engine.finish("while it is away")
        store.restart()
        eventually(lambda: engine.tier.pool.is_up)
        assert engine.look_up(keys_of(3), "later") == [True] * 3 and engine.load(keys_of(3), [5, 6, 7]).success
        assert (engine.memory[5:8] == engine.memory[:3]).all()
        engine.close()


def test_options_that_cannot_be(store: ServedStore) -> None:
    with pytest.raises(UserError, match="knows no option 'n_read_threads'"):
        Engine(store, n_read_threads=4)


def test_vllm_loads_it(store: ServedStore) -> None:
    factory = pytest.importorskip("vllm.v1.kv_offload.tiering.factory", reason="vLLM is not installed")
    config = {"type": "MemserveTier", "module_path": "memserve.integrations.vllm_tier", "locality": "LOCAL"}
    config |= options_of(store)
    memory = np.zeros((CHUNKS, PAGE_BYTES), np.uint8)
    tier = factory.SecondaryTierFactory.create_secondary_tier(config, memoryview(memory), spec())
    assert type(tier).__name__ == "MemserveTier" and tier.pool.is_up and tier.locality is not None
    tier.shutdown()

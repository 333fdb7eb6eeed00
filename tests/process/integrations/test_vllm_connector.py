"""The connector's two sides beside a real store, driven with host tensors as vLLM drives them: what it may rely on."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine_world import flip_byte, options_of
from memserve.integrations.block_cache import BlockCache
from memserve.integrations.store_cache import PoolOptions, namespace
from memserve.integrations.vllm.lookups import Lookups, RankNames
from memserve.integrations.vllm.memory import HostMemory
from memserve.integrations.vllm.scheduler import EngineBlocks, SchedulerSide
from memserve.integrations.vllm.shared_kv import prefix_of, weights_fingerprint
from memserve.integrations.vllm.worker import HostMover, WorkerSide
from memserve.store.client import connection
from served_store import ServedStore
from waiting import eventually

BLOCKS, TOKENS, LAYERS = 24, 4, 3
PREFIX = namespace("vllm", model="m")
WAIT_NS = 30_000_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB") as store:
        yield store


class Engine:
    """Allocates blocks, steps, and computes: the KV of a block is made of its hash, as vLLM's is of all tokens."""

    def __init__(self, store: ServedStore, prefix: bytes = PREFIX, **options: Any) -> None:
        chosen = PoolOptions.from_mapping(options_of(store, **options))
        self.caches = {f"layers.{at}": torch.zeros(BLOCKS, 2, TOKENS, 8) for at in range(LAYERS)}
        memory = HostMemory(self.caches, BLOCKS)
        pool, names = BlockCache(chosen), RankNames(prefix, memory.layout)
        self.worker = WorkerSide(pool, HostMover(pool, [memory], [names]))
        self.lookups = Lookups(BlockCache(chosen))
        self.lookups.set_ranks([(names,)])
        self.side = SchedulerSide(self.lookups, EngineBlocks(TOKENS, 1), WAIT_NS)
        self.tables: dict[str, list[int]] = {}
        self.free = list(range(1, BLOCKS))
        self.received: set[str] = set()
        self.failed: set[int] = set()

    def step(self, tokens: dict[str, int] | None = None) -> None:
        """A step of vLLM's: orders, forward, saves, what has ended."""
        state = SimpleNamespace(get_block_ids=lambda request_id: (self.tables[request_id],))
        output = SimpleNamespace(num_scheduled_tokens=tokens or {}, kv_connector_block_state=state)
        orders = self.side.plan_step(output, time.monotonic_ns())
        self.worker.begin_step(orders)
        self.worker.start_loads(orders)
        for layer in self.caches:
            self.worker.wait_for_layer(layer)
            self.worker.save_layer(layer)
        self.worker.finish_step()
        received = self.worker.take_received()
        failed = self.worker.take_failed()
        self.side.on_loads_received(received, failed)
        self.received |= received
        self.failed |= failed

    def run(self, request: Any) -> tuple[int, set[int]]:
        """A prompt, to its end: blocks that were loaded, and indexes of those that failed."""
        count: int | None = None

        def known() -> bool:
            nonlocal count
            count = self.side.match_request(request, 0, time.monotonic_ns())[0]
            self.step()
            return count is not None

        eventually(known)
        assert count is not None
        request_id, loaded = request.request_id, count // TOKENS
        table = [self.free.pop(0) for _ in request.block_hashes]
        self.tables[request_id] = table
        self.side.on_blocks_allocated(request, (table,), count)
        if count:
            eventually(lambda: self.step() or request_id in self.received)
        bad = {at for at, block_id in enumerate(table[:loaded]) if block_id in self.failed}
        self.failed -= set(table)
        right = min(bad, default=loaded)
        for at, block_hash in enumerate(request.block_hashes):
            if at < right:
                for number, cache in enumerate(self.caches.values()):
                    assert torch.equal(cache[table[at]], kv_of(block_hash, number)), "wrong KV would be attended to"
            else:
                for number, cache in enumerate(self.caches.values()):
                    cache[table[at]] = kv_of(block_hash, number)
        request.num_computed_tokens = right * TOKENS
        self.side.on_blocks_allocated(request, (table,), 0)
        self.step({request_id: request.num_tokens - right * TOKENS})
        for cache in self.caches.values():  # vLLM may write into the blocks as soon as the step is over
            cache[table] = -1.0
        self.side.on_request_finished(request_id)
        self.free += self.tables.pop(request_id)
        return loaded, bad

    def saved(self) -> None:
        """Until the store has what was saved."""
        self.worker._savers.wait_until_idle()

    def close(self) -> None:
        self.worker.close()
        self.lookups.close()
        assert self.side.is_idle and not self.lookups.open_count


def kv_of(block_hash: bytes, layer: int) -> torch.Tensor:
    """Of a block: no two are equal."""
    seed = int.from_bytes(block_hash[:7], "little") + layer
    return torch.from_numpy(np.random.default_rng(seed).random((2, TOKENS, 8), np.float32))


_requests = iter(range(1 << 30))


def request_of(text: str, blocks: int) -> Any:
    """A prompt whose first blocks are those of every longer prompt of this text."""
    hashes = [f"{text}/{at:02}".encode() for at in range(blocks)]
    return SimpleNamespace(
        request_id=f"r{next(_requests)}", block_hashes=hashes, num_tokens=blocks * TOKENS + 1, num_computed_tokens=0
    )


@pytest.fixture
def engines(store: ServedStore) -> Iterator[tuple[Engine, Engine]]:
    both = Engine(store), Engine(store)
    yield both
    assert both[0].lookups.forget_everything()
    for engine in both:
        engine.close()


def test_engine_reads_kv_of_another_engine(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    assert first.run(request_of("a", 6)) == (0, set())
    first.saved()
    assert second.run(request_of("a", 6)) == (6, set())
    assert second.run(request_of("a", 9)) == (6, set())
    second.saved()
    assert first.run(request_of("a", 9)) == (9, set())
    assert second.run(request_of("b", 3)) == (0, set())


def test_a_store_on_another_host(store: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mapped, so nothing can be held: what is damaged is a failed load."""
    monkeypatch.setattr(connection, "this_host", lambda: "another host")
    engine = Engine(store)
    assert engine.run(request_of("far", 6)) == (0, set())
    engine.saved()
    assert engine.run(request_of("far", 6)) == (6, set())
    flip_byte(store, kv_of(b"far/04", 1).numpy().tobytes()[:64])
    loaded, bad = engine.run(request_of("far", 6))
    assert loaded == 6 and 4 in bad
    pools = [engine.worker._pool, engine.lookups.pool]
    eventually(lambda: all(pool.is_up for pool in pools))
    assert engine.lookups.forget_everything()
    engine.close()


def test_other_models_find_nothing(store: ServedStore, engines: tuple[Engine, Engine]) -> None:
    engines[0].run(request_of("a", 4))
    engines[0].saved()
    other = Engine(store, namespace("vllm", model="another"))
    assert other.run(request_of("a", 4)) == (0, set())
    other.close()


def test_damage_is_found_before_a_promise(store: ServedStore, engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    first.run(request_of("a", 6))
    first.saved()
    assert flip_byte(store, kv_of(b"a/03", 1).numpy().tobytes()[:64]) >= 1
    assert second.run(request_of("a", 6)) == (3, set())
    assert second.lookups.pool.counts["damaged"] == 1
    second.saved()
    assert first.run(request_of("a", 6)) == (6, set()), "it was computed, and saved again"


def test_damage_after_a_promise_is_a_failed_load(
    store: ServedStore, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engines
    first.run(request_of("a", 6))
    first.saved()
    matched = second.side.match_request

    def damaged_once_promised(*given: Any) -> tuple[int | None, bool]:
        count, is_async = matched(*given)
        if count:
            flip_byte(store, kv_of(b"a/03", 1).numpy().tobytes()[:64])
        return count, is_async

    monkeypatch.setattr(second.side, "match_request", damaged_once_promised)
    loaded, bad = second.run(request_of("a", 6))
    assert loaded == 6 and bad == {3}


def test_random_lives_of_two_engines(store: ServedStore, engines: tuple[Engine, Engine]) -> None:
    """Every block that is loaded is compared with what it must be, in ``Engine.run``."""
    rng, loaded = random.Random(5), 0
    for _ in range(120):
        engine, text = rng.choice(engines), rng.choice("abcdef")
        loaded += engine.run(request_of(text, rng.randrange(1, 12)))[0]
        if rng.random() < 0.2:
            at = rng.randrange(11)
            flip_byte(store, kv_of(f"{text}/{at:02}".encode(), rng.randrange(LAYERS)).numpy().tobytes()[:64])
        if rng.random() < 0.5:
            engine.saved()
    assert loaded > 100


def test_a_store_that_dies_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ServedStore(tmp_path) as store, caplog.at_level(logging.WARNING):
        engine = Engine(store, timeout_s=1.0)
        engine.run(request_of("a", 4))
        engine.saved()
        store.kill()
        for number in range(4):  # also while nothing has noticed yet
            engine.run(request_of("a", 4))
            engine.run(request_of(f"more {number}", 4))
        engine.saved()
        pools = [engine.worker._pool, engine.lookups.pool]
        eventually(lambda: not pools[0].is_up)
        assert len([one for one in caplog.records if "no KV from" in one.message]) <= 2, "one of each side"
        assert engine.run(request_of("b", 4)) == (0, set())
        store.restart()
        eventually(lambda: all(pool.is_up for pool in pools) and pools[1]._mapped_client() is not None)
        engine.run(request_of("c", 4))
        engine.saved()
        assert engine.run(request_of("c", 4)) == (4, set())
        engine.close()


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with ServedStore(tmp_path) as store:
        store.kill()
        engine = Engine(store, timeout_s=0.5)
        assert engine.run(request_of("a", 4)) == (0, set())
        assert engine.run(request_of("a", 4)) == (0, set())
        store.restart()
        pools = [engine.worker._pool, engine.lookups.pool]
        eventually(lambda: all(pool.is_up for pool in pools) and pools[1]._mapped_client() is not None)
        engine.side.forget_offers()
        engine.run(request_of("a", 4))
        engine.saved()
        assert engine.run(request_of("a", 4)) == (4, set())
        engine.close()


def test_staging_memory_without_room_saves_less(store: ServedStore) -> None:
    engine = Engine(store, staging_bytes=8192)
    engine.run(request_of("full", 6))
    engine.saved()
    counts = engine.worker._pool.counts
    assert counts["stored"] == 2 and counts["refused"] == 4
    assert engine.run(request_of("full", 6)) == (2, set())
    assert engine.lookups.forget_everything()
    engine.close()


def test_the_client_part_imports_no_torch() -> None:
    """vLLM's process gets nothing from memserve that it has not got: its packages stay as they are."""
    modules = ["lookups", "memory", "scheduler", "shared_kv", "worker"]
    code = "import json, sys\nimport memserve.integrations.vllm\n"
    code += "".join(f"import memserve.integrations.vllm.{name}\n" for name in modules)
    code += "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert {"numpy", "msgspec", "zmq"} <= loaded
    assert not loaded & {"torch", "transformers", "vllm", "starlette", "uvicorn", "typer", "httpx", "accelerate"}


def config_of(**changed: Any) -> Any:
    """What is read of vLLM's configuration."""
    model = SimpleNamespace(
        model=changed.get("model", "name"), revision=changed.get("revision"), dtype=changed.get("dtype", "float32"),
        hf_config=SimpleNamespace(to_dict=lambda: {"rope": changed.get("rope", 1), "_name_or_path": changed.get("at")}),
        hf_overrides=None, quantization=None,
    )  # fmt: skip
    cache = SimpleNamespace(cache_dtype="auto", block_size=changed.get("block_size", 32))
    parallel = SimpleNamespace(
        rank=changed.get("rank", 0), world_size=2, tensor_parallel_size=2, pipeline_parallel_size=1
    )
    return SimpleNamespace(model_config=model, cache_config=cache, parallel_config=parallel)


def test_incompatible_configurations_have_other_names(tmp_path: Path) -> None:
    layout = HostMemory({"a": torch.zeros(4, 2)}, 4).layout
    other = HostMemory({"a": torch.zeros(4, 3)}, 4).layout

    def prefix(given: str = "", backends: tuple[str, ...] = ("A",), version: str = "1", **changed: Any) -> bytes:
        return prefix_of(config_of(**changed), given, backends, version, changed.get("layout", layout))

    kinds: list[dict[str, Any]] = [
        {"given": "x"}, {"backends": ("B",)}, {"version": "2"}, {"model": "other"}, {"revision": "r"}, {"rank": 1},
        {"dtype": "bfloat16"}, {"rope": 2}, {"block_size": 64}, {"layout": other},
    ]  # fmt: skip
    assert len({prefix(), *(prefix(**kind) for kind in kinds)}) == 1 + len(kinds)
    assert prefix(at="here") == prefix(at="there")


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    for name, fill in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes([fill]) * 3_000_000)
    prints = {name: weights_fingerprint(str(tmp_path / name), None) for name in "abc"}
    assert prints["a"] == prints["b"] != prints["c"]
    assert weights_fingerprint("org/model", "main") == "org/model@main"

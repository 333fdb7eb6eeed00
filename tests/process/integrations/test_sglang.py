"""MemserveHiCache as SGLang's cache controllers use it: pages of host tensors by index; beside a real store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_doubles import engines
from engine_world import flip_byte, options_of
from memserve import UserError
from served_store import ServedStore
from waiting import eventually

with engines():
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer

    from memserve.integrations.sglang import MemserveHiCache

LAYERS, HEADS, DIM, PAGE, TOKENS = 4, 2, 16, 8, 256


class HostPool:
    """K and V of SGLang's `MHATokenToKVPoolHost`, with its layouts and its addresses of pages."""

    page_size, layer_num, head_num, head_dim, dtype = PAGE, LAYERS, HEADS, DIM, torch.bfloat16

    def __init__(self, layout: str = "page_first", seed: int = 0) -> None:
        self.layout = layout
        shape = {
            "layer_first": (2, LAYERS, TOKENS, HEADS, DIM),
            "page_first": (2, TOKENS, LAYERS, HEADS, DIM),
            "page_first_direct": (2, TOKENS // PAGE, LAYERS, PAGE, HEADS, DIM),
        }[layout]
        drawn = torch.randint(0, 30_000, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
        self.kv_buffer = (drawn if seed else torch.zeros_like(drawn)).view(torch.bfloat16)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token = HEADS * DIM * self.dtype.itemsize
        half = self.kv_buffer.data_ptr() + LAYERS * TOKENS * token
        found = []
        for first in indices.tolist()[::PAGE]:
            if self.layout == "layer_first":
                for layer in range(LAYERS):
                    at = (layer * TOKENS + first) * token
                    found += [self.kv_buffer.data_ptr() + at, half + at]
            else:
                found += [self.kv_buffer.data_ptr() + first * LAYERS * token, half + first * LAYERS * token]
        layers = 1 if self.layout == "layer_first" else LAYERS
        return found, [layers * PAGE * token] * len(found)

    def page(self, number: int) -> torch.Tensor:
        """Page ``number`` as int16, in the order of its layout."""
        whole = self.kv_buffer.view(torch.int16)
        if self.layout == "page_first_direct":
            return whole[:, number]
        tokens = slice(number * PAGE, (number + 1) * PAGE)
        return whole[:, :, tokens] if self.layout == "layer_first" else whole[:, tokens]


class StatePool:
    """One state a page, as of a state-space model: two pieces of different lengths."""

    page_size, layout, dtype = 1, "page_first", torch.float32

    def __init__(self, seed: int = 0) -> None:
        self.states = torch.full((16, 100), float(seed)) + torch.arange(16.0)[:, None]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        rows = [self.states.data_ptr() + 400 * at for at in indices.tolist()]
        return [at for row in rows for at in (row, row + 300)], [300, 100] * len(rows)


def config_of(store: ServedStore, **named: Any) -> Any:
    where = {"module_path": "memserve.integrations.sglang", "class_name": "MemserveHiCache"}
    extra = {"backend_name": "memserve", **where, "interface_v1": 1, "memserve": options_of(store)}
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=extra)
    return replace(config, **named)


def indices(*numbers: int) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE) + PAGE * number for number in numbers])


def made(store: ServedStore, pool: Any, **named: Any) -> MemserveHiCache:
    backend = MemserveHiCache(config_of(store, **named), {})
    backend.register_mem_pool_host(pool)
    return backend


def hashes(count: int, seed: str = "") -> list[str]:
    return [f"{seed}{at:064x}" for at in range(count)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB") as store:
        yield store


@pytest.fixture(autouse=True)
def an_empty_store(store: ServedStore) -> Iterator[None]:
    yield
    with store.client() as client:
        client.purge(everything=True)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_pages_go_and_come_back_elsewhere(store: ServedStore, layout: str) -> None:
    kept, read = HostPool(layout, seed=3), HostPool(layout)
    writer, reader, keys = made(store, kept), made(store, read), hashes(10)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys, indices(*range(10))) == [True] * 10
    assert reader.batch_exists([*keys, *hashes(1, "other")]) == 10 and reader.exists(keys[9])
    assert reader.batch_get_v1(keys, indices(*range(19, 9, -1))) == [True] * 10
    assert all(torch.equal(read.page(19 - at), kept.page(at)) for at in range(10))
    assert writer.clear() and reader.batch_exists(keys) == 0
    writer.close()
    reader.close()


def test_a_batch_with_a_hole(store: ServedStore) -> None:
    kept, read = HostPool(seed=3), HostPool()
    writer, reader, keys = made(store, kept), made(store, read), hashes(6)
    assert writer.batch_set_v1([*keys[:3], *keys[4:]], indices(0, 1, 2, 4, 5)) == [True] * 5
    assert reader.batch_exists(keys) == 3
    assert reader.batch_get_v1(keys, indices(*range(6))) == [True, True, True, False, True, True]
    assert not read.page(3).any() and torch.equal(read.page(5), kept.page(5))
    writer.close()
    reader.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "n"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_size": 2},
        "layout",
        "dtype",
    ],
)
def test_models_ranks_and_layouts_do_not_meet(store: ServedStore, other: Any) -> None:
    kept, read = HostPool(seed=3), HostPool("page_first_direct" if other == "layout" else "page_first")
    if other == "dtype":
        read.dtype = torch.float16
    writer, reader = made(store, kept), made(store, read, **(other if isinstance(other, dict) else {}))
    assert writer.batch_set_v1(hashes(3), indices(0, 1, 2)) == [True] * 3
    assert reader.batch_exists(hashes(3)) == 0
    assert reader.batch_get_v1(hashes(3), indices(0, 1, 2)) == [False] * 3 and not read.page(0).any()
    writer.close()
    reader.close()


def test_ranks_share_what_is_equal_on_them(store: ServedStore) -> None:
    """MLA: one rank writes, all read; a state of a rank's own is not shared."""
    kept, read = HostPool(seed=3), HostPool()
    ranks = [made(store, pool, is_mla_model=True, tp_rank=at, tp_size=2) for at, pool in enumerate((kept, read))]
    for rank in ranks:
        rank.register_mem_host_pool_v2(StatePool(), PoolName.MAMBA)
    assert ranks[0].batch_set_v1(hashes(2), indices(0, 1)) == [True] * 2
    states = PoolTransfer(PoolName.MAMBA, host_indices=torch.arange(2), keys=hashes(2))
    assert ranks[0].batch_set_v2([states]) == {PoolName.MAMBA: [True] * 2}
    assert ranks[1].batch_get_v1(hashes(2), indices(0, 1)) == [True] * 2
    assert ranks[1].batch_get_v2([states]) == {PoolName.MAMBA: [False] * 2}
    for rank in ranks:
        rank.close()


def test_several_pools_at_once(store: ServedStore) -> None:
    kept, read, states, back = HostPool(seed=3), HostPool(), StatePool(7), StatePool()
    writer, reader, keys = made(store, kept), made(store, read), hashes(8)
    for backend, pool in ((writer, states), (reader, back)):
        backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    assert writer.batch_set_v1(keys, indices(*range(8))) == [True] * 8
    for end in (4, 6):  # states at the ends of two nodes
        one = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([end]), keys=[keys[end - 1]])
        assert writer.batch_set_v2([one]) == {PoolName.MAMBA: [True]}
    asked = PoolTransfer(PoolName.MAMBA, keys=[keys[7]], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = reader.batch_exists_v2(keys, [asked])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (6, [4, 6])
    assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.MAMBA: 6}
    every = PoolTransfer(PoolName.MAMBA, keys=keys)
    assert reader.batch_exists_v2(keys, [every]).kv_hit_pages == 0
    assert reader.batch_exists_v2(keys, []).kv_hit_pages == 8
    assert reader.batch_exists_v2(keys, [PoolTransfer(PoolName.SWA, keys=keys)]).kv_hit_pages == 0
    wanted = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([1, 2]), keys=[keys[5], keys[7]])
    assert reader.batch_get_v2([wanted]) == {PoolName.MAMBA: [True, False]}
    assert torch.equal(back.states[1], states.states[6])
    short = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([1]), keys=keys[:2])
    assert reader.batch_get_v2([short]) == {PoolName.MAMBA: [False, False]}, "indices and keys do not fit"
    writer.close()
    reader.close()


def test_tensors_one_by_one(store: ServedStore) -> None:
    """SGLang's path without `interface_v1`."""
    extra = {"memserve": options_of(store)}
    backend = made(store, HostPool(), extra_config=extra)
    kept = [torch.full((500,), float(at), dtype=torch.bfloat16) for at in range(4)]
    assert backend.batch_set(hashes(4), kept) and backend.set("alone", kept[1]) and backend.exists("alone")
    targets = [torch.zeros(500, dtype=torch.bfloat16) for _ in range(5)]
    read = backend.batch_get(hashes(5), targets)
    assert read[4] is None and all(one is target for one, target in zip(read[:4], targets, strict=False))
    assert all(torch.equal(one, other) for one, other in zip(read[:4], kept, strict=True))
    assert torch.equal(backend.get("alone", torch.zeros(500, dtype=torch.bfloat16)), kept[1])
    assert backend.get("alone", torch.zeros(500, dtype=torch.float16)) is None, "another type"
    assert backend.get("alone") is None and backend.set("none") is False
    backend.close()


def test_a_damaged_page_is_a_miss(store: ServedStore) -> None:
    kept, read = HostPool(seed=5), HostPool()
    backend, reader = made(store, kept), made(store, read)
    assert backend.batch_set_v1(hashes(3), indices(0, 1, 2)) == [True] * 3
    assert flip_byte(store, kept.page(1)[1].numpy().tobytes()[64:128])
    assert reader.batch_get_v1(hashes(3), indices(0, 1, 2)) == [True, False, True]
    assert reader.batch_exists(hashes(3)) == 1
    backend.close()
    reader.close()


def test_a_store_that_dies_in_between(tmp_path: Path) -> None:
    with ServedStore(tmp_path, dram="64MiB") as store:
        kept = HostPool(seed=5)
        backend = made(store, kept, extra_config={"interface_v1": 1, "memserve": options_of(store, timeout_s=1.0)})
        assert backend.batch_set_v1(hashes(4), indices(*range(4))) == [True] * 4
        store.kill()
        assert backend.batch_set_v1(hashes(4, "late"), indices(*range(4))) == [False] * 4
        assert (
            backend.batch_exists(hashes(4)) == 0 and backend.batch_get_v1(hashes(4), indices(*range(4))) == [False] * 4
        )
        store.restart()
        eventually(lambda: backend.batch_exists(hashes(4)) == 4)
        assert backend.batch_get_v1(hashes(4), indices(10, 11, 12, 13)) == [True] * 4
        assert all(torch.equal(kept.page(10 + at), kept.page(at)) for at in range(4))
        backend.close()


def test_prefetch_and_backup_at_once(store: ServedStore) -> None:
    kept, read, wrong = HostPool(seed=5), HostPool(), []
    writer, reader = made(store, kept), made(store, read)

    def prefetch() -> None:
        for _ in range(40):
            found = reader.batch_get_v1(hashes(16), indices(*range(16)))
            wrong.extend(at for at, has in enumerate(found) if has and not torch.equal(read.page(at), kept.page(at)))

    thread = threading.Thread(target=prefetch)
    thread.start()
    for _ in range(20):
        assert writer.batch_set_v1(hashes(16), indices(*range(16))) == [True] * 16
        writer.clear()
    thread.join()
    assert wrong == []
    writer.close()
    reader.close()


def test_configurations_that_cannot_be(store: ServedStore) -> None:
    with pytest.raises(UserError, match="no store is named"):
        MemserveHiCache(config_of(store, extra_config={"backend_name": "memserve"}), {})
    with pytest.raises(UserError, match="no heads apart"):
        MemserveHiCache(config_of(store, should_split_heads=True, tp_lcm_size=4), {})


def test_sglang_loads_it(store: ServedStore) -> None:
    factory = pytest.importorskip("sglang.srt.mem_cache.storage.backend_factory", reason="SGLang is not installed")
    kept = HostPool(seed=3)
    backend = factory.StorageBackendFactory.create_backend("dynamic", config_of(store), kept)
    backend.register_mem_pool_host(kept)
    backend.on_host_pools_registered()
    assert backend.batch_set_v1(hashes(2), indices(0, 1)) == [True] * 2 and backend.batch_exists(hashes(3)) == 2
    backend.close()

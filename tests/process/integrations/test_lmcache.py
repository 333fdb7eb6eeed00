"""MemserveL2 as LMCache's controllers use it: tasks, event descriptors, bitmaps; beside a real store."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_doubles import engines
from engine_world import PAGE_BYTES, flip_byte, options_of, pages
from memserve import UserError
from served_store import ServedStore
from waiting import eventually

with engines():
    from lmcache.v1.distributed.api import ObjectKey

    from memserve.integrations.lmcache import MemserveL2

WAIT_MS = 60_000


class Memory:
    """What the adapter asks of LMCache's `MemoryObj`, over a row of an array."""

    def __init__(self, row: NDArray[np.uint8], dtype: str = "torch.bfloat16", shape: tuple[int, ...] = (2, 30)) -> None:
        self.row, self.used, self.data_ptr = row, row.nbytes, row.ctypes.data
        self.metadata = SimpleNamespace(shape=shape, shapes=[shape], dtype=dtype, dtypes=[dtype], fmt="KV_2LTD")

    def get_size(self) -> int:
        return self.used


class Listener:
    """LMCache's accounts."""

    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            self.stored[key] = self.stored.get(key, 0) + size

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any], *sizes: Any) -> None:
        self.deleted += keys


def keys_of(count: int, model: str = "m", rank: int = 0, salt: str = "") -> list[Any]:
    return [ObjectKey(at.to_bytes(16, "big"), model, rank, 0, salt) for at in range(count)]


def memories(array: NDArray[np.uint8], **named: Any) -> list[Memory]:
    return [Memory(row, **named) for row in array]


def wait(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    assert poller.poll(WAIT_MS), "no event came"
    os.eventfd_read(descriptor)


def store_all(adapter: MemserveL2, keys: list[Any], objects: list[Memory]) -> Any:
    number = adapter.submit_store_task(keys, objects)
    done: dict[int, Any] = {}
    while number not in done:
        wait(adapter.get_store_event_fd())
        done |= adapter.pop_completed_store_tasks()
    return done[number]


def look_up(adapter: MemserveL2, keys: list[Any]) -> list[bool]:
    number = adapter.submit_lookup_and_lock_task(keys, {})
    while (bitmap := adapter.query_lookup_and_lock_result(number)) is None:
        wait(adapter.get_lookup_and_lock_event_fd())
    assert adapter.query_lookup_and_lock_result(number) is None, "a result is told once"
    adapter.submit_unlock(keys)
    return [bool(bitmap.test(at)) for at in range(len(keys))]


def load(adapter: MemserveL2, keys: list[Any], objects: list[Memory]) -> list[bool]:
    number = adapter.submit_load_task(keys, objects)
    while (bitmap := adapter.query_load_result(number)) is None:
        wait(adapter.get_load_event_fd())
    return [bool(bitmap.test(at)) for at in range(len(keys))]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB") as store:
        yield store


@pytest.fixture
def adapter(store: ServedStore) -> Iterator[MemserveL2]:
    adapter = MemserveL2(options_of(store), l1_memory_desc=None)
    yield adapter
    adapter._pool.clear(b"lmcache/")
    adapter.close()


def test_store_look_up_and_load(adapter: MemserveL2) -> None:
    listener, keys, kept = Listener(), keys_of(40), pages(40)
    adapter.register_listener(listener)
    assert look_up(adapter, keys) == [False] * 40
    result = store_all(adapter, keys, memories(kept))
    assert result.is_successful() and int(result) == kept.nbytes
    assert look_up(adapter, [*keys, *keys_of(1, "other")]) == [True] * 40 + [False]
    read = np.zeros_like(kept)
    assert load(adapter, keys, memories(read)) == [True] * 40 and (read == kept).all()
    assert listener.stored == dict.fromkeys(keys, PAGE_BYTES) and listener.accessed == keys
    assert int(store_all(adapter, keys, memories(kept))) == 0, "nothing was new"
    assert sum(listener.stored.values()) == kept.nbytes
    adapter.delete([*keys[:3], *keys_of(1, "other")])
    assert listener.deleted == keys[:3] and look_up(adapter, keys[:4]) == [False, False, False, True]
    assert adapter.report_status()["is_healthy"]


def test_the_three_descriptors_differ(adapter: MemserveL2) -> None:
    told = [adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()]
    assert len(set(told)) == 3


@pytest.mark.parametrize("others", [{"model": "n"}, {"rank": 1}, {"salt": "tenant"}])
def test_models_ranks_and_salts_do_not_meet(adapter: MemserveL2, others: dict[str, Any]) -> None:
    kept, read = pages(3), np.zeros((3, PAGE_BYTES), np.uint8)
    assert store_all(adapter, keys_of(3), memories(kept)).is_successful()
    assert look_up(adapter, keys_of(3, **others)) == [False] * 3
    assert load(adapter, keys_of(3, **others), memories(read)) == [False] * 3 and not read.any()


def test_object_with_one_shape(adapter: MemserveL2) -> None:
    """As `lmcache bench l2` makes them."""
    kept, read = pages(1), np.zeros((1, PAGE_BYTES), np.uint8)
    objects = [*memories(kept), *memories(read)]
    for one in objects:
        one.metadata.shapes = one.metadata.dtypes = None
    assert store_all(adapter, keys_of(1), objects[:1]).is_successful()
    assert load(adapter, keys_of(1), objects[1:]) == [True] and (read == kept).all()


@pytest.mark.parametrize("others", [{"dtype": "torch.float16"}, {"shape": (30, 2)}])
def test_an_object_of_another_layout_is_a_miss(adapter: MemserveL2, others: dict[str, Any]) -> None:
    """LMCache's key says nothing of it."""
    kept, read = pages(2), np.zeros((2, PAGE_BYTES), np.uint8)
    assert store_all(adapter, keys_of(2), memories(kept)).is_successful()
    assert load(adapter, keys_of(2), memories(read, **others)) == [False] * 2


def test_a_serialized_object_is_shorter_than_its_buffer(adapter: MemserveL2) -> None:
    kept, read = pages(1), np.zeros((1, PAGE_BYTES), np.uint8)
    short = memories(kept)
    short[0].used = 10_000
    assert int(store_all(adapter, keys_of(1), short)) == 10_000
    assert load(adapter, keys_of(1), memories(read)) == [True] and (read[0, :10_000] == kept[0, :10_000]).all()


def test_a_damaged_object_is_a_miss(store: ServedStore, adapter: MemserveL2) -> None:
    kept, read = pages(3, seed=11), np.zeros((3, PAGE_BYTES), np.uint8)
    assert store_all(adapter, keys_of(3), memories(kept)).is_successful()
    assert flip_byte(store, kept[1, 900:964].tobytes())
    assert load(adapter, keys_of(3), memories(read)) == [True, False, True]
    assert look_up(adapter, keys_of(3)) == [True, False, True]


def test_oversized_object_fails_alone(adapter: MemserveL2) -> None:
    listener, large = Listener(), np.zeros((1, 65 << 20), np.uint8)
    adapter.register_listener(listener)
    keys = keys_of(2)
    result = store_all(adapter, keys, [*memories(large), *memories(pages(1))])
    assert not result.is_successful() and listener.stored == {keys[1]: PAGE_BYTES}
    assert look_up(adapter, keys) == [False, True]


def test_both_controllers_at_once(adapter: MemserveL2) -> None:
    kept, wrong = pages(60), []

    def prefetch() -> None:
        for _ in range(30):
            read = np.zeros((60, PAGE_BYTES), np.uint8)
            found = load(adapter, keys_of(60), memories(read))
            if any(has and (read[at] != kept[at]).any() for at, has in enumerate(found)):
                wrong.append(found)

    thread = threading.Thread(target=prefetch)
    thread.start()
    for _ in range(10):
        assert store_all(adapter, keys_of(60), memories(kept)).is_successful()
        adapter.delete(keys_of(60)[::2])
    thread.join()
    assert wrong == []


def test_a_store_that_dies_in_between(tmp_path: Path) -> None:
    with ServedStore(tmp_path, dram="64MiB") as store:
        adapter = MemserveL2(options_of(store, timeout_s=1.0))
        kept, read = pages(5), np.zeros((5, PAGE_BYTES), np.uint8)
        assert store_all(adapter, keys_of(5), memories(kept)).is_successful()
        store.kill()
        assert not store_all(adapter, keys_of(5, "late"), memories(kept)).is_successful()
        assert load(adapter, keys_of(5, "late"), memories(read)) == [False] * 5
        assert not adapter.report_status()["is_healthy"]
        store.restart()
        eventually(lambda: adapter.report_status()["is_healthy"])
        assert load(adapter, keys_of(5), memories(read)) == [True] * 5 and (read == kept).all()
        adapter.close()


@pytest.mark.parametrize("given", [None, {}, {"pool": "h:1", "address": "h:1"}])
def test_parameters_that_cannot_be(given: Any) -> None:
    with pytest.raises(UserError):
        MemserveL2(given)


def test_lmcache_loads_it(store: ServedStore) -> None:
    adapters = pytest.importorskip("lmcache.v1.distributed.l2_adapters", reason="LMCache is not installed")
    plugin = pytest.importorskip("lmcache.v1.distributed.l2_adapters.plugin_l2_adapter", reason="no plugins")
    where = {"module_path": "memserve.integrations.lmcache", "class_name": "MemserveL2"}
    config = plugin.PluginL2AdapterConfig.from_dict({**where, "adapter_params": options_of(store)})
    adapter = adapters.create_l2_adapter(config)
    assert isinstance(adapter, MemserveL2) and adapter.report_status()["is_healthy"]
    adapter.close()

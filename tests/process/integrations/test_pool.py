"""EnginePool beside a real store: what an engine may rely on, whatever happens to the store and to its values."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine_world import PAGE_BYTES, flip_byte, options_of, pages, values_of
from memserve import UserError
from memserve.integrations.store_cache import EnginePool, PoolOptions, Value, name_in, namespace
from memserve.store.client import connection
from served_store import ServedStore
from waiting import eventually

PREFIX = namespace("test", model="m")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB") as store:
        yield store


@pytest.fixture(params=["here", "elsewhere"])
def pool(request: pytest.FixtureRequest, store: ServedStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[EnginePool]:
    """On the store's host; and as from another one, where nothing is mapped."""
    if request.param == "elsewhere":
        monkeypatch.setattr(connection, "this_host", lambda: "another host")
    pool = EnginePool(PoolOptions.from_mapping(options_of(store)))
    yield pool
    assert pool.clear(PREFIX)
    pool.close()


def test_put_value_is_returned(pool: EnginePool) -> None:
    kept, read = pages(100), np.zeros((100, PAGE_BYTES), np.uint8)
    values = values_of(kept, PREFIX)
    names = [value.name for value in values]
    assert pool.exists(names) == [False] * 100 and pool.match_prefix(names) == 0
    assert pool.put_values(values) == [True] * 100 and pool.match_prefix(names) == 100
    assert pool.get_values(values_of(read, PREFIX)) == [True] * 100
    assert (read == kept).all()
    assert pool.status()["hits"] == 100 and pool.status()["stored"] == 100


def test_a_batch_with_a_hole(pool: EnginePool) -> None:
    kept, read = pages(8), np.zeros((8, PAGE_BYTES), np.uint8)
    values = values_of(kept, PREFIX)
    assert pool.put_values([value for at, value in enumerate(values) if at != 5]) == [True] * 7
    names = [value.name for value in values]
    assert pool.match_prefix(names) == 5 and pool.exists(names) == [at != 5 for at in range(8)]
    assert pool.get_values(values_of(read, PREFIX)) == [at != 5 for at in range(8)]
    assert [bool((read[at] == kept[at]).all()) for at in range(8)] == [at != 5 for at in range(8)]


def test_pieces_of_any_length(pool: EnginePool) -> None:
    kept, read = pages(1, nbytes=1000)[0], np.zeros(1000, np.uint8)

    def value(of: np.ndarray) -> Value:
        first = of.ctypes.data
        return Value(name_in(PREFIX, b"odd"), [(first, 1), (first + 1, 0), (first + 1, 700), (first + 701, 299)])

    assert pool.put_values([value(kept)]) == [True] and pool.get_values([value(read)]) == [True]
    assert (read == kept).all()


def test_a_value_that_is_shorter_than_its_buffer(pool: EnginePool) -> None:
    kept, read = pages(1)[0], np.zeros(PAGE_BYTES, np.uint8)
    name = name_in(PREFIX, b"short")
    assert pool.put_values([Value(name, [(kept.ctypes.data, 1000)])]) == [True]
    assert pool.get_values([Value(name, [(read.ctypes.data, PAGE_BYTES)], at_most=True)]) == [True]
    assert (read[:1000] == kept[:1000]).all() and not read[1000:].any()


@pytest.mark.parametrize("other", ["layout", "length", "pieces"])
def test_a_value_of_another_shape_is_a_miss_and_makes_room(pool: EnginePool, other: str) -> None:
    kept, name = pages(1)[0], name_in(PREFIX, b"shape")
    first = kept.ctypes.data
    assert pool.put_values([Value(name, [(first, 4096)], b"bfloat16")]) == [True]
    asked = {
        "layout": Value(name, [(first, 4096)], b"float16"),
        "length": Value(name, [(first, 8192)], b"bfloat16"),
        "pieces": Value(name, [(first, 2048), (first + 2048, 2048)], b"bfloat16"),
    }[other]
    assert pool.get_values([asked]) == [False] and pool.counts["damaged"] == 1
    assert pool.put_values([asked]) == [True] and pool.get_values([asked]) == [True]


def test_oversized_value_is_refused(pool: EnginePool) -> None:
    kept = np.zeros(65 << 20, np.uint8)
    few = pages(2)
    small = values_of(few, PREFIX)
    large = Value(name_in(PREFIX, b"large"), [(kept.ctypes.data, kept.nbytes)])
    assert pool.put_values([small[0], large, small[1]]) == [True, False, True]
    assert pool.get_values([small[0], large, small[1]]) == [True, False, True] and pool.is_up


def test_many_small_values_and_little_staging_memory(store: ServedStore) -> None:
    """Each takes a page of it."""
    pool = EnginePool(PoolOptions.from_mapping(options_of(store, staging_bytes=1 << 20)))
    kept, read = pages(2000, nbytes=100), np.zeros((2000, 100), np.uint8)
    assert all(pool.put_values(values_of(kept, PREFIX))) and all(pool.get_values(values_of(read, PREFIX)))
    assert (read == kept).all() and pool.is_up and pool.clear(PREFIX)
    pool.close()


def test_a_damaged_value_is_a_miss(store: ServedStore) -> None:
    pool = EnginePool(PoolOptions.from_mapping(options_of(store)))
    kept, read = pages(4, seed=7), np.zeros((4, PAGE_BYTES), np.uint8)
    assert pool.put_values(values_of(kept, PREFIX)) == [True] * 4
    assert flip_byte(store, kept[2, 5000:5064].tobytes()) >= 1
    assert pool.get_values(values_of(read, PREFIX)) == [True, True, False, True]
    assert pool.counts["damaged"] == 1
    assert pool.match_prefix([value.name for value in values_of(kept, PREFIX)]) == 2, "it was forgotten"
    assert (
        pool.put_values(values_of(kept, PREFIX)) == [True] * 4
        and pool.get_values(values_of(read, PREFIX)) == [True] * 4
    )
    assert (read == kept).all()
    assert pool.clear(PREFIX)
    pool.close()


def test_namespaces_and_tenants_do_not_meet(store: ServedStore) -> None:
    one, other = (
        EnginePool(PoolOptions.from_mapping(options_of(store))),
        EnginePool(PoolOptions.from_mapping(options_of(store, tenant="b"))),
    )
    kept, read = pages(3), np.zeros((3, PAGE_BYTES), np.uint8)
    theirs = namespace("test", model="another")
    assert theirs != PREFIX and one.put_values(values_of(kept, PREFIX)) == [True] * 3
    assert (
        one.get_values(values_of(read, theirs)) == [False] * 3
        and other.get_values(values_of(read, PREFIX)) == [False] * 3
    )
    assert not read.any()
    others = kept + 1
    assert one.put_values(values_of(others, theirs)) == [True] * 3 and one.clear(PREFIX)
    assert one.match_prefix([value.name for value in values_of(kept, theirs)]) == 3, "only its own was cleared"
    assert one.clear(theirs)
    one.close()
    other.close()


def test_many_threads(store: ServedStore) -> None:
    pool, wrong = EnginePool(PoolOptions.from_mapping(options_of(store, staging_bytes=2 << 20))), []

    def work(seed: int) -> None:
        for turn in range(5):
            kept = pages(20, seed=seed % 4)
            prefix = namespace("test", of=seed % 4)
            if pool.put_values(values_of(kept, prefix)) != [True] * 20:
                wrong.append(("put", seed, turn))
            read = np.zeros_like(kept)
            if pool.get_values(values_of(read, prefix)) != [True] * 20 or not (read == kept).all():
                wrong.append(("get", seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.close()


def test_a_store_that_is_killed_and_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ServedStore(tmp_path, dram="64MiB") as store:
        pool = EnginePool(PoolOptions.from_mapping(options_of(store, timeout_s=1.0)))
        kept, late, read = pages(4), pages(4, seed=2), np.zeros((4, PAGE_BYTES), np.uint8)
        assert pool.put_values(values_of(kept, PREFIX)) == [True] * 4
        store.kill()
        with caplog.at_level(logging.WARNING, "memserve.integrations"):
            for _ in range(20):
                assert pool.put_values(values_of(late, namespace("test", of="new"))) == [False] * 4
                assert pool.get_values(values_of(read, namespace("test", of="never"))) == [False] * 4
        assert not pool.is_up and len(caplog.records) == 1, caplog.text
        store.restart()
        eventually(lambda: pool.is_up)
        assert pool.get_values(values_of(read, PREFIX)) == [True] * 4 and (read == kept).all()
        pool.close()


def test_an_engine_may_start_before_its_store(tmp_path: Path) -> None:
    with ServedStore(tmp_path, dram="64MiB") as store:
        given = options_of(store, timeout_s=5.0)
        store.kill()
        pool = EnginePool(PoolOptions.from_mapping(given))
        kept = pages(2)
        values = values_of(kept, PREFIX)
        assert not pool.is_up and pool.put_values(values) == [False] * 2
        store.restart()
        eventually(lambda: pool.is_up)
        assert pool.put_values(values) == [True] * 2
        pool.close()
        assert pool.put_values(values) == [False] * 2, "it was closed"


def test_values_on_a_disk(tmp_path: Path) -> None:
    """Written behind the memory, which holds a fraction of them; read side by side."""
    with ServedStore(tmp_path, "--ssd", f"{tmp_path}=128MiB", dram="16MiB") as store:
        pool = EnginePool(PoolOptions.from_mapping(options_of(store)))
        kept = pages(48, nbytes=1 << 20)
        values = values_of(kept, PREFIX)
        for at, value in enumerate(values):
            assert pool.put_values([value]) == [True]
            eventually(lambda at=at: store_number(pool, "disk_records") > at)
        read = np.zeros_like(kept)
        found = pool.get_values(values_of(read, PREFIX))
        assert sum(found) == 48 and (read == kept).all()
        pool.close()


def store_number(pool: EnginePool, name: str) -> int:
    assert pool._client is not None
    return pool._client.statistics()[name]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no store is named"),
        ({"pool": "h:1", "adress": "h:1"}, "knows no option 'adress'"),
        ({"pool": "h:1", "timeout_s": "5"}, "timeout_s is '5'"),
        ({"pool": "h:1", "timeout_s": 0}, "timeout_s is 0"),
        ({"pool": 7100}, "pool is 7100"),
    ],
)
def test_options_that_cannot_be(given: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        PoolOptions.from_mapping(given)


def test_wrong_addresses_and_secrets_are_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no address of a store"):
        EnginePool(PoolOptions("nowhere", secret_file=str(tmp_path / "none")))
    with pytest.raises(UserError):
        EnginePool(PoolOptions("127.0.0.1:1", secret_file=str(tmp_path / "none")))


def test_no_model_is_imported() -> None:
    """An engine brings its own torch, or none: what it loads of memserve needs none."""
    told = "import sys; import memserve.integrations.store_cache, memserve.integrations.block_cache; "
    told += "print([name for name in ('torch', 'transformers', 'memserve.api.llm') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"

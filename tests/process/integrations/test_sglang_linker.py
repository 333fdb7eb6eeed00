"""MemserveLinker as SGLang's cache drives it: look-ups, loads layer by layer, offloads; beside a real store."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_doubles import engines
from engine_world import flip_byte, options_of
from memserve import UserError
from served_store import ServedStore
from waiting import eventually

with engines():
    try:
        from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
        from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup
    except ImportError as error:
        pytest.skip(f"this SGLang has no direct linker: {error}", allow_module_level=True)

    from memserve.integrations import sglang_linker
    from memserve.integrations.sglang_linker import MemserveLinker

LAYERS, HEADS, DIM, PAGE, TOKENS = 4, 2, 16, 8, 160


class Rank:
    """K and V of each layer, and a state for each page that only later layers have."""

    def __init__(self, store: ServedStore, monkeypatch: pytest.MonkeyPatch, seed: int = 0, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            whole = torch.randint(1, 30_000, shape, generator=generator, dtype=torch.int16)
            return (whole if seed else torch.zeros_like(whole)).view(torch.bfloat16)

        self.kv = [drawn(TOKENS, HEADS, DIM) for _ in range(2 * LAYERS)]
        self.states = [drawn(TOKENS // PAGE, 96) for _ in range(2)]
        kv = DevicePoolEntry(
            name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=None, components=[self.kv],
            layer_mapping={at: (at, LAYERS + at) for at in range(LAYERS)}, page_size=PAGE, rows_are_pages=False,
        )  # fmt: skip
        swa = DevicePoolEntry(
            name=PoolName.SWA, indices_from_pool=PoolName.SWA, device_pool=None,
            components=[[self.states[0]], [self.states[1]]], layer_mapping={2: 0}, page_size=PAGE, rows_are_pages=True,
        )  # fmt: skip
        pools = [kv, swa] if options.pop("with_states", False) else [kv]
        group = DevicePoolGroup(pools, LAYERS, PAGE)
        monkeypatch.setattr(sglang_linker, "resolve_hybrid_device_pool_group", lambda **given: group)
        params = SimpleNamespace(
            page_size=PAGE, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, tp_cache_group=None,
            attn_tp_cache_group=None, token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
        )  # fmt: skip
        server_args = SimpleNamespace(model_path=options.pop("model", "m"))
        self.linker = MemserveLinker(
            server_args, params, components=set(), extra_config=options_of(store, **options), forward_stream=None
        )

    def page(self, number: int) -> torch.Tensor:
        """Of all layers, as int16."""
        tokens = slice(number * PAGE, (number + 1) * PAGE)
        return torch.stack([one[tokens].view(torch.int16) for one in self.kv])

    def offloaded(self, transfers: list[Any]) -> bool:
        """Queued, and its result."""
        assert self.linker.offload(transfers)
        eventually(lambda: self.linker.num_completed_offloads() == 1)
        return self.linker.pop_completed_offload()

    def loaded(self, rid: str, transfers: list[Any]) -> bool:
        """As SGLang's forward has it: layer after layer is waited for, and the end is asked for afterwards."""
        assert self.linker.load(rid, transfers)
        index = self.linker.start_layer_wise_loading()
        counter = self.linker.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        return self.linker.finish_layer_wise_loading(index)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store"), dram="256MiB") as store:
        yield store


@pytest.fixture
def ranks(store: ServedStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank]]:
    both = Rank(store, monkeypatch, seed=3), Rank(store, monkeypatch)
    yield both
    for rank in both:
        rank.linker.close()
    with store.client() as client:
        client.purge(everything=True)


def indices(*numbers: int) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE) + PAGE * number for number in numbers])


def keys(count: int) -> list[str]:
    return [f"{at:064x}" for at in range(count)]


def kv(count: int, *pages: int) -> list[Any]:
    return [PoolTransfer(name=PoolName.KV, device_indices=indices(*pages) if pages else None, keys=keys(count))]


def test_pages_come_layer_by_layer_into_other_slots(ranks: tuple[Rank, Rank]) -> None:
    writer, reader = ranks
    assert reader.linker.lookup("r", kv(6)) == []
    assert writer.offloaded(kv(6, *range(6)))
    assert reader.linker.lookup("r2", kv(8)) == [1, 2, 3, 4, 5, 6]
    assert reader.loaded("r2", kv(6, *range(15, 9, -1)))
    for at in range(6):
        assert torch.equal(reader.page(15 - at), writer.page(at))
    assert not reader.page(0).any()


def test_only_the_mapped_layers_move_at_a_time(ranks: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = ranks
    assert writer.offloaded(kv(2, 0, 1))
    load_layer, seen = sglang_linker.load_layer, list[list[bool]]()

    def noted(entry: Any, rows: Any, views: Any, layer: int, threads: int) -> None:
        load_layer(entry, rows, views, layer, threads)
        seen.append([bool(one[:PAGE].any()) for one in reader.kv[:LAYERS]])

    monkeypatch.setattr(sglang_linker, "load_layer", noted)
    assert reader.linker.lookup("r", kv(2)) == [1, 2] and reader.loaded("r", kv(2, 0, 1))
    assert seen == [[at <= layer for at in range(LAYERS)] for layer in range(LAYERS)]


def test_damage_is_found_before_a_promise(store: ServedStore, ranks: tuple[Rank, Rank]) -> None:
    writer, reader = ranks
    assert writer.offloaded(kv(5, *range(5)))
    assert flip_byte(store, writer.kv[2][3 * PAGE : 4 * PAGE].view(torch.uint8).numpy().tobytes()[:64]) >= 1
    assert reader.linker.lookup("r", kv(5)) == [1, 2, 3]
    assert reader.loaded("r", kv(3, 0, 1, 2))


def test_damage_after_a_promise_fails_the_load(store: ServedStore, ranks: tuple[Rank, Rank]) -> None:
    writer, reader = ranks
    assert writer.offloaded(kv(2, 0, 1))
    assert reader.linker.lookup("r", kv(2)) == [1, 2]
    assert flip_byte(store, writer.kv[5][:PAGE].view(torch.uint8).numpy().tobytes()[:64]) >= 1
    assert not reader.loaded("r", kv(2, 4, 5))


def test_lookup_result_survives_the_store(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServedStore(tmp_path_factory.mktemp("dies")) as store:
        writer, reader = (Rank(store, monkeypatch, seed=seed, timeout_s=1.0) for seed in (3, 0))
        assert writer.offloaded(kv(4, *range(4)))
        assert reader.linker.lookup("r", kv(4)) == [1, 2, 3, 4]
        store.kill()
        assert reader.loaded("r", kv(4, *range(4)))
        assert all(torch.equal(reader.page(at), writer.page(at)) for at in range(4))
        assert not writer.offloaded(kv(5, *range(5))), "it is not told that the store has it"
        for rank in (writer, reader):
            rank.linker.close()


def test_load_without_lookup_fails(ranks: tuple[Rank, Rank]) -> None:
    writer, reader = ranks
    assert writer.offloaded(kv(2, 0, 1))
    assert not reader.linker.load("never looked up", kv(2, 0, 1))
    assert reader.linker.start_layer_wise_loading() == -1
    for number in range(100):
        assert reader.linker.lookup(f"r{number}", kv(2)) == [1, 2]
    assert not reader.linker.load("r0", kv(2, 0, 1)), "too many came after it"
    assert reader.linker.load("r99", kv(2, 0, 1))
    with pytest.raises(RuntimeError, match="queued already"):
        reader.linker.load("r99", kv(2, 0, 1))
    assert reader.linker.cancel_queued_load("r99") and not reader.linker.cancel_queued_load("r99")
    assert reader.linker.start_layer_wise_loading() == -1
    reader.linker.reset()
    assert reader.linker.num_completed_offloads() == 0


def test_states_that_exist_at_some_boundaries_only(store: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Rank(store, monkeypatch, seed=3, with_states=True)
    reader = Rank(store, monkeypatch, with_states=True)

    def both(count: int, pages: list[int], states: list[int]) -> list[Any]:
        some = [keys(8)[at] for at in states]
        swa = PoolTransfer(
            name=PoolName.SWA, device_indices=indices(*states), keys=some, hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        return [*kv(count, *pages), swa]

    assert writer.offloaded(both(6, [*range(6)], [2, 5]))
    wanted = both(6, [], [5])
    assert reader.linker.lookup("r", wanted) == [3, 6]
    assert reader.loaded("r", both(6, [*range(6)], [5]))
    assert torch.equal(reader.page(5), writer.page(5))
    for mine, theirs in zip(reader.states, writer.states, strict=True):
        assert torch.equal(mine[5].view(torch.int16), theirs[5].view(torch.int16)) and not mine[2].any()
    for rank in (writer, reader):
        rank.linker.close()


def test_models_do_not_meet_and_options_are_read(store: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, other = Rank(store, monkeypatch, seed=3), Rank(store, monkeypatch, model="n")
    assert writer.offloaded(kv(2, 0, 1))
    assert other.linker.lookup("r", kv(2)) == []
    for rank in (writer, other):
        rank.linker.close()
    with pytest.raises(UserError, match="knows no option"):
        Rank(store, monkeypatch, colour="red")

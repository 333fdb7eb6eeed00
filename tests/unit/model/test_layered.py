"""KV that lies by layer: whatever lies where, the tokens are those of KV that lies whole."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
import torch

from geometries import SHAPES
from memserve import _core
from memserve.base.errors import InvariantError
from memserve.base.types import KVGeometry, Tier
from memserve.instance.events import MovePages, PlaceByLayer
from memserve.model.attention.backends import _warn_of_reference, choose_backend
from memserve.model.copier import Copy, PageCopier
from tiny_models import FAMILIES, Driver, greedy_answers, loaded, prompt, sequence, tiny_module

LAYERS = 3
"""Of the tiny models."""
KEPT_MAX = 4


class Blocks:
    """Hands out HBM and DRAM blocks of a device in random order."""

    def __init__(self, rng: random.Random, driver: Driver) -> None:
        self.hbm, self.dram = (rng.sample(range(count), count) for count in (driver.blocks, driver.dram_blocks))
        self._layers = driver.geometry.num_layers

    def frames(self, entries: int) -> list[int]:
        return [self.hbm.pop() for _ in range(-(-entries // self._layers))]


def keep(layers: int, order: PlaceByLayer, tier: Tier, sources: Sequence[int]) -> MovePages:
    """Page by page from whole blocks ``sources`` into the frames of the kept layers."""
    src, dst = [], []
    for layer, frames in order.resident_layers.items():
        for entry, source in enumerate(sources):
            src.append(source * layers + layer)
            dst.append(frames[entry // layers] * layers + entry % layers)
    return MovePages(tier, Tier.HBM, src, dst)


def spill(layers: int, blocks: Sequence[int], dram_blocks: Sequence[int]) -> MovePages:
    """Whole blocks to DRAM."""
    src, dst = ([block * layers + layer for block in some for layer in range(layers)] for some in (blocks, dram_blocks))
    return MovePages(Tier.HBM, Tier.DRAM, src, dst)


def some_layers(rng: random.Random, layers: int) -> list[int]:
    """Layers to keep: any number of a few."""
    return sorted(rng.sample(range(layers), rng.randrange(min(layers, KEPT_MAX) + 1)))


def decoded(driver: Driver, rng: random.Random, lengths: Sequence[int], count: int, kept: Sequence[int] | None) -> list:
    """Greedy tokens of several prompts. Their full blocks lie by layer as soon as they are computed, with the layers
    ``kept``; None: others in every step, brought there out of DRAM."""
    blocks, layers, block_tokens = Blocks(rng, driver), driver.geometry.num_layers, driver.geometry.block_tokens
    tokens = [prompt(length, seed) for seed, length in enumerate(lengths)]
    drawn: list[list[int]] = [[] for _ in lengths]
    state: list[tuple[list[int], list[int]]] = []
    for slot, some in enumerate(tokens):
        table = [blocks.hbm.pop() for _ in range(-(-(len(some) + count) // block_tokens))]
        state.append((table, [blocks.dram.pop() for _ in range((len(some) - 1) // block_tokens)]))
        driver.step([(slot, 0, len(some) - 1, ())], open=[sequence(slot, some, table)])
    arena = np.frombuffer(driver.device.shared_arenas[Tier.HBM], np.uint8).reshape(driver.blocks, -1)
    place: list[PlaceByLayer] = []
    for step in range(count):
        if step == 0 or kept is None:
            for order in place:
                for frames in [*order.resident_layers.values(), *order.staging]:
                    blocks.hbm[:0] = frames
            place = []
            for slot, (_, dram) in enumerate(state):
                some = some_layers(rng, layers) if kept is None else kept
                frames = {layer: blocks.frames(len(dram)) for layer in some}
                place.append(PlaceByLayer(slot, 0, dram, frames, (blocks.frames(len(dram)), blocks.frames(len(dram)))))
            if step == 0:  # out of the whole blocks, which are garbage afterwards
                moves = [spill(layers, table[: len(dram)], dram) for table, dram in state]
                moves += [
                    keep(layers, order, Tier.HBM, table[: len(dram)])
                    for order, (table, dram) in zip(place, state, strict=True)
                ]
                driver.step(moves=moves)
                for table, dram in state:
                    arena[table[: len(dram)]] = 255
            else:
                driver.step(
                    moves=[keep(layers, order, Tier.DRAM, dram) for order, (_, dram) in zip(place, state, strict=True)]
                )
        rows = [(slot, len(tokens[slot]) - 1 + step, 1, (slot,)) for slot in range(len(state))]
        for slot, token in enumerate(driver.step(rows, place=place).tokens):
            drawn[slot].append(token)
    return drawn


@cache
def whole(name: str, lengths: Sequence[int], count: int) -> list[list[int]]:
    """Greedy tokens of prompts of these lengths, by the own eager path of a family or of a real geometry's model,
    which knows no blocks."""
    module = SHAPES[name].module() if name in SHAPES else tiny_module(name)
    return greedy_answers(module, [prompt(length, seed) for seed, length in enumerate(lengths)], count)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


def device(module: object, kv_dtype: str = "auto", **options: object) -> Driver:
    return Driver(loaded(module, kv_dtype=kv_dtype), blocks=200, dram_blocks=40, shared=True, **options)


@pytest.fixture(params=SHAPES)
def real(request: pytest.FixtureRequest) -> Iterator[tuple[str, Driver]]:
    """The name of a real geometry, and a device with a model of it and little memory: blocks have up to 16 MiB."""
    shape = SHAPES[request.param]
    driver = Driver(loaded(shape.module(), block_tokens=shape.kv.block_tokens), blocks=24, dram_blocks=6, shared=True)
    yield request.param, driver
    driver.device.close()


@pytest.mark.parametrize("kept", [[], [0], [1], [2], [0, 2], [0, 1, 2], None])
def test_tokens_do_not_depend_on_where_layers_lie(kept: list[int] | None, rng: random.Random) -> None:
    """Prompts of one block to seven, some of which lie whole; every set of kept layers, or another one in each step."""
    lengths = (200, 40, 131, 20, 65)
    assert decoded(device(tiny_module("llama")), rng, lengths, 6, kept) == whole("llama", lengths, 6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_its_layers_from_anywhere(family: str, rng: random.Random) -> None:
    """Windows, caps and sinks are a layer's own: they must meet the right pages."""
    lengths = (150, 70)
    assert decoded(device(tiny_module(family)), rng, lengths, 4, None) == whole(family, lengths, 4)


def test_real_geometries_read_their_layers_from_anywhere(real: tuple[str, Driver], rng: random.Random) -> None:
    """More layers than a sequence has blocks: a frame has room that it does not need."""
    name, driver = real
    assert decoded(driver, rng, (140, 70), 2, None) == whole(name, (140, 70), 2)


def rounded_whole(driver: Driver, lengths: Sequence[int], count: int, kept: Sequence[int]) -> list[list[int]]:
    """As :func:`decoded` with KV that lies whole; of layers that are not ``kept`` it has been down in DRAM and up."""
    free, drawn = list(range(200)), []
    for slot, length in enumerate(lengths):
        some, complete = prompt(length, slot), (length - 1) // driver.geometry.block_tokens
        table = [free.pop() for _ in range(-(-(length + count) // driver.geometry.block_tokens))]
        driver.step([(slot, 0, length - 1, ())], open=[sequence(slot, some, table)])
        layers = [layer for layer in range(LAYERS) if layer not in kept]
        above = [block * LAYERS + layer for block in table[:complete] for layer in layers]
        below = [at * LAYERS + layer for at in range(complete) for layer in layers]
        driver.step(moves=[MovePages(Tier.HBM, Tier.DRAM, above, below)])
        driver.step(moves=[MovePages(Tier.DRAM, Tier.HBM, below, above)])
        drawn.append(driver.decode(slot, length - 1, count))
    return drawn


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("kept", [[], [1], None])
def test_layers_of_codes_pass_as_they_are(kept: list[int] | None, kv_dtype: str, rng: random.Random) -> None:
    """A page is a page, whatever is in it."""
    lengths = [200, 40, 131, 20, 65]
    expected = rounded_whole(device(tiny_module("llama"), kv_dtype), lengths, 6, range(LAYERS))
    assert decoded(device(tiny_module("llama"), kv_dtype), rng, lengths, 6, kept) == expected


@pytest.mark.parametrize("lower", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kept", [[], [1], [0, 2], [0, 1, 2]])
def test_layers_that_pass_are_rounded_once_and_kept_ones_are_not(
    kept: list[int], lower: str, rng: random.Random
) -> None:
    """However often a layer is read back, and whichever way its pages took."""
    lengths = [200, 40, 131, 20, 65]
    expected = rounded_whole(device(tiny_module("llama"), lower_dtype=lower), lengths, 6, kept)
    driver = device(tiny_module("llama"), lower_dtype=lower)
    assert decoded(driver, rng, lengths, 6, kept) == expected
    assert set(driver.device.shared_arenas) == {Tier.HBM}, "peers cannot read rounded pages"


def computed_by_layer(driver: Driver, rng: random.Random, lengths: Sequence[int], count: int) -> list[list[int]]:
    """Greedy tokens of prompts that are computed where they lie: in pieces of any length, with any layers kept. Neither
    DRAM nor HBM has anything of use before."""
    blocks, layers, block_tokens = Blocks(rng, driver), driver.geometry.num_layers, driver.geometry.block_tokens
    arenas = {tier: np.frombuffer(driver.device.shared_arenas[tier], np.uint8) for tier in (Tier.HBM, Tier.DRAM)}
    for arena in arenas.values():
        arena[:] = 255
    drawn: list[list[int]] = []
    for slot, length in enumerate(lengths):
        tokens, complete = prompt(length, slot), length // block_tokens
        table = [0] * complete + [blocks.hbm.pop() for _ in range(-(-(length + count) // block_tokens) - complete)]
        kept = {layer: blocks.frames(complete) for layer in some_layers(rng, layers)}
        dram = [blocks.dram.pop() for _ in range(complete)]
        place = [PlaceByLayer(slot, 0, dram, kept, (blocks.frames(complete), blocks.frames(complete)))] if dram else []
        opened, start = [sequence(slot, tokens, table)], 0
        while start < length:
            end = min(length, start + rng.choice((1, 7, 32, 33, 64, 200)))
            draws = (slot,) if end == length else ()
            answer = driver.step([(slot, start, end - start, draws)], open=opened, place=place)
            start, opened, place = end, [], []
        drawn.append([*answer.tokens])
    for step in range(count - 1):
        rows = [(slot, length + step, 1, (slot,)) for slot, length in enumerate(lengths)]
        for slot, token in enumerate(driver.step(rows).tokens):
            drawn[slot].append(token)
    return drawn


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_prompts_are_computed_where_they_lie(family: str, seed: int) -> None:
    lengths = (200, 64, 131, 20, 65)
    assert computed_by_layer(device(tiny_module(family)), random.Random(seed), lengths, 4) == whole(family, lengths, 4)


def test_prompts_of_real_geometries_are_computed_in_place(real: tuple[str, Driver], rng: random.Random) -> None:
    name, driver = real
    assert computed_by_layer(driver, rng, (140, 70), 2) == whole(name, (140, 70), 2)


def test_places_must_exist(rng: random.Random) -> None:
    driver = device(tiny_module("llama"))
    driver.step([(0, 0, 64, ())], open=[sequence(0, prompt(80, 1), [0, 1, 2])])
    with pytest.raises(InvariantError, match="no table entry"):
        driver.step(place=[PlaceByLayer(0, 2, [3, 4], {}, ([5], [6]))])
    with pytest.raises(IndexError, match="40 blocks"):
        driver.step(place=[PlaceByLayer(0, 0, [3, 40], {}, ([5], [6]))])
    with pytest.raises(IndexError, match="200 blocks"):
        driver.step(moves=[MovePages(Tier.HBM, Tier.DRAM, [200 * LAYERS], [0])])


def test_an_error_of_a_copy_fails_the_step_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("the link is down")

    driver = device(tiny_module("llama"))
    driver.step([(0, 0, 64, ())], open=[sequence(0, prompt(80, 1), [0, 1, 2])])
    monkeypatch.setattr(_core, "copy_blocks", fails)
    with pytest.raises(OSError, match="link is down"):
        driver.step([(0, 64, 16, (0,))], place=[PlaceByLayer(0, 0, [3, 4], {}, ([5], [6]))])
    driver.device.close()


class Noted(threading.Event):
    """Notes when it is set."""

    def __init__(self, order: list[int], number: int) -> None:
        super().__init__()
        self._order, self._number = order, number

    def set(self) -> None:
        self._order.append(self._number)
        super().set()


def test_urgent_copies_go_first_within_link_rate() -> None:
    """4 MB at 100 MB/s take 40 ms; the urgent copy comes after the one that is under way."""
    arena = np.zeros((5, 1_000_000), np.uint8)
    copier = PageCopier(100e6)
    page = [np.array([number], np.int32) for number in range(5)]
    address, order = arena.ctypes.data, list[int]()
    copies = [Copy(address, address, page[0], page[1 + i], 1_000_000, Tier.HBM, Noted(order, i)) for i in range(4)]
    for number, copy in enumerate(copies):
        copier.start_copy(copy, urgent=number == 3)
    for copy in copies:
        copier.wait_for(copy)
    assert order.index(3) <= 1 and sorted(order) == [0, 1, 2, 3]
    used = copier.take_link_use()
    assert used is not None and used.busy_ns >= 39e6 and used.up_bytes == 4_000_000 and not used.down_bytes
    assert copier.take_link_use() is None, "nothing since"
    copier.close()


def test_missing_kernel_is_told_once_not_at_each_step(caplog: pytest.LogCaptureFixture) -> None:
    """Each step by layer chooses anew."""
    geometry = KVGeometry(1, 2, 12, 12, "float32", 32)
    _warn_of_reference.cache_clear()
    for _ in range(3):
        choose_backend(torch.zeros(2 * geometry.block_bytes, dtype=torch.uint8), geometry)
    assert sum("plain torch" in record.message for record in caplog.records) == 1

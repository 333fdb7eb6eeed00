"""Adapters that come and go at one instance: what is loaded, what is told of it, and until when requests may run."""

from __future__ import annotations

import random

import pytest

from instance_world import World, config, request
from memserve.base.types import salt_of
from memserve.instance.adapters import AdapterShelf
from memserve.instance.events import AdapterLoaded, DropAdapter, LoadAdapter
from memserve.protocol.messages import AdapterFiles, AdaptersHeld, HoldAdapters

ONE, TWO = AdapterFiles("one", "/adapters/one", "c0de"), AdapterFiles("two", "/adapters/two", "5a17")


def orders(actions: list[object]) -> list[object]:
    return [action for action in actions if isinstance(action, LoadAdapter | DropAdapter | AdaptersHeld)]


def with_adapter(name: str, files: AdapterFiles, **rest: object) -> object:
    return request(name, [1, 2, 3], salt=salt_of("", files.digest), **rest)


def test_requests_are_refused_until_their_adapter_is_there() -> None:
    world = World(config())
    world.arrive(with_adapter("early", ONE))
    assert "does not have the adapter" in world.rejected["early"].reason
    assert orders(world.post(HoldAdapters((ONE,)))) == [LoadAdapter(ONE)]
    world.arrive(with_adapter("loading", ONE))
    assert "loading" in world.rejected
    assert orders(world.post(AdapterLoaded(ONE.digest))) == [AdaptersHeld((ONE.digest,))]
    world.arrive(with_adapter("late", ONE))
    world.drain()
    assert set(world.rejected) == {"early", "loading"} and ("late", 0) in world.final


def test_adapter_is_dropped_behind_the_last_request() -> None:
    world = World(config())
    world.post(HoldAdapters((ONE, TWO)))
    world.post(AdapterLoaded(ONE.digest))
    world.post(AdapterLoaded(TWO.digest))
    world.arrive(with_adapter("runs", ONE, max_tokens=3))
    assert orders(world.post(HoldAdapters(()))) == [DropAdapter(TWO.digest), AdaptersHeld(())]
    dropped: list[object] = []
    world.post_was, world.post = world.post, lambda event: dropped.extend(found := world.post_was(event)) or found
    world.drain()
    assert orders(dropped) == [DropAdapter(ONE.digest)] and ("runs", 0) in world.final


def test_failure_is_told_once_and_tried_again_when_asked() -> None:
    world = World(config())
    world.post(HoldAdapters((ONE,)))
    failed = AdaptersHeld((), ((ONE.digest, "no such folder"),))
    assert orders(world.post(AdapterLoaded(ONE.digest, "no such folder"))) == [failed]
    assert orders(world.post(HoldAdapters((ONE,)))) == [LoadAdapter(ONE)]
    assert orders(world.post(AdapterLoaded(ONE.digest))) == [AdaptersHeld((ONE.digest,))]


def test_adapters_of_the_start_stay_and_count_as_held() -> None:
    shelf = AdapterShelf(frozenset({ONE.digest}))
    shelf.update_wanted((ONE, TWO))
    assert shelf.take_orders(()) == [LoadAdapter(TWO)] and shelf.take_report() is None
    shelf.on_loaded(AdapterLoaded(TWO.digest))
    assert shelf.take_report() == AdaptersHeld(tuple(sorted((ONE.digest, TWO.digest))))
    shelf.update_wanted(())
    assert shelf.take_orders(()) == [DropAdapter(TWO.digest)] and ONE.digest in shelf
    assert shelf.take_report() == AdaptersHeld(()), "a router that wants nothing is told of nothing"


def test_new_router_is_told_of_all_that_is_held() -> None:
    shelf = AdapterShelf(frozenset())
    shelf.on_router_joined()
    assert shelf.take_report() is None
    shelf.update_wanted((ONE,))
    shelf.on_loaded(AdapterLoaded(ONE.digest))
    shelf.update_wanted(())
    shelf.on_router_joined()  # while a request still runs with it
    assert shelf.take_orders((ONE.digest,)) and shelf.take_report() == AdaptersHeld((ONE.digest,))


@pytest.mark.parametrize("seed", range(5))
def test_device_and_shelf_agree_whatever_is_wanted(seed: int) -> None:
    """A device that does what it is told has in the end what was wanted last, and never drops what is used."""
    rng, shelf = random.Random(seed), AdapterShelf(frozenset())
    every = [AdapterFiles(f"a{number}", "/a", f"{number}") for number in range(4)]
    held: set[str] = set()
    loading: list[str] = []
    used: set[str] = set()
    wanted: set[str] = set()
    for step in range(400):
        ends = step > 360
        match "load" if ends else rng.choice(["want", "load", "use", "end"]):
            case "want":
                chosen = rng.sample(every, rng.randrange(4))
                wanted = {files.digest for files in chosen}
                shelf.update_wanted(chosen)
            case "load" if loading:
                digest = loading.pop(rng.randrange(len(loading)))
                held.add(digest)
                shelf.on_loaded(AdapterLoaded(digest))
            case "use":
                used = {digest for digest in held if digest in shelf and rng.random() < 0.5}
            case _:
                used = set()
        for order in shelf.take_orders(used):
            if isinstance(order, LoadAdapter):
                assert order.files.digest not in held and order.files.digest not in loading
                loading.append(order.files.digest)
            else:
                assert order.digest in held and order.digest not in used
                held.discard(order.digest)
        assert {digest for digest in held if digest in shelf} == held
    assert held == wanted and not loading

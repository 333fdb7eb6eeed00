"""Which grammars the host builds at a time, whose they are, and which sequences wait for masks."""

from __future__ import annotations

from random import Random

import pytest

from memserve.instance.events import BuildGrammar, ForgetGrammar
from memserve.instance.scheduler.grammar_waits import BUILD_NS, BUILDS_MAX, GrammarWaits, may_have


def orders(waits: GrammarWaits) -> list[str]:
    """What the host is asked for: ``+`` builds, ``-`` forgets."""
    signs = {BuildGrammar: "+", ForgetGrammar: "-"}
    return [signs[type(order)] + order.grammar for order in waits.take_commands()]


def test_grammar_builds_are_fair_to_tenants() -> None:
    """However many it asks for, and however long they take."""
    waits = GrammarWaits(slots=64)
    for at in range(20):
        waits.on_request_opened(("bombs", f"b{at}"), 0)
    assert orders(waits) == ["+b0", "+b1"]
    waits.on_request_opened(("other", "o"), 1)
    assert orders(waits) == ["+o"]
    waits.on_request_opened(("third", "t"), 1)
    assert orders(waits) == ["+t"]
    waits.check_invariants()


def test_a_build_that_ends_makes_room_for_the_next() -> None:
    waits = GrammarWaits(slots=64)
    for at in range(4):
        waits.on_request_opened(("a", f"a{at}"), 0)
    waits.on_request_opened(("b", "b0"), 0)
    assert orders(waits) == ["+a0", "+a1", "+b0"]
    assert waits.on_grammar_built(1, 5) == ("a", "a0") and orders(waits) == ["+a2"]
    waits.on_request_ended(("a", "a1"), 6)  # its client has left while it is built
    assert orders(waits) == ["-a1", "+a3"]
    assert waits.on_grammar_built(2, 7) is None
    assert waits.is_awaited(("a", "a3")) and not waits.is_awaited(("a", "a0"))


def test_tenants_with_one_grammar_build_it_twice() -> None:
    """What one of them does with it concerns the other one in no way."""
    waits = GrammarWaits(slots=64)
    waits.on_request_opened(("a", "same"), 0)
    waits.on_request_opened(("a", "same"), 0)
    waits.on_request_opened(("b", "same"), 0)
    assert orders(waits) == ["+same", "+same"]
    waits.on_request_ended(("a", "same"), 1)
    assert orders(waits) == []
    waits.on_request_ended(("a", "same"), 1)
    assert orders(waits) == ["-same"]


def test_a_grammar_waits_for_a_place_not_for_a_deadline() -> None:
    """The time that a build may take begins when the host begins."""
    waits = GrammarWaits(slots=64)
    for at in range(3):
        waits.on_request_opened(("a", f"a{at}"), 0)
    assert waits.expire_builds(BUILD_NS - 1) == [] and waits.next_deadline_ns == BUILD_NS
    assert waits.expire_builds(BUILD_NS) == [("a", "a0"), ("a", "a1")]
    assert waits.is_awaited(("a", "a2")) and waits.next_deadline_ns == 2 * BUILD_NS
    waits.check_invariants()


def test_built_grammars_of_one_tenant_are_as_many_as_slots() -> None:
    waits = GrammarWaits(slots=2)
    for at in range(5):
        waits.on_request_opened(("a", f"a{at}"), 0)
        waits.on_grammar_built(at + 1, 0)
    assert orders(waits) == ["+a0", "+a1"]
    waits.on_request_opened(("b", "b0"), 0)
    assert orders(waits) == ["+b0"]
    waits.on_request_ended(("a", "a0"), 0)
    assert orders(waits) == ["-a0", "+a2"]


@pytest.mark.parametrize("limit", [1, 4, 7])
def test_the_last_place_is_for_a_tenant_without_one(limit: int) -> None:
    held: list[int] = []
    while may_have(0, sum(held), limit):
        held.append(0)
        while may_have(held[-1], sum(held), limit):
            held[-1] += 1
    assert sum(held) == limit and held == sorted(held, reverse=True) and held[0] == -(-limit // 2)


def test_random_lives_keep_the_books() -> None:
    for seed in range(60):
        random, waits, live, building = Random(seed), GrammarWaits(slots=random_slots(seed)), [], {}
        for now in range(150):
            choice = random.random()
            if choice < 0.5:
                live.append((random.choice("abc"), f"g{random.randrange(8)}"))
                waits.on_request_opened(live[-1], now)
            elif live and choice < 0.75:
                waits.on_request_ended(live.pop(random.randrange(len(live))), now)
            elif building:
                waits.on_grammar_built(building.pop(random.choice(list(building))), now)
            for order in waits.take_commands():
                if isinstance(order, BuildGrammar):
                    building[order.job_id] = order.job_id
                else:
                    building.pop(order.job_id, None)
            waits.check_invariants()
            assert len(building) <= BUILDS_MAX
        for wanted in live:
            waits.on_request_ended(wanted, 999)
        assert not waits.requests_by_grammar() and waits.next_deadline_ns is None


def random_slots(seed: int) -> int:
    return 1 + seed % 5

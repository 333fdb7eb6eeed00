"""The fixed order of routing: session, exact hit, longest prefix, miss with cache fill."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster_world import World, a_request
from memserve.base.types import Caching, Role
from memserve.router.placement.candidates import OVERLOAD_FACTOR, OVERLOAD_TOKENS, Ask, Candidate
from memserve.router.placement.routing import route

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED
PROMPT = list(range(1, 21))


def some(matched: list[int], work: list[int], role: Role = C) -> list[Candidate]:
    return [
        Candidate(k, f"i{k}", role, matched_tokens=tokens, prefill_tokens=busy)
        for k, (tokens, busy) in enumerate(zip(matched, work, strict=True))
    ]


def choice(ask: Ask, candidates: list[Candidate]) -> tuple[int, str]:
    decided = route("affinity", ask, candidates)
    return decided.first.number, decided.reason


def test_each_rule_decides_when_those_before_it_have_no_answer():
    candidates = some(matched=[0, 480, 960, 0], work=[700, 600, 500, 400])
    number, why = choice(Ask(960, favourites=(0,)), candidates)
    assert number == 0 and "session" in why
    number, why = choice(Ask(960), candidates)
    assert number == 2 and "exact hit" in why
    number, why = choice(Ask(991, block_tokens=32), candidates)
    assert number == 2 and "exact hit" in why, "31 tokens are less than a block"
    number, why = choice(Ask(992, block_tokens=32), candidates)
    assert number == 2 and "longest prefix" in why
    number, why = choice(Ask(1920), candidates)
    assert number == 2 and "longest prefix: i2 has 960 of 1920" in why
    number, why = choice(Ask(1920), some(matched=[0, 0, 0], work=[3, 1, 2]))
    assert number == 1 and "miss" in why


def test_affinity_ignores_overloaded_instances():
    busy = OVERLOAD_TOKENS + 1
    number, why = choice(Ask(960, favourites=(0,)), some(matched=[960, 480, 0], work=[busy, 0, 0]))
    assert number == 1 and "longest prefix" in why
    number, why = choice(Ask(960, favourites=(0,)), some(matched=[960, 0, 0], work=[busy, 9, 0]))
    assert number == 2 and "miss" in why


def the_slow_way(ask: Ask, some: list[Candidate]) -> int:
    """The order of C2, one rule after the other."""
    limit = OVERLOAD_FACTOR * min(c.work_tokens for c in some) + OVERLOAD_TOKENS
    fair = [c for c in some if c.work_tokens <= limit]
    rules = [
        [c for c in fair if c.number in ask.favourites],
        [c for c in fair if c.matched_tokens >= ask.prompt_tokens],
        [c for c in fair if c.matched_tokens == max(f.matched_tokens for f in fair) > 0],
        some,
    ]
    answer = next(found for found in rules if found)
    if answer is rules[1]:  # all of them have everything: the one that has a token more has no more
        most = max(c.matched_tokens for c in answer)
        answer = [c for c in answer if c.matched_tokens == most]
    rank = [(c.work_tokens, c.number not in ask.favourites, c.number) for c in answer]
    return min(rank)[-1]


@given(
    st.integers(1, 2000),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 30_000)), min_size=1, max_size=6),
    st.sets(st.integers(0, 6), max_size=2),
)
def test_affinity_equals_its_rules_applied_in_order(prompt, instances, favourites):
    ask = Ask(prompt, favourites=tuple(sorted(favourites)))
    candidates = some([min(matched, prompt) for matched, _ in instances], [work for _, work in instances])
    assert choice(ask, candidates)[0] == the_slow_way(ask, candidates)


def test_a_miss_fills_the_cache_and_the_next_one_is_a_hit():
    """In the cluster: the first request goes by load, its like follows it although others have less to do."""
    world = World([("a", C), ("b", C), ("c", C)], policy="affinity", caching=Caching.PD_CACHING_3)
    reasons, places = [], []
    for name in ("r0", "r1"):
        world.ask(a_request(name, PROMPT))
        world.run()
        story = dict(world.clients[name].outputs[0].story)
        reasons.append(story["route_why"])
        places.append(story["route"])
        world.ask(a_request(f"{name}-other", [40 + k for k in range(12)]))  # somebody else has work at the same place
        world.run()
    assert "miss" in reasons[0] and "exact hit" in reasons[1]
    assert places[0] == places[1]
    world.check_repeatable()


def test_session_affinity_holds_for_prefill_and_decode():
    world = World([("p0", P), ("p1", P), ("d0", D), ("d1", D)], policy="affinity")
    world.ask(a_request("busy", list(range(100)), max_tokens=50))
    world.ask(a_request("one", PROMPT, session="s"))
    world.ask(a_request("two", [7] * 30, session="s"))
    world.run()
    first, second = (dict(world.clients[name].outputs[0].story) for name in ("one", "two"))
    assert first["route"] == second["route"] == "p1 to d1"
    assert "session: p1 knows it; decodes at d1" in second["route_why"]

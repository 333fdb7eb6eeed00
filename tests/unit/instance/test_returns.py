"""When sessions come back, whose KV is kept for them, and which turns wait."""

from __future__ import annotations

from random import Random

import pytest

from instance_world import World, building_worlds, request
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.instance.returns import forecasts, policy
from memserve.instance.returns.forecasts import ReturnForecasts
from memserve.protocol.events import RequestCancelled, ToolCalled

QUICK_NS, SLOW_NS = 500 * NS_PER_MS, 60 * NS_PER_S

worlds = pytest.fixture(params=["real"])(building_worlds)


@pytest.fixture
def make(worlds):
    """Builds a world that keeps what sessions come back to."""
    return lambda **sizes: worlds(**({"keep_tool_prefixes": "auto"} | sizes))


def learnt(gaps_ns, tool="t", tenant="a"):
    histories = ReturnForecasts()
    for gap_ns in gaps_ns:
        histories.learn_gap(tenant, tool, gap_ns)
    return histories


# -- forecasts


def test_quick_tools_are_worth_more_than_slow_ones():
    histories = learnt([QUICK_NS] * 30, "quick")
    for _ in range(30):
        histories.learn_gap("a", "slow", SLOW_NS)
    quick, slow = (histories.forecast_return("a", tool, 0) for tool in ("quick", "slow"))
    assert quick.worth > 10 * slow.worth and quick.wait_ns < slow.wait_ns / 10


def test_overdue_call_is_worth_less_and_due_one_more():
    histories = learnt([QUICK_NS] * 90 + [SLOW_NS] * 10)
    worths = [histories.forecast_return("a", "t", waited).worth for waited in (0, QUICK_NS // 2, 2 * QUICK_NS)]
    assert worths[1] > worths[0] > 10 * worths[2]


def test_sessions_that_never_return_lower_the_chance():
    histories = learnt([QUICK_NS] * 10)
    before = histories.forecast_return("a", "t", 0).chance
    for _ in range(30):
        histories.learn_gap("a", "t", None)
    assert histories.forecast_return("a", "t", 0).chance < 0.5 < before


def test_answers_without_tool_are_not_waited_for_at_first():
    histories = ReturnForecasts()
    assert histories.forecast_return("a", "", 0).chance < policy.KEPT_CHANCE
    assert histories.forecast_return("a", "t", 0).chance > 0.8
    for _ in range(20):
        histories.learn_gap("a", "", SLOW_NS)
    assert histories.forecast_return("a", "", 0).chance > policy.KEPT_CHANCE


def test_unknown_tool_is_like_its_tenants_others():
    histories = learnt([QUICK_NS] * 50, "known")
    unknown, other_tenant = histories.forecast_return("a", "new", 0), histories.forecast_return("b", "new", 0)
    assert unknown.wait_ns <= 2 * QUICK_NS < other_tenant.wait_ns


def test_old_gaps_fade():
    histories = learnt([SLOW_NS] * 500)
    for _ in range(200):
        histories.learn_gap("a", "t", QUICK_NS)
    assert histories.forecast_return("a", "t", 0).wait_ns <= 2 * QUICK_NS


def test_histories_are_bounded(monkeypatch):
    monkeypatch.setattr(forecasts, "CLASSES_MAX", 8)
    histories = ReturnForecasts()
    for number in range(100):
        histories.learn_gap("a", f"tool-{number}", QUICK_NS)
        histories.forecast_return("a", f"tool-{number}", 0)
        histories.forecast_return("b", f"tool-{number}", 0)
    assert len(histories) <= 8 and len(histories._tables) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_worth_is_the_best_ratio_over_all_waits(seed):
    """The table beside the same index over single gaps, each in the middle of its bin."""
    random = Random(seed)
    gaps_ns = [int(random.lognormvariate(0, 1.5) * NS_PER_S) for _ in range(200)]
    table = learnt(gaps_ns)
    counts, absent = table._counts_of("a", "t")
    for waited_ns in (0, NS_PER_S // 2, 3 * NS_PER_S):
        place = forecasts.bin_of(waited_ns)
        begin_ns = forecasts._EDGES_NS[place - 1] if place else 0.0
        best = 0.0
        for edge in range(place, forecasts.BINS):
            wait_ns = forecasts._EDGES_NS[edge] - begin_ns
            returned = spent_ns = 0.0
            for number in range(place, forecasts.BINS):
                rest_ns = forecasts._MIDDLES_NS[number] - begin_ns
                if number == place:
                    rest_ns = max(rest_ns, (forecasts._EDGES_NS[place] - begin_ns) / 2)
                returned += counts[number] * (number <= edge)
                spent_ns += counts[number] * (rest_ns if number <= edge else wait_ns)
            best = max(best, returned / (spent_ns + absent * wait_ns))
        assert table.forecast_return("a", "t", waited_ns).worth == pytest.approx(best)


# -- what an instance keeps


def turn(world: World, name: str, prompt: list[int], tool: str = "t", max_tokens: int = 2, **rest) -> list[int]:
    """One turn to its end; returns the tokens of the session so far."""
    world.arrive(request(name, prompt, max_tokens=max_tokens, **rest))
    if tool:
        world.post(ToolCalled(name, tool))
    world.drain()
    return [*prompt, *world.got[name, 0]]


def prompt_of(session: int, count: int = 14) -> list[int]:
    """No two sessions begin alike."""
    return [(session + place) % 12 if place else session % 12 for place in range(count)]


def kept(world: World) -> list[int]:
    """Arrivals of the requests whose sessions are waited for."""
    return sorted(world.machine.state.returns._kept)


def test_tool_call_keeps_what_the_order_of_last_use_gives_up(make):
    """A session waits for its tool while others fill memory: its next turn is computed from there, without the policy
    from the beginning."""
    reused = {}
    for mode in ("auto", "off"):
        world = make(hbm=16, keep_tool_prefixes=mode)
        session = turn(world, "a1", prompt_of(1))
        for number in range(2, 8):
            turn(world, f"b{number}", prompt_of(number), tool="")
        before = world.machine.stats().cached_tokens
        turn(world, "a2", [*session, 5, 6])
        reused[mode] = world.machine.stats().cached_tokens - before
    assert reused == {"auto": 12, "off": 0}


def test_gap_is_learnt_by_tool_and_told(make):
    world = make(hbm=32)
    session = turn(world, "a1", prompt_of(1), tool="shell")
    world.now += 3 * NS_PER_S
    turn(world, "a2", [*session, 5, 6], tool="shell")
    returns = world.machine.state.returns
    assert returns.forecasts._histories["", "shell"].counts.sum() == 1
    assert "kept_for_return" in world.facts
    counters = world.machine.state.counters
    assert (counters.returned_turns, counters.kept_turns) == (1, 1)


def test_turn_is_found_where_the_answer_is_written_anew(make):
    """A client renders a tool call in words of its own: the next prompt shares the prompt alone. The same prompt sent
    again is no next turn, and nothing is left that is waited for."""
    world = make(hbm=32)
    turn(world, "a1", prompt_of(1, 16), max_tokens=6)
    turn(world, "a2", [*prompt_of(1, 16), 11, 11, 11, 11, 11, 11])
    counters = world.machine.state.counters
    assert (counters.returned_turns, counters.kept_turns) == (1, 1) and kept(world) == [1]
    turn(world, "b1", prompt_of(5, 16))
    turn(world, "b2", prompt_of(5, 16))
    assert counters.returned_turns == 1


def test_several_tools_of_an_answer_are_one_class(make):
    world = make(hbm=32)
    world.arrive(request("a1", prompt_of(1), max_tokens=2))
    for tool in ("read", "write", "read"):
        world.post(ToolCalled("a1", tool))
    world.post(ToolCalled("unknown", "read"))  # it has just ended
    world.drain()
    assert [absence.tool for absence in world.machine.state.returns._absences.values()] == ["read+write"]


def test_session_that_began_later_is_given_up_first(make):
    world = make(hbm=16)
    for number in range(1, 4):
        turn(world, f"a{number}", prompt_of(number))
    assert kept(world) == [0, 1, 2]
    turn(world, "b", prompt_of(7, 34), tool="")
    retained = world.machine.pool.retained
    assert [bool(retained.retained_tokens(f"turn {number}")) for number in range(3)] == [True, True, False]


def test_kept_prefix_never_keeps_a_request_out(make):
    world = make(hbm=8)
    turn(world, "a1", prompt_of(1))
    assert kept(world) == [0]
    turn(world, "b", prompt_of(5, 29), tool="")  # all of the memory
    assert not world.machine.pool.retained.retained_tokens("turn 0")


def test_session_that_does_not_return_is_forgotten(make):
    world = make(hbm=32)
    turn(world, "a1", prompt_of(1))
    world.now += policy.HORIZON_NS
    turn(world, "b1", prompt_of(4))
    returns = world.machine.state.returns
    assert kept(world) == [1] and returns.forecasts._histories["", "t"].absent == 1


def test_absences_are_bounded(make, monkeypatch):
    monkeypatch.setattr(policy, "ABSENCES_MAX", 3)
    world = make(hbm=32)
    for number in range(8):
        turn(world, f"a{number}", prompt_of(number))
    returns = world.machine.state.returns
    assert len(returns._absences) == 3 and len(returns._kept) <= 3
    assert sum(sum(lengths.values()) for lengths in returns._lengths.values()) == 3


def test_policy_turns_off_where_last_use_has_more_and_on_again(make, monkeypatch):
    monkeypatch.setattr(policy, "JUDGED_RETURNS", 4)
    monkeypatch.setattr(policy, "OFF_RETURNS", 2)
    world = make(hbm=32)
    returns = world.machine.state.returns
    returns._next_off = 2
    session = turn(world, "a0", prompt_of(1))
    for number in range(1, 5):
        world.machine.pool.clear_cache()  # what last use would have had is lost: as if the policy had given it up
        session = turn(world, f"a{number}", [*session, number])
        assert returns.is_on == (number < 4)
    assert not kept(world) and world.machine.state.counters.retention_off == 1
    for number in range(5, 7):
        session = turn(world, f"a{number}", [*session, number])
    assert returns.is_on
    world.diary.clear()  # it has more than events in it


def test_room_of_earlier_sessions_is_taken_only_where_it_pays(make, monkeypatch):
    """Two sessions fill memory and wait for their tools, a third request runs: a new session waits while that delays
    others by more than half of what a turn takes."""
    for turn_ns, waits in ((10**3, True), (10**15, False)):
        world = make(hbm=12)
        world.machine.state.returns._turn_ns = turn_ns
        for number in (1, 2):
            turn(world, f"a{number}", prompt_of(number))
        world.machine.state.returns._running = 1.0
        world.arrive(request("long", prompt_of(5, 6), max_tokens=8))
        world.step()
        world.arrive(request("new", prompt_of(7, 22), max_tokens=2))
        for _ in range(3):
            world.step()
        group = world.machine.state.groups["new"]
        assert (group.admitted_ns is None) == waits
        world.drain()
        assert world.machine.state.counters.delayed_turns == waits
        world.diary.clear()  # it has more than events in it


@pytest.mark.parametrize(("gap_ns", "waits"), [(QUICK_NS, True), (SLOW_NS, False)], ids=["quick", "slow"])
def test_turn_waits_for_what_soon_returns_while_nothing_runs(make, gap_ns, waits):
    """Two sessions fill memory. A new one waits if theirs come back sooner than its own prompt is computed, and not
    longer than that takes."""
    world = make(hbm=12)
    returns, caused_ns = world.machine.state.returns, 4 * NS_PER_S
    returns._caused_ns = lambda sequence: caused_ns
    for _ in range(50):
        returns.forecasts.learn_gap("", "t", gap_ns)
    for number in (1, 2):
        turn(world, f"a{number}", prompt_of(number))
    returns._running = 5.0
    world.arrive(request("new", prompt_of(7, 22), max_tokens=2))
    arrived_ns, group = world.now, world.machine.state.groups["new"]
    assert (group.admitted_ns is None) == waits == (world.machine.next_deadline_ns < arrived_ns + NS_PER_S)
    world.drain()
    waited_ns = group.admitted_ns - arrived_ns
    world.diary.clear()  # it has more than events in it
    assert QUICK_NS < waited_ns <= caused_ns if waits else not waited_ns


def test_waits_by_choice_and_for_room_end_beside_each_other(make):
    """Nothing runs; of two requests one leaves room to its tenant's kept sessions, the other has none until pins are
    given up: neither keeps the other from it."""
    world = make(hbm=12)
    returns = world.machine.state.returns
    returns._caused_ns = lambda sequence: 4 * NS_PER_S * (sequence.group.tenant == "a")
    for _ in range(50):
        returns.forecasts.learn_gap("a", "t", QUICK_NS)
    for number in (1, 2):
        turn(world, f"a{number}", prompt_of(number), tenant="a")
    returns._running = 5.0
    world.arrive(request("new", prompt_of(7, 22), max_tokens=2, tenant="a"))
    world.arrive(request("large", prompt_of(9, 40), max_tokens=2, tenant="b"))
    world.drain()
    assert world.final["new", 0] and world.final["large", 0]
    world.diary.clear()  # it has more than events in it


def test_request_with_an_objective_for_ttft_does_not_wait(make):
    world = make(hbm=12)
    world.machine.state.returns._turn_ns = 10**3
    for number in (1, 2):
        turn(world, f"a{number}", prompt_of(number))
    world.machine.state.returns._running = 1.0
    world.arrive(request("long", prompt_of(5, 6), max_tokens=8))
    world.step()
    world.arrive(request("new", prompt_of(7, 22), max_tokens=2, slo_ttft_ns=60 * NS_PER_S))
    assert "new" not in world.machine.state.returns._delays
    world.drain()


def test_cancelled_turn_leaves_nothing_behind(make):
    world = make(hbm=32)
    session = turn(world, "a1", prompt_of(1))
    world.arrive(request("a2", [*session, 5, 6], max_tokens=20))
    world.asked_to_end.add("a2")
    world.post(RequestCancelled("a2"))
    world.drain()
    returns = world.machine.state.returns
    assert not (returns._returned or returns._delays or returns._absences) and not kept(world)

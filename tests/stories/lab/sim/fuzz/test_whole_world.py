"""Clusters in virtual time, by seed: every token exact, nothing leaked, every request ends, whatever goes wrong."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from memserve.base.types import Caching, TransferMode
from memserve.protocol.messages import AnyMessage, Dispatch, Tokens
from memserve.protocol.peers import Peer
from memserve_lab.sim.fuzz.campaign import parse_setting, play, setting_of
from memserve_lab.sim.fuzz.clients import Conversation, Turn
from memserve_lab.sim.fuzz.network import FaultyNetwork
from memserve_lab.sim.fuzz.scenario import MIXES, MS, Forced, Scenario, Setting, draw
from memserve_lab.sim.fuzz.world import World
from memserve_lab.sim.reference.device import OracleDevice

SEEDS = int(os.environ.get("MEMSERVE_TEST_SEEDS", "1"))
"""Scenarios of each setting; ``memserve sim fuzz --seeds 2000`` runs more."""

HERE = "1P1D"


def by_hand(*turns: Turn, mix: str = HERE, hbm: int = 40, context: int = 48, prefix: int = 0, **sizes) -> Scenario:
    """One client, and nothing goes wrong."""
    count = len(MIXES[mix])
    talk = Conversation("c0", "", "", [(3 * i + i * i) % 12 for i in range(prefix)], list(turns), 0)
    setting = Setting(mix=mix, faulty=False)
    return Scenario(
        0, setting, "cost", (hbm,) * count, (0,) * count, context_tokens=context, conversations=[talk], **sizes
    )


def served(scenario: Scenario) -> World:
    world = World(scenario)
    world.run_scenario()
    return world


# -- random scenarios


@pytest.mark.parametrize("faulty", [False, True], ids=["healthy", "faulty"])
@pytest.mark.parametrize("transfer", list(TransferMode))
@pytest.mark.parametrize("caching", list(Caching))
def test_random_scenarios(caching: Caching, transfer: TransferMode, faulty: bool) -> None:
    """Some seeds of every mix of roles at every caching level and transfer mode."""
    for mix in MIXES:
        for seed in range(SEEDS):
            play(seed, Setting(caching, transfer, mix, faulty))


def test_seed_replays_identically() -> None:
    """Else a seed would be no bug report."""
    for mix in ("2P1D", "1P1D1C"):
        first, second = (play(11, Setting(mix=mix), 100_000) for _ in range(2))
        assert list(first.story) == list(second.story)


MANY_SIDED = (5, 14, 20, 22, 27, 12, 17, 19, 13)
"""Seeds in which together everything happens, in a quarter of the time of the first forty."""


def test_the_scenarios_reach_what_they_are_for() -> None:
    """Handoffs, fetches, returns, resumptions, expulsions, corrupted pages: all happen, or nothing was shown."""
    seen: Counter[str] = Counter()
    rare = {"expired", *OF_SEVERAL_ROUTERS}  # leases rarely end; the others have a test of their own
    missing: list[str] = []
    for place, seed in enumerate((*MANY_SIDED, *range(40))):
        if place >= len(MANY_SIDED) and not missing:
            break
        seen.update(
            play(seed, Setting(mix="2P2D" if seed % 2 else "2C"), forced=Forced(layerwise="off")).count_achievements()
        )
        missing = [name for name, count in seen.items() if not count and name not in rare]
    assert not missing, f"never happened: {missing} in {seen}"


OF_SEVERAL_ROUTERS = (
    "followers: sequences shared",
    "followers: attempts refused",
    "followers: outrun",
    "followers: adopted",
    "keyed: adopted",
)


def test_fuzzing_with_three_routers_reaches_their_features() -> None:
    """With three routers; in any weather."""
    seen: Counter[str] = Counter()
    for seed in (14, 39, 58, 63, 80, 125):
        seen.update(play(seed, setting_of(seed), forced=Forced(routers=3)).count_achievements())
    assert all(seen[name] for name in OF_SEVERAL_ROUTERS), seen


@pytest.mark.parametrize(("groups", "count"), [("states", "states: loaded"), ("windows", "windows: given up")])
def test_models_with_cache_groups_in_every_scenario(groups: str, count: str) -> None:
    forced = Forced(groups=groups)
    for seed in range(60):
        scenario = draw(seed, setting_of(seed), forced)
        assert (scenario.states is not None, scenario.windows is not None) == (groups == "states", groups == "windows")
        assert scenario.layered is scenario.shared is scenario.striped is None
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen.update(play(seed, setting_of(seed), forced=forced).count_achievements())
    assert seen[count], seen


def test_disconnected_client_is_not_counted_as_starved() -> None:
    """One of the quiet tenant has its answer, loses its connection, and reads it after the flood of the other one."""
    play(83002623, parse_setting("pd-caching-1/by-request-agg/1C/healthy"))


# -- the referee is awake


def _expect_failure(match: str, scenario: Scenario) -> None:
    with pytest.raises(AssertionError, match=match):
        served(scenario)


def test_unchecked_corrupt_page_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the data port said "fine" to a corrupted page, attention would read it: wrong tokens, or torn layers."""
    pull = OracleDevice.pull_block
    monkeypatch.setattr(OracleDevice, "pull_block", lambda *args, corrupt: pull(*args, corrupt=True) or True)
    _expect_failure("instead of|belong together", by_hand(Turn([1, 2, 3], 0), prefix=20))


def test_a_lost_client_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the router's word to the clients were lost."""
    monkeypatch.setattr(World, "on_output", lambda *_: None)
    _expect_failure("hangs", by_hand(Turn([1, 2, 3], 0)))


def test_a_leak_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(by_hand(Turn([1, 2, 3], 0)))
    monkeypatch.setattr(world, "check_at_rest", lambda: None)
    world.run_scenario()
    monkeypatch.undo()
    world.instances[0].machine.pool.allocate(1)
    with pytest.raises(AssertionError, match="leaked"):
        world.check_at_rest()


def test_messages_of_one_sender_keep_their_order() -> None:
    """The world's network promises what the mailbox does."""
    world = World(by_hand(Turn([1], 0)))
    arrived: list[int] = []
    world.router.receive_message = lambda sender, message: arrived.append(message)
    network: FaultyNetwork = world.network
    ways = network.cut_ways("p0", "router", "hold", both_ways=True)
    for number in range(20):
        network.send_message(world.instances[0].peer, world.router.peer, number)
        if number == 10:
            network.heal_ways(ways, "hold")
    while world.clock.now < 50 * MS:
        world.clock.run_one()
    assert [number for number in arrived if isinstance(number, int)] == list(range(20))


class OneLost(FaultyNetwork):
    """Loses the first message of a kind, once it is told to."""

    lost_ns = 0  # when; -1: not yet

    def lose_first(self, kind: type, when: Callable[[AnyMessage], bool] = lambda message: True) -> None:
        self.sought, self.when, self.lost_ns = kind, when, -1

    def send_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        if self.lost_ns < 0 and isinstance(message, self.sought) and self.when(message):
            self.lost_ns = self.clock.now
        else:
            super().send_message(sender, to, message)


def ends_something(message: AnyMessage) -> bool:
    return any(output.finish_reason is not None for output in message.outputs)


@pytest.mark.parametrize("mix", ["1C", "1P1D", "2P2D"])
@pytest.mark.parametrize("kind", [Dispatch, Tokens])
def test_cost_of_a_lost_message(kind: type, mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatch, or the last word about a request, on a link that stays up: noticed within two heartbeats, at two
    production machines. The patience for an instance that says nothing would be 4 s here."""
    monkeypatch.setattr("memserve_lab.sim.fuzz.world.FaultyNetwork", OneLost)
    world = World(by_hand(Turn([1, 2, 3], 0, max_tokens=6), mix=mix, prefix=12))
    network = world.network
    assert isinstance(network, OneLost)
    network.lose_first(kind, ends_something if kind is Tokens else lambda message: True)
    world.run_scenario()
    ended_ns = world.referee.asks["c0.0"].ended_ns
    assert network.lost_ns > 0 and ended_ns is not None
    assert (ended_ns - network.lost_ns) < 2 * world.member_config.beat_ns + 60 * MS
    assert world.router.machine.stats().counters.attempts_failed == {"lost": 1}


# -- what random scenarios have found


def test_a_beam_search_with_room_for_one_token_stays_where_it_is() -> None:
    """It cannot leave "after its next token"; it ran as its own substitute, which draws one token for nothing."""
    turn = Turn([1], 0, max_tokens=4, n=2, beam_width=3, logprobs=0)
    world = served(by_hand(turn, prefix=46, context=48))
    assert set(world.referee.asks["c0.0"].final) == {0, 1}


def test_beam_search_with_fully_cached_prompt_is_handed_over() -> None:
    """The last prompt token is computed again where the beams are: its block is there, its logits are not."""
    turn = Turn([1], 0, max_tokens=4, n=1, beam_width=2)
    world = served(by_hand(turn, Turn([2, 3], MS, max_tokens=2, beam_width=2), prefix=19))
    assert world.count_achievements()["handed_over"]


@pytest.mark.parametrize(
    ("seed", "setting"),
    [
        # KV that had come by a handoff was swapped out before it was used: it counted as a cached prompt
        (50418, Setting(Caching.OFF, TransferMode.BY_REQUEST, "1P1D")),
        # a JoinAccepted was lost, the member sent no heartbeat, and joined as an incarnation that was taken to be dead
        (11834, Setting(Caching.PD_CACHING_1, TransferMode.BY_REQUEST_AGG, "1P1D")),
        # a beam search with one token to go was replaced by its substitute, which nobody replaced again
        (497, Setting(Caching.PD_CACHING_3, TransferMode.BY_REQUEST_AGG, "2P1D", faulty=False)),
    ],
)
def test_scenarios_that_went_wrong_once(seed: int, setting: Setting) -> None:
    play(seed, setting)

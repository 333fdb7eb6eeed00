"""Which scenarios have clients that name their requests."""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

from memserve.config import AdmissionConfig
from memserve.sim.fuzz.clients import FLOOD, Conversation, Turn
from memserve.types import Admission
from memserve.units import NS_PER_MS

KEYED_SHARE = 0.1
"""Of all scenarios."""
STREAM = "keys 52904"
"""Of the numbers that decide. Its name was chosen so that seeds that tests and the guide name keep their scenarios."""
FOLLOWED_SHARE = 0.08
"""Of all scenarios, those with several routers at once."""
DEATHS = (1, 1, 2, 3)
"""Of routers, in scenarios with faults."""
FOLLOWER_FAULTS = ("follower-kill", "follower-kill", "follower-pause", "follower-cut")
LONG, SLOW_STEP_NS = (24, 40), (3 * NS_PER_MS, 10 * NS_PER_MS)
"""Tokens of answers, and steps, that take long enough for a router to die, and its client to come again, while they are
written."""


class Drawn(Protocol):
    """A scenario, as far as it is drawn."""

    seed: int
    setting: Any
    conversations: list[Conversation]
    faults: list[Any]
    remembers: bool
    keyed: bool
    followers: int
    step_ns: tuple[int, int]
    admission: AdmissionConfig


def put_keys(scenario: Drawn) -> list[int]:
    """Some scenarios have clients with keys; those with faults also have routers that die, and mostly remember. Drawn
    from a stream of its own. Returns when the router dies, in milliseconds."""
    random = Random(f"{scenario.seed}/{scenario.setting}/{STREAM}")
    if random.random() >= KEYED_SHARE or any(fault.kind == "row" for fault in scenario.faults):
        return []
    turns = _name_all(scenario)
    if not scenario.faults:
        return []
    if random.random() < 0.5:  # else they die beside all that goes wrong anyway
        scenario.faults = []
    scenario.remembers = random.random() < 0.85
    if random.random() < 0.5:
        _slow_down(random, scenario, turns)
    return [random.randint(0, random.choice([60, 400])) for _ in range(random.choice(DEATHS))]


def _slow_down(random: Random, scenario: Drawn, turns: list[Turn]) -> None:
    """Requests run for so long that something happens to their router meanwhile."""
    scenario.step_ns = SLOW_STEP_NS
    for turn in turns:
        turn.max_tokens = turn.max_tokens if turn.beam_width else random.choice(LONG)


def _name_all(scenario: Drawn) -> list[Turn]:
    """All requests have keys; none is called off, or has a deadline."""
    scenario.keyed = True
    turns = [turn for conversation in scenario.conversations for turn in conversation.turns]
    for turn in turns:
        turn.cancel_after_ns = turn.lifetime_ns = None
    return turns


def put_followers(scenario: Drawn, routers: int | None) -> list[tuple[str, int, int, int]]:
    """Some scenarios have several routers, and clients with keys, which any of them serves; ``routers``: so many.
    Drawn from a stream of its own. Returns faults of followers: kind, when and for how long (ms), which."""
    random = Random(f"{scenario.seed}/{scenario.setting}/followers")
    is_drawn = random.random() < FOLLOWED_SHARE
    unfit = any(conversation.tenant == FLOOD for conversation in scenario.conversations)
    unfit = unfit or any(fault.kind == "row" for fault in scenario.faults)
    if unfit or routers == 1 or not (is_drawn or routers):
        return []
    scenario.followers = routers - 1 if routers else random.choice([1, 2])
    turns = _name_all(scenario)
    if scenario.setting.weather == "healthy":
        return []
    if random.random() < 0.5:  # else they die beside all that goes wrong anyway
        scenario.faults = [fault for fault in scenario.faults if fault.kind == "router-restart"]
    kinds = random.choices(FOLLOWER_FAULTS, k=random.choice([1, 2, 3]))
    drawn = [(kind, random.randint(0, 400), random.choice([5, 300, 1500]), random.randrange(2)) for kind in kinds]
    if scenario.admission.mode is not Admission.NONE and random.random() < 0.6:
        _slow_down(random, scenario, turns)
        drawn += [("follower-asks", random.randint(0, 100), 2500, which) for which in range(2)]
    return drawn

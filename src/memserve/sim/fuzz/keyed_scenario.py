"""Which scenarios have clients that name their requests."""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

from memserve.sim.fuzz.clients import Conversation

KEYED_SHARE = 0.15
"""Of all scenarios."""
DEATHS = (1, 1, 2, 3)
"""Of routers, in scenarios with faults."""
LONG = (24, 40)
"""Tokens of answers that take long enough for a router to die, and the client to come again, while they are written."""


class Drawn(Protocol):
    """A scenario, as far as it is drawn."""

    seed: int
    setting: Any
    conversations: list[Conversation]
    faults: list[Any]
    remembers: bool
    keyed: bool


def put_keys(scenario: Drawn) -> list[int]:
    """Some scenarios have clients with keys; those with faults also have routers that die, and mostly remember. Drawn
    from a stream of its own. Returns when the router dies, in milliseconds."""
    random = Random(f"{scenario.seed}/{scenario.setting}/keys")
    if random.random() >= KEYED_SHARE or any(fault.kind == "row" for fault in scenario.faults):
        return []
    scenario.keyed = True
    for turn in (turn for conversation in scenario.conversations for turn in conversation.turns):
        turn.cancel_after_ns = turn.lifetime_ns = None
    if not scenario.faults:
        return []
    if random.random() < 0.5:  # else they die beside all that goes wrong anyway
        scenario.faults = []
    scenario.remembers = random.random() < 0.85
    for turn in (turn for conversation in scenario.conversations for turn in conversation.turns):
        if not turn.beam_width and random.random() < 0.5:
            turn.max_tokens = random.choice(LONG)
    return [random.randint(0, random.choice([60, 400])) for _ in range(random.choice(DEATHS))]

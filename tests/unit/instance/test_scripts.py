"""The machine of an instance as a play: what it hears, and everything it wants done about it.

``RunStep(0: slot 0 [0, 8))``: plan 0 computes the first eight tokens of the sequence in slot 0; *draws* when it also
draws the next token. Two plans may be under way; blocks have 4 tokens.
"""

from __future__ import annotations

from fleet_world import BLOCK, GEOMETRY, ROUTER_PEER, fleet_config
from golden import Script
from instance_world import request
from memserve.instance.events import (
    RequestArrived,
    RequestCancelled,
    StepFailed,
    StepFinished,
)
from memserve.instance.machine import Instance
from memserve.messages import (
    AnyMessage,
    Dispatch,
    Peer,
    PeerInfo,
    Welcome,
)
from memserve.serving import MessageArrived
from memserve.types import Request, Role

P, D = Peer("p", 1), Peer("d", 1)
PROMPT = [5, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def info(peer: Peer) -> PeerInfo:
    return PeerInfo(peer, Role.COLOCATED, "", fleet_config().namespace, GEOMETRY, 24, 0, 64, True)


class Member(Script):
    """The machine of one member of a cluster of two."""

    def __init__(self, me: Peer, **sizes) -> None:
        super().__init__(Instance(fleet_config(**sizes), BLOCK, me=me, geometry=GEOMETRY))
        self.machine.handle(MessageArrived(ROUTER_PEER, Welcome(tuple(info(p) for p in (P, D) if p != me))), 0)

    def hears(self, ms: float, sender: Peer, message: AnyMessage, *wanted: str) -> list:
        return self.at(ms, MessageArrived(sender, message), *wanted)

    def steps(self, ms: float, step: int, *wanted: str, drawn: tuple[int, ...] = ()) -> list:
        """The device has executed plan ``step`` and drawn these tokens."""
        return self.at(ms, StepFinished(step, list(drawn), 1_000_000), *wanted)


class Alone(Script):
    """The machine of an engine without a cluster."""

    def __init__(self, **sizes) -> None:
        super().__init__(Instance(fleet_config(**sizes), BLOCK))

    steps = Member.steps


def a_request(name: str = "r", prompt: list[int] = PROMPT, max_tokens: int = 3) -> Request:
    return request(name, prompt, max_tokens=max_tokens)


def test_admitted_prefilled_and_decoded() -> None:
    it = Alone()
    it.at(1, RequestArrived(a_request()), "")
    it.steps(2, 0)
    it.steps(3, 1, drawn=(7,))
    it.steps(4, 2, drawn=(8,))
    it.steps(5, 3, drawn=(9,))
    it.at(6, RequestArrived(a_request("s")), "")
    assert it.machine.stats().cached_tokens == 8


def test_two_in_one_batch() -> None:
    it = Alone()
    it.at(1, RequestArrived(a_request("a")))
    it.at(1, RequestArrived(a_request("b", PROMPT[::-1])))
    it.steps(2, 0)
    it.steps(3, 1, drawn=(7,))
    it.steps(4, 2, drawn=(8,))


def test_a_client_leaves() -> None:
    it = Alone()
    it.at(1, RequestArrived(a_request()))
    it.at(2, RequestCancelled("r"))
    it.steps(3, 0)
    it.steps(4, 1, drawn=(7,))
    assert it.machine.is_idle


def test_a_step_fails_and_is_tried_again_once() -> None:
    it = Alone(depth=1)
    it.at(1, RequestArrived(a_request(max_tokens=1)))
    it.at(2, StepFailed(0, "out of memory"))
    it.at(3, StepFailed(1, "out of memory"))
    assert it.machine.is_idle


def test_a_preemption() -> None:
    """Room for five blocks, and two sequences that need three each: the later one gives its blocks back."""
    it = Alone(hbm=5, depth=1, chunk=16, caching=False, preemption="recompute")
    it.at(1, RequestArrived(a_request("a", PROMPT[:7], max_tokens=5)))
    it.at(1, RequestArrived(a_request("b", PROMPT[:7], max_tokens=5)))
    for step in range(9):
        it.steps(2 + step, step, drawn=(7, 7))


def test_a_prefill_instance_hands_over() -> None:
    it = Member(P)
    order = Dispatch(a_request(), decode_at=D)
    actions = it.hears(1, ROUTER_PEER, order)
    print(actions)
    it.steps(2, 0)
    it.steps(3, 1, drawn=(7,))

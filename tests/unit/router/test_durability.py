"""The gate between a router that remembers and the world: what may leave, and when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.protocol.events import EmitTokens, RejectRequest, Send
from memserve.protocol.messages import Leave
from memserve.protocol.peers import Peer
from memserve.protocol.records import HandleDropped
from memserve.router.events import ClusterAction, Note, Remember
from memserve.router.outbox import DurabilityGate, Write

A, B = Peer("a", 1), Peer("b", 1)


def record(number: int) -> HandleDropped:
    return HandleDropped("t", f"s{number}")


def test_durable_sends_wait_and_keep_order_per_member() -> None:
    gate = DurabilityGate()
    tokens, first, second, third = EmitTokens([]), Send(A, Leave()), Send(A, Leave()), Send(A, Leave())
    to_b, to_b_later = Send(B, Leave()), Send(B, Leave())
    remember, note = Remember((record(1),)), Note((record(2),))
    assert gate.admit_actions([tokens, remember, first, note]) == [
        tokens,
        Write(remember.records, 1),
        Write(note.records, None),
    ]
    assert [id(x) for x in gate.admit_actions([to_b, second])] == [id(to_b)], "another member need not wait"
    assert gate.admit_actions([Remember((record(3),)), to_b_later]) == [Write((record(3),), 2)]
    assert gate.admit_actions([third, to_b]) == []
    gate.check_invariants()
    assert [id(x) for x in gate.release_actions(1)] == [id(first), id(second)]
    assert [id(x) for x in gate.release_actions(2)] == [id(to_b_later), id(third), id(to_b)]
    assert gate.admit_actions([first]) == [first] and not gate._waiting_messages


class Literal:
    """A twin: each action with everything that must be durable before it, looked through again each time."""

    def __init__(self) -> None:
        self.asked, self.done = 0, 0
        self.waiting: list[tuple[int, object]] = []

    def admit(self, actions: list[object]) -> list[object]:
        left: list[object] = []
        behind = False
        for action in actions:
            if isinstance(action, Remember):
                behind, self.asked = True, self.asked + 1
            elif isinstance(action, RejectRequest):
                left.append(action)  # a client hears no whatever the disk does
            elif behind or any(isinstance(other, Send) and other.to == action.to for _, other in self.waiting):
                self.waiting.append((self.asked, action))
            else:
                left.append(action)
        return left

    def release(self, number: int) -> list[object]:
        self.done = max(self.done, number)
        ready = [action for need, action in self.waiting if need <= self.done]
        self.waiting = [(need, action) for need, action in self.waiting if need > self.done]
        return ready


def _action(kind: str) -> ClusterAction:
    match kind:
        case "r":
            return Remember((record(0),))
        case "x":
            return RejectRequest("r", "the queue is full", 1.0)
    return Send(A if kind == "a" else B, Leave())


@pytest.mark.parametrize("releases_late", [False, True])
@given(st.data())
def test_the_gate_equals_its_twin(releases_late: bool, data: st.DataObject) -> None:
    gate, twin, sent = DurabilityGate(), Literal(), Counter[Peer]()
    for _ in range(data.draw(st.integers(1, 12))):
        kinds = data.draw(st.lists(st.sampled_from("rabx"), max_size=5))
        actions = [_action(kind) for kind in kinds]
        went = [action for action in gate.admit_actions(actions) if not isinstance(action, Write)]
        assert [id(x) for x in went] == [id(x) for x in twin.admit(list(actions))]
        gate.check_invariants()
        if twin.asked > twin.done and data.draw(st.booleans()):
            number = data.draw(st.integers(twin.done + 1, twin.asked)) if releases_late else twin.done + 1
            assert [id(x) for x in gate.release_actions(number)] == [id(x) for x in twin.release(number)]
            gate.check_invariants()
    assert [id(x) for x in gate.release_actions(twin.asked)] == [id(x) for x in twin.release(twin.asked)]
    assert not gate._waiting and sent == Counter()

"""Which instances share a sequence that fits none, and what each of them is told, in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cluster_world import BLOCK, a_request, info
from memserve.base.config import AdmissionConfig, ClusterConfig
from memserve.base.errors import UserError
from memserve.base.types import Admission, ClockTicked, FinishReason, Role, SamplingParams, TokenOutput, salt_of
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import RETRY_S, Cancel, Dispatch, Join, RequestRefused, SegmentHeld, Tokens
from memserve.protocol.peers import PeerInfo
from memserve.router.events import EmitTokens, InstanceDied, RejectRequest, RequestArrived, RequestCancelled, Send
from memserve.router.machine import Cluster
from memserve.router.placement.shards import longest_sequence

ROOM = 8 * BLOCK
MS = 1_000_000


def member(name: str, room: int = ROOM, sequence_tokens: int = 200) -> PeerInfo:
    return structs.replace(
        info(name, Role.COLOCATED),
        context_tokens=room + 1,
        segments_at=f"tcp://{name}:1",
        sequence_tokens=sequence_tokens,
    )


class Router:
    """A cluster machine, and what it has sent, by member."""

    def __init__(self, *names: str, **config: Any) -> None:
        self.machine = Cluster(ClusterConfig(**config))
        self.now = 0
        self.members = {name: member(name) for name in names}
        for one in self.members.values():
            self.hears(one.peer.name, Join(one))

    def handle(self, event: Any) -> list[Any]:
        self.now += MS
        actions = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return actions

    def hears(self, name: str, message: Any) -> list[Any]:
        return self.handle(MessageArrived(self.members[name].peer, message))

    def asked(self, tokens: int, name: str = "r", **more: Any) -> list[Any]:
        return self.handle(RequestArrived(a_request(name, np.arange(tokens) % 40, **more)))


def told(actions: list[Any], kind: type) -> list[tuple[str, Any]]:
    return [(a.to.name, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def held(order: Dispatch) -> SegmentHeld:
    return SegmentHeld(order.request.request_id, len(order.request.prompt))


def test_part_after_part_and_the_last_one_has_the_answer() -> None:
    it = Router("a", "b", "c")
    ((name, first),) = told(it.asked(70, max_tokens=6), Dispatch)
    assert name == "a" and len(first.request.prompt) == ROOM and first.span.holds and not first.span.segments
    ((name, second),) = told(it.hears("a", held(first)), Dispatch)
    assert name == "b" and len(second.request.prompt) == ROOM and second.span.holds
    assert [(s.peer.name, s.address, s.tokens) for s in second.span.segments] == [("a", "tcp://a:1", ROOM)]
    ((name, last),) = told(it.hears("b", held(second)), Dispatch)
    assert name == "c" and not last.span.holds and len(last.span.before) == 2 * ROOM
    assert [*last.span.before, *last.request.prompt] == [*np.arange(70) % 40]
    assert [s.peer.name for s in last.span.segments] == ["a", "b"] and last.request.stop.max_tokens == 6
    assert len({first.request.salt, second.request.salt, last.request.salt}) == 3
    assert not told(it.hears("a", held(first)), Dispatch), "a holder repeats that it holds"
    ended = it.hears("c", Tokens((TokenOutput(last.request.request_id, 0, (7,), finish_reason=FinishReason.STOP),)))
    assert any(isinstance(a, EmitTokens) and a.outputs[0].finish_reason is FinishReason.STOP for a in ended)
    assert {name for name, _ in told(ended, Cancel)} >= {"a", "b"}
    assert [name for name, _ in told(it.hears("a", held(first)), Cancel)] == ["a"], "it has not heard of the end"


def test_as_few_as_hold_prompt_and_answer() -> None:
    it = Router("a", "b", "c", "d")
    ((_, first),) = told(it.asked(40, max_tokens=20), Dispatch)
    ((_, second),) = told(it.hears("a", held(first)), Dispatch)
    assert not second.span.holds and len(second.request.prompt) == 40 - ROOM
    many = Router("a", "b", "c", "d")
    ((_, first),) = told(many.asked(40, max_tokens=60), Dispatch)
    ((_, second),) = told(many.hears("a", held(first)), Dispatch)
    assert second.span.holds, "the answer needs the room of a third instance"


def test_segment_output_is_dropped_and_its_end_ends_the_attempt() -> None:
    it = Router("a", "b", "c")
    ((_, first),) = told(it.asked(50), Dispatch)
    lost = it.hears("a", Tokens((TokenOutput(first.request.request_id, 0, (), finish_reason=FinishReason.ERROR),)))
    assert not any(isinstance(a, EmitTokens) for a in lost)
    ((name, again),) = told(lost, Dispatch)
    assert name == "a" and again.request.request_id != first.request.request_id


def test_next_attempt_keeps_segments_at_their_instances() -> None:
    it = Router("a", "b", "c", "d")
    ((_, first),) = told(it.asked(70), Dispatch)
    ((_, second),) = told(it.hears("a", held(first)), Dispatch)
    died = it.handle(InstanceDied("a", "was killed"))
    assert {name for name, _ in told(died, Cancel)} >= {"b"}
    ((name, again),) = told(died, Dispatch)
    assert name == "d", "the first part goes to an instance without any"
    ((name, repeated),) = told(it.hears("d", held(again)), Dispatch)
    assert name == "b" and repeated.request.salt == second.request.salt
    assert [*repeated.request.prompt] == [*second.request.prompt]


def test_started_sequence_waits_for_instances_new_one_rejected() -> None:
    it = Router("a", "b")
    told(it.asked(50), Dispatch)
    died = it.handle(InstanceDied("a", "was killed"))
    assert not told(died, Dispatch) and not any(isinstance(a, RejectRequest) for a in died)
    (rejected,) = [a for a in it.asked(50, "other") if isinstance(a, RejectRequest)]
    assert rejected.retry_after_s is None and "50 tokens" in rejected.reason
    it.members["e"] = member("e")
    ((name, _),) = told(it.hears("e", Join(it.members["e"])), Dispatch)
    assert name in ("b", "e")


def test_one_shared_sequence_runs_at_a_time() -> None:
    it = Router("a", "b", "c", "d")
    told(it.asked(50), Dispatch)
    assert not told(it.asked(50, "second"), Dispatch)
    assert told(it.asked(10, "short"), Dispatch)


def test_all_routers_take_instances_in_the_order_of_their_names() -> None:
    """Whatever their numbers and loads are: of two that meet at an instance, one goes on."""
    it = Router("c", "a", "b")
    ((name, first),) = told(it.asked(70), Dispatch)
    assert name == "a"
    ((name, _),) = told(it.hears("a", held(first)), Dispatch)
    assert name == "b"


def test_refused_segment_is_retried_without_costing_an_attempt() -> None:
    it = Router("c", "a", "b", attempts_max=2)

    def refuses(name: str, order: Dispatch) -> list[tuple[str, Dispatch]]:
        return told(it.hears(name, RequestRefused(order.request.request_id, "another's", RETRY_S)), Dispatch)

    ((name, order),) = told(it.asked(50), Dispatch)
    for first, second in [("a", "b"), ("b", "a")] * 2:
        assert name == first
        ((name, order),) = refuses(first, order)
        assert name == second, "it and the last one are enough"
        assert refuses(second, order) == []
        it.now += int(RETRY_S * 1000) * MS
        ((name, order),) = told(it.handle(ClockTicked()), Dispatch)
    ((name, last),) = told(it.hears(name, held(order)), Dispatch)
    assert not last.span.holds and name == "c"


def test_of_those_that_wait_for_other_routers_one_tries_again() -> None:
    """Each try sends a long prompt."""
    it = Router("a", "b")
    ((_, order),) = told(it.asked(50, "first"), Dispatch)
    assert not told(it.asked(50, "second"), Dispatch)
    refused = RequestRefused(order.request.request_id, "another's", RETRY_S)
    assert not told(it.hears("a", refused), Dispatch)
    tried = []
    for _ in range(10):
        it.now += int(RETRY_S * 1000) * MS
        for name, again in told(it.handle(ClockTicked()), Dispatch):
            tried.append(again.request.request_id.partition("#")[0])
            it.hears(name, RequestRefused(again.request.request_id, "another's", RETRY_S))
    assert tried == ["first"] * 10
    it.handle(RequestCancelled("first"))
    it.now += int(RETRY_S * 1000) * MS
    assert [again.request.request_id[:6] for _, again in told(it.handle(ClockTicked()), Dispatch)] == ["second"]


@pytest.mark.parametrize(
    "config",
    [
        {"sequence_parallel": "off"},
        {"sequence_parallel": "2"},
        {"admission": AdmissionConfig(Admission.MEMORY)},
    ],
)
def test_long_sequences_are_rejected_where_sharing_is_off(config: dict[str, Any]) -> None:
    actions = Router("a", "b", "c", **config).asked(70)
    assert any(isinstance(a, RejectRequest) for a in actions) and not told(actions, Dispatch)


@pytest.mark.parametrize("more", [{"beam_width": 2}, {"prompt_logprobs": True}])
def test_requests_needing_whole_prompt_at_one_instance_rejected(more: dict[str, Any]) -> None:
    assert any(isinstance(a, RejectRequest) for a in Router("a", "b", "c").asked(50, **more))


def test_every_part_is_computed_with_the_adapter_of_the_request() -> None:
    it = Router("a", "b")
    ((_, first),) = told(it.asked(50, salt=salt_of("own", "ad")), Dispatch)
    ((_, last),) = told(it.hears("a", held(first)), Dispatch)
    assert first.request.adapter == last.request.adapter == "ad" and first.request.salt != last.request.salt


def test_holders_draw_as_simply_as_possible() -> None:
    it = Router("a", "b")
    ((_, order),) = told(it.asked(50, n=2, seed=4), Dispatch)
    assert order.request.n == 1 and order.request.sampling == SamplingParams(temperature=0.0)


def test_the_longest_sequence_is_that_of_all_or_of_the_model() -> None:
    assert longest_sequence([member("a"), member("b"), member("c")], 1024) == 3 * ROOM + 1
    assert longest_sequence([member("a"), member("b"), member("c")], 2) == 2 * ROOM + 1
    assert longest_sequence([member("a"), member("b", sequence_tokens=40)], 1024) == 40
    assert longest_sequence([member("a"), info("b", Role.COLOCATED)], 1024) == 0


@pytest.mark.parametrize("text", ["1", "0", "many", "-3", "2.5"])
def test_numbers_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="cannot be shared"):
        ClusterConfig(sequence_parallel=text)
    with pytest.raises(UserError, match="memory of one instance"):
        ClusterConfig(sequence_parallel="3", admission=AdmissionConfig(Admission.CACHE))

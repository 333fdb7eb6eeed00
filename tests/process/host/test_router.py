"""The router's engine around the real cluster machine: real mailboxes, instances that may die."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from msgspec import structs

from fake_instances import SECRET, FakeInstance, true_token
from memserve.base.config import ClusterConfig
from memserve.base.types import FinishReason, Request, SamplingParams, StopParams
from memserve.base.units import NS_PER_MS
from memserve.host.engine import Refusal, Rejected
from memserve.host.router import RouterEngine
from memserve.protocol.messages import Cancel, Dispatch, Pin, Unpin
from memserve.protocol.peers import ROUTER, Peer
from memserve.router.machine import Cluster
from memserve.system.loop import EngineStopped
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from waiting import eventually

WAIT_S = 20.0
CONFIG = ClusterConfig(dead_after_ns=600 * NS_PER_MS, unplaced_ns=300 * NS_PER_MS)


@pytest.fixture
def machine() -> Cluster:
    return Cluster(CONFIG)


@pytest.fixture
def router(machine: Cluster) -> Iterator[RouterEngine]:
    me = Peer(ROUTER, time.time_ns())
    engine = RouterEngine(machine, partial(ZmqMailbox, me, ListenAddress(SECRET)))
    yield engine
    engine.close(WAIT_S)
    assert engine.requests_outstanding == 0
    machine.check_invariants()


@pytest.fixture
def instance(router: RouterEngine) -> Iterator[Callable[..., FakeInstance]]:
    """Makes members; those that are left at the end are closed."""
    made: list[FakeInstance] = []

    def make(name: str, **options: float) -> FakeInstance:
        made.append(FakeInstance(name, router.address, **options))
        assert router.wait_for_members([name], WAIT_S)
        return made[-1]

    yield make
    for fake in made:
        if fake.alive:
            fake.die()


def ask(name: str, count: int, n: int = 1) -> Request:
    prompt = np.arange(1, 70, dtype=np.int32) + len(name)
    return Request(name, prompt, SamplingParams(temperature=0.0), StopParams(max_tokens=count), n=n)


def submit(router: RouterEngine, request: Request) -> queue.Queue:
    news: queue.Queue = queue.Queue()
    router.submit(request, news.put)
    return news


def collect(news: queue.Queue, n: int = 1) -> dict[int, tuple[list[int], FinishReason]] | Rejected:
    """Everything of one request: ``{index: (tokens, finish_reason)}``, or the rejection."""
    tokens: dict[int, list[int]] = {i: [] for i in range(n)}
    reasons: dict[int, FinishReason] = {}
    while len(reasons) < n:
        item = news.get(timeout=WAIT_S)
        if isinstance(item, Rejected):
            return item
        assert item.index not in reasons, "news of a sequence after its end"
        tokens[item.index] += item.tokens
        if item.finish_reason is not None:
            reasons[item.index] = item.finish_reason
    assert news.empty()
    return {i: (tokens[i], reasons[i]) for i in range(n)}


def truth(request: Request) -> list[int]:
    return [true_token(request.prompt, place) for place in range(request.stop.max_tokens)]


def test_requests_are_spread_over_members_and_answered(router, instance) -> None:
    members = [instance("c1", token_s=0.002), instance("c2", token_s=0.002)]
    requests = [ask("r" * k, 5 + k, n=1 + k % 2) for k in range(1, 13)]
    answers = [(request, submit(router, request)) for request in requests]
    for request, news in answers:
        want = (truth(request), FinishReason.LENGTH)
        assert collect(news, request.n) == dict.fromkeys(range(request.n), want)
    assert all(member.has_heard(Dispatch) for member in members)


def test_stream_resumes_after_member_death(router, instance) -> None:
    first = instance("c1", token_s=0.01)
    request = ask("stream", 60)
    news = submit(router, request)
    got = [news.get(timeout=WAIT_S) for _ in range(5)]
    second = instance("c2")
    first.die()
    rest = collect(news)
    assert sum((output.tokens for output in got), ()) + tuple(rest[0][0]) == tuple(truth(request))
    [resumed] = second.has_heard(Dispatch)
    assert len(resumed.generated[0]) >= 5 and list(resumed.generated[0]) == truth(request)[: len(resumed.generated[0])]
    assert router.stats().cluster.counters.resumptions == 1
    eventually(lambda: set(router.members()) == {"c2"})


def test_cancelling_and_stopping_reach_the_member(router, instance) -> None:
    member = instance("c1", token_s=0.005)
    gone = submit(router, ask("gone", 10_000))
    gone.get(timeout=WAIT_S)
    router.cancel("gone")
    assert collect(gone)[0][1] is FinishReason.CANCELLED
    eventually(lambda: member.has_heard(Cancel))

    stopped = submit(router, ask("stopped", 10_000))
    stopped.get(timeout=WAIT_S)
    router.stop_sequence("stopped", 0)
    assert collect(stopped)[0][1] is FinishReason.STOP


def test_request_without_members_is_refused_busy_after_a_wait(router) -> None:
    answer = collect(submit(router, ask("early", 3)))
    assert isinstance(answer, Rejected) and answer.refusal is Refusal.BUSY and answer.retry_after_s
    assert not router.stats().serving


def test_waiting_request_is_placed_when_an_instance_joins(router, instance) -> None:
    request = ask("patient", 4)
    news = submit(router, request)
    instance("c1")
    assert collect(news) == {0: (truth(request), FinishReason.LENGTH)}


def test_statistics_are_those_of_all_members(router, instance) -> None:
    instance("c1")
    instance("c2")
    eventually(lambda: all(member.engine is not None for member in router.stats().members))
    stats = router.stats()
    assert stats.serving and [member.view.peer.name for member in stats.members] == ["c1", "c2"]
    assert stats.steps == sum(member.engine.steps for member in stats.members)
    assert stats.cluster.instances == 2 and stats.router_ns > 0


def test_a_prefix_is_pinned_where_it_lies_and_given_up(router, instance) -> None:
    member = instance("c1")
    request = structs.replace(ask("read", 1), tenant="tenant")
    collect(submit(router, request))
    router.pin_prefix("doc", "tenant", request.prompt, 60_000 * NS_PER_MS)
    eventually(lambda: router.pinned_tokens(["doc"], "tenant") == [64])
    assert router.pinned_tokens(["doc", "no"], "another") == [None, None]
    (kept,) = router.named_prefixes("tenant")
    assert (kept.handle, kept.pinned_tokens) == ("doc", 64) and router.named_prefixes("another") == []
    router.unpin_prefix("doc", "tenant")
    eventually(lambda: member.has_heard(Unpin))
    assert router.pinned_tokens(["doc"], "tenant") == [None] and len(member.has_heard(Pin)) == 1


def test_closing_ends_what_runs_and_refuses_what_comes(router, instance) -> None:
    instance("c1", token_s=0.005)
    news = submit(router, ask("running", 10_000))
    news.get(timeout=WAIT_S)
    router.close(WAIT_S)
    assert collect(news)[0][1] is FinishReason.CANCELLED
    late = collect(submit(router, ask("late", 1)))
    assert isinstance(late, Rejected) and late.refusal is Refusal.CLOSING
    with pytest.raises(EngineStopped):
        router.stats()

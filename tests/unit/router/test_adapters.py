"""Adapters that come and go in a cluster: what clients are told, when, and which instances get which requests."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_world import World, a_request, info
from memserve.base.config import ClusterConfig
from memserve.base.types import Role, salt_of
from memserve.base.units import NS_PER_S
from memserve.protocol.messages import AdapterFiles, AdaptersHeld, HoldAdapters, Join
from memserve.protocol.peers import Peer
from memserve.protocol.records import AdapterDropped, AdapterPut, RecoveredState
from memserve.router.events import (
    AdapterAnswered,
    AdapterNamed,
    AdapterUnnamed,
    MessageArrived,
    Remember,
    Send,
    StateRecovered,
)
from memserve.router.machine import Cluster
from memserve.router.members.adapters import LOADED_WITHIN_NS, NO_INSTANCE, TOO_LATE
from memserve.router.outbox import DurabilityGate

ONE, TWO = AdapterFiles("one", "/adapters/one", "c0de"), AdapterFiles("two", "/adapters/two", "5a17")
PAIR = (("p1", Role.PREFILL), ("d1", Role.DECODE))


def load(world: World, files: AdapterFiles, call_id: int = 0) -> list[Any]:
    return world.post(AdapterNamed(call_id, files))


def ask(world: World, name: str, files: AdapterFiles, tokens: int = 4) -> Any:
    return world.ask(a_request(name, range(9), max_tokens=tokens, salt=salt_of("", files.digest)))


def loaded(*instances: tuple[str, Role]) -> World:
    world = World(instances)
    load(world, ONE)
    world.step()
    assert world.answers[0].error == ""
    return world


def test_call_is_answered_when_all_instances_have_it() -> None:
    world = World((*PAIR, ("s1", Role.STORE)))
    sent = world.sent(load(world, ONE), HoldAdapters)
    assert sent == [("p1", HoldAdapters((ONE,))), ("d1", HoldAdapters((ONE,)))], "a store has no model"
    world.step("p1")
    assert not world.answers, "d1 has not said that it has it"
    world.step("d1")
    assert world.answers[0].error == ""
    client = ask(world, "r", ONE)
    world.run()
    assert client.got[0], "it was asked for by its digest, which instances compare"


def test_lost_orders_are_repeated_with_heartbeats() -> None:
    world = World(PAIR)
    load(world, ONE)
    for instance in world.instances.values():
        instance.outbox.clear()  # what they said is lost
    world.wait(NS_PER_S)
    world.step()
    assert world.answers[0].error == ""


def test_one_failure_leaves_everything_as_it_was() -> None:
    world = loaded(*PAIR)
    world.instances["d1"].unfit = {TWO.digest: "it does not fit the model"}
    load(world, TWO, call_id=1)
    world.step()
    assert world.answers[1].error == "d1: it does not fit the model" and not world.answers[1].is_passing
    assert all(instance.adapters == {ONE.digest} for instance in world.instances.values())


@pytest.mark.parametrize("died", ["p1", "d1"])
def test_instance_that_dies_is_not_waited_for(died: str) -> None:
    world = World((*PAIR, ("c1", Role.COLOCATED)))
    load(world, ONE)
    for name in {"p1", "d1", "c1"} - {died}:
        world.step(name)
    assert not world.answers
    world.kill(died)
    world.wait(10 * NS_PER_S)
    assert world.answers[0].error == ""


def test_calls_without_instances_fail_and_may_be_repeated() -> None:
    world = World([("c1", Role.COLOCATED)])
    world.instances["c1"].paused = True
    load(world, ONE)
    world.kill("c1")
    world.wait(10 * NS_PER_S)
    load(world, ONE, call_id=1)
    assert [(answer.error, answer.is_passing) for answer in world.answers.values()] == [(NO_INSTANCE, True)] * 2


def test_instance_that_says_nothing_ends_the_call_in_time() -> None:
    world = World([("c1", Role.COLOCATED)])
    load(world, ONE)
    world.wait(LOADED_WITHIN_NS + NS_PER_S)  # it beats, and its answers are lost
    assert world.answers[0].error == TOO_LATE and world.answers[0].is_passing


def test_later_instance_gets_requests_when_it_has_all() -> None:
    world = loaded(("c1", Role.COLOCATED))
    world.kill("c1")
    late = world.add("c2", Role.COLOCATED)
    world.wait(10 * NS_PER_S)
    client = ask(world, "r", ONE)
    assert not late.running and HoldAdapters((ONE,)) in late.heard
    world.step()  # it answers
    assert list(late.running)
    world.run()
    assert client.done and client.rejected is None


def test_later_instance_that_cannot_load_it_gets_none() -> None:
    world = loaded(("c1", Role.COLOCATED))
    late = world.add("c2", Role.COLOCATED)
    late.unfit = {ONE.digest: "no such folder here"}
    late.outbox.clear()
    for _ in range(3):
        world.wait(NS_PER_S)
        world.step()
    assert "it gets no requests: no such folder here" in {report.why for report in world.reports}
    for number in range(4):
        ask(world, f"r{number}", ONE)
    assert not late.running and len(world.instances["c1"].running) == 4
    late.unfit = {}  # the folder is there now
    world.wait(NS_PER_S)
    world.step()
    for number in range(4, 8):
        ask(world, f"r{number}", ONE)
    assert late.running


def test_files_that_are_gone_do_not_stop_everything() -> None:
    """After a start in which no instance can load an adapter, requests that do not name it are served."""
    world = loaded(*PAIR)
    for name, role in PAIR:
        world.kill(name)
        late = world.add(f"{name}b", role)
        late.unfit = {ONE.digest: "no such folder"}
        late.outbox.clear()
    for _ in range(10):
        world.wait(NS_PER_S)
        world.step()
    assert {report.why for report in world.reports} >= {"it lacks an adapter: no such folder"}
    client = world.ask(a_request("plain", range(9)))
    world.run()
    assert client.rejected is None
    for instance in world.instances.values():
        instance.unfit = {}
    world.wait(NS_PER_S)
    world.step()
    assert all(instance.adapters == {ONE.digest} for instance in world.instances.values() if instance.alive)


def test_adapter_leaves_behind_its_last_request() -> None:
    world = loaded(*PAIR)
    client = ask(world, "r", ONE, tokens=6)
    world.step()
    sent = world.post(AdapterUnnamed(1, "one"))
    assert world.answers[1].error == "" and not world.sent(sent, HoldAdapters)
    world.kill("d1")
    world.add("d2", Role.DECODE)
    world.wait(10 * NS_PER_S)  # what ran at d1 goes on at another instance, which has the adapter
    world.run()
    assert client.got[0] and client.reasons != [None]
    world.wait(NS_PER_S)
    assert all(not instance.adapters for instance in world.instances.values() if instance.alive)


def test_new_files_under_a_name_replace_the_old_ones() -> None:
    world = loaded(*PAIR)
    load(world, AdapterFiles("one", "/adapters/other", "0the"), call_id=1)
    world.step()
    world.wait(NS_PER_S)
    assert world.answers[1].error == ""
    assert {frozenset(instance.adapters) for instance in world.instances.values()} == {frozenset({"0the"})}


def test_content_with_two_names_stays_until_both_are_gone() -> None:
    world = loaded(*PAIR)
    load(world, AdapterFiles("same", "/adapters/copy", ONE.digest), call_id=1)
    world.step()
    world.post(AdapterUnnamed(2, "one"))
    world.wait(NS_PER_S)
    assert world.instances["p1"].adapters == {ONE.digest}
    world.post(AdapterUnnamed(3, "same"))
    world.wait(NS_PER_S)
    assert world.instances["p1"].adapters == set()


def test_answers_wait_for_the_journal_and_survive_routers() -> None:
    cluster = Cluster(ClusterConfig(), remembers=True)
    cluster.handle(StateRecovered(RecoveredState(), Peer("router", 1), "tcp://r"), 0)
    for name, role in PAIR:
        cluster.handle(MessageArrived(Peer(name, 1), Join(info(name, role))), 0)
    cluster.handle(AdapterNamed(0, ONE), 0)
    held = [MessageArrived(Peer(name, 1), AdaptersHeld((ONE.digest,))) for name, _ in PAIR]
    actions = [action for event in held for action in cluster.handle(event, 0)]
    record = AdapterPut("one", ONE.folder, ONE.digest)
    assert Remember((record,)) in actions and AdapterAnswered(0) in actions
    assert AdapterAnswered(0) not in DurabilityGate().admit_actions(actions), (
        "no client is answered before it is durable"
    )
    assert Remember((AdapterDropped("one"),)) in cluster.handle(AdapterUnnamed(1, "one"), 0)

    successor = Cluster(ClusterConfig(), remembers=True)
    recovered = RecoveredState(router=Peer("router", 1), adapters=(record,))
    successor.handle(StateRecovered(recovered, Peer("router", 2), "tcp://r2"), 0)
    again = successor.handle(MessageArrived(Peer("p1", 1), Join(info("p1", Role.PREFILL))), 0)
    assert Send(Peer("p1", 1), HoldAdapters((ONE,))) in again


def test_what_an_earlier_router_wanted_is_taken_back() -> None:
    world = World(PAIR)
    actions = world.hear(Peer("p1", 1), AdaptersHeld(("01d",)))
    assert world.sent(actions, HoldAdapters) == [("p1", HoldAdapters(()))]
    assert not world.sent(world.hear(Peer("p1", 1), AdaptersHeld(())), HoldAdapters)


def test_calls_are_deterministic() -> None:
    world = loaded(*PAIR)
    ask(world, "r", ONE)
    world.run()
    world.post(AdapterUnnamed(1, "one"))
    world.check_repeatable()

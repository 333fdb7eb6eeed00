"""Admission controllers of other distributions: what they let wait and reject, and that others go on meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster_world import World, a_request
from memserve.base.config import AdmissionConfig
from memserve.base.errors import InvariantError, UserError
from memserve.base.fairness import FairQueue
from memserve.base.plugins import ADMISSION_CONTROLLERS
from memserve.base.types import Role
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.router.admission.controller import TenantLoads
from memserve.router.admission.needs import Admitted
from memserve.router.report import AdmissionStats
from written_plugins import plugin_folder, write_plugins

__all__ = ["plugin_folder"]

PROMPT = list(range(1, 21))
MODULE = """
import random
from memserve.router.admission.needs import ADMIT, Verdict

def one_each(settings):
    most = int(settings.get("most", 1))
    def judge(request, load, now_ns):
        own = load.admitted_of(request.tenant)
        assert own.requests <= load.admitted().requests and load.waiting() >= 1
        return ADMIT if own.requests < most else Verdict("wait", f"{own.requests} of yours run")
    return judge

def by_length(settings):
    def judge(request, load, now_ns):
        if len(request.prompt) > 20:
            return Verdict("reject", "too long today", float(settings["retry"]) if "retry" in settings else None)
        return ADMIT
    return judge

def at_noon(settings):
    return lambda request, load, now_ns: ADMIT if now_ns >= 5_000_000_000 else Verdict("wait", "before noon")

def fails(settings):
    def judge(request, load, now_ns):
        if request.tenant == "poison":
            raise RuntimeError("no idea")
        return "perhaps"
    return judge

def by_chance(settings):
    chance = random.Random(int(settings["seed"]))
    def judge(request, load, now_ns):
        kind = chance.choice(["admit", "admit", "wait", "wait", "reject", "fail"])
        return ADMIT if kind == "admit" else Verdict(kind, "by chance", chance.choice([None, 2.0]))
    return judge

def refuses_settings(settings):
    raise ValueError("no such setting: " + ", ".join(settings))

def makes_no_rule(settings):
    return lambda request: ADMIT
"""


@pytest.fixture(autouse=True)
def installed(plugin_folder: Path) -> None:
    names = ["one_each", "by_length", "at_noon", "fails", "by_chance", "refuses_settings", "makes_no_rule"]
    write_plugins(plugin_folder, "written_rules", MODULE, {ADMISSION_CONTROLLERS.group: names})


def ruled(mode: str, **admission: object) -> World:
    return World([("c", Role.COLOCATED)], policy="least-load", admission=AdmissionConfig(mode, **admission))


def running(world: World) -> list[str]:
    return [attempt.partition("#")[0] for attempt in world.instances["c"].running]


def stats_of(world: World) -> AdmissionStats:
    return world.cluster.stats().admission


def test_one_tenants_wait_holds_up_no_other() -> None:
    world = ruled("one-each", waiting_max=10)
    for name in ("a1", "a2", "a3", "b1", "b2"):
        world.ask(a_request(name, PROMPT, tenant=name[0], max_tokens=3))
    assert running(world) == ["a1", "b1"] and stats_of(world).waiting == {"a": 2, "b": 1}
    world.cancel("a1")
    assert running(world) == ["b1", "a2"]
    world.run()
    assert stats_of(world).admitted == stats_of(world).released == 5 and stats_of(world).rule_failures == 0


def test_the_head_of_the_queue_holds_up_no_other_tenant() -> None:
    world = ruled("one-each:most=2", waiting_max=10)
    world.ask(a_request("b0", PROMPT, tenant="b", max_tokens=90))  # it costs its tenant many turns
    for name in ("a1", "a2", "a3", "b1"):
        world.ask(a_request(name, PROMPT, tenant=name[0], max_tokens=3))
    assert running(world) == ["b0", "a1", "a2", "b1"] and stats_of(world).waiting == {"a": 1}
    world.run()


def test_settings_reach_the_rule() -> None:
    world = ruled("one-each:most=2")
    for name in ("a1", "a2", "a3"):
        world.ask(a_request(name, PROMPT, tenant="a", max_tokens=3))
    assert running(world) == ["a1", "a2"]
    world.run()


def test_a_wait_that_is_too_long_says_why() -> None:
    world = ruled("one-each", wait_ns=3 * NS_PER_S)
    world.ask(a_request("a1", PROMPT, tenant="a", max_tokens=100))
    client = world.ask(a_request("a2", PROMPT, tenant="a"))
    world.wait(3 * NS_PER_S)
    assert client.rejected is not None and "1 of yours run" in client.rejected.reason
    world.run()


def test_loads_are_counted_in_requests_and_tokens() -> None:
    loads = TenantLoads(FairQueue(), output_tokens_max=8)
    first, second, other = (a_request(name, PROMPT, tenant=name[0], max_tokens=4) for name in ("a1", "a2", "b1"))
    for request in (first, second, other):
        loads.add_request(request)
    assert loads.admitted_of("a") == Admitted(2, 48) and loads.admitted() == Admitted(3, 72)
    loads.remove_request(first)
    assert loads.admitted_of("a") == Admitted(1, 24) and loads.admitted() == Admitted(2, 48)
    loads.check_invariants(["a2", "b1"])
    loads.remove_request(second)
    assert loads.admitted_of("a") == loads.admitted_of("c") == Admitted(0, 0)
    with pytest.raises(InvariantError):
        loads.check_invariants(["a2", "b1"])


def test_max_active_holds_beside_the_rule() -> None:
    world = ruled("one-each:most=9", active_max=1)
    for name in ("a1", "a2"):
        world.ask(a_request(name, PROMPT, tenant="a", max_tokens=3))
    assert running(world) == ["a1"]
    world.run()


@pytest.mark.parametrize(("settings", "retry_after_s"), [("", None), (":retry=7.5", 7.5), (":retry=1e9", 60.0)])
def test_a_rejected_request_is_told_why_and_when(settings: str, retry_after_s: float | None) -> None:
    world = ruled(f"by-length{settings}")
    client = world.ask(a_request("long", [*PROMPT, 1]))
    other = world.ask(a_request("short", PROMPT))
    assert client.rejected is not None and client.rejected.reason == "too long today"
    assert client.rejected.retry_after_s == retry_after_s and not client.rejected.overloaded
    assert other.rejected is None and stats_of(world).rejected == {"rule": 1}
    world.run()


def test_requests_behind_a_rejected_one_go_on() -> None:
    world = ruled("by-length", active_max=1)
    world.ask(a_request("runs", PROMPT, max_tokens=2))
    clients = [world.ask(a_request(name, [*PROMPT, *PROMPT][: 20 + (name != "last")])) for name in ("l1", "l2", "last")]
    world.run()
    assert [client.rejected is not None for client in clients] == [True, True, False]
    assert clients[2].reasons


def test_a_rule_may_change_its_mind_with_time() -> None:
    world = ruled("at-noon", wait_ns=9 * NS_PER_S)
    world.ask(a_request("early", PROMPT))
    world.wait(4 * NS_PER_S)
    assert running(world) == []
    for _ in range(20):  # as heartbeats come
        world.wait(100 * NS_PER_MS)
    assert running(world) == ["early"]
    world.run()


def test_a_failing_rule_is_left_to_the_other_limits() -> None:
    world = ruled("fails", active_max=2)
    for name, tenant in (("p", "poison"), ("a", "a"), ("b", "b")):
        world.ask(a_request(name, PROMPT, tenant=tenant, max_tokens=3))
    assert running(world) == ["p", "a"] and stats_of(world).rule_failures >= 2
    world.run()
    assert stats_of(world).admitted == 3


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_rule_says_every_request_ends_once(seed: int) -> None:
    chance = random.Random(seed)
    world = ruled(f"by-chance:seed={seed}", active_max=chance.choice([None, 2]), waiting_max=chance.choice([0, 3, 20]))
    for number in range(30):
        world.ask(a_request(f"r{number}", PROMPT, tenant=chance.choice("abc"), max_tokens=chance.randrange(1, 5)))
        if chance.random() < 0.3:
            world.cancel(f"r{chance.randrange(number + 1)}")
        if chance.random() < 0.5:
            world.step()
            world.wait(50 * NS_PER_MS)
        world.cluster.check_invariants()
    while not all(client.done for client in world.clients.values()):
        world.step()
        world.wait(50 * NS_PER_MS)
    world.cluster.check_invariants()
    stats = stats_of(world)
    assert (stats.active, stats.waiting) == (0, {}) and stats.admitted == stats.released
    assert stats.rule_failures and stats.rejected.get("rule")


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("refuses-settings:a=1", "no such setting: a"),
        ("makes-no-rule", r"it cannot be called with \(request, load, now_ns\)"),
        ("none:a=1", "it has no settings: a"),
        ("bounded:a=1", "it has no settings: a"),
    ],
)
def test_a_rule_that_cannot_be_made_is_one_clear_error(mode: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"--admission {mode}: {why}"):
        ruled(mode)


def test_an_unknown_controller_lists_those_there_are() -> None:
    with pytest.raises(UserError, match="unknown admission controller 'ones'") as caught:
        AdmissionConfig("ones:a=1")
    assert "bounded" in str(caught.value.hint) and "one-each" in str(caught.value.hint)

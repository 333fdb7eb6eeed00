"""The machine that makes of looks at a cluster what the policy of each role needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memserve.base.deployment import Place, PlacementOptions, Range, ScalingOptions
from memserve.base.errors import UserError
from memserve.base.types import Role
from memserve.base.units import NS_PER_S
from memserve.protocol.peers import Peer
from memserve.router.members.autoscaling import ClusterLook, MemberLook, ScaleRole, Scaling, Totals

UP_NS, DOWN_NS = 2 * NS_PER_S, 10 * NS_PER_S


def scaling(*scale: str, slo_ttft_ns: int | None = None) -> Scaling:
    return Scaling(ScalingOptions(scale, UP_NS, DOWN_NS), slo_ttft_ns)


def member(name: str, role: Role, **fields: object) -> MemberLook:
    return replace(MemberLook(Peer(name, 1), role, True, totals=Totals()), **fields)


P1, D1 = member("p1", Role.PREFILL), member("d1", Role.DECODE)


def looked(machine: Scaling, seconds: int, look: ClusterLook, start_s: int = 0) -> list[ScaleRole]:
    found = []
    for at in range(start_s, start_s + seconds):
        found += machine.handle(look, at * NS_PER_S)
        machine.check_invariants()
    return found


def test_each_role_has_its_own_reasons() -> None:
    """A prompt that no instance has waits for one that computes prompts, not for one that decodes."""
    machine = scaling("prefill=1..2", "decode=1..3")
    (order,) = looked(machine, 5, ClusterLook((P1, D1), unplaced=3))
    assert order == ScaleRole(Role.PREFILL, 1, 2, "3 requests wait, 2 for each instance are allowed")
    assert order.text == "prefill: 1 -> 2, because 3 requests wait, 2 for each instance are allowed"
    machine = scaling("prefill=1..2", "decode=1..3")
    (order,) = looked(machine, 5, ClusterLook((P1, replace(D1, kv_held=0.9))))
    assert (order.role, order.target) == (Role.DECODE, 2)
    prefill, decode = machine.role_counts()
    assert (decode.target, decode.more, decode.fewer) == (2, 1, 0) and (prefill.target, prefill.more) == (1, 0)


def test_totals_count_from_first_poll_per_incarnation() -> None:
    """What an instance did before, and what one of its name did in an earlier life, is no news."""
    machine = scaling("prefill=1..2")
    many = Totals(device_ns=10**12, ttft_missed=1000, ttft_met=1)
    assert looked(machine, 8, ClusterLook((replace(P1, totals=many),))) == []
    fewer = replace(P1, peer=Peer("p1", 2), totals=Totals(ttft_missed=900))
    assert looked(machine, 8, ClusterLook((fewer,)), 8) == []
    news = replace(fewer, totals=Totals(ttft_missed=1100, ttft_met=10))
    (order,) = looked(machine, 5, ClusterLook((news,)), 16)
    assert order.why == "95% of answers miss their objective"


def test_a_device_is_busy_by_its_time_over_some_seconds() -> None:
    machine, found = scaling("prefill=1..2"), []
    for at in range(20):  # totals are told every two seconds
        totals = Totals(device_ns=int(0.95 * (at // 2 * 2) * NS_PER_S))
        found += machine.handle(ClusterLook((replace(P1, totals=totals),)), at * NS_PER_S)
        machine.check_invariants()
    assert [order.why for order in found] == ["the devices work 95% of the time"]


def test_a_prompt_alone_waits_for_nothing_but_itself() -> None:
    """However long it is: another instance would not help."""
    alone = replace(P1, requests=1, prompt_ns=9 * NS_PER_S)
    assert looked(scaling("prefill=1..2"), 10, ClusterLook((alone,))) == []
    (order,) = looked(scaling("prefill=1..2"), 10, ClusterLook((replace(alone, requests=2),)))
    assert order.why == "prompts wait for 9.00 s, 1.00 s are allowed"
    slack = scaling("prefill=1..2", slo_ttft_ns=20 * NS_PER_S)
    assert looked(slack, 10, ClusterLook((replace(alone, requests=2),))) == []


def test_lost_reuse_of_a_full_cache_scales_up() -> None:
    """9 of 10 prompt tokens came again, and half of them had to be computed."""
    machine, found = scaling("prefill=1..2"), []
    for at in range(12):
        tokens = 1000 * at
        totals = Totals(prompt_tokens=tokens, cached_tokens=tokens // 2)
        look = ClusterLook((replace(P1, free=0.01, totals=totals),), 0, tokens, 0.1 * tokens)
        found += machine.handle(look, at * NS_PER_S)
    assert found[0].why == "40% of prompt tokens were cached once, and memory is full"


def test_draining_instances_do_not_count() -> None:
    leaving = member("p2", Role.PREFILL, is_open=False, waiting=50)
    machine = scaling("prefill=1..4")
    assert looked(machine, 3 * DOWN_NS // NS_PER_S, ClusterLook((P1, leaving))) == []


@pytest.mark.parametrize(
    "text", ["prefill=1", "prefill=2..1", "prefill=0..2", "store=1..2", "prefill=1..2,prefill=1..3", ""]
)
def test_ranges_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match="cannot read --scale"):
        ScalingOptions((text,))


def test_the_first_count_is_asked_for_or_the_least() -> None:
    options = ScalingOptions(("prefill=2..4,decode=1..2",))
    assert options.by_role() == {Role.PREFILL: Range(2, 4), Role.DECODE: Range(1, 2)}
    assert [options.initial_count(Role.PREFILL, count) for count in (None, 3)] == [2, 3]
    assert options.initial_count(Role.COLOCATED, None) is None and options.initial_count(Role.COLOCATED, 7) == 7
    with pytest.raises(UserError, match=r"--prefill 1 is not in --scale prefill=2..4"):
        options.initial_count(Role.PREFILL, 1)
    with pytest.raises(UserError, match="--scale-file tells decisions of --scale"):
        ScalingOptions(told_in="file")
    with pytest.raises(UserError, match="Ray carries out the decisions"):
        PlacementOptions(Place.RAY, scaling=ScalingOptions(("decode=1..2",), told_in="file"))

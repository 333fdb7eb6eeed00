"""Members by number: every router numbers them in an order of its own."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from memserve.base.errors import InvariantError
from memserve.base.types import KVGeometry, Role
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.members.registry import ORDERS, MemberState, Registry, order_of

GEOMETRY = KVGeometry(2, 2, 8, 8, "float32", 16)


def info(name: str, generation: int = 1) -> PeerInfo:
    return PeerInfo(Peer(name, generation), Role.COLOCATED, "virtual://", "m", GEOMETRY, 10, 0, 100, True)


def lowest(registry: Registry, count: int) -> list[str]:
    """The members with the lowest numbers: those that are chosen where all are equally good."""
    return [member.name for member in sorted(registry, key=lambda member: member.number)[:count]]


def test_the_owner_numbers_members_as_they_come() -> None:
    registry = Registry()
    assert [registry.add_member(info(f"c{at}"), 0).number for at in range(5)] == [0, 1, 2, 3, 4]


def test_routers_begin_with_different_members() -> None:
    """Four routers and 128 members that all hear in one order: of their first eight none is another's."""
    routers = [Registry(), *(Registry(order_of(f"router-{number}")) for number in (2, 3, 4))]
    for registry in routers:
        for at in range(128):
            registry.add_member(info(f"c{at}"), 0)
        registry.check_invariants()
    first = [name for registry in routers for name in lowest(registry, 8)]
    assert len(set(first)) == len(first) == 32


def test_numbers_are_given_again_in_any_order() -> None:
    """Random joins and deaths: a number has one member, and numbers stay within those of the most members at once."""
    rng = random.Random(3)
    for order in (0, 1, 613, ORDERS - 1):
        registry, generation, most = Registry(order), 0, 0
        for _ in range(400):
            name = f"c{rng.randrange(20)}"
            member = registry.member_by_name(name)
            if member is None:
                generation += 1
                member = registry.add_member(info(name, generation), 0)
                assert registry.member_by_number(member.number) is member
            else:
                registry.remove_member(member)
                with pytest.raises(InvariantError):
                    registry.member_by_number(member.number)
            most = max(most, len(registry))
            assert all(one.number ^ order < most for one in registry)
            registry.check_invariants()


def test_member_name_belongs_to_one_process() -> None:
    """The newer of two wins: it may be a restart. The other one lives, and comes again: it is told."""
    registry = Registry()
    old, new = (structs.replace(info("c", at), address=f"tcp://{at}") for at in (1, 2))
    registry.add_member(old, 0)
    assert registry.refusal_reason(new) is None
    registry.remove_member(registry.member_by_name("c"))
    member = registry.add_member(new, 0)
    member.replaces = old.address
    again = structs.replace(old, peer=Peer("c", 3))
    assert "take another --name" in registry.refusal_reason(again)
    assert registry.refusal_reason(structs.replace(again, address="tcp://3")) is None, "a restart, at whatever port"
    assert registry.refusal_reason(structs.replace(again, address=new.address)) is None
    router = structs.replace(new, peer=Peer("c", 4), role=Role.ROUTER)
    assert "the colocated at tcp://2 has it" in registry.refusal_reason(router)
    member.state = MemberState.REJOINING
    assert registry.refusal_reason(router) is None and registry.refusal_reason(again) is None, "it may be gone"

"""What all members are given: what they say of themselves, and how signals end them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_instances import GEOMETRY
from memserve.base.config import MemberConfig
from memserve.base.types import Role
from memserve.protocol.events import MessageArrived
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import ChangeGeneration, DrainRequested
from memserve.protocol.messages import JoinAccepted
from memserve.protocol.peers import ROUTER, Peer, PeerInfo
from memserve.system.process import HealthState, ending_signals
from memserve.transport.member_place import MemberPlace, health_of, next_incarnation

OWNER = Peer(ROUTER, 7)


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {sig: signal.getsignal(sig) for sig in ending_signals()}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


def place(**fields: Any) -> MemberPlace:
    return MemberPlace(secret="s", name="e1", role=Role.ENGINE, **fields)


@pytest.mark.parametrize("role", [Role.COLOCATED, Role.STORE, Role.ENGINE])
def test_members_of_all_kinds_say_alike_what_they_are(role: Role) -> None:
    member = MemberMachine(PeerInfo(Peer("m", 1), role, "at-m", "", GEOMETRY, 8, 0, 64, True), ("a",), MemberConfig())
    member.start(0)
    assert health_of(member) is HealthState.OUTSIDE
    member.handle(MessageArrived(OWNER, JoinAccepted((), "a")), 1)
    assert health_of(member) is HealthState.MEMBER
    member.handle(DrainRequested(1_000_000_000, "SIGTERM"), 2)
    assert health_of(member) is HealthState.DRAINS


def test_second_signal_leaves_no_time() -> None:
    calls: list[tuple[float, str]] = []
    place(drain_s=3.0).follow_signals(lambda patience_s, name: calls.append((patience_s, name)))
    for sig in (signal.SIGTERM, signal.SIGTERM):
        signal.raise_signal(sig)
    assert calls == [(3.0, "SIGTERM"), (0.0, "SIGTERM")]


def test_a_supervised_member_leaves_the_terminal_to_its_parent() -> None:
    calls: list[str] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    place(is_supervised=True).follow_signals(lambda _, name: calls.append(name))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert calls == ["SIGTERM"]


def test_next_incarnation_is_newer_than_all_known() -> None:
    future = 1 << 60
    order = ChangeGeneration(OWNER, "it was dead", future)
    assert next_incarnation(Peer("m", 1), order) == Peer("m", future)
    assert next_incarnation(Peer("m", 1), ChangeGeneration(OWNER, "it was dead", 2)).generation > 2


def test_health_file_is_opened_where_one_is_named(tmp_path: Path) -> None:
    assert place().open_health() is None
    file = place(health_file=tmp_path / "health").open_health()
    assert file is not None
    file.write_state(HealthState.DRAINS)
    assert (tmp_path / "health").read_text() == "drains\n"

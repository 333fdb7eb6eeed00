"""What operators read of members: a death and a return together, an ordinary start not at all."""

from __future__ import annotations

import logging

import pytest

from memserve.base.types import Role
from memserve.host.router import MemberLog
from memserve.protocol.peers import Peer
from memserve.router.events import MemberChange, ReportMember


def said(caplog: pytest.LogCaptureFixture, *news: tuple[MemberChange, str]) -> list[str]:
    """Warnings about ``c1``, two seconds apart."""
    now = [0.0]
    log = MemberLog(lambda: now[0])
    for change, why in news:
        now[0] += 2.0
        log.log_change(ReportMember(change, Peer("c1", 1), "tcp://h:1", why, Role.PREFILL))
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_instance_that_has_died_is_back(caplog: pytest.LogCaptureFixture) -> None:
    lines = said(caplog, (MemberChange.DIED, "its process was ended by signal 9"), (MemberChange.RETURNED, ""))
    assert lines == [
        "instance c1 at tcp://h:1 is dead: its process was ended by signal 9",
        "instance c1 at tcp://h:1 is back: after 2.0 s",
    ]


def test_member_name_of_an_earlier_run_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The records of a router that ended in good order know its instances; the next start has those names again."""
    assert said(caplog, (MemberChange.RETURNED, "")) == []
    assert said(caplog, (MemberChange.LEFT, "it is drained"), (MemberChange.RETURNED, "")) == []
    assert said(caplog, (MemberChange.RETURNED, "with the KV that it had cached")) == [
        "instance c1 at tcp://h:1 is back: with the KV that it had cached"
    ]


@pytest.mark.parametrize(
    "role, word",
    [(Role.COLOCATED, "instance"), (Role.STORE, "store"), (Role.ROUTER, "router"), (None, "member")],
)
def test_log_line_names_the_kind_of_member(caplog: pytest.LogCaptureFixture, role: Role | None, word: str) -> None:
    MemberLog().log_change(ReportMember(MemberChange.DIED, Peer("x1", 1), "tcp://h:1", "", role))
    assert [record.getMessage() for record in caplog.records] == [f"{word} x1 at tcp://h:1 is dead"]

"""One mailbox of several routers: which model a message is for, and which members are refused."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from typing import Any

import msgspec
import pytest

from memserve.base.errors import InvariantError, UserError
from memserve.base.types import Role
from memserve.protocol.messages import AnyMessage, Join, Leave, Refused
from memserve.protocol.peers import ROUTER, Peer, PeerInfo
from memserve.router.follower import NO_KV
from memserve.transport.ports import OnMessage
from memserve.transport.shared_mailbox import MailboxPart, SharedMailbox

ME = Peer(ROUTER, 7)


class RecordedMailbox:
    """What a shared mailbox asks of the one below it."""

    address = "tcp://h:1"

    def __init__(self, on_message: OnMessage) -> None:
        self.deliver = on_message
        self.calls: list[tuple[Any, ...]] = []

    def connect(self, peer: Peer, address: str) -> None:
        self.calls.append(("connect", peer, address))

    def disconnect(self, peer: Peer) -> None:
        self.calls.append(("disconnect", peer))

    def send(self, to: Peer, message: AnyMessage) -> None:
        self.calls.append(("send", to, message))

    def read_in(self, loop: AbstractEventLoop | None) -> None:
        self.calls.append(("read_in", loop))

    def close(self) -> None:
        self.calls.append(("close",))


class Routers:
    """The models ``a`` and ``b`` behind one mailbox; ``c`` is expected."""

    def __init__(self) -> None:
        self.mailbox: RecordedMailbox
        self.heard: list[tuple[str, Peer, AnyMessage]] = []
        self.shared = SharedMailbox(self.open_mailbox, ME, ["a", "b", "c"])
        self.a, self.b = self.open_part("a"), self.open_part("b")

    def open_mailbox(self, on_message: OnMessage) -> RecordedMailbox:
        self.mailbox = RecordedMailbox(on_message)
        return self.mailbox

    def open_part(self, model: str) -> MailboxPart:
        return self.shared.open_part(model, lambda peer, message: self.heard.append((model, peer, message)))

    def say(self, sender: Peer, message: AnyMessage) -> list[str]:
        """The models whose routers have heard it."""
        self.heard.clear()
        self.mailbox.deliver(sender, message)
        return [model for model, _, _ in self.heard]


def join(name: str, model: str, generation: int = 1) -> tuple[Peer, Join]:
    peer = Peer(name, generation)
    return peer, Join(
        msgspec.structs.replace(PeerInfo(peer, Role.STORE, "tcp://x:1", "", NO_KV, 0, 0, 0, True), model=model)
    )


def test_members_are_heard_by_the_router_of_their_model() -> None:
    routers = Routers()
    peer, message = join("p1", "b")
    assert routers.say(peer, message) == ["b"]
    assert routers.say(peer, Leave()) == ["a"], "not connected yet: any router answers"
    routers.b.connect(peer, "tcp://x:1")
    assert routers.say(peer, Leave()) == ["b"]
    assert routers.say(*join("old", "")) == ["a"], "without a name: the first model"
    routers.b.disconnect(peer)
    assert routers.say(peer, Leave()) == ["a"]


def test_an_older_incarnation_does_not_take_a_name_away() -> None:
    routers = Routers()
    routers.b.connect(Peer("p1", 1), "tcp://x:1")
    routers.b.connect(Peer("p1", 2), "tcp://x:2")
    routers.b.disconnect(Peer("p1", 1))
    assert routers.say(Peer("p1", 2), Leave()) == ["b"]


def test_a_member_for_no_model_here_is_refused() -> None:
    routers = Routers()
    peer, message = join("p1", "z")
    assert routers.say(peer, message) == []
    assert routers.mailbox.calls[-1][:2] == ("send", peer)
    answer = routers.mailbox.calls[-1][2]
    assert isinstance(answer, Refused) and "serves a, b, not 'z'" in answer.reason


def test_a_member_for_a_model_that_comes_is_not_answered() -> None:
    routers = Routers()
    assert routers.say(*join("p1", "c")) == [] and not routers.mailbox.calls
    routers.open_part("c")
    assert routers.say(*join("p1", "c")) == ["c"]


def test_one_name_is_of_one_model() -> None:
    routers = Routers()
    routers.a.connect(Peer("p1", 1), "tcp://x:1")
    assert routers.say(*join("p1", "b", 2)) == []
    assert "a member for the model 'a' is called 'p1'" in routers.mailbox.calls[-1][2].reason
    routers.a.disconnect(Peer("p1", 1))
    assert routers.say(*join("p1", "b", 3)) == ["b"]


def test_a_closed_part_hears_nothing_and_the_others_go_on() -> None:
    routers = Routers()
    routers.a.connect(Peer("p1", 1), "tcp://x:1")
    routers.a.close()
    assert routers.say(Peer("p1", 1), Leave()) == ["b"] and ("close",) not in routers.mailbox.calls
    assert routers.say(*join("p1", "a")) == []
    assert routers.open_part("a") is not routers.a
    routers.shared.close()
    assert routers.mailbox.calls[-1] == ("close",)


def test_all_parts_read_in_one_place() -> None:
    routers, loop = Routers(), object()
    for where in (loop, loop, None, None):
        for part in (routers.a, routers.b):
            part.read_in(where)
    assert routers.mailbox.calls == [("read_in", loop), ("read_in", None)]


def test_parts_do_not_begin_anew() -> None:
    routers = Routers()
    with pytest.raises(UserError, match="is served already"):
        routers.open_part("a")
    with pytest.raises(InvariantError):
        routers.a.restart_as(Peer("x", 2))

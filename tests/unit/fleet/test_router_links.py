"""Connections between the routers of the same engines: messages, their ends, and which end comes first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memserve.base.errors import UserError
from memserve.fleet.messages import FleetEvent, RouterJoined, RouterLeft
from memserve.fleet.routers.links import OwnerLine, RouterDesk
from memserve.protocol.admission import AdmissionGrant, AdmissionGrants, AdmissionRequests
from memserve.protocol.events import MessageArrived
from memserve.protocol.peers import Peer

WAIT_S = 20.0


class Events:
    """What one end has heard."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[FleetEvent] = asyncio.Queue()
        self.post = self._queue.put_nowait

    async def next_event(self) -> FleetEvent:
        return await asyncio.wait_for(self._queue.get(), WAIT_S)

    async def next_joined(self) -> Peer:
        event = await self.next_event()
        assert isinstance(event, RouterJoined)
        return event.peer


class Ends:
    """An owner's end and a follower's."""

    def __init__(self, folder: Path, patience_s: float = WAIT_S) -> None:
        self.at_owner, self.at_follower = Events(), Events()
        self.desk = RouterDesk(folder / "admission", self.at_owner.post, patience_s)
        self.line = OwnerLine(folder / "admission", "router-2", self.at_follower.post)

    async def close(self) -> None:
        await self.line.close()
        await self.desk.close()


def test_messages_come_both_ways_and_ends_are_told(tmp_path: Path) -> None:
    async def run() -> None:
        ends = Ends(tmp_path)
        await ends.line.open()  # before there is an owner
        await ends.desk.open()
        follower, owner = await ends.at_owner.next_joined(), await ends.at_follower.next_joined()
        assert follower.name.startswith("router-2")
        ends.line.send_message(owner, asked := AdmissionRequests(1, open=(7,)))
        assert await ends.at_owner.next_event() == MessageArrived(follower, asked)
        ends.desk.send_message(follower, grants := AdmissionGrants(1, 5, (AdmissionGrant(7),)))
        assert await ends.at_follower.next_event() == MessageArrived(owner, grants)
        await ends.line.close()
        assert await ends.at_owner.next_event() == RouterLeft(follower)
        ends.desk.send_message(follower, grants)  # to one that is gone
        await ends.close()

    asyncio.run(run())


def test_a_follower_comes_back_as_another_peer(tmp_path: Path) -> None:
    async def run() -> None:
        ends = Ends(tmp_path, patience_s=0.0)
        await ends.desk.open()
        await ends.line.open()
        first = await ends.at_owner.next_joined()
        await ends.desk.close()
        assert await ends.at_owner.next_event() == RouterLeft(first)
        await ends.desk.open()
        assert await ends.at_owner.next_joined() != first
        events = [await ends.at_follower.next_event() for _ in range(3)]
        assert [type(event) for event in events] == [RouterJoined, RouterLeft, RouterJoined]
        await ends.close()

    asyncio.run(run())


def test_the_owner_ends_after_its_followers(tmp_path: Path) -> None:
    async def run() -> None:
        ends = Ends(tmp_path)
        await ends.desk.open()
        await ends.line.open()
        follower, owner = await ends.at_owner.next_joined(), await ends.at_follower.next_joined()
        closing = asyncio.create_task(ends.desk.close())
        ends.line.send_message(owner, asked := AdmissionRequests(1))  # it drains, and its requests are admitted still
        assert await ends.at_owner.next_event() == MessageArrived(follower, asked) and not closing.done()
        ends.desk.send_message(follower, grants := AdmissionGrants(1, 5))
        assert await ends.at_follower.next_event() == MessageArrived(owner, grants) and not closing.done()
        await ends.line.close()
        await asyncio.wait_for(closing, WAIT_S)

    asyncio.run(run())


def test_a_connection_that_sends_nonsense_is_closed(tmp_path: Path) -> None:
    async def run() -> None:
        ends = Ends(tmp_path)
        await ends.desk.open()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "admission")
        writer.write(b"\x08\x00\x00\x00router-3" + b"\x03\x00\x00\x00\xff\xff\xff")
        peer = await ends.at_owner.next_joined()
        assert await ends.at_owner.next_event() == RouterLeft(peer)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        await ends.close()

    asyncio.run(run())


def test_a_folder_with_too_long_a_name_is_told(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.raises(UserError, match="cannot share an admission") as refused:
        Ends(folder).desk.bind_socket()
    assert "TMPDIR" in str(refused.value.hint)

"""The cluster's secret changes under open lines: no letter and no query is lost, and the old secret opens nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from msgspec.structs import replace

from links_owner import GEOMETRY, content, info_of, view
from memserve import _core
from memserve.base.types import Tier
from memserve.kv.identity import identity_key, kv_secret, secrets_in
from memserve.model.attention import query_server
from memserve.model.attention.query_server import SegmentServer, ZmqSegmentLines
from memserve.model.attention.sequence_parallel import Query, SegmentLostError
from memserve.protocol.messages import AnyMessage, Cancel, Segment
from memserve.protocol.peers import ArenaPlace, Peer
from memserve.system import secrets as private_files
from memserve.system.secrets import Secret, follow_secret
from memserve.transport import curve, mailbox
from memserve.transport import request_server as answering
from memserve.transport.curve import CurveKeys, Socket
from memserve.transport.links.encrypted import CurveLink
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import LinkError
from memserve.transport.probe import ProbeResult, probe_address
from memserve.transport.ranges import Ranges
from memserve.transport.request_server import Line
from secret_steps import NEW, OLD, STEPS, put
from waiting import eventually


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "LOOK_S", 0.0)


class Talker:
    """A mailbox with a secret file of its own, that writes to another one all the time."""

    def __init__(self, name: str, folder: Path) -> None:
        self.file = put(folder / name, f"{OLD}\n")
        self.me, self.heard = Peer(name, 1), []
        self.sent, self._ends = 0, threading.Event()
        self.box = ZmqMailbox(self.me, ListenAddress(follow_secret(self.file)), self._on_message)
        self._thread = threading.Thread(target=self._talk)

    def _on_message(self, sender: Peer, message: AnyMessage) -> None:
        assert isinstance(message, Cancel)
        self.heard.append(int(message.request_id))

    def talk_to(self, other: Talker) -> None:
        self._other = other.me
        self.box.connect(other.me, other.box.address)
        self._thread.start()

    def _talk(self) -> None:
        while not self._ends.wait(0.002):
            self.box.send(self._other, Cancel(str(self.sent)))
            self.sent += 1

    def close(self) -> None:
        self._ends.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.box.close()


@contextmanager
def talkers(folder: Path, *names: str) -> Iterator[list[Talker]]:
    made = [Talker(name, folder) for name in names]
    try:
        yield made
    finally:
        for talker in made:
            talker.close()


def hears_all(listener: Talker, speaker: Talker) -> None:
    """What has been sent until now has come, once each and in order."""
    count = speaker.sent
    eventually(lambda: len(listener.heard) >= count)
    assert listener.heard[:count] == list(range(count))


def takes(talker: Talker, secret: str) -> ProbeResult:
    return probe_address(talker.box.address, secret, 5.0)


@pytest.mark.parametrize("order", ["one after the other", "the other way round", "at once"])
def test_secret_rotation_in_three_steps_loses_no_message(order: str, tmp_path: Path) -> None:
    with talkers(tmp_path, "a", "b") as (a, b):
        a.talk_to(b)
        b.talk_to(a)
        for text in STEPS:
            for talker in (b, a) if order == "the other way round" else (a, b):
                put(talker.file, text)
                if order != "at once":
                    first = secrets_in(text)[0]
                    eventually(lambda talker=talker, first=first: takes(talker, first) is ProbeResult.ACCEPTED)
                    hears_all(a, b)
                    hears_all(b, a)
            for talker in (a, b):
                eventually(lambda talker=talker, text=text: takes(talker, secrets_in(text)[0]) is ProbeResult.ACCEPTED)
            hears_all(a, b)
            hears_all(b, a)
        for talker in (a, b):
            assert takes(talker, OLD) is ProbeResult.REJECTED and takes(talker, NEW) is ProbeResult.ACCEPTED


def test_peer_with_a_revoked_secret_is_disconnected(tmp_path: Path) -> None:
    """Whatever knew the old secret, and has a line open, says nothing more."""
    with talkers(tmp_path, "a", "spy") as (a, spy):
        spy.talk_to(a)
        eventually(lambda: len(a.heard) > 10)
        put(a.file, f"{NEW}\n")
        eventually(lambda: takes(a, NEW) is ProbeResult.ACCEPTED)
        count, sent = len(a.heard), spy.sent
        eventually(lambda: spy.sent > sent + 100)
        assert len(a.heard) == count and takes(a, OLD) is ProbeResult.REJECTED


def test_a_broken_file_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with talkers(tmp_path, "a", "b") as (a, b):
        a.talk_to(b)
        for text in ("", "short\n", f"{OLD}\nshort\n", f"kv={NEW}\n", "\xff" * 40 + "\n\x00"):
            caplog.clear()
            b.file.write_bytes(text.encode("latin-1"))
            eventually(lambda: "stay in use" in caplog.text)
            hears_all(b, a)
            assert OLD not in caplog.text and takes(b, OLD) is ProbeResult.ACCEPTED


def test_peer_with_a_wrong_secret_is_reconnected_with_backoff(tmp_path: Path) -> None:
    with talkers(tmp_path, "a", "b") as (a, b):
        put(b.file, "a third secret of the tests\n")
        put(a.file, STEPS[0])
        eventually(lambda: takes(b, OLD) is ProbeResult.REJECTED)
        a.talk_to(b)
        began_s = time.monotonic()
        eventually(lambda: b.box.counters.handshakes_failed >= 5)
        seconds = time.monotonic() - began_s
        assert not b.heard and b.box.counters.handshakes_failed < 40 * (1 + seconds)
        put(b.file, STEPS[2])
        eventually(lambda: bool(b.heard))


@contextmanager
def half_way(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Iterator[None]:
    """As if the change took long: a process that listens admits the new key alone, and new connections find the old
    one yet. ZeroMQ tells them that they are turned away, and they do not try again."""

    is_done = threading.Event()

    def with_the_old_one(socket: Socket, endpoint: str, keys: CurveKeys) -> bool:
        if not is_done.is_set() and curve.listen_anew(socket, endpoint, CurveKeys.derived_from(OLD)):
            is_done.set()
        return False

    with monkeypatch.context() as patch:
        patch.setattr(module, "listen_anew", with_the_old_one)
        yield


def is_dead(line: Line) -> bool:
    """Whether it was turned away for good."""
    return not int(line.socket.get(zmq.EVENTS)) & int(zmq.POLLOUT)


def test_messages_are_resent_after_a_rejected_reconnect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with talkers(tmp_path, "a", "b") as (a, b):
        with half_way(monkeypatch, mailbox):
            put(a.file, STEPS[0])
            eventually(lambda: len(a.box._keys) == 2)
            put(b.file, STEPS[1])
            eventually(lambda: takes(b, NEW) is takes(b, OLD) is ProbeResult.REJECTED)
            a.talk_to(b)
            eventually(lambda: a.sent > 300)
            assert a.box.counters.sent < a.sent - 1, "no letter met a line that was turned away"
        hears_all(b, a)
        assert a.box.counters.lost_full == 0


def test_queries_of_attention_go_on_while_the_secret_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(asked: Query) -> tuple[torch.Tensor, torch.Tensor]:
        return asked.q + asked.layer, torch.full(asked.q.shape[:2], float(asked.layer))

    theirs, ours = put(tmp_path / "server", f"{OLD}\n"), put(tmp_path / "lines", f"{OLD}\n")
    server = SegmentServer(ListenAddress(follow_secret(theirs)), "float32", attend)
    lines = ZmqSegmentLines(follow_secret(ours), answer_s=20.0)
    segment = Segment(Peer("i", 1), server.address, 32)

    def ask_some(lines: ZmqSegmentLines = lines) -> None:
        numbers = [lines.send_query(segment, Query("x", layer, torch.ones((3, 4, 8)), 1.0, 0.0)) for layer in range(3)]
        for layer in (2, 0, 1):
            outputs, statistics = torch.empty((3, 4, 8)), torch.empty((3, 4))
            lines.receive_answer(numbers[layer], outputs, statistics)
            assert outputs.unique().tolist() == [1.0 + layer]

    def takes(secret: str) -> bool:
        ask_some()
        other = ZmqSegmentLines(secret, answer_s=0.5)
        try:
            ask_some(other)
        except SegmentLostError:
            return False
        finally:
            other.close()
        return True

    try:
        ask_some()
        put(ours, STEPS[0])
        ask_some()
        with half_way(monkeypatch, answering):
            put(theirs, STEPS[1])
            eventually(lambda: all(map(is_dead, lines._connections.values())))
        ask_some()
        for text in STEPS:
            for file in (theirs, ours) if text != STEPS[0] else (ours, theirs):
                put(file, text)
                ask_some()
            eventually(lambda text=text: takes(secrets_in(text)[0]))
        assert not takes(OLD)
    finally:
        lines.close()
        server.close()


class ScriptedLine:
    """A line whose peer takes ``takes[0]`` queries before it turns the key down; the next one ``takes[1]``. None: it
    answers all."""

    def __init__(self, takes: list[int | None]) -> None:
        self.limit, self.takes = takes[0], takes[1:]
        self.socket, self.answers = self, []

    @property
    def is_rejected(self) -> bool:
        return self.limit is not None

    def with_next_key(self) -> ScriptedLine:
        self.close()
        return ScriptedLine(self.takes)

    def send_multipart(self, frames: list[Any], flags: int) -> None:
        assert self.answers is not None, "it is closed"
        if self.limit == len(self.answers):
            raise zmq.Again
        number = query_server._decode(frames[0]).number
        self.answers.append([zmq.Frame(part) for part in (msgspec.msgpack.encode(number), bytes(16), bytes(8))])

    def poll(self, ms: int) -> bool:
        return self.limit is None and bool(self.answers)

    def recv_multipart(self, copy: bool) -> list[zmq.Frame]:
        return self.answers.pop(0)

    def close(self) -> None:
        self.answers = None


@pytest.mark.parametrize("takes", [[0, 1, None], [2, 1, 0, 2, None], [3, 3, None]])
def test_queries_survive_keys_turned_down_half_way(monkeypatch: pytest.MonkeyPatch, takes: list[int | None]) -> None:
    monkeypatch.setattr(query_server, "Line", lambda *args, **sizes: ScriptedLine(takes))
    lines = ZmqSegmentLines(OLD)
    segment = Segment(Peer("i", 1), "tcp://nowhere", 32)
    numbers = [lines.send_query(segment, Query("x", layer, torch.ones((1, 2, 2)), 1.0, 0.0)) for layer in range(3)]
    for number in numbers:
        outputs, statistics = torch.ones((1, 2, 2)), torch.ones((1, 2))
        lines.receive_answer(number, outputs, statistics)
        assert not outputs.any()
    lines.close()


def test_pages_are_read_while_the_secret_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever end has changed first, also in the middle of a read; with the old secret alone none are read in the
    end."""
    theirs, ours = put(tmp_path / "owner", f"{OLD}\n"), put(tmp_path / "reader", f"{OLD}\n")
    size = GEOMETRY.block_bytes
    arena, target = _core.SharedArena(4 * size), _core.SharedArena(4 * size)
    arena.generation = 1
    view(arena)[:] = content(Tier.HBM, 4 * size)
    order = Ranges(np.array([2, 0], np.int64) * size, np.array([1, 3], np.int64) * size, size)
    want = _core.seal_ranges(arena.address, order.src_offsets, size).tolist()
    owner = CurveLink({Tier.HBM: arena}, ListenAddress(follow_secret(theirs)), size)
    info = owner.describe(
        replace(info_of(Peer("owner", 1)), arenas=(ArenaPlace(Tier.HBM, arena.address, arena.nbytes),))
    )

    def reader_with(secret: Secret, stall_s: float = 20.0) -> CurveLink:
        link = CurveLink({Tier.HBM: target}, ListenAddress(secret), size, stall_s=stall_s)
        link.add_peer(info)
        return link

    reader = reader_with(follow_secret(ours))

    def takes(secret: str) -> bool:
        link = reader_with(secret, 0.5)
        try:
            return link.read(info.peer, Tier.HBM, Tier.HBM, order).tolist() == want
        except LinkError:
            return False
        finally:
            link.close()

    read = reader._read

    def read_slowly(*what: Any) -> Any:
        """The file has changed and another read has noticed before this one is over."""
        monkeypatch.setattr(reader, "_read", read)
        put(ours, STEPS[0])
        assert reader.read(info.peer, Tier.HBM, Tier.HBM, order).tolist() == want
        return read(*what)

    try:
        monkeypatch.setattr(reader, "_read", read_slowly)
        assert reader.read(info.peer, Tier.HBM, Tier.HBM, order).tolist() == want
        with half_way(monkeypatch, answering):
            put(theirs, STEPS[1])
            eventually(lambda: all(map(is_dead, reader._connections[info.peer])))
        eventually(lambda: takes(NEW))
        for _ in range(2):  # as many as there may be lines from before
            assert reader.read(info.peer, Tier.HBM, Tier.HBM, order).tolist() == want
        for text in STEPS:
            for file in (theirs, ours) if text != STEPS[0] else (ours, theirs):
                put(file, text)
                assert reader.read(info.peer, Tier.HBM, Tier.HBM, order).tolist() == want
            eventually(lambda text=text: takes(secrets_in(text)[0]))
        assert not takes(OLD)
        put(theirs, "a third secret of the tests\n")
        eventually(lambda: takes("a third secret of the tests"))
        put(ours, STEPS[0])
        hasty = reader_with(follow_secret(ours), 0.5)
        with pytest.raises(LinkError, match="none of the secrets"):
            hasty.read(info.peer, Tier.HBM, Tier.HBM, order)
        hasty.close()
    finally:
        reader.close()
        owner.close()


def test_kv_names_survive_a_secret_rotation() -> None:
    assert {identity_key(text) for text in (OLD, f"{OLD}\n", *STEPS)} == {identity_key(OLD)}
    assert identity_key(NEW) != identity_key(OLD)
    assert [secrets_in(text) for text in STEPS] == [(OLD, NEW), (NEW, OLD), (NEW,)]
    assert kv_secret("") == "" and secrets_in("\n \n") == ()

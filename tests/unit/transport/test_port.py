"""The port's own logic, over links that do as they are told: order, choice of the way, cancelling, closing."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from links_owner import GEOMETRY, SECRET, info_of
from memserve import _core
from memserve.base.errors import UserError
from memserve.base.types import Tier
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport import data_port as data
from memserve.transport.data_port import Lanes, PagePort, open_data_port
from memserve.transport.links import nixl_agent
from memserve.transport.links.nixl import PollThread
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import LinkError, Seals, UnreachableError
from memserve.transport.ranges import Ranges

A, B = Peer("a", 1), Peer("b", 1)


class FakeLink:
    """Reads nothing. ``gates[peer]``, where there is one, holds its reads up; ``errors[peer]`` fails them."""

    def __init__(self, name: str, workers: int = 2) -> None:
        self.name = name
        self.workers = workers
        self.peers: dict[Peer, PeerInfo] = {}
        self.gates: dict[Peer, threading.Event] = {}
        self.errors: dict[Peer, Exception] = {}
        self.reads: list[tuple[Peer, int]] = []
        self.begun = threading.Semaphore(0)
        self.expected_reads = 0
        self.closed = False

    def describe(self, info: PeerInfo) -> PeerInfo:
        return info

    def reaches(self, info: PeerInfo) -> bool:
        return info.namespace != "unreachable"

    def add_peer(self, info: PeerInfo) -> None:
        self.peers[info.peer] = info

    def remove_peer(self, peer: Peer) -> None:
        self.peers.pop(peer, None)

    def expect_reads(self) -> None:
        self.expected_reads += 1

    def read(self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, *_: object) -> Seals:
        self.begun.release()
        if peer in self.gates:
            assert self.gates[peer].wait(10)
        if peer in self.errors:
            raise self.errors[peer]
        self.reads.append((peer, int(ranges.src_offsets[0]) // GEOMETRY.block_bytes))
        return np.full(len(ranges), 7, np.uint64)

    def close(self) -> None:
        self.closed = True


class World:
    """A port and its answers."""

    def __init__(self, *links: FakeLink) -> None:
        self.arenas = {Tier.HBM: _core.SharedArena(8 * GEOMETRY.block_bytes)}
        self.answers: list[Any] = []
        self._news = threading.Condition()
        self.port = PagePort(GEOMETRY, self.arenas, list(links), self._on_pages)
        for peer in (A, B):
            self.port.add_peer(info_of(peer))

    def _on_pages(self, answer: PagesSealed | PagesPulled) -> None:
        with self._news:
            self.answers.append(answer)
            self._news.notify_all()

    def pull(self, job_id: int, peer: Peer = A, checksum: int = 7) -> None:
        """Of block ``job_id % 8``."""
        blocks = (job_id % 8,)
        self.port.start(PullPages(job_id, peer, Tier.HBM, blocks, Tier.HBM, blocks, 0, 4, (checksum,)))

    def wait(self, count: int) -> dict[int, Any]:
        """By job; each answered once."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.answers) >= count, 10), self.answers
        assert len({answer.job_id for answer in self.answers}) == len(self.answers) == count
        return {answer.job_id: answer for answer in self.answers}


def test_pulls_of_a_peer_run_in_order_next_to_others() -> None:
    link = FakeLink("fake")
    link.gates[A] = threading.Event()
    world = World(link)
    for job_id in range(5):
        world.pull(job_id)
    world.pull(5, B)
    assert set(world.wait(1)) == {5}
    link.gates[A].set()
    world.wait(6)
    assert [block for peer, block in link.reads if peer == A] == [0, 1, 2, 3, 4]
    world.port.close()
    assert link.closed


def test_cancelled_pulls_that_have_not_begun_do_not_begin() -> None:
    link = FakeLink("fake")
    link.gates[A] = threading.Event()
    world = World(link)
    for job_id in range(3):
        world.pull(job_id)
    world.pull(3, B)
    assert link.begun.acquire(timeout=10) and link.begun.acquire(timeout=10)
    world.port.start(CancelPulls(A))
    world.port.start(CancelPulls(Peer("nobody", 1)))
    world.pull(4)  # after the cancelling: the peer may be back
    link.gates[A].set()
    answers = world.wait(5)
    assert {job_id: bool(answer.error) for job_id, answer in answers.items()} == {
        0: False, 1: True, 2: True, 3: False, 4: False,
    }  # fmt: skip
    world.port.close()


def test_every_job_is_answered_while_and_after_closing() -> None:
    link = FakeLink("fake")
    link.gates[A] = threading.Event()
    world = World(link)
    for job_id in range(4):
        world.pull(job_id)
    assert link.begun.acquire(timeout=10)
    closer = threading.Thread(target=world.port.close)
    closer.start()
    link.gates[A].set()
    closer.join(10)
    answers = world.wait(4)
    assert not answers[0].error and all(answers[n].error for n in (1, 2, 3))
    world.pull(4)
    world.port.start(SealPages(5, Tier.HBM, (1,), 0, 4))
    answers = world.wait(6)
    assert "no way" in answers[4].error and len(answers[5].checksums) == 1


def test_unreachable_link_falls_back_to_the_next() -> None:
    near, far = FakeLink("near"), FakeLink("far")
    near.errors[A] = UnreachableError("another user's process")
    world = World(near, far)
    for job_id in range(3):
        world.pull(job_id)
    answers = world.wait(3)
    assert [answers[n].link for n in range(3)] == ["far"] * 3
    world.pull(3, B)
    assert world.wait(4)[3].link == "near"
    far.errors[A] = UnreachableError("nor this one")
    world.pull(4)
    assert "nor this one" in world.wait(5)[4].error
    world.pull(5)
    assert "no way to a" in world.wait(6)[5].error
    world.port.close()


def test_errors_and_wrong_checksums_are_answers() -> None:
    link = FakeLink("fake")
    world = World(link)
    link.errors[A] = LinkError("torn")
    world.pull(0)
    assert world.wait(1)[0].error == "torn"
    link.errors[A] = ZeroDivisionError("a bug")
    world.pull(1)
    assert "ZeroDivisionError" in world.wait(2)[1].error
    del link.errors[A]
    world.pull(2, checksum=8)
    assert "another checksum" in world.wait(3)[2].error
    world.pull(3)
    assert world.wait(4)[3] == PagesPulled(3, "", GEOMETRY.block_bytes, "fake", world.answers[-1].spent_ns)
    world.port.add_peer(msgspec.structs.replace(info_of(A), namespace="unreachable"))
    world.pull(4)
    assert "no way" in world.wait(5)[4].error
    world.port.close()


def test_describe_names_arenas_and_checksums_announce_reads() -> None:
    link = FakeLink("fake")
    world = World(link)
    info = world.port.describe(info_of(Peer("me", 12)))
    (place,) = info.arenas
    arena = world.arenas[Tier.HBM]
    assert (place.address, place.arena_bytes, place.fd) == (arena.address, arena.nbytes, arena.fd)
    assert arena.generation == 12 and info.pid > 0 and info.host_id
    world.port.start(SealPages(1, Tier.HBM, (0, 1), 0, 4))
    first, second = world.wait(1)[1].checksums
    assert first == second  # both are zeros
    world.port.close()
    assert link.expected_reads == 1


def test_links_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown link"):
        open_data_port("carrier pigeon", GEOMETRY, {}, print)
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_module",))
    with pytest.raises(UserError, match=r"memserve\[nixl\]"):
        open_data_port("nixl", GEOMETRY, {}, print)
    with pytest.raises(UserError, match="channel of a cluster"):
        open_data_port("curve", GEOMETRY, {}, print)
    here = ListenAddress(SECRET)
    without = (
        ("auto", ["shm", "staged", "curve"]),
        ("trusted", ["shm", "staged", "curve"]),
        ("shm", ["shm"]),
        ("curve", ["curve"]),
    )
    for kind, names in without:
        port = open_data_port(kind, GEOMETRY, {}, print, here)
        assert [link.name for link in port._links] == names
        port.close()
    monkeypatch.setattr(data, "nixl_is_installed", lambda: True)
    monkeypatch.setattr(data, "NixlLink", lambda *_, host=None: FakeLink("nixl"))
    for adapters, trusted in ((True, ["shm", "nixl", "staged", "curve"]), (False, ["shm", "staged", "curve"])):
        monkeypatch.setattr(data, "has_rdma", lambda _host, adapters=adapters: adapters)
        for kind, names in (("auto", ["shm", "staged", "curve"]), ("trusted", trusted), ("nixl", ["nixl"])):
            port = open_data_port(kind, GEOMETRY, {}, print, here)
            assert [link.name for link in port._links] == names, "NIXL where the network is trusted and has RDMA"
            port.close()


def test_failing_nixl_start_leaves_the_other_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("json",))  # installed, but no NIXL
    monkeypatch.setattr(data, "has_rdma", lambda _host: True)
    with pytest.raises(UserError, match="does not start"):
        open_data_port("nixl", GEOMETRY, {}, print)
    port = open_data_port("trusted", GEOMETRY, {}, print, ListenAddress(SECRET))
    assert [link.name for link in port._links] == ["shm", "staged", "curve"]
    port.close()


def test_lanes_keep_their_order_whatever_fails() -> None:
    lanes, done, lock = Lanes("test", 3), [], threading.Lock()

    def task(lane: int, number: int) -> None:
        with lock:
            done.append((lane, number))
        if number % 7 == 3:
            raise RuntimeError("on purpose")

    for number in range(50):
        for lane in range(5):
            assert lanes.submit_task(lane, lambda lane=lane, number=number: task(lane, number))
    lanes.close()
    for lane in range(5):
        assert [number for which, number in done if which == lane] == list(range(50))
    assert not lanes.submit_task(0, lambda: None)


def test_lane_runs_one_task_at_a_time() -> None:
    lanes, running, most, lock = Lanes("test", 4), 0, 0, threading.Lock()
    barrier = threading.Barrier(2)

    def task() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1

    for _ in range(200):
        lanes.submit_task("one", task)
    for lane in ("two", "three"):  # these meet: they run at the same time
        lanes.submit_task(lane, lambda: barrier.wait(10))
    lanes.close()
    assert most == 1


def test_poll_thread_polls_while_there_is_work() -> None:
    looks = threading.Semaphore(0)
    busy = [False]

    def attend() -> bool:
        looks.release()
        return busy[0]

    attendant = PollThread(attend)
    assert looks.acquire(timeout=10)
    assert not looks.acquire(timeout=0.05)  # nothing to do: it sleeps
    busy[0] = True
    attendant.poll_soon()
    assert all(looks.acquire(timeout=10) for _ in range(5))
    busy[0] = False
    attendant.close()

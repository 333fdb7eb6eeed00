"""Pages between two real processes, over every link: the right bytes or an error, once."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from links_owner import BLOCKS, GEOMETRY, SECRET, Owner, content, info_of, view
from memserve import _core
from memserve.base.errors import InvariantError
from memserve.base.types import Tier
from memserve.kv.transfer.events import PagesPulled, PagesSealed, PullPages, SealPages
from memserve.protocol.peers import ArenaPlace, Peer
from memserve.transport.curve import CurveKeys
from memserve.transport.data_port import PagePort, open_data_port
from memserve.transport.links import encrypted as curve_link
from memserve.transport.links import nixl, nixl_agent
from memserve.transport.links import shared_memory as shm
from memserve.transport.links.encrypted import CurveLink
from memserve.transport.links.gpu_memory import GpuMemory
from memserve.transport.links.nixl import NixlLink
from memserve.transport.links.shared_memory import ShmLink
from memserve.transport.network_devices import ListenAddress
from memserve.transport.outbound import new_context
from memserve.transport.ports import LinkError, PageLink
from memserve.transport.ranges import Ranges
from memserve.transport.request_server import Line
from shard_plans import pull_plan, shards
from waiting import eventually

BLOCK, PAGE = GEOMETRY.block_bytes, GEOMETRY.page_bytes
NIXL = pytest.mark.skipif(not nixl_agent.nixl_is_installed(), reason="NIXL (extra: nixl) is not installed")
WAYS = [
    pytest.param(("shm", None), id="shm"),
    pytest.param(("curve", None), id="curve"),
    pytest.param(("nixl", None), id="nixl", marks=NIXL),
    pytest.param(("nixl", "tcp"), id="nixl-tcp", marks=NIXL),
]
"""Link, and what UCX may use: TCP alone stands for two hosts."""


HERE = ListenAddress(SECRET)


def new_link(name: str, arenas: Any, **sizes: Any) -> PageLink:
    """One of our own."""
    if name == "nixl":
        return NixlLink(arenas, BLOCK, **sizes)
    return CurveLink(arenas, HERE, BLOCK, **sizes) if name == "curve" else ShmLink(arenas)


class Taker:
    """Own arenas, a port over one link, and the answers."""

    def __init__(self, link: str, stall_s: float | None = None) -> None:
        self.arenas = {tier: _core.SharedArena(BLOCKS * BLOCK) for tier in (Tier.HBM, Tier.DRAM)}
        self.answers: dict[int, list[PagesPulled | PagesSealed]] = {}
        self._news = threading.Condition()
        if stall_s is None:
            self.port = open_data_port(link, GEOMETRY, self.arenas, self._on_pages, HERE)
        else:
            one = new_link(link, self.arenas, stall_s=stall_s)
            self.port = PagePort(GEOMETRY, self.arenas, [one], self._on_pages)
        self.port.describe(info_of(Peer("taker", 3)))
        self._job = 0

    def _on_pages(self, answer: PagesPulled | PagesSealed) -> None:
        with self._news:
            self.answers.setdefault(answer.job_id, []).append(answer)
            self._news.notify_all()

    def wait(self, job_id: int, timeout_s: float = 10) -> Any:
        with self._news:
            assert self._news.wait_for(lambda: job_id in self.answers, timeout_s), "no answer"
            assert len(self.answers[job_id]) == 1
            return self.answers[job_id][0]

    def clear(self) -> None:
        for arena in self.arenas.values():
            view(arena)[:] = 0

    def pull(self, owner: Owner, src: tuple[int, ...], dst: tuple[int, ...], **others: Any) -> PullPages:
        """A job that the owner has sealed the pages for; not started."""
        self._job += 1
        job = {"first_layer": 0, "end_layer": 4, "src_tier": Tier.HBM, "dst_tier": Tier.HBM, "by_page": False} | others
        if "checksums" not in job:
            job["checksums"] = owner.seal(job["src_tier"], src, job["first_layer"], job["end_layer"])
        return PullPages(self._job, owner.peer, src_blocks=src, dst_blocks=dst, **job)

    def do(self, job: PullPages) -> PagesPulled:
        self.port.start(job)
        answer = self.wait(job.job_id)
        assert isinstance(answer, PagesPulled)
        return answer


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """The link's name; UCX is told what it may use in this process and its children."""
    link, ucx = request.param
    with pytest.MonkeyPatch.context() as patch:
        if ucx:
            patch.setenv("UCX_TLS", ucx)
        yield link


@pytest.fixture(scope="module")
def pair(way: str) -> Iterator[tuple[Taker, Owner]]:
    """A taker that reads from an owner, shared by the tests of one link."""
    owner = Owner(way)
    taker = Taker(way)
    taker.port.add_peer(owner.info)
    yield taker, owner
    taker.port.close()
    owner.close()


def blocks_of(tier: Tier) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The owner's blocks: ``[blocks, layers, page]``."""
    return content(tier, BLOCKS * BLOCK).reshape(BLOCKS, 4, PAGE)


@pytest.mark.parametrize("by_page", [False, True], ids=["aggregated", "discrete"])
@pytest.mark.parametrize("layers", [(0, 4), (1, 3)], ids=["all layers", "two layers"])
def test_the_right_bytes_arrive_and_no_others(
    pair: tuple[Taker, Owner], layers: tuple[int, int], by_page: bool
) -> None:
    taker, owner = pair
    for src_tier, dst_tier in ((Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.HBM)):
        taker.clear()
        src, dst = (5, 0, 63, 17), (63, 4, 0, 5)
        job = taker.pull(
            owner, src, dst, src_tier=src_tier, dst_tier=dst_tier, by_page=by_page,
            first_layer=layers[0], end_layer=layers[1],
        )  # fmt: skip
        answer = taker.do(job)
        assert (answer.error, answer.link) == ("", taker.port._links[0].name)
        assert answer.pulled_bytes == 4 * (layers[1] - layers[0]) * PAGE and answer.spent_ns > 0
        expected = np.zeros((BLOCKS, 4, PAGE), np.uint8)
        expected[list(dst), slice(*layers)] = blocks_of(src_tier)[list(src), slice(*layers)]
        np.testing.assert_array_equal(view(taker.arenas[dst_tier]).reshape(expected.shape), expected)
        other = taker.arenas[Tier.HBM if dst_tier is Tier.DRAM else Tier.DRAM]
        assert not view(other).any()


def test_a_corrupted_source_is_reported(pair: tuple[Taker, Owner]) -> None:
    taker, owner = pair
    for by_page in (False, True):
        job = taker.pull(owner, (1, 2, 3), (1, 2, 3), by_page=by_page)
        owner.overwrite(Tier.HBM, 2 * BLOCK + 3 * PAGE + 77)
        answer = taker.do(job)
        assert "1 of 3 blocks have another checksum" in answer.error and answer.pulled_bytes == 0
        assert answer.mismatches == 1
        assert taker.do(taker.pull(owner, (1, 2, 3), (1, 2, 3), by_page=by_page)).error == ""
        owner.overwrite(Tier.HBM, 2 * BLOCK + 3 * PAGE + 77)


def test_places_outside_of_the_arenas_are_refused(pair: tuple[Taker, Owner]) -> None:
    taker, owner = pair
    taker.clear()
    seals = (1, 2)
    jobs = [
        taker.pull(owner, (0, BLOCKS), (0, 1), checksums=seals),
        taker.pull(owner, (0, 1), (0, BLOCKS), checksums=seals),
        taker.pull(owner, (0, -1), (0, 1), checksums=seals),
        taker.pull(owner, (0, 1 << 45), (0, 1), checksums=seals),
        taker.pull(owner, (0, 1), (0, 1), checksums=seals, src_tier=Tier.SSD),
        taker.pull(owner, (0, 1), (0, 1), checksums=seals, dst_tier=Tier.SSD),
        taker.pull(owner, (0, 1), (0, 1), checksums=(1,)),
        taker.pull(owner, (0, 1), (0,), checksums=(1,)),
        taker.pull(owner, (0, 1), (0, 1), checksums=seals, end_layer=5),
    ]
    for job in jobs:
        assert taker.do(job).error
        assert taker.do(taker.pull(owner, (9,), (60,))).error == ""
    assert not view(taker.arenas[Tier.HBM])[: 60 * BLOCK].any()


def test_every_block_in_one_job_and_in_many(pair: tuple[Taker, Owner]) -> None:
    """Each is answered exactly once (``wait`` looks)."""
    taker, owner = pair
    taker.clear()
    everything = tuple(range(BLOCKS))
    jobs = [taker.pull(owner, everything, everything[::-1])]
    jobs += [taker.pull(owner, (i,), (i,), dst_tier=Tier.DRAM, by_page=bool(i % 2)) for i in everything]
    for job in jobs:
        taker.port.start(job)
    assert [taker.wait(job.job_id).error for job in jobs] == [""] * len(jobs)
    np.testing.assert_array_equal(view(taker.arenas[Tier.DRAM]), content(Tier.HBM, BLOCKS * BLOCK))
    np.testing.assert_array_equal(
        view(taker.arenas[Tier.HBM]).reshape(BLOCKS, -1)[::-1].ravel(), content(Tier.HBM, BLOCKS * BLOCK)
    )


def test_seals_are_those_of_the_bytes(pair: tuple[Taker, Owner]) -> None:
    taker, owner = pair
    taker.do(taker.pull(owner, (7,), (8,)))
    taker.port.start(SealPages(10_000, Tier.HBM, (8,), 1, 3))
    assert taker.wait(10_000).checksums == owner.seal(Tier.HBM, (7,), 1, 3)
    for blocks, layers in (((BLOCKS,), (0, 4)), ((-1,), (0, 4)), ((0,), (0, 5)), ((0,), (2, 2))):
        with pytest.raises(InvariantError):
            taker.port.start(SealPages(10_001, Tier.HBM, blocks, *layers))


SHARDS = [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (4, 1)), ((1, 1), (1, 2)), ((1, 2), (1, 1)), ((2, 1), (1, 2))]


@pytest.mark.parametrize("degrees", SHARDS, ids=[f"tp{a}pp{b} to tp{c}pp{d}" for (a, b), (c, d) in SHARDS])
def test_ranks_of_other_degrees_get_their_layers_and_heads(way: str, pair: tuple[Taker, Owner], degrees: Any) -> None:
    """The owner's two tiers stand for its two ranks; each of our ranks pulls its part from both."""
    _, owner = pair
    sources, targets = (shards(GEOMETRY, *degree) for degree in degrees)
    whole = assemble(sources)
    src_blocks, dst_blocks = (3, 0, 20), (1, 5, 2)
    arenas: dict[Tier, _core.SharedArena] = {}
    link = new_link(way, arenas)
    link.add_peer(owner.info)
    try:
        for shard in targets:
            arena = arenas[Tier.HBM] = _core.SharedArena(6 * shard.local_geometry.block_bytes)
            for index, ranges in pull_plan(sources, shard, src_blocks, dst_blocks):
                seals = link.read(owner.peer, Tier(index), Tier.HBM, ranges)
                source = content(Tier(index), BLOCKS * BLOCK)
                assert (
                    seals.tolist()
                    == _core.seal_ranges(source.ctypes.data, ranges.src_offsets, ranges.range_bytes).tolist()
                )
            local = shard.local_geometry
            got = view(arena).reshape(6, local.num_layers, local.num_kv_heads, -1)
            layers, heads = slice(shard.first_layer, shard.end_layer), slice(shard.first_head, shard.end_head)
            np.testing.assert_array_equal(got[list(dst_blocks)], whole[list(src_blocks), layers, heads])
            assert not got[[0, 3, 4]].any()
    finally:
        link.close()


def assemble(sources: list[Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The whole model's KV, ``[blocks, layers, heads, run]``, as the owner's ranks hold it together."""
    whole = np.zeros((BLOCKS, 4, 4, PAGE // 4), np.uint8)
    for index, shard in enumerate(sources):
        local = shard.local_geometry
        data = content(Tier(index), BLOCKS * BLOCK)[: BLOCKS * local.block_bytes]
        layers, heads = slice(shard.first_layer, shard.end_layer), slice(shard.first_head, shard.end_head)
        whole[:, layers, heads] = data.reshape(BLOCKS, local.num_layers, local.num_kv_heads, -1)
    return whole


def test_removed_or_unknown_peer_is_not_read(pair: tuple[Taker, Owner]) -> None:
    taker, owner = pair
    job = taker.pull(owner, (1,), (1,))
    taker.port.remove_peer(owner.peer)
    taker.port.remove_peer(owner.peer)
    assert "no way to owner" in taker.do(job).error
    taker.port.add_peer(owner.info)
    assert taker.do(taker.pull(owner, (1,), (1,))).error == ""


def test_the_same_process_as_a_new_generation(pair: tuple[Taker, Owner]) -> None:
    """It is read under its new name; the old one's pages belong to none (shared memory knows; checksums would)."""
    taker, owner = pair
    old = owner.info
    assert taker.do(taker.pull(owner, (1,), (1,))).error == ""
    owner.become(old.peer.generation + 1)
    taker.port.add_peer(owner.info)
    assert taker.do(taker.pull(owner, (1,), (1,))).error == ""
    if taker.port._links[0].name != "nixl":
        stale = taker.pull(owner, (1,), (1,))
        stale = PullPages(stale.job_id, old.peer, Tier.HBM, (1,), Tier.HBM, (1,), 0, 4, stale.checksums)
        assert "generation" in taker.do(stale).error
    taker.port.remove_peer(old.peer)
    time.sleep(0.05)  # whatever the removal starts in the background must not touch the new generation
    assert taker.do(taker.pull(owner, (1,), (1,))).error == ""
    old = owner.info  # and the other way round: gone first, then there again
    owner.become(old.peer.generation + 1)
    jobs = [taker.pull(owner, (1,), (1,)) for _ in range(3)]
    taker.port.remove_peer(old.peer)
    taker.port.add_peer(owner.info)
    for job in jobs:
        assert taker.do(job).error == ""
        time.sleep(0.03)


@pytest.mark.parametrize(
    ("way", "module", "size"),
    [
        pytest.param("curve", curve_link, "PIECE_BYTES", id="messages"),
        pytest.param("nixl", nixl, "SLOT_BYTES_MIN", id="slots", marks=NIXL),
    ],
)
def test_a_read_of_many_pieces(way: str, module: Any, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks a message or slot; the last is not full. None has to hold a longer range than it can."""
    monkeypatch.setattr(module, size, 3 * BLOCK + 100)
    owner, taker = Owner(way), Taker(way)
    try:
        taker.port.add_peer(owner.info)
        everything = tuple(range(BLOCKS))
        for by_page in (False, True):
            assert taker.do(taker.pull(owner, everything, everything, by_page=by_page)).error == ""
            np.testing.assert_array_equal(view(taker.arenas[Tier.HBM]), content(Tier.HBM, BLOCKS * BLOCK))
            taker.clear()
        link = taker.port._links[0]
        if way == "nixl":
            assert len(link._reader._free) == link._reader._made == 2
        longer = Ranges(np.zeros(1, np.int64), np.zeros(1, np.int64), 4 * BLOCK)
        with pytest.raises(LinkError, match="longer than a"):
            link.read(owner.peer, Tier.HBM, Tier.HBM, longer)
    finally:
        taker.port.close()
        owner.close()


def test_strangers_are_handed_no_pages() -> None:
    """Those without the secret hear nothing; a member that asks for what is not there hears so, or nothing."""
    owner, arenas = Owner("curve"), {Tier.HBM: _core.SharedArena(BLOCKS * BLOCK)}
    stranger = CurveLink(arenas, ListenAddress("another secret of these tests"), BLOCK, stall_s=0.3)
    member = new_link("curve", arenas)
    one = Ranges(np.zeros(1, np.int64), np.zeros(1, np.int64), BLOCK)
    context = new_context()
    try:
        stranger.add_peer(owner.info)
        with pytest.raises(LinkError, match="sent nothing"):
            stranger.read(owner.peer, Tier.HBM, Tier.HBM, one)
        assert not view(arenas[Tier.HBM]).any()
        asks = Line(context, CurveKeys.all_in(SECRET), owner.info.pages_at, bytes_max=1 << 20)
        line = asks.socket
        number, places = msgspec.msgpack.encode(7), np.zeros(1, "<i8")
        for head, where in (
            ((7, 1, 0, BLOCK), places - 1), ((7, 1, 0, BLOCK), places + BLOCKS * BLOCK), ((7, 1, 2, BLOCK), places),
            ((7, 1, 0, 0), places), ((7, 1, 0, -BLOCK), places), ((7, 2, 0, BLOCK), places),
            ((7, 1, 0, 1 << 40), places), ((7, 1, 0, BLOCK), np.zeros(1 << 13, "<i8")),
        ):  # fmt: skip
            line.send_multipart([msgspec.msgpack.encode(head), where.tobytes()])
            assert line.poll(5000)
            answer = line.recv_multipart()
            assert answer[:2] == [number, b""] and len(answer) == 3, head
        for frames in ([b""], [b"\xc1", b""], [msgspec.msgpack.encode((7, 1)), b""], [b"a"] * 3,
                       [msgspec.msgpack.encode((7, 1, 0, BLOCK)), b"odd"]):  # fmt: skip
            line.send_multipart(frames)
        member.add_peer(owner.info)
        assert len(member.read(owner.peer, Tier.HBM, Tier.HBM, one)) == 1, "the thread lives"
        assert not line.poll(0)
        asks.close()
    finally:
        context.term()
        member.close()
        stranger.close()
        owner.close()


def test_kv_of_a_gpu_goes_through_the_channel() -> None:
    """Out of a GPU's memory and into one; memory of the host stands for both, as their copies see it."""
    theirs = {Tier.HBM: GpuMemory(torch.from_numpy(content(Tier.HBM, BLOCKS * BLOCK).copy()))}
    ours = {Tier.HBM: GpuMemory(torch.zeros(BLOCKS * BLOCK, dtype=torch.uint8)), Tier.DRAM: _core.SharedArena(BLOCK)}
    owner, reader = new_link("curve", theirs), new_link("curve", ours)
    try:
        theirs[Tier.HBM].generation = 1
        place = ArenaPlace(Tier.HBM, theirs[Tier.HBM].address, theirs[Tier.HBM].nbytes, on_gpu=True)
        info = owner.describe(msgspec.structs.replace(info_of(Peer("gpu", 1)), arenas=(place,)))
        reader.add_peer(info)
        order = np.array([5, 0], np.int64) * BLOCK, np.array([1, 3], np.int64) * BLOCK
        want = _core.seal_ranges(theirs[Tier.HBM].address, order[0], BLOCK).tolist()
        assert reader.read(info.peer, Tier.HBM, Tier.HBM, Ranges(*order, BLOCK)).tolist() == want
        landed = ours[Tier.HBM].tensor.numpy().reshape(BLOCKS, 4, PAGE)
        np.testing.assert_array_equal(landed[[1, 3]], blocks_of(Tier.HBM)[[5, 0]])
        one = Ranges(order[0][:1], np.zeros(1, np.int64), BLOCK)
        assert reader.read(info.peer, Tier.HBM, Tier.DRAM, one).tolist() == want[:1]
        np.testing.assert_array_equal(view(ours[Tier.DRAM]).reshape(4, PAGE), blocks_of(Tier.HBM)[5])
    finally:
        reader.close()
        owner.close()


def peer_maps() -> int:
    """How many read-only maps of unnamed shared files this process has."""
    return sum("memfd:" in line and " r--s " in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_shared_memory_is_unmapped_when_its_owner_is_removed() -> None:
    owner, taker, before = Owner("shm"), Taker("shm"), peer_maps()
    try:
        taker.port.add_peer(owner.info)
        assert peer_maps() == before
        assert taker.do(taker.pull(owner, (1,), (1,))).error == ""
        assert peer_maps() == before + 1
        late = taker.pull(owner, (2,), (2,), src_tier=Tier.DRAM)
        owner.close()
        assert "cannot map" in taker.do(late).error  # this tier was not mapped before its owner died
        taker.port.remove_peer(owner.peer)
        assert peer_maps() == before
    finally:
        taker.port.close()
        owner.close()


def peer_resident_bytes() -> int:
    """How much of those maps counts as resident in this process."""
    areas = Path("/proc/self/smaps").read_text().split("VmFlags:")
    mine = [area for area in areas if "memfd:" in area and " r--s " in area]
    return sum(int(found) * 1024 for area in mine for found in re.findall(r"^Rss:\s+(\d+) kB", area, re.MULTILINE))


def test_pages_read_from_peers_do_not_stay_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each instance counts, in time, the arenas of all."""
    owner, taker = Owner("shm"), Taker("shm")
    monkeypatch.setattr(shm, "_RESIDENT_BYTES_MAX", 4 * BLOCK)
    try:
        taker.port.add_peer(owner.info)
        assert taker.do(taker.pull(owner, (1, 2), (1, 2))).error == ""
        assert peer_resident_bytes() > 0, "nothing is let go of before the bound"
        for first in range(0, BLOCKS, 4):
            blocks = tuple(range(first, first + 4))
            assert taker.do(taker.pull(owner, blocks, blocks)).error == ""
            assert peer_resident_bytes() == 0
        expected = content(Tier.HBM, BLOCKS * BLOCK)
        np.testing.assert_array_equal(view(taker.arenas[Tier.HBM]), expected)
    finally:
        taker.port.close()
        owner.close()


@pytest.mark.parametrize("way", WAYS[1:], indirect=True)
def test_stopped_or_killed_owner_fails_pull_within_deadline(way: str) -> None:
    """And what a stopped one sends when it goes on is written nowhere."""
    stands_still = way == "curve" or os.environ.get("UCX_TLS") == "tcp"
    owner = Owner(way)
    taker = Taker(way, stall_s=0.5)
    try:
        taker.port.add_peer(owner.info)
        assert taker.do(taker.pull(owner, (0,), (0,))).error == ""
        taker.clear()
        everything = tuple(range(BLOCKS))
        job, again = taker.pull(owner, everything, everything), taker.pull(owner, everything, everything)
        owner.stop()
        begin = time.monotonic()
        answer = taker.do(job)
        if stands_still:  # else the kernel copies out of a stopped process just as well
            assert "sent nothing" in answer.error
            assert not view(taker.arenas[Tier.HBM]).any()
        assert time.monotonic() - begin < 3
        owner.resume()
        assert owner.seal(Tier.HBM, (0,), 0, 4)  # it runs again
        if answer.error:
            if way == "nixl":
                reader = taker.port._links[0]._reader
                eventually(lambda: len(reader._free) == reader._made)
            assert not view(taker.arenas[Tier.HBM]).any()
        assert taker.do(again).error == ""
        last = taker.pull(owner, everything, everything)
        owner.close()
        begin = time.monotonic()
        assert taker.do(last).error
        assert time.monotonic() - begin < 3
    finally:
        taker.port.close()
        owner.close()


@NIXL
def test_broken_connection_is_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read that notices fails, if one does; the ones after it do not."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    others = descriptors()
    owner, taker = Owner("nixl"), Taker("nixl", stall_s=1)
    try:
        taker.port.add_peer(owner.info)
        assert taker.do(taker.pull(owner, (1, 2), (1, 2))).error == ""
        assert sum(map(cut, descriptors() - others)) > 0
        failed = [bool(taker.do(taker.pull(owner, (1, 2), (3, 4))).error) for _ in range(4)]
        assert sum(failed) <= 1 and not any(failed[2:])
        got = view(taker.arenas[Tier.HBM]).reshape(BLOCKS, 4, PAGE)
        np.testing.assert_array_equal(got[3:5], blocks_of(Tier.HBM)[1:3])
    finally:
        taker.port.close()
        owner.close()


@NIXL
@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="UCX 1.23 aborts where an answer over TCP cannot be sent: so --link trusted has NIXL by RDMA alone",
)  # fmt: skip
def test_owner_outlives_a_reader_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reader asked for is there when the owner looks, and the reader is not."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    others = descriptors()
    owner, taker = Owner("nixl"), Taker("nixl", stall_s=1)
    try:
        taker.port.add_peer(owner.info)
        if error := taker.do(taker.pull(owner, (1, 2), (1, 2))).error:
            raise RuntimeError(error)
        job = taker.pull(owner, (1, 2), (3, 4))
        owner.stop()
        taker.port.start(job)
        time.sleep(0.3)  # posted, and on its way
        if not sum(map(cut, descriptors() - others)):
            raise RuntimeError("there is no connection")
        owner.resume()
        time.sleep(2)
        assert owner.is_running
    finally:
        taker.port.close()
        owner.close()


@NIXL
def test_process_using_nixl_exits_cleanly() -> None:
    """A second libnl in the process, brought by UCX's module for EFA, crashed it at exit."""
    uses = "from memserve.transport.links.nixl_agent import Agent; Agent('brief').close()"
    copies = "print(len({line.split('/')[-1] for line in open('/proc/self/maps') if 'libnl-3' in line}))"
    env = {name: value for name, value in os.environ.items() if name != "UCX_MODULES"}
    run = subprocess.run(
        [sys.executable, "-c", f"{uses}; {copies}"], env=env, timeout=60, capture_output=True, text=True, check=False
    )
    assert (run.returncode, int(run.stdout) <= 1) == (0, True), run.stderr


def descriptors() -> set[int]:
    """Open ones of this process."""
    return {int(name) for name in os.listdir("/proc/self/fd")}


def cut(descriptor: int) -> bool:
    """Shut the TCP connection down, if it is one."""
    try:
        duplicate = os.dup(descriptor)
    except OSError:  # that of the listing itself
        return False
    if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
        os.close(duplicate)
        return False
    with socket.socket(fileno=duplicate) as connection, contextlib.suppress(OSError):
        connection.getpeername()  # not one that listens
        if connection.family == socket.AF_INET:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False

"""KV of a GPU for readers of the same host that have none: through memory that both see, or by the channel. Memory of
the host stands for the GPU's."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from geometries import SHAPES
from links_owner import SECRET, info_of
from memserve import _core
from memserve.base.types import KVGeometry, Tier
from memserve.base.units import MIB
from memserve.kv.transfer.events import PagesPulled, PullPages
from memserve.protocol.peers import Peer
from memserve.system.gpus import DriverError
from memserve.transport.data_port import PagePort, open_data_port
from memserve.transport.links import encrypted, staging
from memserve.transport.links.encrypted import CurveLink
from memserve.transport.links.gpu_memory import GpuMemory
from memserve.transport.links.staging import StagedLink, StagedPlace, StagingRings
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import LinkError, UnreachableError
from memserve.transport.ranges import Ranges

HERE = ListenAddress(SECRET)
BLOCKS = 24
OWNER = Peer("gpu", 7)


class Pair:
    """An owner with KV on a GPU, and a reader of the same host without one."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.geometry, nbytes = geometry, BLOCKS * geometry.block_bytes
        source = np.random.default_rng(geometry.block_bytes).integers(0, 256, nbytes, np.uint8)
        self.source, self.memory = source, GpuMemory(torch.from_numpy(source))
        self.dram = _core.SharedArena(geometry.block_bytes)
        np.frombuffer(self.dram, np.uint8)[:] = source[: geometry.block_bytes]
        self.host = _core.SharedArena(nbytes)
        self.target = np.frombuffer(self.host, np.uint8)
        arenas = {Tier.HBM: self.memory, Tier.DRAM: self.dram}
        channel = CurveLink(arenas, HERE, geometry.block_bytes)  # there is no driver for a link between GPUs
        self.owner = PagePort(geometry, arenas, [channel], self._on_pages)
        info = msgspec.structs.replace(info_of(OWNER), geometry=geometry)
        self.info = self.owner.describe(info)
        self._answers: dict[int, PagesPulled] = {}
        self._news = threading.Condition()
        self.reader = open_data_port("auto", geometry, {Tier.DRAM: self.host}, self._on_pages, HERE)
        self.reader.add_peer(self.info)

    @property
    def rings(self) -> StagingRings:
        (channel,) = (link for link in self.owner._links if isinstance(link, CurveLink))
        return channel._staging

    def _on_pages(self, answer: Any) -> None:
        with self._news:
            self._answers[answer.job_id] = answer
            self._news.notify_all()

    def pull(self, job_id: int, blocks: list[int], places: list[int], *, by_page: bool = False) -> PagesPulled:
        offsets = np.array(blocks, np.int64) * self.geometry.block_bytes
        seals = _core.seal_ranges(self.source.ctypes.data, offsets, self.geometry.block_bytes).tolist()
        job = PullPages(
            job_id, OWNER, src_tier=Tier.HBM, dst_tier=Tier.DRAM, src_blocks=tuple(blocks), dst_blocks=tuple(places),
            first_layer=0, end_layer=self.geometry.num_layers, checksums=tuple(seals), by_page=by_page,
        )  # fmt: skip
        self.reader.start(job)
        with self._news:
            assert self._news.wait_for(lambda: job_id in self._answers, 30), "no answer"
        return self._answers[job_id]

    def has_landed(self, blocks: list[int], places: list[int]) -> bool:
        source, target = self.source.reshape(BLOCKS, -1), self.target.reshape(BLOCKS, -1)
        return bool((target[places] == source[blocks]).all())

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


@pytest.fixture
def made() -> Iterator[Callable[[KVGeometry], Pair]]:
    pairs: list[Pair] = []

    def make(geometry: KVGeometry) -> Pair:
        pairs.append(Pair(geometry))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.fixture
def no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent over the channel but places."""

    def fail(*_arguments: object) -> None:
        raise AssertionError("bytes go over the channel")

    monkeypatch.setattr(encrypted, "_copy_ranges", fail)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("by_page", [False, True])
@pytest.mark.usefixtures("no_bytes")
def test_blocks_of_a_gpu_come_through_shared_memory(
    name: str, by_page: bool, made: Callable[[KVGeometry], Pair]
) -> None:
    """More pieces than a ring has slots, of any block size, whole and by page; twice over one line."""
    pair = made(SHAPES[name].kv)
    order = np.random.default_rng(3).permutation(BLOCKS).tolist()
    for job_id in (1, 2):
        pair.target[:] = 0
        answer = pair.pull(job_id, order, list(range(BLOCKS)), by_page=by_page)
        assert (answer.error, answer.link, answer.saved_bytes) == ("", "staged", 0)
        assert pair.has_landed(order, list(range(BLOCKS)))


@pytest.mark.usefixtures("no_bytes")
def test_host_memory_of_a_gpu_is_read_as_between_cpus(made: Callable[[KVGeometry], Pair]) -> None:
    pair = made(SHAPES["smollm2"].kv)
    (link,) = (link for link in pair.reader._links if isinstance(link, StagedLink))
    zero = np.zeros(1, np.int64)
    seals = link.read(OWNER, Tier.DRAM, Tier.DRAM, Ranges(zero, zero, pair.geometry.block_bytes))
    assert seals.tolist() == _core.seal_ranges(pair.source.ctypes.data, zero, pair.geometry.block_bytes).tolist()
    assert pair.has_landed([0], [0]) and pair.rings._arena is None


def test_lines_without_a_ring_get_bytes(made: Callable[[KVGeometry], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lines have the two rings; the third one reads all the same, and gets a ring once one has been idle."""
    monkeypatch.setattr(staging, "STAGING_BYTES", 1)
    pair = made(SHAPES["smollm2"].kv)
    for line in (11, 12):
        where = np.zeros(1, np.int64)
        assert pair.rings.stage_ranges(line, pair.memory, where, 64, encrypted.time.monotonic_ns()) is not None
    answer = pair.pull(1, [5, 2], [0, 1])
    assert (answer.error, answer.link) == ("", "staged") and pair.has_landed([5, 2], [0, 1])
    assert {11, 12} == pair.rings._rings.keys()
    for ring in pair.rings._rings.values():
        ring.used_ns -= 60 * 10**9
    assert pair.pull(2, [7], [3]).error == "" and pair.has_landed([7], [3])
    assert len(pair.rings._rings) == 2 and {11, 12} != pair.rings._rings.keys()


def test_slots_of_a_ring_come_in_turn_and_rings_lie_apart() -> None:
    """A model in four lines: each line's pieces go round its own slots."""
    rings, memory = StagingRings(4096, 4, 10**9), GpuMemory(torch.arange(64, dtype=torch.uint8))
    memory.generation = 3
    begins: dict[int, list[int]] = {1: [], 2: []}
    for line in (1, 2, 1, 1, 2, 1, 1, 1, 1, 1):
        place = rings.stage_ranges(line, memory, np.array([8, 0], np.int64), 4, 0)
        assert place is not None and rings._tensor is not None
        begins[line].append(place.begin)
        assert rings._tensor[place.begin : place.begin + 8].tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
        peer = _core.PeerArena(os.getpid(), place.fd, place.arena_bytes)
        assert peer.generation == 3
    assert begins == {1: [0, 4096, 8192, 12288, 0, 4096, 8192, 12288], 2: [16384, 20480]}
    rings.close()
    assert rings.stage_ranges(1, memory, np.zeros(1, np.int64), 4, 0) is None


def test_memory_that_a_gpu_does_not_reach_is_not_used(
    made: Callable[[KVGeometry], Pair], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Locked memory is limited: said once, and KV goes over the channel."""

    def refuse(_memory: GpuMemory, _address: int, _nbytes: int) -> None:
        raise DriverError("cuMemHostRegister_v2 fails with CUDA's error 2")

    monkeypatch.setattr(GpuMemory, "pin_host", refuse)
    pair = made(SHAPES["smollm2"].kv)
    for job_id in (1, 2):
        assert pair.pull(job_id, [4], [job_id]).error == "" and pair.has_landed([4], [job_id])
    assert [record.message for record in caplog.records].count(
        "KV of the GPU goes to stores of this host through the encrypted channel: "
        "cuMemHostRegister_v2 fails with CUDA's error 2"
    ) == 1  # fmt: skip


@pytest.mark.parametrize("what", ["another descriptor", "another size", "behind the end", "before the begin"])
def test_places_that_a_peer_makes_up_are_not_read(
    what: str, made: Callable[[KVGeometry], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be mapped is asked for over the channel; what lies outside fails."""
    pair, stage = made(SHAPES["smollm2"].kv), StagingRings.stage_ranges

    def lie(rings: StagingRings, *arguments: Any) -> StagedPlace | None:
        place = stage(rings, *arguments)
        assert place is not None
        return StagedPlace(
            0 if what == "another descriptor" else place.fd,
            place.arena_bytes * 2 if what == "another size" else place.arena_bytes,
            {"behind the end": place.arena_bytes, "before the begin": -1}.get(what, place.begin),
        )

    monkeypatch.setattr(StagingRings, "stage_ranges", lie)
    answer = pair.pull(1, [9], [0])
    if what.startswith("another"):
        assert (answer.error, answer.link) == ("", "curve") and pair.has_landed([9], [0])
    else:
        assert "outside of its memory" in answer.error and not pair.target.any()


def test_readers_of_other_hosts_are_not_given_places(made: Callable[[KVGeometry], Pair]) -> None:
    """Nor does a process with an older generation read a newer one's."""
    pair = made(SHAPES["smollm2"].kv)
    far = msgspec.structs.replace(pair.info, host_id="another")
    pair.reader.add_peer(far)
    assert (answer := pair.pull(1, [3], [0])).link == "curve" and not answer.error
    assert not pair.rings._rings
    pair.reader.add_peer(pair.info)
    pair.memory.generation = 8
    assert "generation" in pair.pull(2, [3], [1]).error


def test_readers_at_once_and_memory_given_back(made: Callable[[KVGeometry], Pair]) -> None:
    """Four reads at a time over lines of their own; then nothing is mapped any more."""
    pair = made(SHAPES["llama3"].kv)
    (link,) = (link for link in pair.reader._links if isinstance(link, StagedLink))
    size = pair.geometry.block_bytes

    def read(number: int) -> bool:
        blocks = np.random.default_rng(number).permutation(BLOCKS)[:6].astype(np.int64)
        places = np.arange(6 * number, 6 * number + 6, dtype=np.int64)
        seals = link.read(OWNER, Tier.HBM, Tier.DRAM, Ranges(blocks * size, places * size, size))
        right = seals.tolist() == _core.seal_ranges(pair.source.ctypes.data, blocks * size, size).tolist()
        return right and pair.has_landed(blocks.tolist(), places.tolist())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))
    assert 1 <= len(pair.rings._rings) <= 4 and pair.rings._arena is not None
    assert pair.rings._arena.nbytes <= max(staging.STAGING_BYTES, 8 * max(size, MIB))
    descriptor = f"/proc/self/fd/{pair.rings._arena.fd}"
    target = os.readlink(descriptor)
    pair.reader.remove_peer(OWNER)
    assert not link._staging
    with pytest.raises(LinkError, match="gone"):
        link.read(OWNER, Tier.HBM, Tier.DRAM, Ranges(np.zeros(1, np.int64), np.zeros(1, np.int64), size))
    pair.owner.close()
    gc.collect()
    assert not Path(descriptor).exists() or os.readlink(descriptor) != target


def test_an_owner_that_knows_no_staging_sends_bytes(made: Callable[[KVGeometry], Pair]) -> None:
    """An older release does not look behind its own fields."""
    pair = made(SHAPES["smollm2"].kv)
    (channel,) = (link for link in pair.owner._links if isinstance(link, CurveLink))
    channel._staging.close()
    answer = pair.pull(1, [6, 1], [2, 3])
    assert (answer.error, answer.link) == ("", "staged") and pair.has_landed([6, 1], [2, 3])


def test_staged_links_are_there_for_links_that_see_the_host() -> None:
    """``--link curve`` is the channel alone."""
    geometry = SHAPES["smollm2"].kv
    arena = {Tier.DRAM: _core.SharedArena(geometry.block_bytes)}
    for link, names in (("auto", ["shm", "staged", "curve"]), ("curve", ["curve"]), ("shm", ["shm"])):
        port = open_data_port(link, geometry, arena, lambda answer: None, HERE)
        assert isinstance(port, PagePort) and [one.name for one in port._links] == names
        port.close()


def test_staging_that_cannot_be_mapped_is_said_to_be_unreachable(made: Callable[[KVGeometry], Pair]) -> None:
    pair = made(SHAPES["smollm2"].kv)
    (link,) = (link for link in pair.reader._links if isinstance(link, StagedLink))
    with pytest.raises(UnreachableError, match="cannot map"):
        link._find_staging(pair.info, StagedPlace(0, 4096, 0))

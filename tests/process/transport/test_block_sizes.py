"""Blocks of real models over every link: 64 KiB to 32 MiB, whole, by page and by layer, sizes that fill a message among
them."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from geometries import SHAPES
from links_owner import SECRET, view
from memserve import _core
from memserve.base.types import KVGeometry, Role, Tier
from memserve.base.units import KIB, MIB
from memserve.kv.transfer.events import PagesPulled, PagesSealed, PullPages, SealPages
from memserve.protocol.peers import Peer, PeerInfo
from memserve.transport.curve import CurveKeys
from memserve.transport.data_port import PagePort, open_data_port
from memserve.transport.links.encrypted import PIECE_BYTES
from memserve.transport.links.nixl_agent import nixl_is_installed
from memserve.transport.network_devices import ListenAddress
from memserve.transport.outbound import new_context
from memserve.transport.request_server import Answering, Line

GEOMETRIES = {
    "8 layers, MQA": KVGeometry(8, 1, 64, 64, "bfloat16", 32),
    "16 layers, MQA": KVGeometry(16, 1, 64, 64, "bfloat16", 32),
    "18 layers, MQA of 256, float32": KVGeometry(18, 1, 256, 256, "float32", 32),
    "32 layers, MQA, 64 tokens": KVGeometry(32, 1, 128, 128, "bfloat16", 64),
    "64 layers, 8 heads, 128 tokens": KVGeometry(64, 8, 128, 128, "bfloat16", 128),
    **{name: shape.kv for name, shape in SHAPES.items()},
}
LINKS = ["shm", "curve", pytest.param("nixl", marks=pytest.mark.skipif(not nixl_is_installed(), reason="no NIXL"))]
BLOCKS = 5


def test_the_sizes_are_those_that_matter() -> None:
    sizes = [geometry.block_bytes for geometry in GEOMETRIES.values()]
    assert min(sizes) == 64 * KIB and max(sizes) == 32 * MIB
    assert any(PIECE_BYTES % size == 0 for size in sizes) and any(size % PIECE_BYTES == 0 for size in sizes)
    assert any(PIECE_BYTES % size and size % PIECE_BYTES for size in sizes)
    real = {name: shape.kv.block_bytes // KIB for name, shape in SHAPES.items()}
    assert real == {
        "smollm2": 720, "llama3": 4096, "mqa": 576, "long-blocks": 8192, "moe": 3072, "windows": 3328, "latents": 2196
    }  # fmt: skip


@contextmanager
def pair(link: str, geometry: KVGeometry) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """An owner's port and arena, a taker's, and their answers."""
    answers: dict[str, Any] = {"owner": queue.Queue(), "taker": queue.Queue()}
    ports: dict[str, PagePort] = {}
    arenas: dict[str, Any] = {}
    try:
        for name in answers:
            arenas[name] = _core.SharedArena(BLOCKS * geometry.block_bytes)
            own = {Tier.HBM: arenas[name]}
            ports[name] = open_data_port(link, geometry, own, answers[name].put, ListenAddress(SECRET))
        infos = {name: ports[name].describe(described(name, geometry)) for name in ports}
        for name, other in (("owner", "taker"), ("taker", "owner")):
            ports[name].add_peer(infos[other])
        yield ports, arenas, answers
    finally:
        for port in ports.values():
            port.close()


def described(name: str, geometry: KVGeometry) -> PeerInfo:
    return PeerInfo(Peer(name, 1), Role.PREFILL, "tcp://127.0.0.1:1", "ns", geometry, BLOCKS, 0, 100, True)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_blocks_come_as_they_were(name: str, link: str) -> None:
    geometry = GEOMETRIES[name]
    order, layers = tuple(range(BLOCKS)), (0, geometry.num_layers)
    with pair(link, geometry) as (ports, arenas, answers):
        owned, taken = (words(arenas[end]).reshape(BLOCKS, -1) for end in ("owner", "taker"))
        owned[:] = drawn(len(name), owned.shape)
        checksums = sealed(ports, answers, order, layers)
        for by_page in (False, True):
            taken[:] = 0
            pull(ports, answers, link, order, order[::-1], layers, checksums, by_page=by_page)
            assert np.array_equal(taken[::-1], owned)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", SHAPES)
def test_layers_come_without_the_others(name: str, link: str) -> None:
    """As by-layer transfer takes them: some in the middle, then the first; nothing else is written."""
    geometry = SHAPES[name].kv
    src, dst, middle = (4, 0, 2), (1, 3, 0), geometry.num_layers // 2
    with pair(link, geometry) as (ports, arenas, answers):
        owned, taken = (words(arenas[end]).reshape(BLOCKS, geometry.num_layers, -1) for end in ("owner", "taker"))
        owned[:] = drawn(7, owned.shape)
        expected = np.zeros_like(taken)
        for layers, by_page in (((middle, middle + 3), False), ((0, 1), True)):
            checksums = sealed(ports, answers, src, layers)
            pull(ports, answers, link, src, dst, layers, checksums, by_page=by_page)
            expected[list(dst), slice(*layers)] = owned[list(src), slice(*layers)]
            assert np.array_equal(taken, expected)


def words(arena: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Its bytes, eight by eight: they are drawn and compared in an eighth of the time."""
    return view(arena).view(np.uint64)


def drawn(seed: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Random words in which no byte is 0."""
    return np.random.default_rng(seed).integers(0, 1 << 64, shape, dtype=np.uint64) | np.uint64(0x0101010101010101)


def sealed(ports: Any, answers: Any, blocks: tuple[int, ...], layers: tuple[int, int]) -> tuple[int, ...]:
    """The owner's checksums of these layers."""
    ports["owner"].start(SealPages(1, Tier.HBM, blocks, *layers))
    answer = answers["owner"].get(timeout=10)
    assert isinstance(answer, PagesSealed)
    return answer.checksums


def pull(
    ports: Any, answers: Any, link: str, src: tuple[int, ...], dst: tuple[int, ...], layers: tuple[int, int],
    checksums: tuple[int, ...], *, by_page: bool,
) -> None:  # fmt: skip
    """Let the taker read these layers of the owner's blocks, over ``link``."""
    tiers = {"src_tier": Tier.HBM, "dst_tier": Tier.HBM, "by_page": by_page}
    place = {"first_layer": layers[0], "end_layer": layers[1], "checksums": checksums}
    ports["taker"].start(PullPages(1, Peer("owner", 1), src_blocks=src, dst_blocks=dst, **place, **tiers))
    pulled = answers["taker"].get(timeout=20)
    assert isinstance(pulled, PagesPulled) and pulled.error == "" and pulled.link == link


def test_a_message_may_be_as_long_as_its_limit() -> None:
    """And one byte more ends the connection: what the cipher adds is no part of either."""
    frame_bytes = 64 * KIB
    where, context = ListenAddress(SECRET), new_context()
    answering = Answering(where, "echo", lambda frames: [frames[0].bytes], bytes_max=frame_bytes, queued_max=4)
    line = Line(context, CurveKeys.all_in(SECRET), answering.address, bytes_max=frame_bytes)
    try:
        line.socket.send_multipart([b"x" * frame_bytes])
        assert line.socket.poll(5000) and line.socket.recv_multipart() == [b"x" * frame_bytes]
        line.socket.send_multipart([b"x" * (frame_bytes + 1)])
        assert not line.socket.poll(300)
    finally:
        line.close()
        answering.close()
        context.term()


def test_a_failed_read_is_a_warning_with_peer_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    geometry = GEOMETRIES["16 layers, MQA"]
    with pair("curve", geometry) as (ports, _, answers), caplog.at_level(logging.WARNING):
        for job_id in range(3):
            job = {"first_layer": 0, "end_layer": geometry.num_layers, "by_page": False, "checksums": (7,)}
            ports["taker"].start(
                PullPages(job_id, Peer("owner", 1), src_blocks=(0,), dst_blocks=(0,), src_tier=Tier.HBM,
                          dst_tier=Tier.HBM, **job)
            )  # fmt: skip
            assert answers["taker"].get(timeout=10).error
    lines = [record.getMessage() for record in caplog.records if "was not read" in record.getMessage()]
    assert len(lines) == 1, "one line in a while for each peer"
    assert lines[0].startswith("KV of owner (1 blocks, over curve) was not read in ") and "checksum" in lines[0]

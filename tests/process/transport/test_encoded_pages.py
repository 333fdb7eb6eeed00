"""Pages that come through the encrypted channel in fewer bytes: the right ones, or a checksum that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from geometries import SHAPES
from kv_floats import floats
from memserve import _core
from memserve.base.types import KVGeometry, Role, Tier
from memserve.kv.transfer.events import PagesPulled, PullPages
from memserve.protocol.peers import ArenaPlace, Peer, PeerInfo
from memserve.system.kv_codec import CodecRates, KvCodec
from memserve.transport.data_port import PagePort
from memserve.transport.links import encrypted
from memserve.transport.links.encrypted import CurveLink
from memserve.transport.network_devices import ListenAddress
from memserve.transport.ports import ChecksumError, LinkError, Travelled
from memserve.transport.ranges import Ranges
from memserve.transport.request_server import Line

SECRET = "a secret of these tests alone"
HERE = ListenAddress(SECRET)
OWNER, READER = Peer("owner", 5), Peer("reader", 6)


class Pair:
    """An owner and a reader of some blocks, each with a codec mode of its own."""

    def __init__(self, geometry: KVGeometry, owner: Any = "always", reader: Any = "always", blocks: int = 4) -> None:
        self.geometry, self.blocks = geometry, blocks
        nbytes = blocks * geometry.block_bytes
        self.arenas = [_core.SharedArena(nbytes), _core.SharedArena(nbytes)]
        self.source, self.target = (np.frombuffer(arena, np.uint8) for arena in self.arenas)
        self.source[:] = floats(geometry.dtype, nbytes, 3)
        self.arenas[0].generation = OWNER.generation
        modes = zip(self.arenas, (owner, reader), strict=True)
        self.owner, self.reader = (
            CurveLink({Tier.HBM: arena}, HERE, geometry.block_bytes, kv_codec=mode, stall_s=5.0)
            for arena, mode in modes
        )
        place = ArenaPlace(Tier.HBM, self.arenas[0].address, nbytes)
        info = PeerInfo(OWNER, Role.PREFILL, "", "", geometry, blocks, 0, 0, True, arenas=(place,))
        self.info = self.owner.describe(info)
        self.reader.add_peer(self.info)

    def ranges(self, range_bytes: int | None = None) -> Ranges:
        size = range_bytes or self.geometry.block_bytes
        sources = np.random.default_rng(1).permutation(len(self.source) // size).astype(np.int64) * size
        return Ranges(sources, sources[::-1].copy(), size)

    def read(self, ranges: Ranges) -> Travelled:
        travelled = Travelled()
        self.target[:] = 0
        seals = self.reader.read(OWNER, Tier.HBM, Tier.HBM, ranges, travelled)
        expected = _core.seal_ranges(self.arenas[0].address, ranges.src_offsets, ranges.range_bytes)
        assert (seals == expected).all()
        for source, target in zip(ranges.src_offsets, ranges.dst_offsets, strict=True):
            landed = self.target[target : target + ranges.range_bytes]
            assert (landed == self.source[source : source + ranges.range_bytes]).all()
        return travelled

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


@pytest.fixture
def made() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(*args: Any, **others: Any) -> Pair:
        pairs.append(Pair(*args, **others))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_and_pages_come_in_fewer_bytes(name: str, made: Callable[..., Pair]) -> None:
    geometry = SHAPES[name].kv
    pair = made(geometry)
    for size in (geometry.block_bytes, geometry.page_bytes, 3 * geometry.page_bytes):
        if size == 3 * geometry.page_bytes and geometry.num_layers % 3:
            continue
        travelled = pair.read(pair.ranges(size))
        assert 0.25 * len(pair.source) < travelled.saved_bytes < 0.4 * len(pair.source)
        assert travelled.codec_ns > 0


@pytest.mark.parametrize(("owner", "reader"), [("none", "always"), ("always", "none"), ("none", "none")])
def test_one_end_that_encodes_nothing_is_understood(owner: str, reader: str, made: Callable[..., Pair]) -> None:
    pair = made(SHAPES["smollm2"].kv, owner, reader)
    assert pair.read(pair.ranges()) == Travelled()


def test_pages_that_do_not_become_shorter_come_as_they_are(made: Callable[..., Pair]) -> None:
    pair = made(SHAPES["smollm2"].kv)
    pair.source[:] = np.random.default_rng(2).integers(0, 256, len(pair.source), np.uint8)
    travelled = pair.read(pair.ranges())
    assert travelled.saved_bytes == 0 and travelled.codec_ns > 0
    half = len(pair.source) // 2
    pair.source[:half] = floats("bfloat16", half, 9)
    assert pair.read(pair.ranges()).saved_bytes > 0


def answer_of(pair: Pair, request: list[bytes]) -> list[bytes]:
    context = encrypted.new_context()
    line = Line(context, pair.reader._keys, pair.info.pages_at, bytes_max=pair.geometry.block_bytes)
    line.socket.send_multipart(request)
    assert line.socket.poll(5000)
    frames = [bytes(frame) for frame in line.socket.recv_multipart()]
    line.close()
    context.term()
    return frames


def test_member_of_before_is_answered_as_ever(made: Callable[..., Pair]) -> None:
    """Its requests have four fields, and it takes answers of two frames."""
    pair = made(SHAPES["smollm2"].kv)
    size = pair.geometry.block_bytes
    head, where = [7, OWNER.generation, int(Tier.HBM), size], np.array([size], "<i8").tobytes()
    number, payload = answer_of(pair, [msgspec.msgpack.encode(head), where])
    assert msgspec.msgpack.decode(number) == 7 and payload == pair.source[size : 2 * size].tobytes()
    assert len(answer_of(pair, [msgspec.msgpack.encode([*head, _core.KV_CODEC_VERSION]), where])) == 4
    later = [*head, _core.KV_CODEC_VERSION + 1, 0, "and what a later member would say"]
    assert len(answer_of(pair, [msgspec.msgpack.encode(later), where])) == 2, "a codec that is not known here"


@pytest.mark.parametrize("place", [0, 9, 30, 400, -1])
def test_damaged_encoding_is_counted_as_a_mismatch(
    place: int, made: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = made(SHAPES["smollm2"].kv)
    encode = pair.owner._codec.encode

    def damaged(base: int, offsets: Any, range_bytes: int, out: Any) -> int:
        nbytes = encode(base, offsets, range_bytes, out)
        out[place if place >= 0 else nbytes - 1] ^= 0x40
        return nbytes

    monkeypatch.setattr(pair.owner._codec, "encode", damaged)
    answers: list[Any] = []
    port = PagePort(pair.geometry, {Tier.HBM: pair.arenas[1]}, [pair.reader], answers.append)
    port.add_peer(pair.info)
    blocks = tuple(range(pair.blocks))
    places, nbytes = np.arange(pair.blocks, dtype=np.int64) * pair.geometry.block_bytes, pair.geometry.block_bytes
    checksums = tuple(_core.seal_ranges(pair.arenas[0].address, places, nbytes).tolist())
    job = PullPages(1, OWNER, Tier.HBM, blocks, Tier.HBM, blocks, 0, pair.geometry.num_layers, checksums)
    port.start(job)
    for lanes in port._lanes.values():
        lanes.close()
    answer = answers[0]
    assert isinstance(answer, PagesPulled) and answer.mismatches >= 1 and "checksum" in answer.error


def test_false_answers_end_in_an_error(made: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = made(SHAPES["smollm2"].kv)
    answer = pair.owner._answer_request
    facts = msgspec.msgpack.encode([True, 5])

    def forged(change: Callable[[list[Any]], list[Any]]) -> Callable[[Any], list[Any]]:
        return lambda frames: change(list(answer(frames) or ()))

    cases: list[tuple[Callable[[list[Any]], list[Any]], type[Exception]]] = [
        (lambda frames: [frames[0], b"", b"", facts], ChecksumError),
        (lambda frames: [frames[0], b"x" * 1000, b"", facts], ChecksumError),
        (lambda frames: [frames[0], frames[1], b"", msgspec.msgpack.encode([False, 5])], LinkError),
        (lambda frames: [frames[0], frames[1], b"", b"nonsense"], LinkError),
        (lambda frames: [frames[0], frames[1], b"", msgspec.msgpack.encode([True, -1])], LinkError),
        (lambda frames: [frames[0], frames[1], b"", facts, b"more"], LinkError),
        (lambda frames: [frames[0], frames[1]], LinkError),
    ]
    for change, error in cases:
        monkeypatch.setattr(pair.owner._answering, "_answer", forged(change))
        with pytest.raises(error):
            pair.reader.read(OWNER, Tier.HBM, Tier.HBM, pair.ranges())
    monkeypatch.undo()
    pair.owner._answering._answer = answer
    assert pair.read(pair.ranges()).saved_bytes > 0


def test_reader_asks_for_encoded_pieces_where_the_way_is_slow() -> None:
    way = encrypted._Way(KvCodec("auto", CodecRates(encode_byte_ns=0.2, decode_byte_ns=0.1, share=0.7)))
    assert not way.wants_encoded(), "nothing is known of the way"
    way.note_spent(1 << 20, 8 << 20)
    assert way.wants_encoded()
    for _ in range(60):
        way.note_spent(1 << 20, 1 << 19)
    assert not way.wants_encoded(), "half a nanosecond a byte, and the codec takes a third of it"
    for _ in range(60):
        way.note_spent(1 << 20, 8 << 20)
        way.note_piece(1 << 20, 1 << 20, encrypted._Facts(False, 1000))
    assert [way.wants_encoded() for _ in range(200)].count(True) <= 4, "what does not become shorter, but for a try"
    assert not encrypted._Way(KvCodec("none")).wants_encoded()


def test_slow_peer_encodes_and_quick_codec_is_used_by_itself(made: Callable[..., Pair]) -> None:
    pair = made(SHAPES["smollm2"].kv, "auto", "auto", blocks=40)
    for _ in range(3):
        pair.read(pair.ranges())
    # A hundred megabits a second: on a machine that does much else, a gigabit is not slow beside the codec.
    pair.reader._way_from(OWNER).note_spent(1 << 30, 80 << 30)
    assert pair.read(pair.ranges()).saved_bytes > 0

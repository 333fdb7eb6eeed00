"""Memory tiers between processes: readers under eviction, owners and readers that are killed, and hostile bytes."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import select
import signal
import stat
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from memserve import _core
from memserve._core import MemoryTier, PeerArena, TierReader
from tier_names import new_tier_name, remove_tier_files, tier_files

BLOCK = 16384
ARENA = 48 * BLOCK
KEYS = 100
WAIT_S = 60.0

SUPPORT = Path(__file__).resolve().parents[2] / "support"
PAGE, IN_PAGE, BUCKET_BYTES = 4096, 7, 576
"""A page of the index holds 7 buckets: 8 tags, then 8 entries of 64 bytes."""

READER = """
import random, sys
sys.path[:0] = sys.argv[1:3]
from memserve._core import TierReader
from test_memory_tier import KEYS, at, is_whole, key_of
reader = TierReader(*sys.argv[3:6])
rng, seen, wanted = random.Random(7), 0, int(sys.argv[6])
print("reads", flush=True)
held = []
while seen < wanted:
    key = key_of(rng.randrange(KEYS))
    if rng.random() < 0.3:
        target = bytearray(1 << 17)
        length, = (reader.copy if rng.random() < 0.5 else reader.copy_all)(key, [b"name"], [target]) or [-1]
        assert length < 0 or is_whole(key, bytes(target[:length])), "torn copy"
        seen += length >= 0
    elif (found := reader.hold(key, b"name")) is not None:
        assert is_whole(key, at(*found[:2])), "torn"
        held.append((key, found))
    if len(held) > 4 or held and found is None:
        key, found = held.pop(rng.randrange(len(held)))
        assert is_whole(key, at(*found[:2])), "changed while it was held"
        reader.let_go(found[2])
        seen += 1
    found = True
print("whole", flush=True)
"""

OWNER = """
import sys
sys.path[:0] = sys.argv[1:3]
from memserve._core import MemoryTier
from test_memory_tier import ARENA, BLOCK, key_of, publish
tier = MemoryTier(ARENA, BLOCK, name=sys.argv[3])
print("owns", flush=True)
number = 0
for line in sys.stdin:
    if line.startswith("client"):
        print(tier.open_client(int(line.split()[1])), flush=True)
    while line.startswith("churn"):
        number += 1
        publish(tier, number, 2)
        sys.stdout.write(f"{number}\\n")
        if number % 8 == 0:
            sys.stdout.flush()
    if line.startswith("publish"):
        for number in range(int(line.split()[1])):
            publish(tier, number, number)
        tier.allocate(BLOCK)
        print("done", flush=True)
"""


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 4


def payload_of(number: int, life: int) -> bytes:
    """Says which key it has, and is whole or not."""
    body = key_of(number) + life.to_bytes(8, "little") + bytes([life & 255]) * (200 + life * 7919 % (BLOCK - 300))
    return zlib.crc32(body).to_bytes(4, "little") + body


def is_whole(key: bytes, payload: bytes) -> bool:
    return payload[4:20] == key and payload[:4] == zlib.crc32(payload[4:]).to_bytes(4, "little")


def at(address: int, length: int) -> bytes:
    return ctypes.string_at(address, length)


def seal_of(payload: bytes) -> int:
    data = np.frombuffer(payload, np.uint8)
    return int(_core.seal_ranges(data.ctypes.data, np.zeros(1, np.int64), len(payload))[0])


def publish(tier: MemoryTier, number: int, life: int) -> bool:
    """A new value of a key that has none; evicts for it."""
    payload = payload_of(number, life)
    offset = tier.allocate(len(payload) + 4)
    if offset is None:
        return False
    arena = tier.arena
    assert arena is not None
    memoryview(arena)[offset : offset + len(payload)] = payload
    done = tier.publish(key_of(number), offset, len(payload), seal=seal_of(payload), name=b"name")
    tier.release(offset)
    tier.take_evicted()
    return done


def read(tier: MemoryTier, number: int) -> bytes | None:
    place = tier.find(key_of(number), counts=False)
    if place is None:
        return None
    arena = tier.arena
    assert arena is not None
    payload = bytes(memoryview(arena)[place.offset : place.offset + place.length])
    tier.release(place.offset)
    assert place.seal == seal_of(payload) and place.name == b"name"
    return payload


@pytest.fixture
def name() -> Iterator[str]:
    name = new_tier_name()
    yield name
    remove_tier_files(name)


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, str(SUPPORT), str(Path(__file__).parent), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> str:
    assert child.stdout
    assert select.select([child.stdout], [], [], WAIT_S)[0], "the process says nothing"
    return child.stdout.readline().strip()


def tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin
    child.stdin.write(line + "\n")
    child.stdin.flush()


def keys_of(tier: MemoryTier) -> set[bytes]:
    keys = tier.keys()
    return {keys[i : i + 16] for i in range(0, len(keys), 16)}


def reader_of(tier: MemoryTier, number: int) -> TierReader:
    return TierReader(tier.data_path, tier.index_path, tier.open_client(number))


def test_reader_never_sees_torn_values_during_eviction(name: str) -> None:
    tier, rng, life = MemoryTier(ARENA, BLOCK, name=name), random.Random(3), 0
    paths = (tier.data_path, tier.index_path, tier.open_client(1))
    with process(READER, *paths, 20_000) as reader:
        assert said(reader) == "reads"
        deadline = time.monotonic() + WAIT_S
        while reader.poll() is None and time.monotonic() < deadline:
            for _ in range(200):
                life += 1
                number = rng.randrange(KEYS)
                if rng.random() < 0.2:
                    tier.remove(key_of(number))
                publish(tier, number, life)
                if rng.random() < 0.1:
                    tier.mark_on_disk(key_of(number), rng.random() < 0.5)
            tier.check_invariants()
        assert said(reader) == "whole"
    counters = tier.counters()
    assert counters["evicted"] > 1000 and counters["client_hits"] > 100
    tier.close_client(1)
    assert tier.counters()["limbo"] == 0
    tier.unlink()
    assert tier_files(name) == []


def test_values_of_killed_owner_are_adopted_unverified(name: str) -> None:
    for round_ in range(3):
        with process(OWNER, name) as owner:
            assert said(owner) == "owns"
            tell(owner, "churn")
            numbers = [int(said(owner)) for _ in range(100 + 37 * round_)]
            owner.send_signal(signal.SIGKILL)
            owner.wait(WAIT_S)
            assert owner.stdout
            numbers += [int(line) for line in owner.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        tier = MemoryTier(ARENA, BLOCK, name=name)
        tier.check_invariants()
        assert tier.adopted and len(tier) == tier.counters()["adopted"] >= ARENA // BLOCK - 4
        reader = reader_of(tier, 1)
        newest = numbers[-10:]
        assert all(key_of(number) in tier for number in newest)
        for key in keys_of(tier):
            place = tier.find(key)
            assert place is not None and not place.verified
            tier.release(place.offset)
            number = int.from_bytes(key[:4], "little")
            assert is_whole(key, read(tier, number) or b"")
            assert reader.where(key) == b"\1" and reader.hold(key, b"name") is None
            tier.verified(key)
            held = reader.hold(key, b"name")
            assert held is not None and is_whole(key, at(*held[:2]))
            reader.let_go(held[2])
        tier.unlink()
        assert tier_files(name) == []
        del reader, tier


def entries(name: str) -> tuple[bytearray, list[int], bytes]:
    """The index's bytes, where the entries begin that are used, and its secret."""
    index = bytearray(Path(f"/dev/shm/memserve-store-{name}.index").read_bytes())
    buckets = int.from_bytes(index[32:40], "little")
    assert len(index) == PAGE + -(-buckets // IN_PAGE) * PAGE
    starts = [PAGE + b // IN_PAGE * PAGE + b % IN_PAGE * BUCKET_BYTES for b in range(buckets)]
    places = [start + 64 * way for start in starts for way in range(1, 9)]
    return index, [place for place in places if any(index[place + 8 : place + 56])], bytes(index[40:56])


def write_index(name: str, index: bytearray) -> None:
    path = Path(f"/dev/shm/memserve-store-{name}.index")
    with path.open("r+b") as file:
        file.write(index)


def signed(index: bytearray, where: int, secret: bytes, **fields: int) -> None:
    """Changes an entry and signs it anew, as another process of this user could."""
    places = {"offset": (24, "<Q"), "length": (40, "<I"), "units": (48, "<I"), "name": (52, "<H"), "class": (55, "<B")}
    for field, value in fields.items():
        offset, form = places[field]
        struct.pack_into(form, index, where + offset, value)
    check = _core.siphash128(secret, bytes(index[where + 8 : where + 56]))[:8]
    index[where + 56 : where + 64] = check


def test_half_written_damaged_and_forged_entries_are_not_adopted(name: str) -> None:
    tier = MemoryTier(ARENA, BLOCK, name=name)
    for number in range(20):
        assert publish(tier, number, number)
    del tier
    index, used, secret = entries(name)
    assert len(used) == 20
    index[used[0]] |= 1  # its version: the owner was writing
    index[used[1] + 30] ^= 4  # its offset
    index[used[2] + 60] ^= 1  # its check
    forged: list[dict[str, int]] = [
        {"offset": 1 << 40}, {"offset": ARENA - 4096, "units": 4}, {"offset": 100}, {"length": 1 << 31},
        {"units": 0, "class": 9}, {"units": 0, "class": 3, "offset": 7}, {"units": 1 << 31}, {"name": 60_000},
        {"units": 0, "class": 255, "offset": 0},
    ]  # fmt: skip
    for where, fields in zip(used[3:], forged, strict=False):
        signed(index, where, secret, **fields)
    left = used[3 + len(forged) :]
    sizes = [(index[place + 48 : place + 52], index[place + 55]) for place in left]
    # Of one size: a larger one would lie on a third as well.
    twice, other = next(
        pair for pair in itertools.combinations(range(len(left)), 2) if sizes[pair[0]] == sizes[pair[1]]
    )
    signed(index, left[twice], secret, offset=struct.unpack_from("<Q", index, left[other] + 24)[0])
    write_index(name, index)
    tier = MemoryTier(ARENA, BLOCK, name=name)
    tier.check_invariants()
    assert len(tier) == 20 - 3 - len(forged) - 1
    wrong = 0
    for key in keys_of(tier):
        place, arena = tier.find(key), tier.arena
        assert place is not None and arena is not None and not place.verified
        payload = bytes(memoryview(arena)[place.offset : place.offset + place.length])
        assert is_whole(key, payload) == (seal_of(payload) == place.seal)
        wrong += not is_whole(key, payload)
        tier.release(place.offset)
    assert wrong <= 1  # of two with one extent, either: its seal tells
    for number in range(200):
        publish(tier, number, number)
    tier.check_invariants()
    tier.unlink()


def test_an_index_full_of_garbage_is_survived(name: str) -> None:
    rng = random.Random(11)
    for round_ in range(25):
        tier = MemoryTier(ARENA, BLOCK, name=name)
        tier.check_invariants()
        for number in range(rng.randrange(60)):
            publish(tier, rng.randrange(KEYS), number)
        reader = reader_of(tier, 1)
        path = Path(tier.index_path)
        index = bytearray(path.read_bytes())
        start = 0 if round_ % 5 == 4 else PAGE  # a head of garbage: these files are another store's
        for _ in range(rng.choice((1, 50, 3000))):
            where = rng.randrange(start, len(index) - 8)
            index[where : where + 8] = rng.randbytes(8)
        with path.open("r+b") as file:
            file.seek(start)
            file.write(index[start:])
        for number in range(KEYS):  # the owner reads none of it, a reader all of it
            if (found := reader.hold(key_of(number), b"name")) is not None:
                reader.let_go(found[2])
            reader.where(key_of(number))
            publish(tier, number, number)
            tier.mark_on_disk(key_of(number), rng.random() < 0.5)
        tier.check_invariants()
        assert is_whole(key_of(KEYS - 1), read(tier, KEYS - 1) or b"")
        del reader, tier
    MemoryTier(ARENA, BLOCK, name=name).unlink()


def test_corrupt_client_area_harms_only_its_client(name: str) -> None:
    tier, rng = MemoryTier(ARENA, BLOCK, name=name), random.Random(5)
    good = reader_of(tier, 1)
    assert publish(tier, 0, 0)
    held = good.hold(key_of(0), b"name")
    assert held is not None
    for number in range(2, 40):
        path = Path(tier.open_client(number))
        with path.open("r+b") as file:
            kind = number % 4
            if kind == 0:
                file.write(rng.randbytes(path.stat().st_size))
            elif kind == 1:
                file.truncate(rng.choice((0, 10, 100, 9000)))
            elif kind == 2:  # pins on everything that there is, and hits as many as a word can say
                file.seek(24)
                file.write(b"\xff" * 8)
                file.seek(64)
                file.write(b"".join((block * 4096 + 1).to_bytes(8, "little") for block in range(1024)))
            else:
                path.unlink()
        for life in range(100):
            publish(tier, 1 + rng.randrange(KEYS), life)
            tier.remove(key_of(1 + rng.randrange(KEYS)))
        tier.check_invariants()
        assert is_whole(key_of(0), at(*held[:2]))
        if number > 4:
            tier.close_client(number - 2)
    tier.purge()
    tier.check_invariants()
    assert is_whole(key_of(0), at(*held[:2]))  # removed, and still read
    good.let_go(held[2])
    for number in (1, 2, 38, 39):
        tier.close_client(number)
    assert tier.bytes_used == 0 and tier.counters()["limbo"] == 0
    tier.unlink()
    assert tier_files(name) == []


HOLDER = """
import sys
sys.path[:0] = sys.argv[1:3]
from memserve._core import TierReader
from test_memory_tier import KEYS, key_of
reader = TierReader(*sys.argv[3:6])
print(sum(reader.hold(key_of(number), b"name") is not None for number in range(KEYS)), flush=True)
sys.stdin.read()
"""


def test_pins_of_a_dead_reader_end_when_its_client_is_closed(name: str) -> None:
    tier = MemoryTier(ARENA, BLOCK, name=name)
    for number in range(10):
        assert publish(tier, number, number)
    paths = (tier.data_path, tier.index_path, tier.open_client(1))
    with process(HOLDER, *paths) as holder:
        assert said(holder) == "10"
        holder.kill()
        holder.wait(WAIT_S)
    assert tier.allocate_blocks(tier.blocks_total) is None  # the kernel does not clear a dead reader's pins
    assert all(key_of(number) in tier for number in range(10))
    tier.remove(key_of(0))
    assert tier.counters()["limbo"] == 1
    tier.close_client(1)
    assert tier.counters()["limbo"] == 0
    blocks = tier.allocate_blocks(tier.blocks_total)
    assert blocks is not None and len(tier.take_evicted()) == 9
    tier.unlink()


def test_clients_of_a_killed_owner_read_on_as_long_as_they_live(name: str) -> None:
    with process(OWNER, name) as owner:
        assert said(owner) == "owns"
        tell(owner, "publish 10")
        assert said(owner) == "done"
        tell(owner, "client 1")
        area = said(owner)
        paths = (f"/dev/shm/memserve-store-{name}.data", f"/dev/shm/memserve-store-{name}.index", area)
        with process(HOLDER, *paths) as holder:
            assert said(holder) == "10"
            owner.send_signal(signal.SIGKILL)
            owner.wait(WAIT_S)
            tier = MemoryTier(ARENA, BLOCK, name=name)
            assert tier.counters()["clients"] == 1
            assert tier.bytes_used == sum(-(-(len(payload_of(n, n)) + 4) // 4096) * 4096 for n in range(10))
            assert tier.allocate_blocks(tier.blocks_total) is None
            assert len(tier) == 10
            new = reader_of(tier, 1)  # the number is the new owner's, the area is another
            assert new.hold(key_of(1), b"name") is None
            holder.kill()
            holder.wait(WAIT_S)
    assert tier.allocate_blocks(tier.blocks_total) is not None
    assert tier.counters()["clients"] == 1 and not Path(area).exists()
    tier.unlink()


def test_a_second_owner_is_refused_until_the_first_is_gone(name: str) -> None:
    with process(OWNER, name) as owner:
        assert said(owner) == "owns"
        tell(owner, "publish 5")
        assert said(owner) == "done"
        for sizes in ((ARENA, BLOCK), (ARENA * 2, BLOCK)):
            with pytest.raises(OSError, match=r"has an owner.*another store of this name.*choose another name"):
                MemoryTier(*sizes, name=name)
        other = MemoryTier(ARENA, BLOCK, name=f"{name}-b")
        other.unlink()
        owner.kill()
        owner.wait(WAIT_S)
    tier = MemoryTier(ARENA, BLOCK, name=name)
    assert len(tier) == 5
    with pytest.raises(OSError, match="has an owner"):
        MemoryTier(ARENA, BLOCK, name=name)
    tier.unlink()


def test_resized_files_are_replaced_and_old_readers_keep_theirs(name: str) -> None:
    tier = MemoryTier(ARENA, BLOCK, name=name)
    assert publish(tier, 1, 1)
    old = reader_of(tier, 1)
    held = old.hold(key_of(1), b"name")
    assert held is not None
    del tier
    tier = MemoryTier(ARENA // 2, BLOCK, name=name)
    assert not tier.adopted and len(tier) == 0 and len(tier_files(name)) == 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tier_files(name))
    for number in range(KEYS):
        publish(tier, number, number)
    assert is_whole(key_of(1), at(*held[:2]))
    old.let_go(held[2])
    with pytest.raises(OSError, match="cannot be opened"):
        TierReader(tier.data_path, tier.index_path, tier.data_path + "-client-9")
    with pytest.raises(OSError, match="no index of a store"):
        TierReader(tier.data_path, tier.data_path, tier.open_client(1))
    with pytest.raises(OSError, match="no client's area"):
        TierReader(tier.data_path, tier.index_path, tier.data_path)
    tier.unlink()


def test_peers_of_the_exchange_map_the_named_file(name: str) -> None:
    tier = MemoryTier(ARENA, BLOCK, name=name)
    assert publish(tier, 1, 1)
    arena = tier.arena
    assert arena is not None and arena.address % 4096 == 0
    arena.generation = 77
    script = "import sys\nfrom memserve._core import PeerArena\npeer = PeerArena(*map(int, sys.argv[3:6]))\n"
    script += "import zlib\nprint(peer.generation, zlib.crc32(memoryview(peer)), flush=True)\n"
    with process(script, os.getpid(), arena.fd, ARENA) as peer:
        assert said(peer) == f"77 {zlib.crc32(memoryview(arena))}"
    Path(tier.data_path).chmod(0o644)
    with pytest.raises(OSError, match="could shrink"):
        PeerArena(os.getpid(), arena.fd, ARENA)
    tier.unlink()


@pytest.mark.parametrize("behind", [0, 1, 16, 31, 63, 64, 65, 4095])
def test_copy_writes_exact_bytes_at_any_target_alignment(name: str, behind: int) -> None:
    tier, drawn = MemoryTier(1 << 20, BLOCK, name=name), random.Random(behind)
    reader = TierReader(tier.data_path, tier.index_path, tier.open_client(1))
    lengths = [1, 63, 64, 255, 256, 4097, 65_536, 65_537, 300_000]
    whole = np.zeros(2 * PAGE + max(lengths) + 64, np.uint8)
    for number, length in enumerate(lengths):
        payload, key = drawn.randbytes(length), key_of(number)
        offset = tier.allocate(length)
        assert offset is not None and tier.arena is not None
        memoryview(tier.arena)[offset : offset + length] = payload
        assert tier.publish(key, offset, length)
        tier.release(offset)
        begin = -whole.ctypes.data % PAGE + behind
        whole[:] = 0xEE
        assert reader.copy(key, [b""], [whole[begin : begin + length]]) == [length]
        assert whole[begin : begin + length].tobytes() == payload
        assert (whole[:begin] == 0xEE).all() and (whole[begin + length :] == 0xEE).all()
    tier.unlink()


def test_memory_is_preallocated_on_huge_and_small_pages(name: str) -> None:
    """Both ends of an arena come first to have huge pages, where there are some; the rest has small ones."""
    tier = MemoryTier((11 << 20) + BLOCK, BLOCK, name=name)
    for path in (tier.data_path, tier.index_path):
        status = os.stat(path)
        assert status.st_blocks * 512 >= status.st_size
    assert tier.arena is not None and not np.frombuffer(tier.arena, np.uint8).any()
    count = (11 << 20) // (2 * BLOCK)
    assert all(publish(tier, number, 4) for number in range(count)) and len(tier) == count
    reader = TierReader(tier.data_path, tier.index_path, tier.open_client(1))
    for number in range(count):
        held = reader.hold(key_of(number), b"name")
        assert held is not None and at(*held[:2]) == payload_of(number, 4)
        reader.let_go(held[2])
    tier.unlink()


def test_no_room_for_the_files_leaves_none(name: str) -> None:
    with pytest.raises(OSError, match="/dev/shm has not that many: give the store less memory"):
        MemoryTier(1 << 42, 1 << 20, name=name)
    assert [path.suffix for path in tier_files(name)] in ([], [".lock"])

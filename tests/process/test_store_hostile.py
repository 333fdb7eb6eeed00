"""A store beside clients that lie, break off, crowd in or die: each gets a right answer or a clear error, the others
notice nothing, and nothing is left of them."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memserve import StoreClient, StoreUnavailable, _core
from memserve.base.types import Tier
from memserve.protocol import codec as wire
from memserve.protocol.messages import AnyMessage, Expelled
from memserve.protocol.peers import ArenaPlace
from memserve.protocol.store import (
    CALL_KEYS_MAX,
    LIST_MAX,
    StoreCode,
    StoreDelete,
    StoreDone,
    StoreGet,
    StoreHello,
    StoreList,
    StoreListing,
    StoreLook,
    StorePair,
    StorePlaces,
    StorePurge,
    StorePut,
    StoreStat,
    StoreVerify,
    StoreWelcome,
)
from memserve.transport.links.shared_memory import this_host
from places import SUPPORT
from served_store import SECRET, WAIT_S, Impostor, ServedStore
from waiting import eventually

HUGE = (1 << 63) - 1
GREETING_BYTES = 64
"""Of ZeroMQ's protocol: what each side says before it knows anything of the other."""
KEY = b"k" * 16
VALUE = np.random.default_rng(1).integers(0, 256, 200_000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    with ServedStore(tmp_path_factory.mktemp("store")) as store:
        yield store
        assert store.process.poll() is None, "the store has ended"


@pytest.fixture(autouse=True)
def an_honest_client(store: ServedStore) -> Iterator[StoreClient]:
    """Puts and gets before and after each test, and finds nothing left of the others."""
    with store.client("honest") as client:
        client.put(b"before", VALUE)
        yield client
        assert client.put(b"after", VALUE, timeout_s=WAIT_S)
        for key in (b"before", b"after"):
            view = client.get(key, timeout_s=WAIT_S)
            assert view is not None and view.in_place and view.data == VALUE
            view.release()
        client.purge(everything=True, timeout_s=WAIT_S)
        eventually(lambda: client.statistics()["clients"] == 1)
        assert client.statistics()["dram_bytes_used"] == 0
        assert list(client.entries(everything=True)) == []


def greeted(impostor: Impostor, **given: Any) -> StoreWelcome:
    hello = StoreHello(impostor.mailbox.address, **{"tenant": "impostor", "pid": os.getpid()} | given)
    answer = impostor.ask(hello)
    assert isinstance(answer, StoreWelcome), answer
    return answer


def pair(key: bytes = KEY, name: bytes = b"name", length: int = 4, **given: Any) -> StorePair:
    return StorePair(key, name, length, **given)


def codes(answer: AnyMessage) -> list[StoreCode]:
    assert isinstance(answer, StoreDone), answer
    return [StoreCode(code) for code in answer.codes]


# -- frames


def malformed() -> list[tuple[bytes, ...]]:
    """What is no letter, or a letter with something else inside than a message."""
    pack, drawn = msgspec.msgpack.encode, random.Random(1)
    good = msgspec.msgpack.encode(StoreStat(1))
    whole = wire.seal(*_envelope(), 1, good)
    inside = [
        b"",
        b"\xc1",
        good[:-1],
        good + good,
        pack(None),
        pack("StoreStat"),
        pack([]),
        pack(["StoreStat"]),
        pack(["StoreNothing", 1]),
        pack(["StoreStat", "one"]),
        pack(["StoreStat", -1]),
        pack(["StoreStat", 1 << 63]),
        pack(["StoreStat", 1.5]),
        pack(["StorePut", 1]),
        pack(["StorePut", 1, [[b"short", b"name", 4]]]),
        pack(["StorePut", 1, [[KEY, bytes(1025), 4]]]),
        pack(["StorePut", 1, [[KEY, b"name", -4]]]),
        pack(["StorePut", 1, [[KEY, b"name", 4, -1]]]),
        pack(["StorePut", 1, [[KEY, "name", 4, 0, 5]]]),
        pack(["StorePut", 1, [[KEY, b"name", 4, 0, b"data"]] * 3, "yes"]),
        pack(["StoreGet", 1, 5, [b"name"]]),
        pack(["StoreGet", 1, bytes(16 * CALL_KEYS_MAX + 16), []]),
        pack(["StoreGet", 1, KEY, [bytes(1025)]]),
        pack(["StoreList", 1, 0, 0]),
        pack(["StoreList", 1, 0, LIST_MAX + 1]),
        pack(["StoreHello", "tcp://127.0.0.1:1", "x" * 257]),
        pack(["StoreHello", "tcp://127.0.0.1:1", "t", -5]),
        pack(["StoreHello", "tcp://127.0.0.1:1", "t", 5, "host", [1, -2, 3]]),
        b"\x93\xa9StoreStat\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ]
    letters = [wire.seal(*_envelope(), number, message) for number, message in enumerate(inside, 2)]
    return [
        *((letter,) for letter in letters),
        (b"",),
        (b"mss",),
        (b"mss\x01" + whole[4:],),
        (b"xxx" + whole[3:],),
        (whole[: len(whole) // 2],),
        (whole + b"more",),
        (whole, b"a second frame"),
        (drawn.randbytes(100_000),),
        *((_bent(whole, drawn),) for _ in range(20)),
    ]


def _envelope() -> tuple[Any, str, Any]:
    from memserve.protocol.peers import Peer

    return Peer("raw", 1), "tcp://127.0.0.1:1", Peer("store", 0)


def _bent(letter: bytes, drawn: random.Random) -> bytes:
    bent = bytearray(letter)
    for _ in range(3):
        bent[drawn.randrange(4, len(bent))] = drawn.randrange(256)
    return bytes(bent)


def test_malformed_frames_are_dropped(store: ServedStore) -> None:
    frames = malformed()
    assert len(frames) >= 40
    with Impostor(store.address) as impostor:
        for one in frames:
            impostor.post(*one)
        assert isinstance(impostor.ask(StoreStat(1)), Expelled)


def test_bytes_that_are_no_protocol_are_dropped(store: ServedStore, an_honest_client: StoreClient) -> None:
    """The store ends each such connection by itself, has told it nothing but which protocol it speaks, says so in its
    log, and keeps no descriptor and none of the bytes: 32 times a megabyte here."""
    drawn = random.Random(2)
    host, port = store.address.split(":")
    asked = [
        b"GET / HTTP/1.1\r\n\r\n",
        *(drawn.randbytes(1 << at) for at in range(20)),
        *[drawn.randbytes(1 << 20)] * 32,
    ]
    descriptors, resident = store.descriptors(), store.resident_bytes()
    lines = store.log().count("it does not speak this protocol")
    for words in asked:
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
            heard = _all_that_is_answered(raw, words)
        assert len(heard) <= GREETING_BYTES and VALUE[:16] not in heard, heard
        view = an_honest_client.get(b"before", timeout_s=WAIT_S)
        assert view is not None and view.data == VALUE
        view.release()
    eventually(lambda: store.descriptors() <= descriptors)
    assert store.resident_bytes() < resident + (8 << 20)
    eventually(lambda: store.log().count("it does not speak this protocol") > lines)


def _all_that_is_answered(raw: socket.socket, words: bytes) -> bytes:
    """To ``words``, until the store ends the connection, mostly before it has read all of them."""
    heard = b""
    try:
        raw.sendall(words)
        while part := raw.recv(4096):
            heard += part
    except ConnectionError:
        pass
    return heard


# -- strangers


def test_another_secret_says_nothing(store: ServedStore, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(SECRET + "!")
    other.chmod(0o600)
    for _ in range(5):
        with pytest.raises(StoreUnavailable, match="another secret"):
            StoreClient(store.address, secret_file=other, timeout_s=0.2)


def test_without_a_greeting_nothing_is_told(store: ServedStore) -> None:
    asked: list[AnyMessage] = [
        StorePut(1, (pair(data=b"data"),)),
        StoreGet(2, KEY, (b"name",)),
        StoreLook(3, KEY),
        StoreDelete(4, KEY, (b"name",)),
        StorePurge(5, True),
        StoreStat(6),
        StoreList(7, everything=True),
        StoreVerify(8),
    ]
    for message in asked:
        with Impostor(store.address) as impostor:
            assert isinstance(impostor.ask(message), Expelled)


# -- lies


def test_places_that_are_not_the_clients_are_not_read(store: ServedStore) -> None:
    """Memory of other processes, files that are no arena, and bytes behind its end."""
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 1 << 16)
    arena = _core.SharedArena(8192)
    end = arena.nbytes
    here = this_host()
    lies: list[tuple[int, ArenaPlace, tuple[int, int]]] = [
        (os.getpid(), ArenaPlace(Tier.DRAM, arena.address, end, arena.fd), (end - 2, 4)),
        (os.getpid(), ArenaPlace(Tier.DRAM, arena.address, end, arena.fd), (HUGE, 4)),
        (os.getpid(), ArenaPlace(Tier.DRAM, arena.address, end, arena.fd), (0, end + 1)),
        (os.getpid(), ArenaPlace(Tier.DRAM, arena.address, HUGE, arena.fd), (1 << 40, 4)),
        (os.getpid(), ArenaPlace(Tier.DRAM, 0, 1 << 16, plain), (0, 4)),
        (os.getpid(), ArenaPlace(Tier.DRAM, 0, 8192, 0), (0, 4)),
        (os.getpid(), ArenaPlace(Tier.DRAM, 0, 8192, 99_999), (0, 4)),
        (os.getpid(), ArenaPlace(Tier.DRAM, 0, 8192, -1), (0, 4)),
        (store.pid, ArenaPlace(Tier.DRAM, 0, 64 << 20, 5), (0, 4)),
        (1, ArenaPlace(Tier.DRAM, 0, 8192, 1), (0, 4)),
        (HUGE, ArenaPlace(Tier.DRAM, 0, 8192, 3), (0, 4)),
    ]
    for pid, place, (offset, length) in lies:
        with Impostor(store.address) as impostor:
            greeted(impostor, pid=pid, host_id=here, arena=place)
            answer = impostor.ask(StorePut(1, (pair(length=length, offset=offset),)))
            assert codes(answer) == [StoreCode.UNREADABLE], (place, offset, length)
    os.close(plain)


def test_lengths_that_cannot_be_are_refused(store: ServedStore) -> None:
    with Impostor(store.address) as impostor:
        welcome = greeted(impostor)
        put = (pair(length=HUGE), pair(length=welcome.value_bytes_max + 1), pair(length=5, data=b"four"))
        answer = codes(impostor.ask(StorePut(1, put, deadline_in_ns=HUGE)))
        assert answer == [StoreCode.TOO_LARGE, StoreCode.TOO_LARGE, StoreCode.BAD_CALL]
        assert codes(impostor.ask(StorePut(2, ()))) == []
        assert codes(impostor.ask(StorePut(3, (pair(data=b"four"),), deadline_in_ns=HUGE))) == [StoreCode.DONE]
        got = impostor.ask(StoreGet(4, KEY, (b"name",), True, HUGE, first_byte=HUGE))
        assert isinstance(got, StoreDone) and got.lengths == (4,) and got.values == (b"",)
        assert codes(impostor.ask(StoreGet(5, KEY + b"!", (b"name",)))) == [StoreCode.BAD_CALL]
        assert codes(impostor.ask(StoreGet(6, KEY, (b"name", b"more")))) == [StoreCode.BAD_CALL] * 2
        assert codes(impostor.ask(StoreDelete(7, KEY * 3, (b"name",)))) == [StoreCode.BAD_CALL]
        listed = impostor.ask(StoreList(8, after=HUGE, everything=True))
        assert isinstance(listed, StoreListing) and listed.entries == () and listed.after == 0
        looked = impostor.ask(StoreLook(9, KEY + b"odd"))
        assert isinstance(looked, StorePlaces) and looked.where in (b"\1", b"")
        late = impostor.ask(StoreGet(10, KEY, (b"name",), True, deadline_in_ns=0))
        assert codes(late)[0] in (StoreCode.DONE, StoreCode.LATE)


def test_more_calls_than_one_may_have_under_way(store: ServedStore) -> None:
    """Each is answered once; none of them keeps another client waiting."""
    with Impostor(store.address) as impostor:
        greeted(impostor)
        data = bytes(100_000)
        for call in range(500):
            key = struct.pack("<QQ", call, 7)
            impostor.say(StorePut(call, (pair(key, b"name", len(data), data=data),)))
        eventually(lambda: sum(isinstance(message, StoreDone) for message in impostor.heard) == 500)
        said = [code for message in impostor.heard if isinstance(message, StoreDone) for code in codes(message)]
        assert set(said) <= {StoreCode.DONE, StoreCode.NO_ROOM} and StoreCode.DONE in said


def test_reused_call_number(store: ServedStore) -> None:
    with Impostor(store.address) as impostor:
        greeted(impostor)
        for _ in range(50):
            impostor.say(StorePut(7, (pair(data=b"data"),)))
            impostor.say(StoreGet(7, KEY, (b"name",), True))
        eventually(lambda: sum(isinstance(message, StoreDone) for message in impostor.heard) >= 2)
        assert codes(impostor.ask(StorePut(8, (pair(data=b"data"),))))


def test_greetings_that_change_all_the_time(store: ServedStore) -> None:
    arena = _core.SharedArena(8192)
    with Impostor(store.address) as impostor:
        for at in range(200):
            place = ArenaPlace(Tier.DRAM, arena.address, arena.nbytes, arena.fd) if at % 2 else None
            host = this_host() if at % 3 else ""
            tenant = f"tenant {at}\N{SNOWMAN}"
            impostor.say(StoreHello(impostor.mailbox.address, tenant, os.getpid(), host, place))
        impostor.say(StorePut(1, (pair(data=b"data"),)))
        eventually(lambda: any(isinstance(message, StoreDone) for message in impostor.heard))
        (answer,) = (message for message in impostor.heard if isinstance(message, StoreDone))
        assert codes(answer) == [StoreCode.DONE]
    for address in ("", "nowhere", "tcp://127.0.0.1:99999", "inproc://x", "tcp://" + "a" * 5000, "ipc:///tmp/x\0y"):
        with Impostor(store.address) as impostor:
            impostor.say(StoreHello(address, "impostor", os.getpid()))


# -- tenants


def test_another_tenants_values_are_absent(store: ServedStore, an_honest_client: StoreClient) -> None:
    with store.client("other") as other, store.client("honest") as same:
        assert same.exists([b"before"]) == [True]
        assert other.exists([b"before"]) == [False] and other.get(b"before") is None
        assert other.get_into([(b"before", bytearray(300_000))]) == [-1] and other.get_copies([b"before"]) == [None]
        assert other.delete([b"before"]) == 0 and other.purge() == 0 and list(other.entries()) == []
        assert other.put(b"before", b"mine") and bytes(other.get(b"before")) == b"mine"
        assert other.delete([b"before"]) == 1
        assert same.exists([b"before"]) == [True]


def test_a_guessed_key_of_another_tenant_is_of_no_use(store: ServedStore, an_honest_client: StoreClient) -> None:
    """Even the keys of 16 bytes, which follow from a secret of the tenant's, open nothing."""
    key = _core.value_keys(an_honest_client.connection.known_session.welcome.key, b"", [b"before"])
    with Impostor(store.address) as impostor:
        greeted(impostor)
        looked = impostor.ask(StoreLook(1, key))
        assert isinstance(looked, StorePlaces) and looked.where == b"\0"
        for message in (
            StoreGet(2, key, (b"before",), True),
            StorePut(3, (pair(key, b"before", data=b"evil"),)),
            StorePut(4, (pair(key, b"other", data=b"evil"),), replace=False),
            StoreDelete(5, key, (b"before",)),
        ):
            answer = impostor.ask(message)
            assert codes(answer) == [StoreCode.BAD_CALL] and not any(answer.values)


# -- crowds and deaths


def test_three_hundred_connections(store: ServedStore, an_honest_client: StoreClient) -> None:
    """Some greet the store and keep quiet, some say nothing at all; each that is greeted is served."""
    host, port = store.address.split(":")
    before = store.descriptors()
    silent = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(150)]
    crowd = [Impostor(store.address, f"crowd-{at}") for at in range(150)]
    try:
        for at, impostor in enumerate(crowd):
            impostor.say(StoreHello(impostor.mailbox.address, f"crowd {at % 7}", os.getpid(), this_host()))
        eventually(lambda: all(impostor.heard for impostor in crowd), WAIT_S)
        assert all(isinstance(impostor.heard[0], StoreWelcome) for impostor in crowd)
        assert an_honest_client.put(b"meanwhile", b"value", timeout_s=WAIT_S)
        for at, impostor in enumerate(crowd):
            assert codes(impostor.ask(StorePut(1, (pair(b"%016d" % at, data=b"data"),)))) == [StoreCode.DONE]
    finally:
        for one in (*silent, *crowd):
            one.close()
    an_honest_client.purge(everything=True)
    eventually(lambda: an_honest_client.statistics()["clients"] == 1, WAIT_S)  # silent ones are dropped
    eventually(lambda: store.descriptors() <= before + 2, WAIT_S)
    an_honest_client.put(b"before", VALUE)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_dies_or_hangs_gives_up_its_pins(
    store: ServedStore, an_honest_client: StoreClient, end: signal.Signals
) -> None:
    """Its values stay where they are as long as it is a client; then they make room like any others."""
    command = [sys.executable, str(SUPPORT / "holding_client.py"), store.address, str(store.secret_file)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert victim.stdout.readline().split() == [str(at) for at in range(12)]

    def filled() -> bool:
        """The memory, 67 MB, has room for values of 57 MB at once: when nothing is held."""
        an_honest_client.purge(timeout_s=WAIT_S)
        wanted = [(b"fill %d" % at, bytes(1_000_000)) for at in range(57)]
        taken = an_honest_client.put_many(wanted, timeout_s=WAIT_S)
        return all(taken) and all(an_honest_client.exists([key for key, _ in wanted]))

    try:
        assert not filled(), "views that are held keep their memory"
        os.kill(victim.pid, end)
        eventually(lambda: an_honest_client.statistics()["clients"] == 1, WAIT_S)
        eventually(filled, WAIT_S)
    finally:
        victim.kill()
        victim.communicate()
    an_honest_client.put(b"before", VALUE)

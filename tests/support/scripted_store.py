"""A store for tests of its clients: one thread, a dictionary or a memory tier, and faults on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from memserve import _core
from memserve.protocol.messages import AnyMessage, Expelled, Leave
from memserve.protocol.peers import Peer
from memserve.protocol.store import (
    INLINE_BYTES_MAX,
    StoreCode,
    StoreDelete,
    StoreDone,
    StoreEntry,
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
    StoreStatus,
    StoreVerify,
    StoreWelcome,
)
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress

SECRET = "a secret of the tests, long enough"
KEY = b"0123456789abcdef"


def seal_of(value: bytes) -> int:
    if not value:
        return 0
    array = np.frombuffer(value, np.uint8)
    return int(_core.seal_ranges(array.ctypes.data, np.zeros(1, np.int64), len(value))[0])


class ScriptedStore:
    """Values in ``values`` by key of 16 bytes; with ``tier`` those lie in its memory, where clients read them."""

    def __init__(
        self, tier: Any = None, *, port: int = 0, secret: str = SECRET, value_bytes_max: int = 1 << 26
    ) -> None:
        self.values: dict[bytes, tuple[bytes, bytes]] = {}
        self.tier = tier
        self.value_bytes_max = value_bytes_max
        self.inline_bytes_max = INLINE_BYTES_MAX
        self.heard: list[AnyMessage] = []
        self.clients: dict[Peer, int] = {}
        self.hellos: dict[Peer, StoreHello] = {}
        self.areas: dict[int, str] = {}
        self.is_silent = False
        self.answers: Callable[[AnyMessage], AnyMessage | None] | None = None
        """Gets every call first; what it returns is the answer. None: the store answers as ever."""
        self._next = 0
        self._lock = threading.Lock()
        self._mailbox = ZmqMailbox(Peer("store", time.time_ns()), ListenAddress(SECRET, port=port), self._arrived)
        self.address = self._mailbox.address.removeprefix("tcp://")
        self.port = int(self.address.rpartition(":")[2])

    def forget(self) -> None:
        """Drop all clients, as after a silence."""
        with self._lock:
            for number in self.clients.values():
                self._close_area(number)
            self.clients.clear()

    def _close_area(self, number: int) -> None:
        if self.areas.pop(number, None) is not None:
            self.tier.close_client(number)

    def close(self) -> None:
        self._mailbox.close()

    def __enter__(self) -> ScriptedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arrived(self, sender: Peer, message: AnyMessage) -> None:
        with self._lock:
            self.heard.append(message)
            if self.is_silent:
                return
            if isinstance(message, StoreHello):
                self._greet(sender, message)
                return
            if isinstance(message, Leave):
                number = self.clients.pop(sender, None)
                if number is not None:
                    self._close_area(number)
                return
            if sender not in self.clients:
                self._mailbox.send(sender, Expelled("unknown here"))
                return
            answer = self.answers(message) if self.answers is not None else None
            self._mailbox.send(sender, answer or self._answer(sender, message))

    def _greet(self, sender: Peer, hello: StoreHello) -> None:
        new = sender not in self.clients
        if new:
            self._next += 1
            self.clients[sender] = self._next
            self._mailbox.connect(sender, hello.address)
        self.hellos[sender] = hello
        number, paths = self.clients[sender], ("", "", "")
        if self.tier is not None and hello.host_id:
            if number not in self.areas:
                self.areas[number] = self.tier.open_client(number)
            paths = (self.tier.data_path, self.tier.index_path, self.areas[number])
        self._mailbox.send(sender, StoreWelcome(number, KEY, 1 << 30, self.value_bytes_max, *paths))

    def _answer(self, sender: Peer, message: AnyMessage) -> AnyMessage:
        match message:
            case StorePut(call, pairs, replace):
                return StoreDone(call, bytes(self._put(sender, pair, replace) for pair in pairs))
            case StoreGet():
                return self._get(message)
            case StoreLook(call, keys):
                return StorePlaces(call, bytes(key in self.values for key in _split(keys)))
            case StoreDelete(call, keys, names):
                named = zip(_split(keys), names, strict=True)
                return StoreDone(call, bytes(self._delete(key, name) for key, name in named))
            case StorePurge(call):
                count = len(self.values)
                for key, (name, _) in list(self.values.items()):
                    self._delete(key, name)
                return StoreDone(call, b"", count=count)
            case StoreStat(call):
                return StoreStatus(call, {"values": len(self.values)})
            case StoreVerify(call):
                return StoreStatus(call, {"verify_running": 0, "verify_damaged": 0})
            case StoreList(call, after, count):
                found = sorted(self.values.items())[after : after + count]
                entries = tuple(StoreEntry(key, name, len(value), 7, 1) for key, (name, value) in found)
                end = after + count
                return StoreListing(call, end if end < len(self.values) else 0, entries)
        raise AssertionError(f"no answer to {message}")

    def _put(self, sender: Peer, pair: StorePair, replace: bool) -> StoreCode:
        if pair.length > self.value_bytes_max:
            return StoreCode.TOO_LARGE
        if pair.key in self.values and not replace:
            return StoreCode.PRESENT
        value = pair.data if pair.data is not None else self._pulled(sender, pair)
        self._delete(pair.key, pair.name)
        self.values[pair.key] = (pair.name, value)
        return self._show(pair.key)

    def _pulled(self, sender: Peer, pair: StorePair) -> bytes:
        hello = self.hellos[sender]
        assert hello.arena is not None
        arena = _core.PeerArena(hello.pid, hello.arena.fd, hello.arena.arena_bytes)
        assert arena.generation == sender.generation
        return bytes(memoryview(arena)[pair.offset : pair.offset + pair.length])

    def _show(self, key: bytes) -> StoreCode:
        """Have the value in the tier's memory, if there is a tier."""
        if self.tier is None or key in self.tier:
            return StoreCode.DONE
        name, value = self.values[key]
        offset = self.tier.allocate(len(value) + len(name))
        if offset is None:
            return StoreCode.NO_ROOM
        memoryview(self.tier.arena)[offset : offset + len(value)] = value
        self.tier.publish(key, offset, len(value), name=name, seal=seal_of(value))
        self.tier.release(offset)
        return StoreCode.DONE

    def _get(self, message: StoreGet) -> StoreDone:
        codes, lengths, seals, values, room = [], [], [], [], self.inline_bytes_max
        for key, name in zip(_split(message.keys), message.names, strict=True):
            found_name, value = self.values.get(key, (None, b""))
            code = StoreCode.DONE if found_name == name else StoreCode.ABSENT
            if code == StoreCode.DONE and not message.inline:
                code = self._show(key)
            part = b""
            if code == StoreCode.DONE and message.inline:
                part = value[message.first_byte :][:room]
                if not part and value[message.first_byte :]:
                    code = StoreCode.LATER
                room -= len(part)
            codes.append(code)
            lengths.append(len(value))
            seals.append(seal_of(value))
            values.append(part)
        if not message.inline:
            return StoreDone(message.call, bytes(codes), tuple(lengths))
        return StoreDone(message.call, bytes(codes), tuple(lengths), tuple(seals), tuple(values))

    def _delete(self, key: bytes, name: bytes) -> StoreCode:
        if self.values.get(key, (None,))[0] != name:
            return StoreCode.ABSENT
        del self.values[key]
        if self.tier is not None:
            self.tier.remove(key)
        return StoreCode.DONE


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]

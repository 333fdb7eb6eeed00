"""Store backends of other distributions: values outlive the store, and what fails is a miss, or the disk's end."""

from __future__ import annotations

import ctypes
import errno
import select
import sys
import threading
import types
from pathlib import Path
from typing import ClassVar

import pytest

from disk_files import Files
from memserve.base.deployment import backend_of, read_folders
from memserve.base.errors import UserError
from memserve.base.plugins import STORE_BACKENDS
from memserve.base.units import MIB, NS_PER_S
from memserve.store.disks import events as ev
from memserve.store.host.backends import CalledMedium, open_medium
from memserve.store.host.files import first_folder
from written_plugins import plugin_folder, write_plugins

__all__ = ["plugin_folder"]

SIZE = 32 * MIB


class Memory:
    """A backend that keeps bytes for the next one of its location, and fails as it is told."""

    kept: ClassVar[dict[str, bytearray]] = {}
    failing: ClassVar[dict[str, Exception]] = {}
    concurrency = 3

    def __init__(self, location: str, nbytes: int) -> None:
        if location == "absent":
            raise FileNotFoundError("no such place")
        self.bytes = self.kept.setdefault(location, bytearray(nbytes))
        self.calls: list[str] = []

    def read(self, offset: int, into: memoryview, /) -> None:
        self._note("read")
        assert offset % 512 == 0 and len(into) % 512 == 0
        into[:] = self.bytes[offset : offset + len(into)]

    def write(self, offset: int, data: memoryview, /) -> None:
        self._note("write")
        assert data.readonly and offset % 512 == 0 and len(data) % 512 == 0
        self.bytes[offset : offset + len(data)] = data

    def sync(self) -> None:
        self._note("sync")

    def erase(self) -> None:
        self._note("erase")
        self.bytes[:] = bytes(len(self.bytes))

    def close(self) -> None:
        self._note("close")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.failing:
            raise self.failing[call]


MODULE = """
from test_backends_memory import Memory as memory

class Half:
    def __init__(self, location, nbytes): ...
    def read(self, offset, into): ...

half = Half
"""


@pytest.fixture(autouse=True)
def installed(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("test_backends_memory")
    module.Memory = Memory
    monkeypatch.setitem(sys.modules, "test_backends_memory", module)
    monkeypatch.delitem(sys.modules, "written_backends", raising=False)
    Memory.kept.clear()
    Memory.failing.clear()
    write_plugins(plugin_folder, "written_backends", MODULE, {STORE_BACKENDS.group: ["memory", "half"]})


def keys(count: int) -> list[bytes]:
    return [bytes([number + 1]) * 16 for number in range(count)]


def test_values_outlive_the_store() -> None:
    files = Files([("memory://here", SIZE)])
    payloads = {key: bytes([number]) * (5000 + 4096 * number) for number, key in enumerate(keys(40))}
    for key, payload in payloads.items():
        assert files.write(key, 0, payload)
    files.close()
    again = Files([("memory://here", SIZE)])
    for key, payload in payloads.items():
        assert again.read(key, 0, len(payload)) == payload
    again.close()


def test_a_failing_read_is_a_miss_and_the_disk_goes_on() -> None:
    files = Files([("memory://here", SIZE)])
    first, second = keys(2)
    files.write(first, 0, b"x" * 9000)
    Memory.failing["read"] = KeyError("a bug")
    assert files.read(first, 0, 9000) is None
    Memory.failing.clear()
    files.write(second, 0, b"y" * 9000)
    assert files.read(second, 0, 9000) == b"y" * 9000
    files.close()


def test_a_disk_that_fails_again_and_again_is_given_up() -> None:
    files = Files([("memory://here", SIZE)])
    for key in keys(9):
        assert files.write(key, 0, b"x" * 9000)
    (medium,) = [file.medium for file in files.host._files]
    Memory.failing.update(dict.fromkeys(("read", "write", "sync"), KeyError("a bug")))
    for key in keys(9):
        assert files.read(key, 0, 9000) is None
    assert files.outcomes_of(ev.DiskLost) == [ev.DiskLost(0, "EIO")]
    files.close()
    assert isinstance(medium, CalledMedium)
    assert medium._backend.calls[-2:] == ["erase", "close"]
    assert "write" not in medium._backend.calls[medium._backend.calls.index("erase") :]
    assert not any(Memory.kept["here"]), "the next start begins anew"


def test_a_full_backend_is_written_again_when_there_is_room() -> None:
    files = Files([("memory://here", SIZE)])
    Memory.failing["write"] = OSError(errno.ENOSPC, "full")
    assert not any(files.write(key, 0, b"x" * 9000) for key in keys(12))
    Memory.failing.clear()
    files.tick(60 * NS_PER_S)
    assert [files.write(key, 0, b"x" * 9000) for key in keys(3)][-1]
    assert files.outcomes_of(ev.DiskLost) == []
    files.close()


def test_as_many_calls_at_once_as_the_backend_takes() -> None:
    inside, most, through = threading.Semaphore(0), [], threading.Event()

    class Slow(Memory):
        def read(self, offset: int, into: memoryview, /) -> None:
            most.append(None)
            inside.release()
            through.wait(30)

    backend = Slow("slow", SIZE)
    medium = CalledMedium(backend, "slow://")
    queue = medium.open_queue([], 64, "")
    target = bytearray(4096)
    address = ctypes.addressof((ctypes.c_char * 4096).from_buffer(target))
    for tag in range(9):
        queue.read(tag, 0, address, 4096)
    for _ in range(3):
        assert inside.acquire(timeout=30)
    assert len(most) == 3
    through.set()
    ended: list[tuple[int, int]] = []
    while len(ended) < 9:
        assert select_ready(queue.fileno())
        ended += queue.take()
    assert sorted(ended) == [(tag, 0) for tag in range(9)]
    medium.close()
    assert backend.calls == ["close"]


def select_ready(fd: int) -> bool:
    return bool(select.select([fd], [], [], 30)[0])


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("memory://absent", "store backend 'memory' cannot open memory://absent: no such place"),
        ("half://here", r"store backend 'half' cannot open half://here: read: |write: it cannot be called"),
        ("nothing://here", "unknown store backend 'nothing'"),
    ],
)
def test_what_cannot_be_opened_is_one_clear_error(folder: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        open_medium(folder, SIZE)


def test_folders_and_backends_are_named_alike() -> None:
    assert backend_of("/mnt/a") == ("file", "/mnt/a")
    assert backend_of("file:///mnt/a") == ("file", "/mnt/a")
    assert backend_of("memory://host:1/x") == ("memory", "host:1/x")
    assert backend_of("/odd/a://b") == ("file", "/odd/a://b")
    assert read_folders(["memory://x=y=20GiB"]) == (("memory://x=y", 20 << 30),)
    with pytest.raises(UserError, match="unknown store backend 'other'") as caught:
        read_folders(["other://x=20GiB"])
    assert "file" in str(caught.value.hint) and "memory" in str(caught.value.hint)
    assert first_folder((("memory://x", 1), ("/a", 1))) == Path("/a") and first_folder((("memory://x", 1),)) is None

"""Where a store's disks lie: in a file of a folder, or where a plug-in puts them (``--ssd NAME://LOCATION=20GiB``).

::

    --ssd /mnt/nvme0=20GiB          FileBackend: a file, with the kernel's own queues
    --ssd NAME://LOCATION=20GiB     a StoreBackend, called by threads of its own (CalledMedium)

To the store each is bytes from 0 to its size. What lies where, what a restart finds, and whether it is what was
written, the store decides and compares itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from memserve import _core
from memserve.base.deployment import backend_of
from memserve.base.errors import UserError
from memserve.base.plugins import REASON_CHARS_MAX, STORE_BACKENDS, check_methods
from memserve.base.units import flag_bytes

log = logging.getLogger(__name__)

FILE = "memserve-store.dat"
THREADS_MAX = 64


class StoreBackend(Protocol):
    """Bytes that outlive the process: what an entry point of ``memserve.store_backends`` makes, from its location (what
    is behind ``NAME://``) and its size in bytes. Making one raises where the location cannot be had, or is in use.

    All methods may wait; each is called by threads of this backend alone, and at most ``concurrency`` (an ``int``, 1
    where there is no such attribute) at once, never two for bytes that overlap unless both read. Whatever they raise
    fails that one read or write: what was to be read counts as not cached, and after some failures in a row the disk
    is given up. A call that never returns holds up this disk alone."""

    def read(self, offset: int, into: memoryview, /) -> None:
        """Fill ``into`` (bytes, writable, not to be kept) with what lies at ``offset``; what was never written is
        zeros. ``offset`` and length are multiples of 512 bytes."""

    def write(self, offset: int, data: memoryview, /) -> None:
        """Put ``data`` (bytes, not to be kept) at ``offset``: a read that begins later gives it."""

    def sync(self) -> None:
        """Return when all that was written would outlive a loss of power."""

    def erase(self) -> None:
        """The disk was given up: nothing of it may be found by another start. It may be called again."""

    def close(self) -> None:
        """The store ends, and other stores may use the location. The last call, unless one has not returned."""


_METHODS = {
    "read": ("offset", "into"), "write": ("offset", "data"), "sync": (), "erase": (), "close": (),
}  # fmt: skip


class Queue(Protocol):
    """What a disk's thread needs of :class:`memserve._core.DiskQueue`: operations by tag, and their ends."""

    def read(self, tag: int, offset: int, address: int, count: int) -> None: ...
    def write(self, tag: int, offset: int, address: int, count: int) -> None: ...
    def write_bytes(self, tag: int, offset: int, data: bytes) -> None: ...
    def sync(self, tag: int) -> None: ...
    def take(self) -> list[tuple[int, int]]: ...
    def fileno(self) -> int: ...


class DiskMedium(Protocol):
    """What the host of a store's disks needs of one."""

    @property
    def name(self) -> str:
        """Of its file, or as ``--ssd`` names it; for people."""

    def source(self) -> int | Callable[[int, int], bytes | None]:
        """To recover from, as ``_core.SegmentLog`` takes it."""

    def open_queue(self, memory: list[tuple[int, int]], depth: int, engine: str) -> Queue:
        """For one thread. ``memory``: address and size of what operations use. Raises ``OSError``."""

    def erase(self) -> None:
        """Let a restart find nothing here, as far as that can be done."""

    def close(self) -> None:
        """It is used no more."""


def open_medium(folder: str, nbytes: int) -> DiskMedium:
    """What ``--ssd FOLDER=SIZE`` names. Raises :class:`UserError` where it cannot be had."""
    name, location = backend_of(folder)
    make = STORE_BACKENDS.load(name)
    if make is FileBackend:
        return FileBackend(location, nbytes)
    try:
        backend = make(location, nbytes)
        check_methods(backend, _METHODS)
        return CalledMedium(backend, folder)
    except Exception as error:  # a plug-in's
        message = f"store backend {name!r} cannot open {folder}: {error}"
        raise UserError(message[:REASON_CHARS_MAX], hint="its documentation says what it needs", param="ssd") from error


class FileBackend:
    """A file in a folder, locked for this process as long as it is open, read and written past the page cache."""

    def __init__(self, location: str, nbytes: int) -> None:
        """Open or make the file, in folder ``location``. Raises :class:`UserError`."""
        self._path, self._folder, self._nbytes = Path(location) / FILE, Path(location), nbytes
        self.name = str(self._path)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self._path, error) from None
        try:
            self._lock_file()
            self._allocate_space()
        except BaseException:
            os.close(self._fd)
            raise

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            hint = "another `memserve store` runs with it: end that one, or give this one another folder"
            raise UserError(f"{self._path} is in use", hint=hint, param="ssd") from None

    def _allocate_space(self) -> None:
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes not in (0, self._nbytes):
            option = f"--ssd {self._folder}={flag_bytes(size_bytes)}"
            hint = f"give {option}, or remove the file, and what it holds is forgotten"
            message = f"{self._path} has {size_bytes:,} bytes, not {self._nbytes:,}"
            raise UserError(message, hint=hint, param="ssd")
        try:
            os.posix_fallocate(self._fd, 0, self._nbytes)
        except OSError as error:
            if size_bytes == 0:
                os.unlink(self._path)
            raise _unusable(self._path, error) from None

    def source(self) -> int:
        """Its descriptor."""
        return self._fd

    def open_queue(self, memory: list[tuple[int, int]], depth: int, engine: str) -> Queue:
        """The kernel's. From now on everything passes the page cache."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _core.DiskQueue(str(self._path), 0, depth, engine=engine, memory=memory)

    def erase(self) -> None:
        """As far as the device allows."""
        try:
            os.pwrite(self._fd, bytes(8192), 0)
            os.fdatasync(self._fd)
        except OSError as error:
            log.warning("%s cannot be marked as lost: %s", self._path, error.strerror)
        try:
            os.unlink(self._path)
        except OSError as error:
            log.warning("%s cannot be removed: %s; do so before the next start", self._path, error.strerror)

    def close(self) -> None:
        """Unlock the file."""
        os.close(self._fd)


def _unusable(path: Path, error: OSError) -> UserError:
    hint = "give a folder on a disk, --ssd DIR=SIZE, that this user may write"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        hint = "give a smaller --ssd DIR=SIZE, or make room"
    return UserError(f"cannot keep values in {path}: {error.strerror}", hint=hint, param="ssd")


class CalledMedium:
    """A plug-in's backend, called by threads of its own."""

    def __init__(self, backend: StoreBackend, name: str) -> None:
        """``name``: for the log."""
        self._backend, self.name = backend, name
        self._threads = min(THREADS_MAX, max(1, int(getattr(backend, "concurrency", 1))))
        self._queues: list[CallQueue] = []
        self._is_erased = False

    def source(self) -> Callable[[int, int], bytes | None]:
        """Reads what an earlier start has left."""
        return self._read_bytes

    def _read_bytes(self, offset: int, count: int) -> bytes | None:
        data = bytearray(count)
        try:
            self._backend.read(offset, memoryview(data))
        except Exception as error:
            log.warning("%s cannot be read at %d: %s", self.name, offset, error)
            return None
        return bytes(data)

    def open_queue(self, memory: list[tuple[int, int]], depth: int, engine: str) -> Queue:
        """As many threads as the backend takes calls at once."""
        self._queues.append(CallQueue(self._backend, self.name, self._threads))
        return self._queues[-1]

    def erase(self) -> None:
        """As far as the backend does; what has not begun by now is not written any more."""
        self._is_erased = True
        for queue in self._queues:
            queue.is_refusing = True
        self._call("erase", self._backend.erase)

    def close(self) -> None:
        """Of a call that has not returned nothing is waited for."""
        for queue in self._queues:
            queue.close()
        if self._is_erased:  # a write may have been under way
            self._call("erase", self._backend.erase)
        self._call("close", self._backend.close)

    def _call(self, name: str, method: Callable[[], None]) -> None:
        try:
            method()
        except Exception as error:
            log.warning("%s: %s failed: %s", self.name, name, error)


class CallQueue:
    """Reads and writes of a disk as calls of a :class:`StoreBackend`. Threads take them in order."""

    def __init__(self, backend: StoreBackend, name: str, threads: int) -> None:
        self._backend, self._name = backend, name
        self._calls: SimpleQueue[tuple[int, Callable[[], None]] | None] = SimpleQueue()
        self._ended: deque[tuple[int, int]] = deque()
        #: what has not begun fails
        self.is_refusing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads = [
            threading.Thread(target=self._run_calls, name="memserve-backend", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, tag: int, offset: int, address: int, count: int) -> None:
        """Into ``count`` bytes at ``address``, which stay until the end is taken."""
        self._calls.put((tag, lambda: self._backend.read(offset, _memory_at(address, count))))

    def write(self, tag: int, offset: int, address: int, count: int) -> None:
        """Out of ``count`` bytes at ``address``, which stay until the end is taken."""
        self._calls.put((tag, lambda: self._backend.write(offset, _memory_at(address, count).toreadonly())))

    def write_bytes(self, tag: int, offset: int, data: bytes) -> None:
        """A few pages."""
        self._calls.put((tag, lambda: self._backend.write(offset, memoryview(data))))

    def sync(self, tag: int) -> None:
        """What was written by now."""
        self._calls.put((tag, self._backend.sync))

    def take(self) -> list[tuple[int, int]]:
        """Tags of the operations that have ended since, each with an ``errno``; 0: it was done."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._wake

    def close(self) -> None:
        """No more is asked for."""
        for _ in self._threads:
            self._calls.put(None)

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            tag, method = call
            error_number = errno.EIO if self.is_refusing else 0
            try:
                if not self.is_refusing:
                    method()
            except Exception as error:  # a plug-in's: this operation has failed, and no other
                error_number = (error.errno if isinstance(error, OSError) else None) or errno.EIO
                log.warning("%s: %s: %s", self._name, type(error).__name__, error)
            self._ended.append((tag, error_number))
            os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        os.close(self._wake)


def _memory_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")

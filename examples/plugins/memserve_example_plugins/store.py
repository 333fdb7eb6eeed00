"""``--ssd chunks:///mnt/share/kv=200GiB``: a store's disk as files of 4 MiB in a folder.

For network file systems and object stores that are mounted as folders: nothing is allocated before it is written, no
file is large, and neither O_DIRECT nor fallocate is asked for. What was never written has no file, and is zeros.
"""

import errno
import fcntl
import os
import threading
from pathlib import Path

CHUNK_BYTES = 4 << 20


class ChunkFolder:
    concurrency = 4

    def __init__(self, location: str, nbytes: int) -> None:
        self._folder, self._nbytes = Path(location), nbytes
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ValueError(f"{location} is in use by another store") from None
        self._unsynced: set[Path] = set()
        self._changes = threading.Lock()

    def read(self, offset: int, into: memoryview, /) -> None:
        for path, within, start, stop in self._pieces(offset, len(into)):
            try:
                with path.open("rb") as chunk:
                    chunk.seek(within)
                    count = chunk.readinto(into[start:stop]) or 0
            except FileNotFoundError:
                count = 0
            into[start + count : stop] = bytes(stop - start - count)

    def write(self, offset: int, data: memoryview, /) -> None:
        for path, within, start, stop in self._pieces(offset, len(data)):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if os.pwrite(fd, data[start:stop], within) < stop - start:
                    raise OSError(errno.ENOSPC, f"{path} takes no more")
            finally:
                os.close(fd)
            with self._changes:
                self._unsynced.add(path)

    def sync(self) -> None:
        with self._changes:
            paths, self._unsynced = self._unsynced, set()
        for path in (*sorted(paths), self._folder):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def erase(self) -> None:
        for path in self._folder.glob("chunk-*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _pieces(self, offset: int, nbytes: int) -> list[tuple[Path, int, int, int]]:
        """Of bytes from ``offset`` on: each file, the place in it, and where in the whole they begin and end."""
        if not 0 <= offset <= offset + nbytes <= self._nbytes:
            raise OSError(errno.EINVAL, f"{nbytes} bytes at {offset} are not all within {self._nbytes}")
        pieces, start = [], 0
        while start < nbytes:
            number, within = divmod(offset + start, CHUNK_BYTES)
            stop = min(nbytes, start + CHUNK_BYTES - within)
            pieces.append((self._folder / f"chunk-{number:06}", within, start, stop))
            start = stop
        return pieces

"""The part of the lower tier that lies in a file: pages of blocks behind those in DRAM.

::

    file      | layer 0: block 0, block 1, ... | layer 1: block 0, block 1, ... | ...
    read      |              [ a sequence's ]  |             [ next layer's ]  |        few runs, as pages of a layer
                                                                                       lie together

The copier (:mod:`memserve.model.copier`), and a plan's copies, read and write here what has no place in memory. A
page's checksum stays in memory: what a disk gives back is compared before attention may read it, and a page that cannot
be read as it was written fails the step, so that it is computed again from its tokens. The file has no name: nothing is
left of it when the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import UserError
from memserve.base.units import flag_bytes

Pages = NDArray[np.int32]

_RUN_MAX = 512  # buffers of one system call
_DIRECT_BYTES = 4096
"""Pages of a multiple of this, which lie at one, pass the system's page cache by."""


class TierFile:
    """Pages of ``blocks`` blocks in a file of one folder, by their numbers in the lower tier."""

    def __init__(self, folder: str, first_block: int, blocks: int, block_pages: int, page_bytes: int) -> None:
        """``first_block``: of the lower tier; those before it are in memory. Raises :class:`UserError` where the folder
        has no room."""
        self._first_block, self._blocks, self._block_pages = first_block, blocks, block_pages
        self._page_bytes = page_bytes
        self._checksums = np.zeros(blocks * block_pages, np.uint64)
        self._written = np.zeros(blocks * block_pages, np.bool_)
        nbytes = blocks * block_pages * page_bytes
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._fd = _open_unnamed(folder, direct=page_bytes % _DIRECT_BYTES == 0)
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            hint = "another folder, or less, for example --kv-ssd /mnt/nvme0=20GiB"
            text = f"no file of {flag_bytes(nbytes)} in {folder}: {error.strerror}"
            raise UserError(text, hint=hint, param="kv_ssd") from error

    def in_file(self, pages: Pages) -> NDArray[np.bool_]:
        """Which of ``pages``, numbers in the lower tier, lie here."""
        return pages >= self._first_block * self._block_pages

    def write_pages(self, pages: Pages, source: int, source_pages: Pages) -> None:
        """Write ``source_pages`` of the arena at address ``source`` to ``pages``. Raises :class:`OSError`."""
        places = self._places_of(pages)
        self._written[places] = False  # until all of it is written
        sums = self._sums_of(source, source_pages)
        self._transfer(places, source, source_pages, os.pwritev)
        self._checksums[places], self._written[places] = sums, True

    def read_pages(self, pages: Pages, target: int, target_pages: Pages) -> None:
        """Read ``pages`` to ``target_pages`` of the arena at address ``target``. Raises :class:`OSError`, also where
        they are not what was written."""
        places = self._places_of(pages)
        self._transfer(places, target, target_pages, os.preadv)
        is_right = self._written[places] & (self._sums_of(target, target_pages) == self._checksums[places])
        if not is_right.all():
            wrong = int(len(places) - is_right.sum())
            raise OSError(errno.EIO, f"{wrong} of {len(places)} pages of KV on disk are not what was written")

    def close(self) -> None:
        """The file is gone."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _places_of(self, pages: Pages) -> NDArray[np.int64]:
        """Numbers of pages in the file: by layer, then by block."""
        block, layer = np.divmod(pages.astype(np.int64), self._block_pages)
        return layer * self._blocks + block - self._first_block

    def _sums_of(self, base: int, pages: Pages) -> NDArray[np.uint64]:
        return _core.seal_ranges(base, pages.astype(np.int64) * self._page_bytes, self._page_bytes)

    def _transfer(self, places: NDArray[np.int64], base: int, pages: Pages, call: Callable[..., int]) -> None:
        """``call`` for each run of places that follow each other; one that moves less than it should goes on behind."""
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        starts = np.flatnonzero(np.diff(sorted_places, prepend=-2) != 1)
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True):
            for first in range(start, end, _RUN_MAX):
                part = order[first : min(end, first + _RUN_MAX)]
                buffers = [self._buffer_at(base, page) for page in pages[part].tolist()]
                self._call_whole(call, buffers, int(sorted_places[first]) * self._page_bytes)

    def _buffer_at(self, base: int, page: int) -> memoryview:
        return memoryview((ctypes.c_ubyte * self._page_bytes).from_address(base + page * self._page_bytes)).cast("B")

    def _call_whole(self, call: Callable[..., int], buffers: list[memoryview], offset: int) -> None:
        while buffers:
            moved = call(self._fd, buffers, offset)
            if moved <= 0:
                raise OSError(errno.EIO, "the file of KV on disk ends early")
            offset += moved
            while buffers and moved >= len(buffers[0]):
                moved -= len(buffers.pop(0))
            if moved:
                buffers[0] = buffers[0][moved:]


def _open_unnamed(folder: str, *, direct: bool) -> int:
    """A new file without a name. ``direct``: past the page cache, where its file system can do that."""
    fd, name = tempfile.mkstemp(prefix="memserve-kv-", dir=folder)
    try:
        if direct:
            with suppress(OSError):
                direct_fd = os.open(name, os.O_RDWR | os.O_DIRECT)
                os.close(fd)
                fd = direct_fd
    finally:
        os.unlink(name)
    return fd

"""Memory of a client out of which a store on the same host pulls what is put.

The client is the only writer of its arena, as the store is of its own. A value lies there from before ``StorePut``
until the answer; a program that builds its value there in the first place saves a copy.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.errors import UserError, check
from memserve.units import ceil_div

_ALIGNMENT = 4096
"""Of every piece: the store's copy reads whole lines, and what a value touches is touched for no other."""

_LOOK_S = 0.02
"""How often a thread that waits for room looks for pieces that the garbage collector has returned."""


class Staging:
    """A shared arena and the pieces of it that are taken. Pieces are handed out from the bottom, so that the same pages
    are used again and again, and only as much memory is touched as was ever needed at once. Thread-safe."""

    def __init__(self, nbytes: int, generation: int) -> None:
        """Raises ``OSError`` when the kernel has no shared memory to give."""
        self.arena = _core.SharedArena(ceil_div(nbytes, _ALIGNMENT) * _ALIGNMENT)
        self.arena.generation = generation
        self.bytes: NDArray[np.uint8] = np.asarray(memoryview(self.arena))
        """The whole arena, ``[nbytes]``."""
        self._room = threading.Condition()
        self._free: list[tuple[int, int]] = [(0, self.arena.nbytes)]
        """Free pieces ``(offset, length)``: in order, never empty, never side by side."""
        self._taken: dict[int, int] = {}
        """Offset -> length of every piece that is taken."""
        self._returned: deque[int] = deque()
        """Taken pieces that are free when they are next looked at."""

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self.arena.nbytes

    def take(self, nbytes: int, deadline_s: float) -> int | None:
        """The offset of ``nbytes`` that are the caller's until :meth:`give_back`. None: there was no room until
        ``deadline_s`` of ``time.monotonic()``, or never is."""
        wanted = max(1, ceil_div(nbytes, _ALIGNMENT)) * _ALIGNMENT
        if wanted > self.arena.nbytes:
            return None
        with self._room:
            while (offset := self._cut(wanted)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._room.wait(min(left_s, _LOOK_S))
            return offset

    def _cut(self, wanted: int) -> int | None:
        while self._returned:
            self._put_back(self._returned.popleft())
        for at, (offset, length) in enumerate(self._free):
            if length >= wanted:
                self._free[at : at + 1] = [(offset + wanted, length - wanted)] if length > wanted else []
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """The piece that begins there is free again."""
        with self._room:
            self._put_back(offset)
            self._room.notify_all()

    def give_back_later(self, offset: int) -> None:
        """As :meth:`give_back`, from the garbage collector: it may have interrupted any line of this class."""
        self._returned.append(offset)

    def _put_back(self, offset: int) -> None:
        length = self._taken.pop(offset)
        at = bisect.bisect(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + length:
            length += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            length, at = length + before, at - 1
        self._free.insert(at, (offset, length))

    @property
    def bytes_free(self) -> int:
        """In all free pieces together."""
        with self._room:
            return sum(length for _, length in self._free) + sum(self._taken[offset] for offset in self._returned)

    def check_invariants(self) -> None:
        """Raise :class:`memserve.errors.InvariantError` when free and taken pieces are not the arena, each once."""
        with self._room:
            pieces, end = sorted([*self._free, *self._taken.items()]), 0
            for offset, length in pieces:
                check(offset == end and length > 0, f"a piece at {offset} follows one that ends at {end}")
                end = offset + length
            check(end == self.arena.nbytes, "pieces do not fill the arena")
            sides = zip(self._free, self._free[1:], strict=False)
            check(all(sum(one) < other[0] for one, other in sides), "free pieces lie side by side")


class _Piece:
    """Gives a piece back when the last buffer over it is gone."""

    __slots__ = ("_offset", "_staging")

    def __init__(self, staging: Staging, offset: int) -> None:
        self._staging = staging
        self._offset = offset

    def __del__(self) -> None:
        self._staging.give_back_later(self._offset)


class Staged:
    """Writable memory out of which a ``put`` takes its value without a copy in between: fill ``data``, put it, release
    it (or use ``with``). It may be filled and put again; not be written to while a ``put`` of it runs, nor after one
    that ended without an answer."""

    def __init__(self, staging: Staging, offset: int, nbytes: int) -> None:
        self._staging = staging
        self._offset = offset
        exporter: Any = (ctypes.c_char * nbytes).from_buffer(staging.arena, offset)
        exporter.piece = _Piece(staging, offset)
        self._data: memoryview | None = memoryview(exporter).cast("B")

    @property
    def data(self) -> memoryview:
        """The memory, writable. Raises :class:`UserError` once it was released."""
        if self._data is None:
            raise UserError("this memory was released", hint="allocate again")
        return self._data

    def place(self, staging: Staging) -> int | None:
        """The offset in ``staging``; None: it belongs to another client, or was released."""
        return self._offset if self._data is not None and staging is self._staging else None

    def release(self) -> None:
        """Give it back, as soon as no array over ``data`` lives; again: nothing."""
        data, self._data = self._data, None
        if data is not None:
            with suppress(BufferError):
                data.release()

    def __len__(self) -> int:
        return len(self.data)

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

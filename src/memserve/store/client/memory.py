"""What a ``get`` returns: a value as a read-only ``memoryview``, in the store's own memory or as a copy.

Memory of a client out of which a store on the same host pulls what is put.

The client is the only writer of its arena, as the store is of its own. A value lies there from before ``StorePut``
until the answer; a program that builds its value there in the first place saves a copy.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import StoreUnavailable, UserError, check
from memserve.base.units import ceil_div

_HINT = "get the value again: what was read of it may belong to another one"


class MemoryHolder(Protocol):
    """Holds values where they are; see :class:`memserve.store.client.connection.Session`."""

    pins: dict[int, Any]

    def release_pin(self, pin: int) -> None:
        """One of them is not needed any more."""


class ClientPin:
    """Keeps one value where it is, until the last buffer that was made of it is gone.

    A ``memoryview`` of memory that is only mapped holds its exporter, an array of ctypes; that array holds the pin. So
    an array of numpy over a view that was released already still reads the right bytes.
    """

    __slots__ = ("_holder", "_number", "_pid")

    def __init__(self, holder: MemoryHolder, number: int) -> None:
        self._holder = holder
        self._number = number
        self._pid = os.getpid()
        holder.pins[number] = None

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a child of fork has a copy of this object, and not of the pin
            self._holder.release_pin(self._number)


def mapped(address: int, nbytes: int, pin: ClientPin) -> memoryview:
    """The bytes at ``address``, read-only; whatever is made of them holds ``pin``."""
    exporter: Any = (ctypes.c_char * nbytes).from_address(address)
    exporter.pin = pin
    return memoryview(exporter).cast("B").toreadonly()


class View:
    """One value. Use it in a ``with``, or call :meth:`release`: until then the store cannot use that memory for others.

    >>> with client.get(b"key") as view:
    ...     array = numpy.frombuffer(view.data, numpy.float32).copy()
    """

    __slots__ = ("__weakref__", "_data", "_is_valid", "in_place")

    def __init__(self, data: memoryview, still: Callable[[], bool] | None) -> None:
        """``still``: whether the value is still where it was; None: these bytes are the client's own."""
        self._data: memoryview | None = data
        self._is_valid = still
        self.in_place = still is not None
        """Whether this is the store's own memory, and no copy."""

    @property
    def data(self) -> memoryview:
        """The value, read-only, of bytes.

        Raises :class:`UserError` once it was released, and :class:`memserve.base.errors.StoreUnavailable` when the
        store was restarted, or has dropped this client, since the ``get``.
        """
        if self._data is None:
            raise UserError("this view was released", hint="get the value again")
        if not self.valid:
            raise StoreUnavailable("the store has given up the memory of this view", hint=_HINT)
        return self._data

    @property
    def valid(self) -> bool:
        """Whether everything read so far was the value."""
        return self._is_valid is None or self._is_valid()

    def release(self) -> None:
        """The store may use the memory again, as soon as nothing that was made of ``data`` lives; again: nothing.

        Raises :class:`memserve.base.errors.StoreUnavailable` when the store gave up the memory before.
        """
        if self._data is None:
            return
        # asked first: afterwards the memory is another one's, and what was read could not be judged
        valid = self.valid
        self.drop()
        if not valid:
            raise StoreUnavailable("the store has given up the memory of this view", hint=_HINT)

    def drop(self) -> None:
        """As :meth:`release`, whatever the store has done."""
        data, self._data = self._data, None
        if data is not None:
            with suppress(BufferError):  # arrays made of it live on, and hold the pin
                data.release()

    def __bytes__(self) -> bytes:
        """A copy. Raises as :attr:`data`."""
        # asked again: the store may have taken the memory while it was copied
        copy = bytes(self.data)
        if not self.valid:
            raise StoreUnavailable("the store has given up the memory of this view", hint=_HINT)
        return copy

    def __len__(self) -> int:
        return len(self.data)

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.release()
        else:
            self.drop()


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

    def take_piece(self, nbytes: int, deadline_s: float) -> int | None:
        """The offset of ``nbytes`` that are the caller's until :meth:`return_piece`. None: there was no room until
        ``deadline_s`` of ``time.monotonic()``, or never is."""
        piece_bytes = max(1, ceil_div(nbytes, _ALIGNMENT)) * _ALIGNMENT
        if piece_bytes > self.arena.nbytes:
            return None
        with self._room:
            while (offset := self._cut_piece(piece_bytes)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._room.wait(min(left_s, _LOOK_S))
            return offset

    def _cut_piece(self, piece_bytes: int) -> int | None:
        while self._returned:
            self._free_piece(self._returned.popleft())
        # the lowest that fits: the same pages again and again
        for index, (offset, length) in enumerate(self._free):
            if length >= piece_bytes:
                self._free[index : index + 1] = (
                    [(offset + piece_bytes, length - piece_bytes)] if length > piece_bytes else []
                )
                self._taken[offset] = piece_bytes
                return offset
        return None

    def return_piece(self, offset: int) -> None:
        """The piece that begins there is free again."""
        with self._room:
            self._free_piece(offset)
            self._room.notify_all()

    def return_piece_later(self, offset: int) -> None:
        """As :meth:`return_piece`, from the garbage collector: it may have interrupted any line of this class."""
        self._returned.append(offset)

    def _free_piece(self, offset: int) -> None:
        length = self._taken.pop(offset)
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            length, index = length + before, index - 1
        self._free.insert(index, (offset, length))

    @property
    def bytes_free(self) -> int:
        """In all free pieces together."""
        with self._room:
            return sum(length for _, length in self._free) + sum(self._taken[offset] for offset in self._returned)

    def check_invariants(self) -> None:
        """Raise :class:`memserve.base.errors.InvariantError` when free and taken pieces are not the arena, each
        once."""
        with self._room:
            pieces, end = sorted([*self._free, *self._taken.items()]), 0
            for offset, length in pieces:
                check(offset == end and length > 0, f"a piece at {offset} follows one that ends at {end}")
                end = offset + length
            check(end == self.arena.nbytes, "pieces do not fill the arena")
            sides = zip(self._free, self._free[1:], strict=False)
            check(all(sum(before) < after[0] for before, after in sides), "free pieces lie side by side")


class _Piece:
    """Gives a piece back when the last buffer over it is gone."""

    __slots__ = ("_offset", "_staging")

    def __init__(self, staging: Staging, offset: int) -> None:
        self._staging = staging
        self._offset = offset

    def __del__(self) -> None:
        self._staging.return_piece_later(self._offset)


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

    def offset_in(self, staging: Staging) -> int | None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

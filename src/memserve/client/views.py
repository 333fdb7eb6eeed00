"""What a ``get`` returns: a value as a read-only ``memoryview``, in the store's own memory or as a copy."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from memserve.errors import StoreUnavailable, UserError

_HINT = "get the value again: what was read of it may belong to another one"


class Holder(Protocol):
    """Holds values where they are; see :class:`memserve.client.connection.Session`."""

    pins: dict[int, Any]

    def let_go(self, pin: int) -> None:
        """One of them is not needed any more."""


class Pin:
    """Keeps one value where it is, until the last buffer that was made of it is gone.

    A ``memoryview`` of memory that is only mapped holds its exporter, an array of ctypes; that array holds the pin. So
    an array of numpy over a view that was released already still reads the right bytes.
    """

    __slots__ = ("_holder", "_number", "_pid")

    def __init__(self, holder: Holder, number: int) -> None:
        self._holder = holder
        self._number = number
        self._pid = os.getpid()
        holder.pins[number] = None

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a child of fork has a copy of this object, and not of the pin
            self._holder.let_go(self._number)


def mapped(address: int, nbytes: int, pin: Pin) -> memoryview:
    """The bytes at ``address``, read-only; whatever is made of them holds ``pin``."""
    exporter: Any = (ctypes.c_char * nbytes).from_address(address)
    exporter.pin = pin
    return memoryview(exporter).cast("B").toreadonly()


class View:
    """One value. Use it in a ``with``, or call :meth:`release`: until then the store cannot use that memory for others.

    >>> with client.get(b"key") as view:
    ...     array = numpy.frombuffer(view.data, numpy.float32).copy()
    """

    __slots__ = ("__weakref__", "_data", "_still", "in_place")

    def __init__(self, data: memoryview, still: Callable[[], bool] | None) -> None:
        """``still``: whether the value is still where it was; None: these bytes are the client's own."""
        self._data: memoryview | None = data
        self._still = still
        self.in_place = still is not None
        """Whether this is the store's own memory, and no copy."""

    @property
    def data(self) -> memoryview:
        """The value, read-only, of bytes.

        Raises :class:`UserError` once it was released, and :class:`memserve.errors.StoreUnavailable` when the store was
        restarted, or has dropped this client, since the ``get``.
        """
        if self._data is None:
            raise UserError("this view was released", hint="get the value again")
        if not self.valid:
            raise StoreUnavailable("the store has given up the memory of this view", hint=_HINT)
        return self._data

    @property
    def valid(self) -> bool:
        """Whether everything read so far was the value."""
        return self._still is None or self._still()

    def release(self) -> None:
        """The store may use the memory again, as soon as nothing that was made of ``data`` lives; again: nothing.

        Raises :class:`memserve.errors.StoreUnavailable` when the store gave up the memory before.
        """
        if self._data is None:
            return
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
        copy = bytes(self.data)
        if not self.valid:
            raise StoreUnavailable("the store has given up the memory of this view", hint=_HINT)
        return copy

    def __len__(self) -> int:
        return len(self.data)

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.release()
        else:
            self.drop()

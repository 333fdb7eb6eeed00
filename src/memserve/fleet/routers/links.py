"""Connections between the routers of the same engines, on one host: what they tell each other of admission.

::

    OwnerLine (follower)                            RouterDesk (owner)
    name ------------------------------------------>  RouterJoined
    AdmissionRequests, each behind its length ----->  MessageArrived
                      <-----------------------------  AdmissionGrants

The socket lies in a folder that no other user may enter: there is no secret. It ends with its process, also with one
that was killed: what a router holds is released at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from memserve.base.errors import UserError
from memserve.fleet.messages import FleetEvent, RouterJoined, RouterLeft
from memserve.protocol.codec import FRAME_BYTES_MAX, WireError, decode, encode
from memserve.protocol.events import MessageArrived
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import ROUTER, Peer
from memserve.system.process import new_generation

log = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_RETRY_S = 0.2
"""Until a follower tries again to reach the owner, which may not listen yet."""

PostEvent = Callable[[FleetEvent], None]


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises :class:`asyncio.IncompleteReadError` at the end."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    return await reader.readexactly(length)


def _write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Or drop it: a router that reads nothing may be told later, since each heartbeat tells all again."""
    if writer.transport.get_write_buffer_size() <= FRAME_BYTES_MAX:
        writer.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


async def _post_messages(peer: Peer, reader: asyncio.StreamReader, post: PostEvent) -> None:
    """Hand on what ``peer`` tells, until its connection ends."""
    post(RouterJoined(peer))
    try:
        while True:
            post(MessageArrived(peer, decode(await _read_frame(reader))))
    except (OSError, asyncio.IncompleteReadError):
        pass
    except WireError as error:
        log.error("the connection to %s is closed: %s", peer.name, error)
    finally:
        post(RouterLeft(peer))


class RouterDesk:
    """The owner's: followers connect here."""

    def __init__(self, path: Path, post: PostEvent, patience_s: float) -> None:
        """``path``: of the socket. ``patience_s``: how long :meth:`close` waits for followers to end."""
        self._path, self._post, self._patience_s = path, post, patience_s
        self._generations = itertools.count(new_generation())
        self._writers: dict[Peer, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None

    def bind_socket(self) -> None:
        """Take the path, before anything is served. Raises :class:`UserError` where that is not possible."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
        except OSError as error:  # such names have about a hundred bytes
            self._socket.close()
            hint = "set TMPDIR to a folder with a short name, or leave out --routers"
            raise UserError(f"routers cannot share an admission: {self._path}: {error}", hint=hint) from None

    async def open(self) -> None:
        """Listen. Raises :class:`UserError` as :meth:`bind_socket` does."""
        if self._socket is None:
            self.bind_socket()
        self._server = await asyncio.start_unix_server(self._accept, sock=self._socket)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_router(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve_router(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            try:
                name = (await _read_frame(reader)).decode()
            except (OSError, asyncio.IncompleteReadError):
                return
            # the number tells apart two connections of one router, the first of which has not ended for this process
            generation = next(self._generations)
            peer = Peer(f"{name}.{generation}", generation)
            self._writers[peer] = writer
            try:
                await _post_messages(peer, reader, self._post)
            finally:
                del self._writers[peer]

    def send_message(self, to: Peer, message: AnyMessage) -> None:
        """Tell a follower, if it is there still."""
        writer = self._writers.get(to)
        if writer is not None:
            _write_frame(writer, encode(message))

    async def close(self) -> None:
        """When the followers have ended, which drain as long as this router does: until then they are admitted."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._patience_s)
        if self._server is not None:
            self._server.close()
            self._socket = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class OwnerLine:
    """A follower's: to the owner, as long as both live."""

    def __init__(self, path: Path, name: str, post: PostEvent) -> None:
        """``path``: of the owner's socket. ``name``: of this router."""
        self._path, self._name, self._post = path, name, post
        self._generations = itertools.count(new_generation())
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._stay_connected())

    async def _stay_connected(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            self._writer = writer
            with contextlib.closing(writer):
                _write_frame(writer, self._name.encode())
                await _post_messages(Peer(ROUTER, next(self._generations)), reader, self._post)
            self._writer = None

    def send_message(self, to: Peer, message: AnyMessage) -> None:
        """Tell the owner."""
        if self._writer is not None:
            _write_frame(self._writer, encode(message))

    async def close(self) -> None:
        """The owner releases at once what this router holds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

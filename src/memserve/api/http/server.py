"""The HTTP server: its socket, its start, and its end."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from memserve.api.http.connection import Connection
from memserve.api.http.limits import Edge
from memserve.api.http.tls import Handshake, Handshakes, Tls
from memserve.base.config import DRAIN_S
from memserve.base.errors import UserError
from memserve.base.units import KIB
from memserve.system.process import SignalCounter

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""How long an ended request may take to send its error to its client."""

UNSENT_BYTES_MAX = 128 * KIB
"""Output that the kernel buffers for a client beyond what is on its way: more would only hide a client that does not
read."""

_BACKLOG = 2048
_POLL_S = 0.05


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A bound socket; port 0 chooses a free one. ``is_shared``: other processes of this user may bind the same port,
    and the kernel spreads connections over them. Raises :class:`UserError` when that is impossible.

    Call it before the model loads, so that a port in use shows at once.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only where the protocol is spelled out; without it answers wait 40 ms for an ACK
        bound = socket.socket(family, kind, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted sockets inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        bound.bind(address)
        bound.listen(_BACKLOG)  # SO_REUSEADDR lets two binds pass: only listening shows a port in use
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="choose another port with --port, or --port 0 for any free one",
            param="port",
        ) from None
    return bound


class Calls(Protocol):
    """The requests of an application, as its server sees them (:class:`memserve.api.openai.streams.Hub`)."""

    draining: bool
    """True: new ones are refused."""

    @property
    def calls_open(self) -> int:
        """Requests that are being answered."""

    def end_all(self) -> int:
        """End all of them with a 503. Returns their number."""


class DrainedApp(Protocol):
    """An ASGI application that a server can drain: its ``state`` has ``hub`` (:class:`Calls`) and ``edge``."""

    state: State

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of ASGI."""


class Server(uvicorn.Server):
    """uvicorn with a graceful end: the first signal drains, the second ends every stream, a third the process."""

    def __init__(
        self,
        app: DrainedApp,
        *,
        drain_s: float = DRAIN_S,
        log_level: str = "warning",
        tls: Tls | None = None,
        on_ready: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """``on_ready`` is called when it accepts connections, ``on_end`` when it begins to shut down.

        ``tls`` None: plain HTTP."""
        config = uvicorn.Config(
            app,
            http=functools.partial(Connection, edge=app.state.edge),  # type: ignore[arg-type]  # uvicorn only calls it
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=math.ceil(drain_s + FAREWELL_S) + 1,  # ours comes first
            backlog=_BACKLOG,
            server_header=False,
        )
        super().__init__(config)
        self._hub: Calls = app.state.hub
        self._edge: Edge = app.state.edge
        self._drain_s = drain_s
        self._tls = tls
        self._on_ready = on_ready
        self._on_end = on_end
        self._signals = SignalCounter()
        self._cut_off = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, then call ``on_ready``."""
        await super().startup(sockets if self._tls is None else [])
        if self._tls is not None:
            handshakes = [
                Handshakes(listener, self._tls, self._edge, self._new_connection) for listener in sockets or []
            ]
            self.servers += handshakes  # type: ignore[arg-type]  # only `close` is called
        if self._on_ready is not None and not self.should_exit:
            self._on_ready()

    def _new_connection(self, handshake: Handshake) -> Connection:
        state = self.server_state, self.lifespan.state
        return Connection(self.config, *state, edge=self._edge, handshake=handshake)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing new; let streams finish, or end them when the drain time is over."""
        self._hub.draining = True
        if self._on_end is not None:
            self._on_end()
        why, calls = self._signals.names[0] if self._signals.names else "no signal", self._hub.calls_open
        log.warning("%s: stopping; %d requests in progress have %.0f s to finish", why, calls, self._drain_s)
        drain_task = asyncio.create_task(self._end_calls())
        try:
            await super().shutdown(sockets)
        finally:
            drain_task.cancel()
            how = "by a second signal" if self._signals.count > 1 else f"after {self._drain_s:.0f} s"
            cut_off = f"{self._cut_off} were cut off {how}" if self._cut_off else "none was cut off"
            log.warning("stopped: %d requests have finished, %s", calls - self._cut_off, cut_off)

    async def _end_calls(self) -> None:
        """When the drain time is over, end every call with a 503; abandon those that cannot even send it."""
        deadline = time.monotonic() + self._drain_s
        while time.monotonic() < deadline and self._signals.count < 2:
            await asyncio.sleep(_POLL_S)
        self._cut_off = self._hub.end_all()
        await asyncio.sleep(FAREWELL_S)
        for task in self.server_state.tasks:  # blocked on its client, or still waiting for its request
            task.cancel()
        await asyncio.sleep(_POLL_S)
        self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came. Unlike uvicorn's, it is not raised again: a drained server exits with status 0."""
        self._hub.draining = True
        self.should_exit = True
        self._signals.count_signal(sig)
        if self._signals.count > 2:
            self.force_exit = True

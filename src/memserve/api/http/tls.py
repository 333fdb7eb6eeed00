"""TLS of the HTTP server: its certificate, and the handshakes.

A handshake is a client that may never go on. It counts among the connections of its address from the moment in which it
is accepted, has the deadline of a request's head, and gives way to others as an idle connection does.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from memserve.api.http.limits import Edge
from memserve.base.errors import UserError
from memserve.system.secrets import Followed

log = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 0.1
_FAREWELL_S = 5.0


class Tls:
    """The certificate of new connections. What renews certificates replaces the files; no restart is needed."""

    def __init__(self, cert: Path, key: Path) -> None:
        """``cert``: PEM, the server's certificate first, then those between it and the authority; ``key``: PEM without
        a passphrase. Raises :class:`UserError` for files that are no such pair."""
        self._files = cert, key
        self._followed_context = Followed(self._files, lambda: _context(cert, key), "the certificate and its key")

    @property
    def files(self) -> tuple[Path, Path]:
        """Of the certificate and of its key."""
        return self._files

    def current_context(self) -> ssl.SSLContext:
        """That of the files as they are; of the last good pair while they are halfway through a change."""
        return self._followed_context.value()


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # an empty passphrase: OpenSSL would ask for one at the terminal, and wait
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        hint = "give both in PEM, the key without a passphrase and of this certificate"
        text = f"{cert} and {key} are no certificate with its key: {error.reason or error}"
        raise UserError(text, hint=hint, param="tls_cert") from None
    except OSError as error:
        raise _unreadable(error) from None
    return context


def _unreadable(error: OSError) -> UserError:
    text = f"cannot read {error.filename or 'the certificate or its key'}: {error.strerror or error}"
    return UserError(text, hint="give the paths of two PEM files", param="tls_cert")


class Handshake:
    """A connection whose handshake is under way."""

    def __init__(self, client: socket.socket, address: str, edge: Edge, open_handshakes: set[Handshake]) -> None:
        """``open_handshakes``: those under way, of which this is one as long as it lasts."""
        self._client, self._address, self._edge, self._open_handshakes = client, address, edge, open_handshakes
        #: since when it has been waiting for bytes of its client
        self.waits_since_s: float | None = asyncio.get_running_loop().time()
        self.task: asyncio.Task[None] | None = None

    def start_handshake(self, context: ssl.SSLContext, connection: Callable[[], asyncio.BufferedProtocol]) -> None:
        """Begin the handshake with the client, if there is room for it. ``connection`` makes what takes over."""
        if self._edge.connections.admit_connection(self, self._address) is not None:
            self._client.close()  # it expects TLS, and could not read why
            return
        self._open_handshakes.add(self)
        self.task = asyncio.get_running_loop().create_task(self._run_handshake(context, connection))

    def evict(self) -> None:
        """Give up: another client needs the place, or the server ends."""
        self.on_handshake_end()
        if self.task is not None:
            self.task.cancel()

    def on_handshake_end(self) -> None:
        """It does not count any more."""
        self.waits_since_s = None
        self._open_handshakes.discard(self)
        self._edge.connections.remove_connection(self, self._address)

    async def _run_handshake(self, context: ssl.SSLContext, connection: Callable[[], asyncio.BufferedProtocol]) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                connection,
                self._client,
                ssl=context,
                ssl_handshake_timeout=self._edge.limits.header_timeout_s,
                ssl_shutdown_timeout=_FAREWELL_S,
            )
        except (OSError, asyncio.CancelledError) as error:  # no TLS, another certificate wanted, too late, or gone
            log.info("no TLS with %s: %s", self._address, error)
            self._edge.metrics.refused.labels("handshake").inc()
        finally:
            self.on_handshake_end()


class Handshakes:
    """Accepts connections for as long as the server does."""

    def __init__(
        self, listener: socket.socket, tls: Tls, edge: Edge, connection: Callable[[Handshake], asyncio.BufferedProtocol]
    ) -> None:
        """``connection`` makes the protocol after the handshake."""
        self._listener, self._tls, self._edge, self._connection = listener, tls, edge, connection
        listener.setblocking(False)
        self._handshakes: set[Handshake] = set()
        self._ending: list[Handshake] = []
        self._accepting = asyncio.get_running_loop().create_task(self._accept_connections())

    def close(self) -> None:
        """Accept nothing more, and end the handshakes."""
        self._accepting.cancel()
        self._ending = list(self._handshakes)
        for handshake in self._ending:
            handshake.evict()

    async def wait_closed(self) -> None:
        """Return when that is done."""
        tasks = [handshake.task for handshake in self._ending if handshake.task is not None]
        await asyncio.wait([self._accepting, *tasks])

    async def _accept_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is left: those that wait are accepted when there is one
                log.warning("cannot accept a connection: %s", error.strerror or error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            handshake = Handshake(client, str(address[0]), self._edge, self._handshakes)
            handshake.start_handshake(self._tls.current_context(), functools.partial(self._connection, handshake))

"""What all connections of a server share: a limit on their number, and on the memory of request bodies."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from starlette.types import Receive, Scope

from memserve.api.http.config import EdgeConfig
from memserve.api.http.errors import ApiError, bad_request, bodies_full, client_bodies_full, echo, too_large
from memserve.api.http.parser import HttpSyntaxError
from memserve.api.metrics.http import ApiMetrics
from memserve.base.units import KIB

log = logging.getLogger(__name__)

SMALL_BODY_BYTES = 16 * KIB
"""The first bytes of a body are not counted: small requests pass even when the memory for bodies is full."""

READ_BYTES_MAX = 32 * KIB
"""Bytes that one read of a socket takes."""

DESCRIPTORS_KEPT = 128
"""File descriptors that connections leave to the rest of the process."""


class MovableTimeout:
    """A deadline that is moved often and passes rarely. Uses one timer of the loop, however often it is moved."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_timeout: Callable[[], None]) -> None:
        self._loop, self._on_timeout = loop, on_timeout
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set_timeout(self, seconds: float) -> None:
        """Ring in ``seconds``; an earlier deadline no longer counts."""
        self._deadline_s = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._deadline_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline_s, self._check_deadline)

    def clear_timeout(self) -> None:
        """Do not ring."""
        self._deadline_s = None

    def close(self) -> None:
        """Do not ring, and cancel the timer."""
        self._deadline_s = None
        if self._timer is not None:
            self._timer.cancel()

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline_s is None:
            return
        if self._deadline_s > self._loop.time():
            self._timer = self._loop.call_at(self._deadline_s, self._check_deadline)
            return
        self._deadline_s = None
        self._on_timeout()


class Waiting(Protocol):
    """A connection, as :class:`Connections` sees it."""

    @property
    def waits_since_s(self) -> float | None:
        """Since when it has been waiting for bytes of its client; ``None``: it is being answered, or its request may
        have arrived and not be read yet."""

    def evict(self) -> None:
        """Close it: another client needs the place. It counts as refused."""


class Connections:
    """The open connections by address. A client with many connections loses one of its own before others do."""

    def __init__(self, limits: EdgeConfig, metrics: ApiMetrics) -> None:
        self._per_address_max = limits.connections_per_address_max
        self._metrics = metrics
        self._max = min(limits.connections_max, _room())
        self._by_address: dict[str, dict[Waiting, None]] = {}
        self._count = 0

    def admit_connection(self, connection: Waiting, address: str) -> HttpSyntaxError | None:
        """Accept ``connection``, if need be by closing one that waits. Returns the error when there is no room."""
        connections = self._by_address.get(address, {})
        if (
            self._per_address_max
            and len(connections) >= self._per_address_max
            and not self._evict_longest_waiting(connections)
        ):
            return HttpSyntaxError(429, "Too many connections from this address", "connections_of_address")
        if self._count >= self._max and not self._evict_any():
            return HttpSyntaxError(503, "The server has too many connections", "connections")
        self._by_address.setdefault(address, {})[connection] = None
        self._change_count(1)
        return None

    def remove_connection(self, connection: Waiting, address: str) -> None:
        """``connection`` has ended; unknown ones are ignored."""
        connections = self._by_address.get(address, {})
        if connection not in connections:
            return
        del connections[connection]
        if not connections:
            del self._by_address[address]
        self._change_count(-1)

    def _change_count(self, by: int) -> None:
        self._count += by
        self._metrics.connections.set(self._count)

    def _evict_any(self) -> bool:
        groups = sorted(self._by_address.values(), key=len, reverse=True)
        return any(self._evict_longest_waiting(group) for group in groups)

    def _evict_longest_waiting(self, connections: dict[Waiting, None]) -> bool:
        """Close the one that has waited longest. False: none waits."""
        waiting = [(since, connection) for connection in connections if (since := connection.waits_since_s) is not None]
        if not waiting:
            return False
        min(waiting, key=lambda pair: pair[0])[1].evict()
        return True


def make_room_for_connections(count: int) -> None:
    """Raise the soft limit of open files so that ``count`` connections fit, as far as the hard one allows.

    With too low a limit, clients could take every descriptor and leave none to the rest of the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_needed = count + DESCRIPTORS_KEPT
    if soft != resource.RLIM_INFINITY and soft < files_needed:
        soft = files_needed if hard == resource.RLIM_INFINITY else min(files_needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if (room := _room()) < count:
        log.warning(
            "the limit of open files, %d, leaves room for %d of %d connections at once: raise it to %d (ulimit -n %d)",
            soft, room, count, files_needed, files_needed,
        )  # fmt: skip


def _room() -> int:
    """How many connections there may be by the limit of open files: at least one, whatever it is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft if soft != resource.RLIM_INFINITY else 1 << 20) - DESCRIPTORS_KEPT)


class BodyMemory:
    """The bytes of all bodies that are being read or parsed, by client."""

    def __init__(self, limits: EdgeConfig, metrics: ApiMetrics) -> None:
        self._total_max, self._share_max = limits.body_total_bytes, limits.body_share_bytes
        self._metrics = metrics
        self._bytes_by_client: Counter[str] = Counter()
        self.reserved_bytes = 0

    def open_lease(self, client: str) -> BodyLease:
        """An account for one body."""
        return BodyLease(self, client)

    def reserve_bytes(self, client: str, count: int) -> ApiError | None:
        """Add ``count`` bytes for a body of ``client``. Returns the error when they are too many."""
        if self._bytes_by_client[client] + count > self._share_max:
            self._metrics.refused.labels("client_body_memory").inc()
            return client_bodies_full()
        if self.reserved_bytes + count > self._total_max:
            self._metrics.refused.labels("body_memory").inc()
            return bodies_full()
        self._add_bytes(client, count)
        return None

    def release_bytes(self, client: str, count: int) -> None:
        """A body of ``client`` is gone."""
        self._add_bytes(client, -count)

    def _add_bytes(self, client: str, count: int) -> None:
        self.reserved_bytes += count
        self._bytes_by_client[client] += count
        if not self._bytes_by_client[client]:
            del self._bytes_by_client[client]
        self._metrics.body_bytes.set(self.reserved_bytes)


class BodyLease:
    """The bytes of :class:`BodyMemory` that one body holds."""

    def __init__(self, memory: BodyMemory, client: str) -> None:
        self._memory, self._client = memory, client
        self._counted_bytes = 0

    def grow_to(self, count: int) -> None:
        """The body has ``count`` bytes now. Raises :class:`ApiError` 429 and 503 when there is no room for them."""
        more = max(0, count - SMALL_BODY_BYTES) - self._counted_bytes
        if more <= 0:
            return
        error = self._memory.reserve_bytes(self._client, more)
        if error is not None:
            raise error
        self._counted_bytes += more

    def release_bytes(self) -> None:
        """The body is gone."""
        if self._counted_bytes:
            self._memory.release_bytes(self._client, self._counted_bytes)
        self._counted_bytes = 0


class Edge:
    """The limits of a server, and what its connections share under them."""

    def __init__(self, limits: EdgeConfig, metrics: ApiMetrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self.connections = Connections(limits, metrics)
        self.bodies = BodyMemory(limits, metrics)
        #: shared: the loop reads one socket at a time, and its connection copies the bytes at once
        self.read_buffer = bytearray(READ_BYTES_MAX)


TENANT_KEY = "memserve.tenant"
"""Where the guard leaves the tenant in the ASGI scope."""


_FIELDS_KEY = "memserve.fields"


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that ``name``, which is in lower case; None: there is none."""
    fields = scope.get(_FIELDS_KEY)
    if fields is None:  # a request is asked for eight of them
        fields = scope[_FIELDS_KEY] = dict(reversed(list(scope["headers"])))
    value = fields.get(name)
    return None if value is None else str(value, "latin-1")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


class json_body:  # used as a function: `async with json_body(...) as data`
    """The whole body; its bytes count in the memory of all bodies until the caller has parsed it.

    Raises :class:`ApiError` 413 for a body that is too long, 429 and 503 when there is no memory for it, 415 for a
    content type other than JSON.
    """

    __slots__ = ("_edge", "_lease", "_receive", "_scope")

    def __init__(self, scope: Scope, receive: Receive, edge: Edge) -> None:
        self._scope, self._receive, self._edge = scope, receive, edge
        self._lease = edge.bodies.open_lease(scope.get(TENANT_KEY) or (scope.get("client") or ("",))[0])

    async def __aenter__(self) -> bytes:
        try:
            return await _read(self._scope, self._receive, self._edge.limits.body_bytes_max, self._lease)
        except BaseException:
            self._lease.release_bytes()
            raise

    async def __aexit__(self, *failed: object) -> None:
        self._lease.release_bytes()


async def _read(scope: Scope, receive: Receive, limit_bytes: int, lease: BodyLease) -> bytes:
    content_type = header(scope, b"content-type") or ""
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "Unsupported media type: send the body as 'Content-Type: application/json'")
    if encoding := header(scope, b"content-encoding"):
        raise ApiError(415, f"Content-Encoding '{echo(encoding)}' is not supported: send the body uncompressed")
    if (declared := header(scope, b"content-length") or "").isdecimal() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if len(body) + len(chunk) > limit_bytes:
            raise too_large(limit_bytes)
        lease.grow_to(len(body) + len(chunk))
        body += chunk
    if not body:
        raise bad_request("The request body is empty: send a JSON object")
    return bytes(body)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

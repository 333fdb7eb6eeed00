"""Reading request bodies with a limit, and noticing clients that leave (level 4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from memserve.api.edge import BodyLease, Edge
from memserve.api.errors import ApiError, bad_request, echo, too_large

TENANT_KEY = "memserve.tenant"
"""Where the guard leaves the tenant in the ASGI scope."""


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


@asynccontextmanager
async def json_body(scope: Scope, receive: Receive, edge: Edge) -> AsyncIterator[bytes]:
    """The whole body, while it is parsed: its bytes count among those of all bodies until then.

    Raises :class:`ApiError` 413 for a body that is too long, 429 and 503 for one too many, 415 for a content type other
    than JSON.
    """
    lease = edge.bodies.lease(scope.get(TENANT_KEY) or (scope.get("client") or ("",))[0])
    try:
        yield await _read(scope, receive, edge.limits.body_bytes_max, lease)
    finally:
        lease.give_back()


async def _read(scope: Scope, receive: Receive, limit_bytes: int, lease: BodyLease) -> bytes:
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "Unsupported media type: send the body as 'Content-Type: application/json'")
    if encoding := headers.get("content-encoding"):
        raise ApiError(415, f"Content-Encoding '{echo(encoding)}' is not supported: send the body uncompressed")
    if (declared := headers.get("content-length", "0")).isdecimal() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    body = bytearray()
    more = True
    while more:
        chunk, more = await _next_chunk(receive)
        if len(body) + len(chunk) > limit_bytes:
            raise too_large(limit_bytes)
        lease.grow_to(len(body) + len(chunk))
        body += chunk
    if not body:
        raise bad_request("The request body is empty: send a JSON object")
    return bytes(body)


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""Reading request bodies with a limit, and noticing clients that leave (level 4)."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from memserve.api.errors import ApiError, bad_request, too_large

DISCARD_BYTES_MAX = 1 << 30
DISCARD_S_MAX = 10.0


class ClientGone(Exception):
    """The client closed the connection: nobody is left to answer."""


async def read_json_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole body, never holding more than ``limit_bytes`` of it.

    Raises :class:`ApiError` 413 beyond the limit, 415 for a content type other than JSON.
    """
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "Unsupported media type: send the body as 'Content-Type: application/json'")
    if encoding := headers.get("content-encoding"):
        raise ApiError(415, f"Content-Encoding {encoding!r} is not supported: send the body uncompressed")
    if (declared := headers.get("content-length", "0")).isdecimal() and int(declared) > limit_bytes:
        await _discard(receive)
        raise too_large(limit_bytes)
    body = bytearray()
    more = True
    while more:
        chunk, more = await _next_chunk(receive)
        body += chunk
        if len(body) > limit_bytes:
            del body
            await _discard(receive)
            raise too_large(limit_bytes)
    if not body:
        raise bad_request("The request body is empty: send a JSON object")
    return bytes(body)


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


async def _discard(receive: Receive) -> None:
    """Read on without keeping anything.

    Answering while the client still sends makes the kernel reset the connection, and the client would see the reset
    instead of the 413. The patience for it is bounded.
    """
    seen_bytes, more = 0, True
    try:
        async with asyncio.timeout(DISCARD_S_MAX):
            while more and seen_bytes < DISCARD_BYTES_MAX:
                chunk, more = await _next_chunk(receive)
                seen_bytes += len(chunk)
    except TimeoutError:
        return


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

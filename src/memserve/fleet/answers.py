"""Answers of engines, as they are sent to clients: whole, or as streams of whole events, byte for byte.

A stream of chats and completions ends with ``[DONE]``; one of ``/v1/responses`` with an event that says how the
response ended. One that its engine breaks off ends with one error, in the form of its interface.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.types import Send

from memserve.api.http.client import NOT_SENT_BACK, HttpCall, HttpFault
from memserve.api.http.errors import ApiError, echo
from memserve.base.units import MIB
from memserve.fleet.host import Ticket

ANSWER_BYTES_MAX = 64 * MIB
EVENT_BYTES_MAX = 4 * MIB
_ELSEWHERE = (404, 408, 425, 429)
"""Client errors that another engine may not make. All other ones are the client's own."""
_FIELDS = (b"data:", b":", b"event:", b"id:", b"retry:")
DONE = b"[DONE]"
_ODD_DATA = (DONE, b"null")
"""llama.cpp begins a stream for several prompts with ``null``."""
_encode = msgspec.json.encode


class EventForm:
    """Of the streams of chats and completions."""

    def is_last(self, data: bytes) -> bool:
        """Whether the stream ends with an event of this data."""
        return data == DONE

    def last_event(self, error: ApiError) -> bytes:
        """What ends a stream that broke off."""
        return b"data: " + error.encode_body() + b"\n\ndata: " + DONE + b"\n\n"


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    sequence_number: int = -1


class ResponseEvents(EventForm):
    """Of the stream of one response."""

    def __init__(self) -> None:
        self._number = -1

    def is_last(self, data: bytes) -> bool:
        """Whether the response has ended with it, however it did."""
        try:
            event = msgspec.json.decode(data, type=_ResponseEvent)
        except (msgspec.DecodeError, RecursionError):  # it is the client's to read
            return data == DONE
        self._number = max(self._number, event.sequence_number)
        return event.type in ("response.completed", "response.incomplete", "response.failed", "error")

    def last_event(self, error: ApiError) -> bytes:
        """As OpenAI's clients read it: ``error``, with the next number."""
        fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + _encode({**fields, "sequence_number": self._number + 1}) + b"\n\n"


@dataclass(slots=True)
class EngineAnswer:
    """An answer that has begun: nothing of it was sent yet."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes] | None = None
    """The further events of a stream; ``None``: ``first`` is the whole body."""
    events: EventForm = field(default_factory=lambda: EventForm())
    """How that stream ends."""

    async def send_to_client(self, ticket: Ticket, send: Send) -> bool:
        """Send it. Returns whether its engine broke it off."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        if self.rest is None:
            await send({"type": "http.response.body", "body": self.first})
            return False
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        last, is_cut = b"", False
        try:
            async for events in self.rest:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except HttpFault as fault:
            if ticket.end_error is not None and not isinstance(ticket.end_error, ApiError):
                raise ticket.end_error from None
            is_cut = ticket.end_error is None
            message = f"The stream ends here: {fault.reason}"
            error = ticket.end_error or ApiError(fault.status, message, kind="server_error", code="engine_failed")
            assert isinstance(error, ApiError)
            last = self.events.last_event(error)
        await send({"type": "http.response.body", "body": last})
        return is_cut


async def answer_of(call: HttpCall, events: EventForm | None, silence_s: float) -> EngineAnswer:
    """The answer, as far as it must be known before anything is sent. ``events``: of the stream that was asked for;
    None: a whole one was. Raises :class:`HttpFault` for one that another engine may give better."""
    headers = [header for header in call.headers if header[0] not in NOT_SENT_BACK]
    kind = call.header(b"content-type").partition(";")[0].strip().lower()
    if call.status == 200 and events is not None:
        if kind != "text/event-stream":
            raise HttpFault(f"it answered a stream with {echo(kind) or 'no content type'}")
        rest = whole_events(call.body_pieces(silence_s), events)
        try:
            return EngineAnswer(200, headers, await anext(rest), rest, events)
        except StopAsyncIteration:
            raise HttpFault("its stream is empty") from None
    body = await call.read_body(ANSWER_BYTES_MAX, silence_s)
    if call.status == 200:
        _check_object(body, kind)
    elif is_failure(call.status):
        busy = call.status in (429, 503)
        status = call.status if busy or call.status == 404 else 502
        excerpt = echo(body.decode("utf-8", "replace"), 120)
        wait_s = _seconds(call.header(b"retry-after")) if busy else None
        raise HttpFault(f"it said {call.status}: {excerpt}", status=status, retry_after_s=wait_s)
    return EngineAnswer(call.status, headers, body)


def is_failure(status: int) -> bool:
    """Whether another engine may answer better than with this status, which is not 200."""
    return not 400 <= status < 500 or status in _ELSEWHERE


def _seconds(text: str) -> float:
    return min(60.0, float(text)) if text.isdecimal() and text.isascii() else 1.0


def _check_object(body: bytes, kind: str) -> None:
    try:
        msgspec.json.decode(body, type=Mapping[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        raise HttpFault(f"its answer is no JSON object ({echo(kind) or 'no content type'})") from None


async def whole_events(pieces: AsyncIterator[bytes], events: EventForm) -> AsyncIterator[bytes]:
    """A stream in whole events, byte for byte. Raises :class:`HttpFault` where it is no stream of ``events``, or ends
    without its last one."""
    buffer, is_done = bytearray(), False
    async for piece in pieces:
        buffer += piece
        end = max(buffer.rfind(b"\n\n") + 2, buffer.rfind(b"\r\n\r\n") + 4)
        if end < 4:
            if len(buffer) > EVENT_BYTES_MAX:
                raise HttpFault("an event of its stream never ends")
            continue
        block = bytes(buffer[:end])
        del buffer[:end]
        is_done = _check_events(block, events) or is_done
        yield block
    if buffer.strip():
        raise HttpFault("its stream ended in the middle of an event")
    if not is_done:
        raise HttpFault("its stream ended too early")


def _check_events(block: bytes, events: EventForm) -> bool:
    """Whether the stream's end is among them."""
    is_done = False
    for line in block.splitlines():
        if line and not line.startswith(_FIELDS):
            raise HttpFault("its stream is no stream of events")
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data not in _ODD_DATA and not (data.startswith(b"{") and data.endswith(b"}")):
                raise HttpFault("an event of its stream is no JSON object")
            is_done = events.is_last(data) or is_done
    return is_done

"""Answers a call: as one JSON object, or as a stream of server-sent events.

Chunks are most of what a server sends: the constant part of a chunk is encoded once per response, and a token costs one
small JSON string.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from memserve import __version__
from memserve.api.http.errors import ApiError, internal, rejected
from memserve.api.http.limits import ClientGone, wait_for_disconnect
from memserve.api.http.request import WHEN_GONE_KEY
from memserve.api.openai.request.schema import IGNORED_HEADER, INEXACT_HEADER
from memserve.api.openai.response.formats import AnswerFormat
from memserve.api.openai.response.idempotency import EventIds, split_tokens
from memserve.api.openai.response.reply import Delta, Reply, failure
from memserve.api.openai.streams import Hub, News, StreamCall
from memserve.base.types import Request, TokenOutput
from memserve.host.engine import Rejected

_encode = msgspec.json.Encoder().encode


FINGERPRINT = f"memserve-{__version__}"

DONE = b"data: [DONE]\n\n"

SLICE_PIECES = 32
"""Tokens whose logprobs are written without a pause: a millisecond, with 20 alternatives each."""


class AnswerEnvelope(msgspec.Struct, frozen=True):
    """What every part of one response repeats."""

    response_id: str
    model: str
    created_s: int

    def response_fields(self, kind: str, created_s: int | None = None) -> dict[str, Any]:
        """The fields around ``choices``. ``created_s``: of an answer that was there before this response."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s if created_s is None else created_s,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def new_envelope(response_id: str, model: str) -> AnswerEnvelope:
    """An envelope created now."""
    return AnswerEnvelope(response_id, model, int(time.time()))


class AnswerFactory(Protocol):
    """Makes the writer of one answer, in the form of one interface."""

    def __call__(self, reply: Reply, envelope: AnswerEnvelope, call: StreamCall, send: Send) -> AnswerWriter:
        """``send`` gets all of the answer."""


async def answer(
    hub: Hub,
    reply: Reply,
    make_writer: AnswerFactory,
    envelope: AnswerEnvelope,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Run ``reply.plan`` in the engine and answer the client.

    The engine keeps none of its requests, however the call ends. Raises :class:`ApiError` as long as no byte was sent,
    and :class:`ClientGone` when the client left.
    """
    call = hub.open_call(reply.plan.requests)
    end_watch = _watch(call, scope, receive)
    try:
        writer = make_writer(reply, envelope, call, send)
        await (writer.run_stream() if reply.plan.stream else writer.run_whole())
        reply.record_totals()
    finally:
        end_watch()
        hub.close_call(call)


def _watch(call: StreamCall, scope: Scope, receive: Receive) -> Callable[[], object]:
    """Abandon ``call`` when its client leaves. Returns what ends that."""
    call_when_client_left: Callable[[Callable[[], None]], Callable[[], None]] | None = scope.get(WHEN_GONE_KEY)
    if call_when_client_left is not None:
        return call_when_client_left(call.abandon_call)
    return asyncio.create_task(abandon_on_disconnect(call, receive)).cancel


async def abandon_on_disconnect(call: StreamCall, receive: Receive) -> None:
    """Wait for the client to leave, then abandon its call. Runs as a task, cancelled when the call has ended."""
    await wait_for_disconnect(receive)
    call.abandon_call()


async def read_whole(call: StreamCall, reply: Reply, take_delta: Callable[[Delta], object]) -> None:
    """Absorb all of an answer. Raises as :meth:`Reply.absorb_output`."""
    while not reply.is_done:
        for prompt_index, output in await call.next_outputs():
            if (delta := reply.absorb_output(call, prompt_index, output)) is not None:
                take_delta(delta)


def frame_event(event: dict[str, Any]) -> bytes:
    """A server-sent event with the name that its ``type`` says."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


async def run_requests(
    hub: Hub, requests: list[Request], receive: Receive, take_output: Callable[[int, TokenOutput], object]
) -> None:
    """Run ``requests`` of one sequence each, without an answer of their own. ``take_output``: gets each output with the
    place of its request. Raises :class:`ApiError` for one that the engine refuses or gives up, and
    :class:`ClientGone`."""
    call, unanswered = hub.open_call(requests), len(requests)
    watcher = asyncio.create_task(abandon_on_disconnect(call, receive))
    try:
        while unanswered:
            for place, output in await call.next_outputs():
                if isinstance(output, Rejected):
                    raise rejected(output)
                if error := failure(output):
                    raise error
                take_output(place, output)
                unanswered -= output.finish_reason is not None
    finally:
        watcher.cancel()
        hub.close_call(call)


async def in_slices(pieces: Iterator[bytes], parts: list[bytes]) -> None:
    """Append ``pieces`` to ``parts``, and yield to other requests every now and then: each piece is little work, but
    clients decide how many there are. An empty piece only offers a place to pause."""
    for number, piece in enumerate(pieces, 1):
        if piece:
            parts.append(piece)
        if number % SLICE_PIECES == 0:
            await asyncio.sleep(0)


def told_headers(reply: Reply) -> dict[str, str]:
    """The fields of the request that had no effect; how many tokens of the prompt make the answer inexact."""
    headers = {IGNORED_HEADER: ", ".join(reply.plan.ignored)} if reply.plan.ignored else {}
    return headers | ({INEXACT_HEADER: str(reply.inexact_tokens)} if reply.inexact_tokens else {})


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """One whole JSON response."""
    await send_body(send, status, body, b"application/json", headers)


async def send_body(
    send: Send, status: int, body: bytes, media_type: bytes, headers: dict[str, str] | None = None
) -> None:
    """One whole response."""
    raw = [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class AnswerWriter(ABC):
    """Writes one answer. The headers of a stream wait for the first news, so that a refused request gets its proper
    status."""

    end_mark = DONE
    """Behind the last event of a stream."""

    def __init__(self, reply: Reply, envelope: AnswerEnvelope, call: StreamCall, send: Send) -> None:
        self._reply, self._envelope, self._call, self._send = reply, envelope, call, send
        self._ids = EventIds(reply.plan) if reply.plan.is_keyed else None
        self._started = False

    @abstractmethod
    def _encode_chunks(self, delta: Delta) -> Iterator[bytes]:
        """The events of ``delta``; ``b""``: a place to pause."""

    @abstractmethod
    def _last_chunks(self) -> bytes:
        """The events behind all deltas."""

    @abstractmethod
    def _encode_error(self, error: ApiError) -> bytes:
        """An error after the first event."""

    @abstractmethod
    async def _encode_whole(self) -> bytes:
        """The body of an answer without a stream, when every sequence has ended."""

    @abstractmethod
    def _take_delta(self, delta: Delta) -> None:
        """News of an answer without a stream."""

    async def run_whole(self) -> None:
        """Wait until every sequence ended, and send one JSON object."""
        await read_whole(self._call, self._reply, self._take_delta)
        await send_json(self._send, 200, await self._encode_whole(), told_headers(self._reply))

    async def run_stream(self) -> None:
        """Stream until every sequence ended."""
        try:
            while not self._reply.is_done:
                await self._send_updates()
            last = self._last_chunks()
            if self._ids is not None:
                self._ids.check_end()
        except ApiError as error:
            await self._end_with(error)
            return
        except ClientGone:
            raise
        except Exception:
            await self._end_with(internal())
            raise
        await self._write_chunk(last + self.end_mark, more=False)

    async def _send_updates(self) -> None:
        """One write for everything that happened since the last one."""
        parts: list[bytes] = []
        updates = await self._call.next_outputs()
        try:
            await in_slices(self._encode_updates(updates), parts)
        finally:
            if parts:
                await self._write_chunk(b"".join(parts))

    def _encode_updates(self, updates: list[News]) -> Iterator[bytes]:
        for prompt_index, output in self._split_updates(updates):
            delta = self._reply.absorb_output(self._call, prompt_index, output)
            if delta is not None:
                yield from self._encode_chunks(delta)
                self._reply.drop_logprobs(delta)

    def _split_updates(self, updates: list[News]) -> Iterator[News]:
        """With ids, an event is one token's, however many come together."""
        for prompt_index, output in updates:
            if self._ids is None or isinstance(output, Rejected):
                yield prompt_index, output
            else:
                yield from ((prompt_index, single) for single in split_tokens(output))

    def _with_event_id(self, choice: int, chunk: bytes) -> bytes:
        """``chunk`` with its id, where the stream has some; empty: the client has it."""
        if self._ids is None:
            return chunk
        line = self._ids.next_id_line(choice)
        return b"" if line is None else line + chunk

    async def _end_with(self, error: ApiError) -> None:
        if not self._started:
            raise error
        await self._write_chunk(self._encode_error(error) + self.end_mark, more=False)

    async def _write_chunk(self, data: bytes, *, more: bool = True) -> None:
        self._call.writing = True
        try:
            await self._send_data(data, more=more)
        finally:
            self._call.writing = False

    async def _send_data(self, data: bytes, *, more: bool) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *((name.encode(), value.encode()) for name, value in told_headers(self._reply).items()),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class ChoicesWriter(AnswerWriter):
    """Chats and completions: their ``choices``, within what every part of the answer repeats."""

    def __init__(
        self, shape: AnswerFormat, reply: Reply, envelope: AnswerEnvelope, call: StreamCall, send: Send
    ) -> None:
        super().__init__(reply, envelope, call, send)
        self._shape, self._head = shape, b""
        self._tail = b',"usage":null}\n\n' if reply.plan.include_usage else b"}\n\n"
        self._first_chunk_fields = _encode(shape.first_chunk_fields(reply))[1:-1]
        self._tokens_shown = 0

    def _take_delta(self, delta: Delta) -> None:
        """The reply keeps its texts."""

    async def _encode_whole(self) -> bytes:
        reply, shape = self._reply, self._shape
        rest = {"usage": reply.usage_fields()}
        if reply.plan.explain:
            rest["memserve"] = reply.as_explanation()
        fields = self._envelope.response_fields(shape.response_kind, reply.created_s)
        parts = [_encode(fields)[:-1] + b',"choices":[']
        await in_slices(self._encode_choices(), parts)
        parts[-1] = b"],"  # instead of the last comma
        await in_slices(shape.encode_other_fields(reply), parts)
        return b"".join([*parts, _encode(rest)[1:]])

    def _encode_choices(self) -> Iterator[bytes]:
        for sequence in self._reply.best_sequences():
            yield from self._shape.encode_choice(self._reply, sequence)
            yield b","

    def _encode_chunks(self, delta: Delta) -> Iterator[bytes]:
        choice = delta.sequence.choice
        if delta.opens and (opening := self._shape.encode_opening(self._reply, delta)):
            yield self._with_event_id(choice, self._frame_chunk(opening))
        self._tokens_shown += delta.last - delta.first if self._reply.plan.generates else 0
        for choices in self._shape.encode_choices(self._reply, delta):
            yield self._with_event_id(choice, self._frame_chunk(choices)) if choices else b""

    def _frame_chunk(self, choices: bytes) -> bytes:
        tail = self._tail
        if self._reply.plan.continuous_usage:
            tail = b',"usage":%b}\n\n' % _encode(self._reply.usage_fields(self._tokens_shown))
        if self._first_chunk_fields:
            tail, self._first_chunk_fields = b"," + self._first_chunk_fields + tail, b""
        return self._chunk_head() + choices + tail

    def _chunk_head(self) -> bytes:
        if not self._head:  # the first news tell when the answer was asked for
            fields = self._envelope.response_fields(self._shape.chunk_kind, self._reply.created_s)
            self._head = b"data: " + _encode(fields)[:-1] + b',"choices":'
        return self._head

    def _last_chunks(self) -> bytes:
        plan, extra = self._reply.plan, {}
        if plan.include_usage:
            extra["usage"] = self._reply.usage_fields()
        if plan.explain:
            extra["memserve"] = self._reply.as_explanation()
        if not extra:
            return b""
        return self._with_event_id(-1, self._chunk_head() + b"[]," + _encode(extra)[1:] + b"\n\n")

    def _encode_error(self, error: ApiError) -> bytes:
        return b"data: " + error.encode_body() + b"\n\n"

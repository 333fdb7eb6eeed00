"""Answers a call: as one JSON object, or as a stream of server-sent events.

Chunks are most of what a server sends: the constant part of a chunk is encoded once per response, and a token costs one
small JSON string.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from memserve import __version__
from memserve.api.http.errors import ApiError, internal
from memserve.api.http.limits import ClientGone, wait_for_disconnect
from memserve.api.http.request import WHEN_GONE_KEY
from memserve.api.openai.request.schema import IGNORED_HEADER
from memserve.api.openai.response.formats import AnswerFormat
from memserve.api.openai.response.idempotency import EventIds, singles
from memserve.api.openai.response.reply import Delta, Reply
from memserve.api.openai.streams import Hub, News, StreamCall
from memserve.host.engine import Rejected

_encode = msgspec.json.Encoder().encode


FINGERPRINT = f"memserve-{__version__}"

_DONE = b"data: [DONE]\n\n"

SLICE_PIECES = 32
"""Tokens whose logprobs are written without a pause: a millisecond, with 20 alternatives each."""


class AnswerEnvelope(msgspec.Struct, frozen=True):
    """What every part of one response repeats."""

    response_id: str
    model: str
    created_s: int

    def fields(self, kind: str, created_s: int | None = None) -> dict[str, Any]:
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


async def answer(
    hub: Hub, reply: Reply, shape: AnswerFormat, envelope: AnswerEnvelope, scope: Scope, receive: Receive, send: Send
) -> None:
    """Run ``reply.plan`` in the engine and answer the client.

    The engine keeps none of its requests, however the call ends. Raises :class:`ApiError` as long as no byte was sent,
    and :class:`ClientGone` when the client left.
    """
    call = hub.open(reply.plan.requests)
    end_watch = _watch(call, scope, receive)
    try:
        if reply.plan.stream:
            await Streamer(reply, shape, envelope, call, send).run()
        else:
            await _answer_whole(call, reply, shape, envelope, send)
        reply.finished()
    finally:
        end_watch()
        hub.close(call)


def _watch(call: StreamCall, scope: Scope, receive: Receive) -> Callable[[], object]:
    """Abandon ``call`` when its client leaves. Returns what ends that."""
    when_gone: Callable[[Callable[[], None]], Callable[[], None]] | None = scope.get(WHEN_GONE_KEY)
    if when_gone is not None:
        return when_gone(call.abandon)
    return asyncio.create_task(abandon_on_disconnect(call, receive)).cancel


async def abandon_on_disconnect(call: StreamCall, receive: Receive) -> None:
    """Wait for the client to leave, then abandon its call. Runs as a task, cancelled when the call has ended."""
    await wait_for_disconnect(receive)
    call.abandon()


async def _answer_whole(
    call: StreamCall, reply: Reply, shape: AnswerFormat, envelope: AnswerEnvelope, send: Send
) -> None:
    while not reply.done:
        for at, news in await call.news():
            reply.absorb(call, at, news)
    rest = {"usage": reply.usage()}
    if reply.plan.explain:
        rest["memserve"] = reply.explanation()
    parts = [_encode(envelope.fields(shape.response_kind, reply.created_s))[:-1] + b',"choices":[']
    await in_slices(_choices(reply, shape), parts)
    parts[-1] = b"],"  # instead of the last comma
    await in_slices(shape.beside(reply), parts)
    await send_json(send, 200, b"".join([*parts, _encode(rest)[1:]]), ignored_header(reply))


def _choices(reply: Reply, shape: AnswerFormat) -> Iterator[bytes]:
    for sequence in reply.best():
        yield from shape.choice(reply, sequence)
        yield b","


async def in_slices(pieces: Iterator[bytes], parts: list[bytes]) -> None:
    """Append ``pieces`` to ``parts``, and yield to other requests every now and then: each piece is little work, but
    clients decide how many there are. An empty piece only offers a place to pause."""
    for at, piece in enumerate(pieces, 1):
        if piece:
            parts.append(piece)
        if at % SLICE_PIECES == 0:
            await asyncio.sleep(0)


def ignored_header(reply: Reply) -> dict[str, str]:
    """The fields of the request that had no effect."""
    return {IGNORED_HEADER: ", ".join(reply.plan.ignored)} if reply.plan.ignored else {}


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """One whole JSON response."""
    raw = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class Streamer:
    """One stream. The headers wait for the first news, so that a refused request gets its proper status."""

    def __init__(
        self, reply: Reply, shape: AnswerFormat, envelope: AnswerEnvelope, call: StreamCall, send: Send
    ) -> None:
        self._reply, self._shape, self._call, self._send = reply, shape, call, send
        self._envelope, self._head = envelope, b""
        self._ids = EventIds(reply.plan) if reply.plan.is_keyed else None
        self._tail = b',"usage":null}\n\n' if reply.plan.include_usage else b"}\n\n"
        self._beside = _encode(shape.beside_first(reply))[1:-1]
        self._tokens_shown = 0
        self._started = False

    async def run(self) -> None:
        """Stream until every sequence ended."""
        try:
            while not self._reply.done:
                await self._show()
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
        await self._write(last + _DONE, more=False)

    async def _show(self) -> None:
        """One write for everything that happened since the last one."""
        parts: list[bytes] = []
        news = await self._call.news()
        try:
            await in_slices(self._pieces(news), parts)
        finally:
            if parts:
                await self._write(b"".join(parts))

    def _pieces(self, news: list[News]) -> Iterator[bytes]:
        for at, output in self._one_by_one(news):
            delta = self._reply.absorb(self._call, at, output)
            if delta is not None:
                yield from self._chunks(delta)
                self._reply.forget(delta)

    def _one_by_one(self, news: list[News]) -> Iterator[News]:
        """With ids, an event is one token's, however many come together."""
        for at, output in news:
            if self._ids is None or isinstance(output, Rejected):
                yield at, output
            else:
                yield from ((at, single) for single in singles(output))

    def _chunks(self, delta: Delta) -> Iterator[bytes]:
        choice = delta.sequence.choice
        if delta.opens and (opening := self._shape.opening(self._reply, delta)):
            yield self._numbered(choice, self._chunk(opening))
        self._tokens_shown += delta.last - delta.first if self._reply.plan.generates else 0
        for choices in self._shape.choices(self._reply, delta):
            yield self._numbered(choice, self._chunk(choices)) if choices else b""

    def _numbered(self, choice: int, chunk: bytes) -> bytes:
        """``chunk`` with its id, where the stream has some; empty: the client has it."""
        if self._ids is None:
            return chunk
        line = self._ids.count(choice)
        return b"" if line is None else line + chunk

    def _chunk(self, choices: bytes) -> bytes:
        tail = self._tail
        if self._reply.plan.continuous_usage:
            tail = b',"usage":%b}\n\n' % _encode(self._reply.usage(self._tokens_shown))
        if self._beside:
            tail, self._beside = b"," + self._beside + tail, b""
        return self._chunk_head() + choices + tail

    def _chunk_head(self) -> bytes:
        if not self._head:  # the first news tell when the answer was asked for
            fields = self._envelope.fields(self._shape.chunk_kind, self._reply.created_s)
            self._head = b"data: " + _encode(fields)[:-1] + b',"choices":'
        return self._head

    def _last_chunks(self) -> bytes:
        plan, extra = self._reply.plan, {}
        if plan.include_usage:
            extra["usage"] = self._reply.usage()
        if plan.explain:
            extra["memserve"] = self._reply.explanation()
        if not extra:
            return b""
        return self._numbered(-1, self._chunk_head() + b"[]," + _encode(extra)[1:] + b"\n\n")

    async def _end_with(self, error: ApiError) -> None:
        if not self._started:
            raise error
        await self._write(self._error(error) + _DONE, more=False)

    def _error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    async def _write(self, data: bytes, *, more: bool = True) -> None:
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
                *((name.encode(), value.encode()) for name, value in ignored_header(self._reply).items()),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

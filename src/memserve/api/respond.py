"""Answers a call: as one JSON object, or as a stream of server-sent events, of completions or of chats.

Clients decide how many tokens, alternatives and choices there are, so answers are encoded in pieces: an iterator yields
at least once per token, ``b""`` where it only offers a place to pause. Chunks are most of what a server sends: the
constant part of a chunk is encoded once per response, and a token costs one small JSON string.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Send

from memserve import __version__
from memserve.api.edge import ClientGone, wait_for_disconnect
from memserve.api.errors import ApiError, internal
from memserve.api.hub import Call, Hub, News
from memserve.api.plan import Generation
from memserve.api.reply import Delta, Reply, Sequence
from memserve.api.served import TokenNames
from memserve.types import TokenLogprobs

_encode = msgspec.json.Encoder().encode


class Shape(Protocol):
    """How one endpoint writes its answers."""

    @property
    def response_kind(self) -> str:
        """``object`` of a whole response."""

    @property
    def chunk_kind(self) -> str:
        """``object`` of a chunk."""

    def choice(self, reply: Reply, sequence: Sequence) -> Iterator[bytes]:
        """One encoded entry of ``choices`` of a whole response, in pieces."""

    def choices(self, reply: Reply, delta: Delta) -> Iterator[bytes]:
        """The encoded ``choices`` of each chunk for ``delta``, usually one; ``b""``: a place to pause."""


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    response_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def choice(self, reply: Reply, sequence: Sequence) -> Iterator[bytes]:
        """One entry of ``choices`` of a whole response."""
        message = _encode({"role": "assistant", "content": "".join(sequence.texts), "refusal": None})
        yield b'{"index":%d,"message":%b,"logprobs":' % (sequence.choice, message)
        yield from self._logprobs(reply.plan, sequence, 0, sequence.shown_tokens)
        yield b',"finish_reason":%b}' % _encode(sequence.stream.finish_reason)

    def choices(self, reply: Reply, delta: Delta) -> Iterator[bytes]:
        """The role first, then text, then an empty delta with the finish reason: OpenAI's order."""
        index = delta.sequence.choice
        if delta.opens:
            opening = {"role": "assistant", "content": "", "refusal": None}
            yield _encode([_chat_chunk(index, opening)])
        if delta.text or (reply.plan.logprobs is not None and delta.last > delta.first):
            parts = [b'[{"index":%d,"delta":{"content":%b},"logprobs":' % (index, _encode(delta.text))]
            for piece in self._logprobs(reply.plan, delta.sequence, delta.first, delta.last):
                parts.append(piece)
                yield b""
            yield b"".join([*parts, b',"finish_reason":null}]'])
        if delta.finish_reason is not None:
            yield _encode([_chat_chunk(index, {}, delta.finish_reason)])

    def _logprobs(self, plan: Generation, sequence: Sequence, first: int, last: int) -> Iterator[bytes]:
        if plan.logprobs is None:
            yield b"null"
            return
        comma = b'{"content":['
        for at in range(first, last):
            yield comma + _encode(self._entry(sequence.logprobs[at]))
            comma = b","
        yield (comma if first == last else b"") + b'],"refusal":null}'

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._alternative(token, logprob) for token, logprob in entry.top]
        return {**self._alternative(entry.token, entry.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._names.name(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


def _chat_chunk(index: int, delta: dict[str, Any], finish_reason: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape:
    """``text_completion``, whole and in chunks."""

    response_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def choice(self, reply: Reply, sequence: Sequence) -> Iterator[bytes]:
        """One entry of ``choices`` of a whole response."""
        generates = reply.plan.generates
        text = self._echo(reply, sequence) + ("".join(sequence.texts) if generates else "")
        yield b'{"text":%b,"index":%d,"logprobs":' % (_encode(text), sequence.choice)
        yield from self._logprobs(reply, sequence, 0, sequence.shown_tokens if generates else 0, opens=True)
        yield b',"finish_reason":%b}' % _encode(sequence.stream.finish_reason if generates else "length")

    def choices(self, reply: Reply, delta: Delta) -> Iterator[bytes]:
        """One chunk per delta; the first of a sequence carries the echoed prompt."""
        sequence, generates = delta.sequence, reply.plan.generates
        text = delta.text if generates else ""
        last = delta.last if generates else delta.first
        if delta.opens:
            text = self._echo(reply, sequence) + text
        reason = delta.finish_reason if generates or delta.finish_reason is None else "length"
        if not (text or reason or (reply.plan.logprobs is not None and last > delta.first)):
            return
        parts = [b'[{"index":%d,"text":%b,"logprobs":' % (sequence.choice, _encode(text))]
        for piece in self._logprobs(reply, sequence, delta.first, last, opens=delta.opens):
            parts.append(piece)
            yield b""
        yield b"".join([*parts, b',"finish_reason":%b}]' % _encode(reason)])

    @staticmethod
    def _echo(reply: Reply, sequence: Sequence) -> str:
        return (reply.plan.prompts[sequence.at].text or "") if reply.plan.echo else ""

    def _logprobs(self, reply: Reply, sequence: Sequence, first: int, last: int, *, opens: bool) -> Iterator[bytes]:
        if reply.plan.logprobs is None:
            yield b"null"
            return
        columns = _TokenColumns(self._names)
        start = len(self._echo(reply, sequence))
        if opens and (prompt := reply.prompt_logprobs[sequence.at]) is not None:
            yield from columns.add_prompt(reply.plan.prompts[sequence.at].tokens.tolist(), prompt)
        for at in range(first, last):
            columns.add(sequence.logprobs[at], start + sequence.stream.offsets[at])
            yield b""
        yield columns.encoded()


_COLUMNS = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")


class _TokenColumns:
    """The columns of a completion's ``logprobs``."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._columns: dict[bytes, list[bytes]] = {name: [] for name in _COLUMNS}

    def add(self, entry: TokenLogprobs, offset: int) -> None:
        """One generated token, with text that starts at ``offset``."""
        top = {self._names.name(token)[0]: finite(logprob) for token, logprob in entry.top}
        name = self._names.name(entry.token)[0]
        top.setdefault(name, finite(entry.logprob))  # OpenAI always includes the chosen token
        self._append(name, finite(entry.logprob), top, offset)

    def add_prompt(self, tokens: list[int], entries: tuple[TokenLogprobs | None, ...]) -> Iterator[bytes]:
        """The prompt's tokens; the first has no logprob, because nothing precedes it."""
        offset = 0
        for token, entry in zip(tokens, entries, strict=True):
            name, data = self._names.name(token)
            if entry is None:
                self._append(name, None, None, offset)
            else:
                self.add(entry, offset)
            offset += sum(byte & 0xC0 != 0x80 for byte in data)  # characters that begin in this token
            yield b""

    def encoded(self) -> bytes:
        """All columns as one JSON object."""
        return b"{" + b",".join(b'"%b":[%b]' % (name, b",".join(items)) for name, items in self._columns.items()) + b"}"

    def _append(self, name: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        for column, value in zip(self._columns.values(), (name, logprob, top, offset), strict=True):
            column.append(_encode(value))


def finite(logprob: float) -> float:
    """``logprob`` as JSON can write it: tokens that cannot be drawn get OpenAI's -9999."""
    return max(logprob, -9999.0)


FINGERPRINT = f"memserve-{__version__}"

_DONE = b"data: [DONE]\n\n"

SLICE_PIECES = 32
"""Tokens whose logprobs are written without a pause: a millisecond, with 20 alternatives each."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every part of one response repeats."""

    response_id: str
    model: str
    created_s: int

    def fields(self, kind: str) -> dict[str, Any]:
        """The fields around ``choices``."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def new_envelope(response_id: str, model: str) -> Envelope:
    """An envelope created now."""
    return Envelope(response_id, model, int(time.time()))


async def answer(hub: Hub, reply: Reply, shape: Shape, envelope: Envelope, receive: Receive, send: Send) -> None:
    """Run ``reply.plan`` in the engine and answer the client.

    The engine keeps none of its requests, however the call ends. Raises :class:`ApiError` as long as no byte was sent,
    and :class:`ClientGone` when the client left.
    """
    call = hub.open(reply.plan.requests)
    watcher = asyncio.create_task(abandon_on_disconnect(call, receive))
    try:
        if reply.plan.stream:
            await _Streamer(reply, shape, envelope, call, send).run()
        else:
            await _answer_whole(call, reply, shape, envelope, send)
        reply.finished()
    finally:
        watcher.cancel()
        hub.close(call)


async def abandon_on_disconnect(call: Call, receive: Receive) -> None:
    """Wait for the client to leave, then abandon its call. Runs as a task, cancelled when the call has ended."""
    await wait_for_disconnect(receive)
    call.abandon()


async def _answer_whole(call: Call, reply: Reply, shape: Shape, envelope: Envelope, send: Send) -> None:
    while not reply.done:
        for at, news in await call.news():
            reply.absorb(call, at, news)
    rest = {"usage": reply.usage(), **({"memserve": reply.explanation()} if reply.plan.explain else {})}
    parts = [_encode(envelope.fields(shape.response_kind))[:-1] + b',"choices":[']
    await in_slices((piece for sequence in reply.best() for piece in _listed(shape.choice(reply, sequence))), parts)
    parts[-1] = b"],"  # instead of the last comma
    await send_json(send, 200, b"".join([*parts, _encode(rest)[1:]]))


def _listed(choice: Iterator[bytes]) -> Iterator[bytes]:
    yield from choice
    yield b","


async def in_slices(pieces: Iterator[bytes], parts: list[bytes]) -> None:
    """Append ``pieces`` to ``parts``, and yield to other requests every now and then: each piece is little work, but
    clients decide how many there are. An empty piece only offers a place to pause."""
    for at, piece in enumerate(pieces, 1):
        if piece:
            parts.append(piece)
        if at % SLICE_PIECES == 0:
            await asyncio.sleep(0)


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """One whole JSON response."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class _Streamer:
    """One stream. The headers wait for the first news, so that a refused request gets its proper status."""

    def __init__(self, reply: Reply, shape: Shape, envelope: Envelope, call: Call, send: Send) -> None:
        self._reply, self._shape, self._call, self._send = reply, shape, call, send
        self._head = b"data: " + _encode(envelope.fields(shape.chunk_kind))[:-1] + b',"choices":'
        self._tail = b',"usage":null}\n\n' if reply.plan.include_usage else b"}\n\n"
        self._started = False

    async def run(self) -> None:
        """Stream until every sequence ended."""
        try:
            while not self._reply.done:
                await self._show()
        except ApiError as error:
            await self._end_with(error)
            return
        except ClientGone:
            raise
        except Exception:
            await self._end_with(internal())
            raise
        await self._write(self._last_chunks() + _DONE, more=False)

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
        for at, output in news:
            delta = self._reply.absorb(self._call, at, output)
            if delta is not None:
                for choices in self._shape.choices(self._reply, delta):
                    yield self._head + choices + self._tail if choices else b""
                self._reply.forget(delta)

    def _last_chunks(self) -> bytes:
        plan, extra = self._reply.plan, {}
        if plan.include_usage:
            extra["usage"] = self._reply.usage()
        if plan.explain:
            extra["memserve"] = self._reply.explanation()
        if not extra:
            return b""
        return self._head + b"[]," + _encode(extra)[1:] + b"\n\n"

    async def _end_with(self, error: ApiError) -> None:
        if not self._started:
            raise error
        await self._write(b"data: " + error.body() + b"\n\n" + _DONE, more=False)

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
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

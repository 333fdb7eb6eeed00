"""Sends the attacks of ``hostile_grammar`` to a server, many at once, and judges every byte that comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field

import httpx

from hostile_grammar import Attack, Ending, Target, attack

ANSWER_S_MAX = 60.0
"""A sound request that is not answered by then hangs."""

SILENCE_S = 0.3
"""The server may wait for the rest of a damaged request: after so long without a byte the client ends it."""

MESSAGE_CHARS_MAX = 400
NO_ANSWER_NEEDED = "left before its answer"

_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [\x20-\x7e]*")
_FIELD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [\x20-\x7e\x80-\xff\t]*")
_EXPLAINED = {
    501: {"malformed"},
    503: {"overloaded", "connections", "not_durable"},
    504: {"deadline_exceeded"},
    505: {"malformed"},
}
"""Answers of 500 and above that are right, with their codes. No other is: a server that shuts down has broken."""


class Wrong(Exception):
    """An answer that must not be."""


class Unfinished(Exception):
    """The bytes end within an answer."""


@dataclass(frozen=True)
class Answer:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool


@dataclass
class Storm:
    """What came of many attacks."""

    statuses: Counter[str] = field(default_factory=Counter)
    """By status; ``closed``: no answer, where none need be."""
    misses: list[str] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """Connections made."""
        return sum(self.statuses.values())


# -- reading answers: strictly, and with nothing of the server's own code


def read_answers(data: bytes, methods: tuple[str, ...] | None, *, closed: bool) -> list[Answer]:
    """The final answers in ``data`` to requests of these methods; ``None``: unknown ones.

    Raises :class:`Unfinished`, and :class:`Wrong` for what is no HTTP.
    """
    answers: list[Answer] = []
    at = 0
    while at < len(data):
        if answers and answers[-1].headers.get("connection", "").lower() == "close":
            raise Wrong(f"bytes after an answer that closes: {data[at : at + 60]!r}")
        if methods is not None and len(answers) >= len(methods):
            raise Wrong(f"more answers than requests: {data[at : at + 60]!r}")
        answer, at = _read_one(data, at, methods[len(answers)] if methods else None, closed=closed)
        if answer.status >= 200:
            answers.append(answer)
    return answers


def _read_one(data: bytes, at: int, method: str | None, *, closed: bool) -> tuple[Answer, int]:
    end = data.find(b"\r\n\r\n", at)
    if end < 0:
        raise Unfinished
    first, *lines = data[at:end].split(b"\r\n")
    status = _STATUS.fullmatch(first)
    if status is None or not all(_FIELD.fullmatch(line) for line in lines):
        raise Wrong(f"no head of HTTP: {data[at:end][:300]!r}")
    pairs = [line.decode("latin-1").split(": ", 1) for line in lines]
    headers = {name.lower(): value for name, value in pairs}
    if len(headers) != len(pairs):
        raise Wrong(f"a header twice: {data[at:end][:300]!r}")
    code = int(status.group(1))
    bare = code < 200 or code in (204, 304) or _answers_head(data, end + 4, method, headers, closed=closed)
    body, after = (b"", end + 4) if bare else _read_body(data, end + 4, headers, closed=closed)
    return Answer(code, headers, body, not bare), after


def _answers_head(data: bytes, at: int, method: str | None, headers: dict[str, str], *, closed: bool) -> bool:
    """Whether the answer with a head that ends ``at`` has no body because it answers HEAD.

    A request that is refused before its method is read gets a body, and then the end of the connection.
    """
    nothing_follows = len(data) == at and closed
    if method is None:
        return nothing_follows or data[at : at + 7] == b"HTTP/1."
    return method == "HEAD" and (headers.get("connection") != "close" or len(data) == at)


def _read_body(data: bytes, at: int, headers: dict[str, str], *, closed: bool) -> tuple[bytes, int]:
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if (length is None) == (coding is None):
        if length is not None:
            raise Wrong("two lengths")
        if not closed or headers.get("connection") != "close":
            raise Unfinished
        return data[at:], len(data)
    if length is not None:
        if len(data) < at + int(length):
            raise Unfinished
        return data[at : at + int(length)], at + int(length)
    body = bytearray()
    while True:
        line = data.find(b"\r\n", at)
        if line < 0:
            raise Unfinished
        size = int(data[at:line], 16)
        at = line + 2 + size + 2
        if len(data) < at:
            raise Unfinished
        if data[at - 2 : at] != b"\r\n":
            raise Wrong("a chunk of another length than it says")
        if not size:
            return bytes(body), at
        body += data[line + 2 : line + 2 + size]


# -- judging


def check_answer(answer: Answer) -> None:
    """Raise :class:`Wrong` unless it is an answer that the server may give to anything."""
    status, shown = answer.status, answer.body[:300]
    if not answer.headers.get("x-request-id"):
        raise Wrong(f"{status} without x-request-id")
    if not answer.whole:
        if status >= 500 and status not in _EXPLAINED:
            raise Wrong(f"{status}")
        return
    if status >= 400:
        code = _check_error(status, answer.body)
        if status >= 500 and code not in _EXPLAINED.get(status, ()):
            raise Wrong(f"{status}: {shown!r}")
        if status in (429, 503) and not answer.headers.get("retry-after", "").isdecimal():
            raise Wrong(f"{status} without retry-after: {shown!r}")
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        _check_events(answer.body)
    elif answer.headers.get("content-type") == "application/json":
        json.loads(answer.body)


def _check_error(status: int, body: bytes) -> str | None:
    try:
        error = json.loads(body)["error"]
        good = set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= MESSAGE_CHARS_MAX
        good = good and len(error["param"] or "") <= MESSAGE_CHARS_MAX and isinstance(error["type"], str)
    except (ValueError, TypeError, KeyError):
        good = False
    if not good:
        raise Wrong(f"{status} is no error in OpenAI's form: {body[:300]!r}")
    return error["code"]


def _check_events(body: bytes) -> None:
    """Server-sent events of JSON up to ``[DONE]``; an error among them must be one that is right."""
    events = body.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise Wrong(f"a stream ends with {body[-200:]!r}")
    for event in events[:-2]:
        value = json.loads(event.removeprefix("data: "))
        if error := value.get("error"):
            codes = {"deadline_exceeded", "client_too_slow", "overloaded", "rate_limit_exceeded"}
            if error["code"] not in codes:
                raise Wrong(f"in a stream: {error}")


# -- sending


class _Client:
    """One attack on one connection."""

    def __init__(self, attack: Attack, host: str, port: int) -> None:
        self._attack, self._host, self._port = attack, host, port
        self._data = bytearray()
        self._closed = False

    async def run(self) -> list[Answer]:
        """The answers. Raises :class:`Wrong`."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise Wrong(f"no connection: {error}") from None
        attack = self._attack
        try:
            sending = asyncio.create_task(self._send(writer))
            try:
                await self._read(reader, writer)
            finally:
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sending
            return self._answers()
        finally:
            if attack.ending is Ending.LEAVE:
                with contextlib.suppress(OSError):  # a reset
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the server may have closed it
            for piece in self._attack.pieces:
                writer.write(piece)
                await writer.drain()
                if len(self._attack.pieces) > 1:
                    await asyncio.sleep(0)
            if self._attack.ending is Ending.HALF_CLOSE:
                writer.write_eof()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attack = self._attack
        patience_s = ANSWER_S_MAX if attack.sound else SILENCE_S
        if attack.ending is Ending.LEAVE:
            patience_s = SILENCE_S if attack.leave_after_bytes else 0.01
        while not self._enough():
            try:
                piece = await asyncio.wait_for(reader.read(1 << 16), patience_s)
            except TimeoutError:
                if attack.sound:
                    raise Wrong(f"no whole answer in {ANSWER_S_MAX:g} s, but {bytes(self._data[:200])!r}") from None
                return
            except ConnectionError:
                piece = b""
            if not piece:
                self._closed = True
                return
            self._data += piece

    def _enough(self) -> bool:
        """The client has seen what it wants to see."""
        attack = self._attack
        if attack.ending is Ending.LEAVE:
            return len(self._data) > attack.leave_after_bytes
        if not attack.sound or attack.ending is Ending.HALF_CLOSE:
            return False
        with contextlib.suppress(Unfinished):
            return len(read_answers(bytes(self._data), attack.methods, closed=False)) >= len(attack.methods)
        return False

    def _answers(self) -> list[Answer]:
        attack = self._attack
        try:
            methods = attack.methods if attack.sound else None
            answers = read_answers(bytes(self._data), methods, closed=self._closed)
        except Unfinished:
            if attack.sound:
                raise Wrong(f"an answer ends early: {bytes(self._data[-200:])!r}") from None
            return []  # the client ended it, or the server ended a request that was damaged
        if attack.sound and not answers:
            raise Wrong("the connection was closed without an answer")
        if attack.sound and len(answers) < len(attack.methods) and answers[-1].headers.get("connection") != "close":
            raise Wrong(f"{len(answers)} answers to {len(attack.methods)} requests")
        return answers


async def storm(url: str, target: Target, seed: int, numbers: range, *, clients: int) -> Storm:
    """Send attacks ``numbers`` of ``seed``, ``clients`` at a time."""
    address, result = httpx.URL(url), Storm()
    queue = iter(numbers)

    async def client() -> None:
        for number in queue:
            one = attack(target, seed, number)
            try:
                answers = await _Client(one, address.host, address.port or 80).run()
                for answer in answers:
                    result.statuses[str(answer.status)] += 1
                    check_answer(answer)
                if not answers:
                    result.statuses["closed"] += 1
            except Exception as error:
                about = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
                result.misses.append(f"{one.name}: {about}\n    sent {b''.join(one.pieces)[:600]!r}")

    await asyncio.gather(*(client() for _ in range(clients)))
    return result


def fresh_seed() -> int:
    """``HOSTILE_SEED``, else another one each time."""
    return int(os.environ.get("HOSTILE_SEED") or random.SystemRandom().randrange(1 << 32))


def main() -> None:
    """Show one attack: ``python tests/support/hostile_storm.py SEED NUMBER MODEL CONTEXT_TOKENS VOCAB_SIZE``."""
    import sys

    seed, number, model, context_tokens, vocab_size = sys.argv[1:6]
    one = attack(Target(model, int(context_tokens), int(vocab_size)), int(seed), int(number))
    print(one.name, one.ending, one.methods)
    for piece in itertools.islice(one.pieces, 100):
        print(piece)


if __name__ == "__main__":
    main()

"""The two response shapes: choices and chunks of completions and of chats (level 4).

A client decides how many tokens, alternatives and choices there are. So all of it is made in pieces: an iterator yields
at least once a token, and ``b""`` where there is only a place to pause.

Chunks are most of what a server sends. Everything of a chunk that does not change is encoded once a response; a token
then costs one small JSON string.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

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
        """The encoded ``choices`` of each chunk that ``delta`` makes, usually one; ``b""``: a place to pause."""


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
        """The role first, then text, then an empty delta with the reason of the end: OpenAI's order."""
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
        """One chunk a delta; the first of a sequence carries the echoed prompt."""
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
        """One generated token, whose text starts at ``offset``."""
        top = {self._names.name(token)[0]: finite(logprob) for token, logprob in entry.top}
        name = self._names.name(entry.token)[0]
        top.setdefault(name, finite(entry.logprob))  # the chosen token is always among them, as at OpenAI
        self._append(name, finite(entry.logprob), top, offset)

    def add_prompt(self, tokens: list[int], entries: tuple[TokenLogprobs | None, ...]) -> Iterator[bytes]:
        """The prompt's tokens; nothing precedes the first, so it has no logprob."""
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
        """All of them."""
        return b"{" + b",".join(b'"%b":[%b]' % (name, b",".join(items)) for name, items in self._columns.items()) + b"}"

    def _append(self, name: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        for column, value in zip(self._columns.values(), (name, logprob, top, offset), strict=True):
            column.append(_encode(value))


def finite(logprob: float) -> float:
    """JSON has no infinity: tokens that cannot be drawn get OpenAI's -9999."""
    return max(logprob, -9999.0)

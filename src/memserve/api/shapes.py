"""The two response shapes: choices and chunks of completions and of chats (level 4).

Chunks are most of what a server sends. Everything of a chunk that does not change is encoded once a response; a token
then costs one small JSON string.
"""

from __future__ import annotations

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

    def choice(self, reply: Reply, sequence: Sequence) -> dict[str, Any]:
        """One entry of ``choices`` of a whole response."""

    def choices(self, reply: Reply, delta: Delta) -> list[bytes]:
        """The encoded ``choices`` of each chunk that ``delta`` makes, usually one."""


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    response_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def choice(self, reply: Reply, sequence: Sequence) -> dict[str, Any]:
        """One entry of ``choices`` of a whole response."""
        return {
            "index": sequence.choice,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": self._logprobs(reply.plan, sequence, 0, sequence.shown_tokens),
            "finish_reason": sequence.stream.finish_reason,
        }

    def choices(self, reply: Reply, delta: Delta) -> list[bytes]:
        """The role first, then text, then an empty delta with the reason of the end: OpenAI's order."""
        index, chunks = delta.sequence.choice, []
        if delta.opens:
            opening = {"role": "assistant", "content": "", "refusal": None}
            chunks.append(_encode([_chat_chunk(index, opening)]))
        logprobs = self._logprobs(reply.plan, delta.sequence, delta.first, delta.last)
        if logprobs is not None and (delta.text or delta.last > delta.first):
            chunks.append(_encode([_chat_chunk(index, {"content": delta.text}, logprobs)]))
        elif delta.text:
            text = _encode(delta.text)
            chunks.append(b'[{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}]' % (index, text))
        if delta.finish_reason is not None:
            chunks.append(_encode([_chat_chunk(index, {}, None, delta.finish_reason)]))
        return chunks

    def _logprobs(self, plan: Generation, sequence: Sequence, first: int, last: int) -> dict[str, Any] | None:
        if plan.logprobs is None:
            return None
        return {"content": [self._entry(entry) for entry in sequence.logprobs[first:last]], "refusal": None}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._alternative(token, logprob) for token, logprob in entry.top]
        return {**self._alternative(entry.token, entry.logprob), "top_logprobs": top}

    def _alternative(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._names.name(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


def _chat_chunk(index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


class CompletionShape:
    """``text_completion``, whole and in chunks."""

    response_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def choice(self, reply: Reply, sequence: Sequence) -> dict[str, Any]:
        """One entry of ``choices`` of a whole response."""
        generated = sequence.text if reply.plan.generates else ""
        shown = sequence.shown_tokens if reply.plan.generates else 0
        return {
            "text": self._echo(reply, sequence) + generated,
            "index": sequence.choice,
            "logprobs": self._logprobs(reply, sequence, 0, shown, opens=True),
            "finish_reason": sequence.stream.finish_reason if reply.plan.generates else "length",
        }

    def choices(self, reply: Reply, delta: Delta) -> list[bytes]:
        """One chunk a delta; the first of a sequence carries the echoed prompt."""
        sequence, generates = delta.sequence, reply.plan.generates
        text = delta.text if generates else ""
        last = delta.last if generates else delta.first
        if delta.opens:
            text = self._echo(reply, sequence) + text
        logprobs = self._logprobs(reply, sequence, delta.first, last, opens=delta.opens)
        reason = delta.finish_reason if generates or delta.finish_reason is None else "length"
        if not (text or reason or (logprobs is not None and last > delta.first)):
            return []
        if logprobs is None and reason is None:
            return [b'[{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}]' % (sequence.choice, _encode(text))]
        choice = {"index": sequence.choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return [_encode([choice])]

    @staticmethod
    def _echo(reply: Reply, sequence: Sequence) -> str:
        return (reply.plan.prompts[sequence.at].text or "") if reply.plan.echo else ""

    def _logprobs(
        self, reply: Reply, sequence: Sequence, first: int, last: int, *, opens: bool
    ) -> dict[str, Any] | None:
        if reply.plan.logprobs is None:
            return None
        shape = _TokenColumns(self._names)
        start = len(self._echo(reply, sequence))
        if opens and (prompt := reply.prompt_logprobs[sequence.at]) is not None:
            shape.add_prompt(reply.plan.prompts[sequence.at].tokens.tolist(), prompt)
        for at in range(first, last):
            shape.add(sequence.logprobs[at], start + sequence.stream.offsets[at])
        return shape.columns


class _TokenColumns:
    """The columns of a completion's ``logprobs``."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self.columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, entry: TokenLogprobs, offset: int) -> None:
        """One generated token, whose text starts at ``offset``."""
        top = {self._names.name(token)[0]: finite(logprob) for token, logprob in entry.top}
        name = self._names.name(entry.token)[0]
        top.setdefault(name, finite(entry.logprob))  # the chosen token is always among them, as at OpenAI
        self._append(name, finite(entry.logprob), top, offset)

    def add_prompt(self, tokens: list[int], entries: tuple[TokenLogprobs | None, ...]) -> None:
        """The prompt's tokens; nothing precedes the first, so it has no logprob."""
        offset = 0
        for token, entry in zip(tokens, entries, strict=True):
            name, data = self._names.name(token)
            if entry is None:
                self._append(name, None, None, offset)
            else:
                self.add(entry, offset)
            offset += sum(byte & 0xC0 != 0x80 for byte in data)  # characters that begin in this token

    def _append(self, name: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        for column, value in zip(self.columns.values(), (name, logprob, top, offset), strict=True):
            column.append(value)


def finite(logprob: float) -> float:
    """JSON has no infinity: tokens that cannot be drawn get OpenAI's -9999."""
    return max(logprob, -9999.0)

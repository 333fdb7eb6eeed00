"""How completions and chats are written, whole and in chunks.

Clients decide how many tokens, alternatives and choices there are, so answers are encoded in pieces: an iterator yields
at least once per token, ``b""`` where it only offers a place to pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from memserve.api.openai.interfaces import TokenNames
from memserve.api.openai.request.plan import Generation
from memserve.api.openai.response.reply import Delta, Reply, ReplySequence
from memserve.base.types import FinishReason, TokenLogprobs

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


class AnswerFormat(Protocol):
    """How one endpoint writes its answers."""

    @property
    def response_kind(self) -> str:
        """``object`` of a whole response."""

    @property
    def chunk_kind(self) -> str:
        """``object`` of a chunk."""

    def encode_choice(self, reply: Reply, sequence: ReplySequence) -> Iterator[bytes]:
        """One encoded entry of ``choices`` of a whole response, in pieces."""

    def encode_opening(self, reply: Reply, delta: Delta) -> bytes:
        """The encoded ``choices`` of a chunk before the first token of ``delta``'s sequence; empty: there is none."""

    def encode_choices(self, reply: Reply, delta: Delta) -> Iterator[bytes]:
        """The encoded ``choices`` of each chunk for ``delta``, usually one; ``b""``: a place to pause."""

    def encode_other_fields(self, reply: Reply) -> Iterator[bytes]:
        """What stands beside the ``choices`` of a whole response, in pieces: fields, each with a comma behind it."""

    def first_chunk_fields(self, reply: Reply) -> Json:
        """What stands beside the ``choices`` of a stream's first chunk."""


def _naming(names: TokenNames, plan: Generation) -> Any:
    return _by_id if plan.names_token_ids else names.name


def _by_id(token: int) -> tuple[str, bytes]:
    text = f"token_id:{token}"
    return text, text.encode()


def _new_ids(delta: Delta) -> list[int]:
    """Of the tokens in a chunk; the last one has those of a stop string, too, as the whole answer has."""
    tokens = delta.sequence.stream.tokens
    return tokens[delta.first : delta.last if delta.finish_reason is None else len(tokens)]


def _prompt_ids(reply: Reply, prompt_index: int) -> list[int] | None:
    return reply.plan.prompts[prompt_index].tokens.tolist() if reply.plan.token_ids else None


def _prompt_logprobs(names: TokenNames, reply: Reply, prompt_index: int) -> Iterator[bytes]:
    """In vLLM's form: an object by token id for each token; ``rank`` is known among those reported."""
    entries = reply.prompt_logprobs[prompt_index]
    if not reply.plan.prompt_logprobs or not entries:
        yield b"null"
        return
    most = reply.plan.requests[prompt_index].sampling.prompt_top_logprobs or 0
    for place, entry in enumerate(entries):
        yield (b"," if place else b"[") + _encode(None if entry is None else _by_token(names, entry, most))
    yield b"]"


def _by_token(names: TokenNames, entry: TokenLogprobs, most: int) -> Json:
    ranked: dict[int, tuple[int | None, float]] = {
        token: (rank, logprob) for rank, (token, logprob) in enumerate(entry.top[:most], 1)
    }
    ranked.setdefault(entry.token, (None, entry.logprob))
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token)[0]}
        for token, (rank, logprob) in ranked.items()
    }


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    response_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def encode_choice(self, reply: Reply, sequence: ReplySequence) -> Iterator[bytes]:
        """One entry of ``choices`` of a whole response."""
        plan = reply.plan
        message: Json = {
            "role": "assistant",
            "content": self._echoed_text(reply, sequence) + sequence.content,
            "refusal": None,
        }
        if sequence.reasoning is not None:
            message["reasoning_content"] = sequence.reasoning
        if sequence.calls:
            message["tool_calls"] = [call.as_json() for call in sequence.calls]
        yield b'{"index":%d,"message":%b,"logprobs":' % (sequence.choice, _encode(message))
        yield from self._encode_logprobs(plan, sequence, 0, sequence.shown_tokens)
        ids = _encode(sequence.stream.tokens if plan.token_ids else None)
        yield b',"finish_reason":%b,"token_ids":%b}' % (_encode(_reason(plan, sequence)), ids)

    def encode_opening(self, reply: Reply, delta: Delta) -> bytes:
        """The role, and the echoed message."""
        opening = {"role": "assistant", "content": self._echoed_text(reply, delta.sequence), "refusal": None}
        return _encode([{"index": delta.sequence.choice, "delta": opening, "logprobs": None, "finish_reason": None}])

    def encode_choices(self, reply: Reply, delta: Delta) -> Iterator[bytes]:
        """Text, calls and the finish reason, which comes with the last of them."""
        plan, sequence = reply.plan, delta.sequence
        shows = plan.logprobs is not None or plan.token_ids
        parts = delta.deltas or ([{"content": delta.text}] if delta.text else [])
        if not parts and shows and delta.last > delta.first:
            parts = [{"content": ""}]
        if not parts and delta.finish_reason is not None:
            parts = [{}]
        for part_index, part in enumerate(parts):
            pieces = [b'[{"index":%d,"delta":%b,"logprobs":' % (sequence.choice, _encode(part))]
            if part_index == 0 and delta.last > delta.first:
                for piece in self._encode_logprobs(plan, sequence, delta.first, delta.last):
                    pieces.append(piece)
                    yield b""
            else:
                pieces.append(b"null")
            reason = (
                _reason(plan, sequence) if delta.finish_reason is not None and part_index == len(parts) - 1 else None
            )
            ids = b',"token_ids":%b' % _encode(_new_ids(delta)) if plan.token_ids else b""
            yield b"".join([*pieces, b',"finish_reason":%b%b}]' % (_encode(reason), ids if part_index == 0 else b"")])

    def encode_other_fields(self, reply: Reply) -> Iterator[bytes]:
        """Of the one prompt."""
        yield b'"prompt_logprobs":'
        yield from _prompt_logprobs(self._names, reply, 0)
        yield b',"prompt_token_ids":%b,' % _encode(_prompt_ids(reply, 0))

    def first_chunk_fields(self, reply: Reply) -> Json:
        """The prompt's ids, where they are asked for."""
        return {"prompt_token_ids": _prompt_ids(reply, 0)} if reply.plan.token_ids else {}

    @staticmethod
    def _echoed_text(reply: Reply, sequence: ReplySequence) -> str:
        return (reply.plan.prompts[sequence.prompt_index].text or "") if reply.plan.echo else ""

    def _encode_logprobs(self, plan: Generation, sequence: ReplySequence, first: int, last: int) -> Iterator[bytes]:
        if plan.logprobs is None:
            yield b"null"
            return
        comma = b'{"content":['
        for token_index in range(first, last):
            yield comma + _encode(self.logprob_entry(plan, sequence.logprobs[token_index]))
            comma = b","
        yield (comma if first == last else b"") + b'],"refusal":null}'

    def logprob_entry(self, plan: Generation, entry: TokenLogprobs) -> Json:
        """One token."""
        top = list(entry.top)
        if plan.logprob_token_ids and entry.token not in plan.logprob_token_ids:
            top.insert(0, (entry.token, entry.logprob))
        naming = _naming(self._names, plan)
        listed = [_alternative(naming(token), logprob) for token, logprob in top]
        return {**_alternative(naming(entry.token), entry.logprob), "top_logprobs": listed}


def _alternative(name: tuple[str, bytes], logprob: float) -> Json:
    text, data = name
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


def _reason(plan: Generation, sequence: ReplySequence) -> str | None:
    """``tool_calls`` where the model has chosen to call; a call that was named in the request is an answer like any."""
    reason = sequence.stream.finish_reason
    if sequence.calls and reason is FinishReason.STOP and plan.calls is not None and not plan.calls.function_name:
        return "tool_calls"
    return reason


class CompletionShape:
    """``text_completion``, whole and in chunks."""

    response_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def encode_choice(self, reply: Reply, sequence: ReplySequence) -> Iterator[bytes]:
        """One entry of ``choices`` of a whole response."""
        generates = reply.plan.generates
        text = self._echoed_text(reply, sequence) + ("".join(sequence.texts) if generates else "")
        yield b'{"text":%b,"index":%d,"logprobs":' % (_encode(text), sequence.choice)
        yield from self._encode_logprobs(reply, sequence, 0, sequence.shown_tokens if generates else 0, opens=True)
        reason = _encode(sequence.stream.finish_reason if generates else "length")
        ids = (sequence.stream.tokens if generates else []) if reply.plan.token_ids else None
        listed = _encode({"token_ids": ids, "prompt_token_ids": _prompt_ids(reply, sequence.prompt_index)})[1:-1]
        yield b',"finish_reason":%b,%b,"prompt_logprobs":' % (reason, listed)
        yield from _prompt_logprobs(self._names, reply, sequence.prompt_index)
        yield b"}"

    def encode_opening(self, reply: Reply, delta: Delta) -> bytes:
        """None."""
        return b""

    def encode_other_fields(self, reply: Reply) -> Iterator[bytes]:
        """Nothing: each choice has its own."""
        yield b""

    def first_chunk_fields(self, reply: Reply) -> Json:
        """Nothing."""
        return {}

    def encode_choices(self, reply: Reply, delta: Delta) -> Iterator[bytes]:
        """One chunk per delta; the first of a sequence carries the echoed prompt."""
        sequence, generates = delta.sequence, reply.plan.generates
        text = delta.text if generates else ""
        last = delta.last if generates else delta.first
        if delta.opens:
            text = self._echoed_text(reply, sequence) + text
        reason = delta.finish_reason if generates or delta.finish_reason is None else "length"
        shows = reply.plan.logprobs is not None or reply.plan.token_ids
        if not (text or reason or (shows and last > delta.first)):
            return
        parts = [b'[{"index":%d,"text":%b,"logprobs":' % (sequence.choice, _encode(text))]
        for piece in self._encode_logprobs(reply, sequence, delta.first, last, opens=delta.opens):
            parts.append(piece)
            yield b""
        ids: Json = {}
        if reply.plan.token_ids:
            prompt = {"prompt_token_ids": _prompt_ids(reply, sequence.prompt_index)} if delta.opens else {}
            ids = {"token_ids": _new_ids(delta) if generates else [], **prompt}
        yield b"".join([*parts, b',"finish_reason":', _encode(reason), b"," * bool(ids), _encode(ids)[1:], b"]"])

    @staticmethod
    def _echoed_text(reply: Reply, sequence: ReplySequence) -> str:
        return (reply.plan.prompts[sequence.prompt_index].text or "") if reply.plan.echo else ""

    def _encode_logprobs(
        self, reply: Reply, sequence: ReplySequence, first: int, last: int, *, opens: bool
    ) -> Iterator[bytes]:
        if reply.plan.logprobs is None:
            yield b"null"
            return
        columns = _TokenColumns(_naming(self._names, reply.plan))
        start = len(self._echoed_text(reply, sequence))
        if opens and (prompt := reply.prompt_logprobs[sequence.prompt_index]) is not None:
            yield from columns.add_prompt(reply.plan.prompts[sequence.prompt_index].tokens.tolist(), prompt)
        for token_index in range(first, last):
            columns.add_token(sequence.logprobs[token_index], start + sequence.stream.offsets[token_index])
            yield b""
        yield columns.encode_columns()


_COLUMNS = (b"tokens", b"token_logprobs", b"top_logprobs", b"text_offset")


class _TokenColumns:
    """The columns of a completion's ``logprobs``."""

    def __init__(self, naming: Any) -> None:
        self._naming = naming
        self._columns: dict[bytes, list[bytes]] = {name: [] for name in _COLUMNS}

    def add_token(self, entry: TokenLogprobs, offset: int) -> None:
        """One generated token, with text that starts at ``offset``."""
        name = self._naming(entry.token)[0]
        top = {
            name: finite(entry.logprob)
        }  # OpenAI always includes the chosen token; clients of vLLM look for it first
        top |= {self._naming(token)[0]: finite(logprob) for token, logprob in entry.top}
        self._append_row(name, finite(entry.logprob), top, offset)

    def add_prompt(self, tokens: list[int], entries: tuple[TokenLogprobs | None, ...]) -> Iterator[bytes]:
        """The prompt's tokens; the first has no logprob, because nothing precedes it."""
        offset = 0
        for token, entry in zip(tokens, entries, strict=True):
            name, data = self._naming(token)
            if entry is None:
                self._append_row(name, None, None, offset)
            else:
                self.add_token(entry, offset)
            offset += sum(byte & 0xC0 != 0x80 for byte in data)  # characters that begin in this token
            yield b""

    def encode_columns(self) -> bytes:
        """All columns as one JSON object."""
        return b"{" + b",".join(b'"%b":[%b]' % (name, b",".join(items)) for name, items in self._columns.items()) + b"}"

    def _append_row(self, name: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        for column, value in zip(self._columns.values(), (name, logprob, top, offset), strict=True):
            column.append(_encode(value))


def finite(logprob: float) -> float:
    """``logprob`` as JSON can write it: tokens that cannot be drawn get OpenAI's -9999."""
    return max(logprob, -9999.0)

"""How answers of ``POST /v1/messages`` are written: blocks of content, whole or as events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from memserve.api.http.errors import ApiError, message_error
from memserve.api.openai.request.tool_calls import CallPiece, ToolCall
from memserve.api.openai.response.reply import Delta, Reply, ReplySequence
from memserve.api.openai.response.responders import AnswerEnvelope, AnswerWriter, frame_event
from memserve.api.openai.streams import StreamCall
from memserve.base.types import FinishReason
from memserve.base.units import ns_from_s

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]
Event = Json
_HOUR_NS = ns_from_s(3600)


class ContentBlocks:
    """The content of one message: feed it each delta, send the events that it yields."""

    def __init__(self) -> None:
        self.content: list[Json] = []
        """The blocks that are complete."""
        self._open: Json | None = None
        self._texts: list[str] = []  # of the open block
        self._call: ToolCall | None = None

    def push_delta(self, delta: Delta) -> Iterator[Event]:
        """The events of ``delta``."""
        for piece in (CallPiece(delta.text),) if delta.pieces is None else delta.pieces:
            if piece.call is not None:
                yield from self._push_call(piece, piece.call)
            elif piece.reasoning:
                yield from self._push_text("thinking", {"signature": ""}, piece.reasoning)
            elif piece.content:
                yield from self._push_text("text", {}, piece.content)

    def close_block(self) -> Iterator[Event]:
        """The events that end the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return
        index = len(self.content)
        if block["type"] in ("text", "thinking"):
            block[block["type"]] = "".join(self._texts)
        if block["type"] == "thinking":
            # for clients that ask for one: thoughts that come back are not checked
            block["signature"] = hashlib.blake2b(block["thinking"].encode(), digest_size=16).hexdigest()
            signed = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        elif self._call is not None:
            block["input"], self._call = _input_of(self._call), None
        self.content.append(block)
        yield {"type": "content_block_stop", "index": index}

    def _begin_block(self, block: Json) -> Iterator[Event]:
        yield from self.close_block()
        self._open, self._texts = block, []
        yield {"type": "content_block_start", "index": len(self.content), "content_block": dict(block)}
        if not self.content:
            yield {"type": "ping"}

    def _push_text(self, kind: str, more: Json, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin_block({"type": kind, kind: "", **more})
        self._texts.append(text)
        yield {
            "type": "content_block_delta", "index": len(self.content), "delta": {"type": f"{kind}_delta", kind: text},
        }  # fmt: skip

    def _push_call(self, piece: CallPiece, call: ToolCall) -> Iterator[Event]:
        if piece.begins:
            call_id = f"toolu_{call.call_id.removeprefix('call_')}"
            yield from self._begin_block({"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
            self._call = call
        if piece.arguments:
            arguments = {"type": "input_json_delta", "partial_json": piece.arguments}
            yield {"type": "content_block_delta", "index": len(self.content), "delta": arguments}


def _input_of(call: ToolCall) -> Json:
    """The arguments as an object; empty where the answer ends within them."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def input_usage(reply: Reply) -> Json:
    """Tokens of the prompt: those with KV from the cache, those whose KV the request asks to keep, and the rest."""
    cached_tokens = reply.cached_tokens
    kept_tokens = max((prefix.tokens for prefix in reply.plan.kept_prefixes), default=0)
    hour_tokens = max((prefix.tokens for prefix in reply.plan.kept_prefixes if prefix.ttl_ns >= _HOUR_NS), default=0)
    created_tokens, of_an_hour = (max(0, tokens - cached_tokens) for tokens in (kept_tokens, hour_tokens))
    return {
        "input_tokens": reply.prompt_tokens - cached_tokens - created_tokens,
        "cache_creation_input_tokens": created_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created_tokens - of_an_hour,
            "ephemeral_1h_input_tokens": of_an_hour,
        },
    }


def _stop_fields(sequence: ReplySequence, *, generates: bool) -> Json:
    stream = sequence.stream
    if not generates or stream.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if stream.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stream.stop_string}
    return {"stop_reason": "tool_use" if sequence.calls else "end_turn", "stop_sequence": None}


class MessageWriter(AnswerWriter):
    """One message."""

    end_mark = b""

    def __init__(self, reply: Reply, envelope: AnswerEnvelope, call: StreamCall, send: Any) -> None:
        super().__init__(reply, envelope, call, send)
        self._blocks = ContentBlocks()
        self._has_begun = False

    def _take_delta(self, delta: Delta) -> None:
        for _ in self._events_of(delta):
            pass

    def _events_of(self, delta: Delta) -> Iterator[Event]:
        if self._reply.plan.generates:
            yield from self._blocks.push_delta(delta)

    async def _encode_whole(self) -> bytes:
        for _ in self._blocks.close_block():
            pass
        return _encode(self._message(self._end_fields(), self._output_usage()))

    def _encode_chunks(self, delta: Delta) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            nothing_yet = {"stop_reason": None, "stop_sequence": None}
            yield self._frame({"type": "message_start", "message": self._message(nothing_yet, {"output_tokens": 0})})
        for event in self._events_of(delta):
            yield self._frame(event)

    def _last_chunks(self) -> bytes:
        last = [self._frame(event) for event in self._blocks.close_block()]
        usage = {**input_usage(self._reply), **self._output_usage()}
        usage.pop("cache_creation")
        explained = {"memserve": self._reply.as_explanation()} if self._reply.plan.explain else {}
        end_event: Event = {"type": "message_delta", "delta": self._end_fields(), "usage": usage, **explained}
        return b"".join([*last, self._frame(end_event), self._frame({"type": "message_stop"})])

    def _encode_error(self, error: ApiError) -> bytes:
        return frame_event(message_error(error))

    def _message(self, end: Json, output_usage: Json) -> Json:
        """Of what is complete."""
        reply = self._reply
        message = {
            "id": self._envelope.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": self._blocks.content,
            **end,
            "usage": {**input_usage(reply), **output_usage, "service_tier": "standard"},
        }
        return (
            {**message, "memserve": reply.as_explanation()} if reply.plan.explain and not reply.plan.stream else message
        )

    def _output_usage(self) -> Json:
        thoughts = self._reply.reasoning_tokens
        details = {} if thoughts is None else {"output_tokens_details": {"thinking_tokens": thoughts}}
        return {"output_tokens": self._reply.completion_tokens, **details}

    def _end_fields(self) -> Json:
        (sequence,) = self._reply.sequences
        return _stop_fields(sequence, generates=self._reply.plan.generates)

    def _frame(self, event: Event) -> bytes:
        return self._with_event_id(0, frame_event(event))

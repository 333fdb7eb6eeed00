"""The body of ``POST /v1/responses``, and the chat that it asks for.

Output items of a response, and the events that tell of them as they grow.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

from memserve.api.http.errors import bad_request, unsupported
from memserve.api.openai.request.plan import Generation
from memserve.api.openai.request.schema import (
    AnswerBody,
    ChatBody,
    LogprobCount,
    StreamOptions,
    TokenCount,
    body_of,
)
from memserve.api.openai.request.tool_calls import CallPiece, ToolCall
from memserve.api.openai.response.formats import ChatShape
from memserve.api.openai.response.reply import Delta

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = {LOGPROBS, "reasoning.encrypted_content"}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ResponsesBody(AnswerBody, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``POST /v1/responses``."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = (*AnswerBody.NO_EFFECT, "max_tool_calls")

    input: Any = None
    """A text, or a list of items: messages (`role`, `content`), `function_call`, `function_call_output`. Items of
    `reasoning` are left out."""
    instructions: str | None = None
    """A system message before all others, of this response alone."""
    previous_response_id: str | None = None
    """Continue this response: its input and output come first, and their KV is kept."""
    max_output_tokens: TokenCount | None = None
    """Longest answer. Default: as for chats."""
    top_logprobs: LogprobCount | None = None
    """Alternatives to each token. Only with `include: ["message.output_text.logprobs"]`."""
    include: list[str] | None = None
    """`message.output_text.logprobs`: report log probabilities."""
    text: dict[str, Any] | None = None
    """`{"format": ...}`: the form of the answer: `text`, `json_object`, or `json_schema` with its `schema`."""
    tools: list[Any] | None = None
    """Functions that the model may call: `{"type": "function", "name": ..., "parameters": ...}`. Others are refused."""
    tool_choice: Any = None
    """`none`, `auto`, `required`, or `{"type": "function", "name": ...}`."""
    parallel_tool_calls: bool | None = None
    """false: at most one call in an answer."""
    background: bool | None = None
    """Answer at once with a response that is `queued`; `GET /v1/responses/{id}` tells what came of it."""
    store: bool | None = None
    """false: forget the response when it is answered. Default true."""
    reasoning: dict[str, Any] | None = None
    """`{"effort": ...}`: a variable of the chat template; no effect where the template has no such variable."""
    truncation: str | None = None
    """`disabled`; `auto` is refused."""
    stream_options: StreamOptions | None = None
    """Accepted, no effect: the last event has the usage."""
    metadata: dict[str, str] | None = None
    """Repeated in the answer."""
    user: str | None = None
    """Repeated in the answer."""
    max_tool_calls: int | None = None
    """Accepted, no effect: it counts tools that a server runs, and here are none."""

    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chats."""
    enable_response_messages: bool | None = None
    """Report prompt and answer as the model has them: `input_messages` and `output_messages`, with text and tokens."""


_AS_IN_CHATS = (*AnswerBody.__struct_fields__, "chat_template_kwargs", "tool_choice", "parallel_tool_calls")

Messages = list[dict[str, Any]]


def chat_of(body: ResponsesBody, model: str, messages: Messages, session: str | None) -> ChatBody:
    """The chat that ``body`` asks for, with all its ``messages``. Raises :class:`ApiError` 400."""
    if body.truncation not in (None, "disabled"):
        raise unsupported("truncation", "Leaving out items of the input")
    if unknown := [name for name in body.include or () if name not in _INCLUDED]:
        raise unsupported("include", f"Including {unknown[0][:100]!r}")
    fields: dict[str, Any] = {name: getattr(body, name) for name in _AS_IN_CHATS if getattr(body, name) is not None}
    fields |= {"model": model, "messages": messages, "tools": _tools(body.tools)}
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if form := _format(body.text):
        fields["response_format"] = form
    if (effort := (body.reasoning or {}).get("effort")) is not None:
        if effort not in _EFFORTS:
            raise bad_request(f"reasoning.effort must be one of {', '.join(_EFFORTS)}", "reasoning.effort")
        fields["reasoning_effort"] = effort
    if session is not None:
        fields["session"] = session
    return body_of(fields, ChatBody)


def _tools(tools: list[Any] | None) -> list[Any] | None:
    if not tools:
        return None
    functions = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else None
            raise unsupported(f"tools[{index}]", f"A tool of type {str(kind)[:100]!r}")
        functions.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    return functions


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise bad_request("text.format.type must be text, json_object or json_schema", "text.format")
    return {"type": "json_schema", "json_schema": form} if form["type"] == "json_schema" else form


def messages_of(items: Any) -> Messages:
    """The input's items as messages of a chat. Raises :class:`ApiError` 400 naming the item at fault."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise bad_request("'input' must be a text or a list of items", "input", "missing_required_parameter")
    messages: Messages = []
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: Messages, item: Any, path: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    match kind:
        case "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        case "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            entry = {"id": item.get("call_id"), "type": "function", "function": call}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(entry)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [entry]})
        case "function_call_output":
            call_id, output = item.get("call_id"), _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        case "reasoning":
            return
        case _:
            raise unsupported(path, f"An item of type {str(kind)[:100]!r}")


def _content(content: Any) -> Any:
    """Parts of a response as parts of a chat; what is none of them is left to the chat's own checks."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]


Json = dict[str, Any]
Event = Json


class Items:
    """The output of one response: feed it each delta, send the events that it yields."""

    def __init__(self, plan: Generation, shape: ChatShape) -> None:
        self._plan, self._shape = plan, shape
        self.closed_items: list[Json] = []
        self._open: Json | None = None
        self._text = ""
        self._logprobs: list[Json] = []  # of the open message
        self._fresh: list[Json] = []  # that no event has told yet
        self._call: ToolCall | None = None

    @property
    def text(self) -> str:
        """The text of all messages."""
        parts = [part["text"] for item in self.closed_items if item["type"] == "message" for part in item["content"]]
        return "".join(parts)

    def push_delta(self, delta: Delta) -> Iterator[Event]:
        """The events of ``delta``."""
        if self._plan.logprobs is not None:
            entries = delta.sequence.logprobs[delta.first : delta.last]
            self._fresh += [self._shape.logprob_entry(self._plan, entry) for entry in entries]
        for piece in (CallPiece(delta.text),) if delta.pieces is None else delta.pieces:
            if piece.call is not None:
                yield from self._push_arguments(piece)
            elif piece.reasoning:
                yield from self._push_thought(piece.reasoning)
            elif piece.content:
                yield from self._push_content(piece.content)

    def take_delta(self, delta: Delta) -> None:
        """As :meth:`push_delta`, for an answer without events."""
        for _ in self.push_delta(delta):
            pass

    def finish_items(self, *, complete: bool) -> Iterator[Event]:
        """The end: what is open is closed. A response without any item has an empty message."""
        if self._open is None and not self.closed_items:
            yield from self._begin_message()
        yield from self._close_item("completed" if complete else "incomplete")

    def _push_content(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "message":
            yield from self._close_item("completed")
            yield from self._begin_message()
        fresh, self._fresh = self._fresh, []
        self._text += text
        self._logprobs += fresh
        yield self._make_event("response.output_text.delta", content_index=0, delta=text, logprobs=fresh)

    def _push_thought(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "reasoning":
            yield from self._close_item("completed")
            opened: Json = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": []}
            self._open, self._text = {**opened, "status": "in_progress"}, ""
            yield self._make_event("response.output_item.added", item=self._open)
            part = {"type": "reasoning_text", "text": ""}
            yield self._make_event("response.content_part.added", content_index=0, part=part)
        self._fresh.clear()  # log probabilities are those of the answer
        self._text += text
        yield self._make_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _begin_message(self) -> Iterator[Event]:
        opened: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": []}
        self._open = {**opened, "status": "in_progress"}
        self._text, self._logprobs = "", []
        yield self._make_event("response.output_item.added", item=self._open)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._make_event("response.content_part.added", content_index=0, part=part)

    def _push_arguments(self, piece: CallPiece) -> Iterator[Event]:
        call = piece.call
        assert call is not None
        if piece.begins:
            yield from self._close_item("completed")
            self._call = call
            call_fields = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.call_id}
            self._open = {**call_fields, "name": call.name, "arguments": "", "status": "in_progress"}
            yield self._make_event("response.output_item.added", item=self._open)
        if piece.arguments:
            yield self._make_event("response.function_call_arguments.delta", delta=piece.arguments)

    def _close_item(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            content_fields = {"text": self._text, "logprobs": self._logprobs}
            part = {"type": "output_text", "annotations": [], **content_fields}
            item = {**item, "content": [part], "status": status}
            if self._text:
                yield self._make_event("response.output_text.done", content_index=0, **content_fields)
            yield self._make_event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": self._text}
            item = {**item, "content": [part], "status": status}
            yield self._make_event("response.reasoning_text.done", content_index=0, text=self._text)
            yield self._make_event("response.content_part.done", content_index=0, part=part)
        elif self._call is not None:
            content_fields = {"name": self._call.name, "arguments": self._call.arguments}
            item = {**item, **content_fields, "status": status}
            yield self._make_event("response.function_call_arguments.done", **content_fields)
        yield self._make_event("response.output_item.done", item=item)
        self.closed_items.append(item)
        self._open = self._call = None

    def _make_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        place = {} if "item" in fields else {"item_id": self._open["id"]}
        return {"type": kind, "output_index": len(self.closed_items), **place, **fields}

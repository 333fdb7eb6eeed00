"""Output items of a response, and the events that tell of them as they grow."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from memserve.api.plan import Generation
from memserve.api.reply import Delta
from memserve.api.shapes import ChatShape
from memserve.api.tools.parse import Piece, ToolCall

Json = dict[str, Any]
Event = Json


class Items:
    """The output of one response: feed it each delta, send the events that it yields."""

    def __init__(self, plan: Generation, shape: ChatShape) -> None:
        self._plan, self._shape = plan, shape
        self.done: list[Json] = []
        self._open: Json | None = None
        self._text = ""
        self._logprobs: list[Json] = []  # of the open message
        self._fresh: list[Json] = []  # that no event has told yet
        self._call: ToolCall | None = None

    @property
    def text(self) -> str:
        """The text of all messages."""
        parts = [part["text"] for item in self.done if item["type"] == "message" for part in item["content"]]
        return "".join(parts)

    def push(self, delta: Delta) -> Iterator[Event]:
        """The events of ``delta``."""
        if self._plan.logprobs is not None:
            entries = delta.sequence.logprobs[delta.first : delta.last]
            self._fresh += [self._shape.entry(self._plan, entry) for entry in entries]
        for piece in (Piece(delta.text),) if delta.pieces is None else delta.pieces:
            if piece.call is not None:
                yield from self._arguments(piece)
            elif piece.reasoning:
                yield from self._thought(piece.reasoning)
            elif piece.content:
                yield from self._content(piece.content)

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """The end: what is open is closed. A response without any item has an empty message."""
        if self._open is None and not self.done:
            yield from self._begin_message()
        yield from self._close("completed" if complete else "incomplete")

    def _content(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "message":
            yield from self._close("completed")
            yield from self._begin_message()
        fresh, self._fresh = self._fresh, []
        self._text += text
        self._logprobs += fresh
        yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=fresh)

    def _thought(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != "reasoning":
            yield from self._close("completed")
            opened: Json = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": []}
            self._open, self._text = {**opened, "status": "in_progress"}, ""
            yield self._event("response.output_item.added", item=self._open)
            part = {"type": "reasoning_text", "text": ""}
            yield self._event("response.content_part.added", content_index=0, part=part)
        self._fresh.clear()  # log probabilities are those of the answer
        self._text += text
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _begin_message(self) -> Iterator[Event]:
        opened: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": []}
        self._open = {**opened, "status": "in_progress"}
        self._text, self._logprobs = "", []
        yield self._event("response.output_item.added", item=self._open)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", content_index=0, part=part)

    def _arguments(self, piece: Piece) -> Iterator[Event]:
        call = piece.call
        assert call is not None
        if piece.begins:
            yield from self._close("completed")
            self._call = call
            named = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.call_id}
            self._open = {**named, "name": call.name, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", item=self._open)
        if piece.arguments:
            yield self._event("response.function_call_arguments.delta", delta=piece.arguments)

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            said = {"text": self._text, "logprobs": self._logprobs}
            part = {"type": "output_text", "annotations": [], **said}
            item = {**item, "content": [part], "status": status}
            if self._text:
                yield self._event("response.output_text.done", content_index=0, **said)
            yield self._event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            part = {"type": "reasoning_text", "text": self._text}
            item = {**item, "content": [part], "status": status}
            yield self._event("response.reasoning_text.done", content_index=0, text=self._text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        elif self._call is not None:
            said = {"name": self._call.name, "arguments": self._call.arguments}
            item = {**item, **said, "status": status}
            yield self._event("response.function_call_arguments.done", **said)
        yield self._event("response.output_item.done", item=item)
        self.done.append(item)
        self._open = self._call = None

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        place = {} if "item" in fields else {"item_id": self._open["id"]}
        return {"type": kind, "output_index": len(self.done), **place, **fields}

"""Server-sent events of OpenAI-compatible servers, parsed as their bytes arrive (level 4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

DONE = b"[DONE]"


class PromptDetails(msgspec.Struct, frozen=True):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """What the server counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    """The news of a chat chunk; thinking models send part of it as reasoning."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk of either endpoint."""

    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None

    @property
    def news(self) -> str:
        """Generated text."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def spoken(self) -> str:
        """The part of it that belongs into the chat's history: no reasoning."""
        return (self.text if self.delta is None else self.delta.content) or ""


class Chunk(msgspec.Struct, frozen=True):
    """One event; unknown fields are ignored."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    memserve: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


class EventReader:
    """Cuts a byte stream into events, however the network cut it."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False
        """``[DONE]`` was seen."""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """The events that ``data`` completes. Raises ``msgspec.DecodeError`` for what is no JSON of this shape."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if not line.startswith(b"data:"):  # blank lines, comments (": ping"), event names
                continue
            payload = line[5:].strip()
            if payload == DONE:
                self.done = True
            elif payload:
                yield _decode(payload)

"""``--log-requests``: one line a request, with its account and without its content (level 4).

A line names ids, tenant, counts, times and instances. It has no text, no token, no key and no salt. Nothing in it is a
client's own but the ``x-request-id``, whose alphabet is bounded.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import UTC, datetime
from typing import TextIO

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memserve.api.body import TENANT_KEY
from memserve.api.exchange import REQUEST_ID_KEY
from memserve.api.guard import route_of
from memserve.api.reply import Reply
from memserve.types import RequestLogFormat
from memserve.units import NS_PER_MS

REPLY_KEY = "memserve.reply"
"""Where an endpoint leaves its :class:`Reply` in the ASGI scope."""

LINES_MAX = 4096
"""Lines that wait for a reader of stderr that is slow; further ones are left out and counted."""

CLOSE_S = 2.0

Line = dict[str, str | int | float | bool | list[str] | None]


class LineWriter:
    """Writes lines from a thread of its own: a reader that stands still must not stop the event loop."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_MAX)
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="memserve-request-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Never blocks."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """What waits has a moment to be written."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            left_out, self._left_out = self._left_out, 0
            try:
                if left_out:
                    self._stream.write(f"{left_out} lines about requests were left out: stderr is read too slowly\n")
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                return  # the reader has left, or the stream is closed


class RequestLog:
    """ASGI middleware around the whole application: a line for each request below ``/v1/``."""

    def __init__(self, app: ASGIApp, kind: RequestLogFormat, model: str, writer: LineWriter) -> None:
        """``model``: its served name."""
        self._app, self._kind, self._model, self._writer = app, kind, model, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        started_ns, status = time.monotonic_ns(), 0

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            line = self._line(scope, status or 499, started_ns)
            is_json = self._kind is RequestLogFormat.JSON
            self._writer.write(msgspec.json.encode(line).decode() if is_json else plain(line))

    def _line(self, scope: Scope, status: int, started_ns: int) -> Line:
        now_ns = time.monotonic_ns()
        line: Line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": scope.get(REQUEST_ID_KEY, ""),
            "tenant": scope.get(TENANT_KEY, ""),
            "method": scope["method"],
            "route": route_of(scope["path"]),
            "status": status,
            "total_ms": round((now_ns - started_ns) / NS_PER_MS, 1),
        }
        reply = scope.get(REPLY_KEY)
        return line | account(reply, self._model, started_ns) if isinstance(reply, Reply) else line


def account(reply: Reply, model: str, started_ns: int) -> Line:
    """What one answer took. ``finish_reason`` of several sequences: each reason once, in order; ``incomplete``: the
    client left, the deadline passed, or the server ended."""
    reasons = [sequence.stream.finish_reason for sequence in reply.sequences]
    shown = dict.fromkeys(reason.value if reason is not None else "incomplete" for reason in reasons)
    first_ns = reply.first_token_ns
    return {
        "model": model,
        "stream": reply.plan.stream,
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
        "finish_reason": ",".join(shown),
        "ttft_ms": round((first_ns - started_ns) / NS_PER_MS, 1) if first_ns is not None else None,
        "instances": reply.instances,
    }


def plain(line: Line) -> str:
    """``name=value`` pairs; nothing in a value needs quotes. A value that is not known, or empty, is ``-``."""
    return " ".join(f"{name}={_word(value)}" for name, value in line.items())


def _word(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None or value == "" else str(value).replace(" ", "_")

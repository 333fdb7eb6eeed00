"""Middleware around all routes: keys and errors in OpenAI's form, web origins, the log of requests.

A line of the log names ids, tenant, counts, times and instances. It has no text, no token, no key and no salt. The only
client input in it is the ``x-request-id``, which has a restricted alphabet.

API keys, and the tenants they stand for.

Paths of OpenAI's reference that no model of this server answers, each with the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import queue
import re
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TextIO

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memserve.api.http.errors import (
    ApiError,
    echo,
    from_user_error,
    internal,
    is_message_path,
    message_error,
    shutting_down,
    unauthorized,
)
from memserve.api.http.limits import TENANT_KEY, ClientGone, header
from memserve.api.http.request import REQUEST_ID_KEY
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.response.reply import Account, Reply
from memserve.api.openai.response.responders import send_json
from memserve.base.errors import UserError
from memserve.base.types import RequestLogFormat
from memserve.base.units import NS_PER_MS
from memserve.system.secrets import Followed

_NO_KEY = re.compile(r"[^=]*=")
"""``NAME=``: what is left of ``NAME=$KEY`` when the variable is empty. It must not become a key."""
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.*[^=].*)")


ApiKeys = Sequence[str] | Followed[tuple[str, ...]]
"""As given on the command line: ``KEY``, or ``NAME=KEY`` for a tenant of its own. Those of a file may change."""

_Tenants = list[tuple[bytes, str]]


class KeyRing:
    """Maps API keys to tenants. Tenants never share KV."""

    def __init__(self, keys: ApiKeys = ()) -> None:
        """Raises :class:`UserError` for malformed keys; in a file that changes, they change nothing."""
        followed = keys if isinstance(keys, Followed) else Followed.of_constant(tuple(keys))
        self._followed_tenants = followed.derive_value(_tenants_of)

    @property
    def _tenants(self) -> _Tenants:
        return self._followed_tenants.value()

    @property
    def is_open(self) -> bool:
        """No key is required."""
        return not self._tenants

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of an ``Authorization`` header. Raises :class:`ApiError` 401.

        The digest of every key is compared in constant time, so the duration reveals neither a key nor its length.
        """
        if self.is_open:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode("utf-8", "surrogateescape"))
        tenants = [tenant for key_digest, tenant in self._tenants if hmac.compare_digest(key_digest, digest)]
        if scheme.lower() != "bearer" or not tenants:
            raise unauthorized()
        return tenants[0]


def _tenants_of(keys: Sequence[str]) -> _Tenants:
    tenants_by_digest: dict[bytes, str] = {}
    for text in keys:
        tenant, key = split_key(text)
        digest = _digest(key.encode())
        if digest in tenants_by_digest:
            raise UserError("the same API key is given twice", hint="one key belongs to one tenant", param="api_key")
        tenants_by_digest[digest] = tenant
    return list(tenants_by_digest.items())


def split_key(text: str) -> tuple[str, str]:
    """Tenant and key of ``KEY`` or ``NAME=KEY``. Raises :class:`UserError` for an empty key, in either form."""
    match = _NAMED.fullmatch(text)
    tenant, key = match.groups() if match else ("", text)
    if not key or _NO_KEY.fullmatch(text):
        hint = "is a variable unset? Give a key that itself ends with = as NAME=KEY"
        raise UserError("an API key is empty", hint=hint, param="api_key")
    if not key.isascii() or not key.isprintable() or any(char.isspace() for char in key):
        hint = "give KEY or NAME=KEY"
        raise UserError("an API key must be printable ASCII without spaces", hint=hint, param="api_key")
    return tenant, key


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32).digest()


_NO_FOLDER = (
    "Files and batches are kept in the folder of --metadata, and this server has none: start it with --metadata FOLDER,"
    " without --in-process and --engine"
)
_REASONS = {
    "audio": "Audio is not supported: this server's models read and write text",
    "images": "Images are not supported: this server's models read and write text",
    "videos": "Videos are not supported: this server's models read and write text",
    "realtime": "Audio is not supported: this server's models read and write text",
    "moderations": "Moderation is not supported: this server has no model for it",
    "files": _NO_FOLDER,
    "uploads": "Files are not taken in parts: send a whole one (POST /v1/files), or a document (PUT /v1/documents/ID)",
    "batches": _NO_FOLDER,
    "fine_tuning": "Fine-tuning is not supported",
    "assistants": "Assistants are not supported: use POST /v1/responses",
    "threads": "Threads are not supported: use POST /v1/responses with previous_response_id",
    "vector_stores": "Vector stores are not supported",
}
"""By the first part of the path below ``/v1/``."""


def why_unserved(path: str) -> str | None:
    """Why there is nothing at ``path``; ``None``: it is no path of OpenAI's."""
    below = path.removeprefix("/v1/")
    return None if below == path else _REASONS.get(below.partition("/")[0])


log = logging.getLogger(__name__)

WORK_ROUTES = (
    "/invocations", "/tokenize", "/detokenize", "/tokenizer_info", "/rerank", "/v2/rerank", "/score",
    "/pooling", "/v2/embed",
)  # fmt: skip
"""Outside of ``/v1/``, where clients of others look for them; they need a key as well."""
OPERATOR_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""They need an operator's key, where operators have keys of their own."""
KNOWN_ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings",
    "/v1/rerank", "/v1/score", "/v1/models", "/health", "/metrics", "/openapi.json", "/version",
    "/ping", "/load", *WORK_ROUTES, *OPERATOR_ROUTES,
)  # fmt: skip
"""Labels of the request counter: paths that clients invent must not add labels."""

NAMED_ROUTES = (
    "/v1/batches", "/v1/documents", "/v1/files", "/v1/responses", "/v1/sessions", "/engines", "/adapters", "/ui",
)  # fmt: skip
"""Routes with names as paths below them."""


def route_of(path: str) -> str:
    """The label of a path in metrics and logs."""
    for route in NAMED_ROUTES:
        if path == route or path.startswith(f"{route}/"):
            return route
    return path if path in KNOWN_ROUTES else "other"


def is_work(path: str) -> bool:
    """Whether requests for ``path`` need a key."""
    return (path.startswith("/v1/") and path not in OPERATOR_ROUTES) or path in WORK_ROUTES


class Answered:
    """What the client of a request was sent. One note serves all middleware around an application."""

    __slots__ = ("began_ns", "status")

    def __init__(self) -> None:
        self.status = 0
        """0: nothing yet."""
        self.began_ns: int | None = None
        """When its answer began, by the monotonic clock."""


ANSWERED_KEY = "memserve.answered"
"""Where the ASGI scope has its :class:`Answered`."""


def wrap_send(scope: Scope, send: Send) -> tuple[Answered, Send]:
    """The note of a request, and ``send`` as it keeps it."""
    earlier_note: Answered | None = scope.get(ANSWERED_KEY)
    if earlier_note is not None:
        return earlier_note, send
    note = scope[ANSWERED_KEY] = Answered()

    async def send_noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            note.status, note.began_ns = message["status"], time.monotonic_ns()
        await send(message)

    return note, send_noting


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, keys: KeyRing, metrics: ApiMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if is_message_path(scope["path"]):
            send = _send_with_id(scope, send)
        answered, send = wrap_send(scope, send)
        self._metrics.in_progress.value += 1
        try:
            error = await self._run_app(scope, receive, send)
            if error is not None and answered.status == 0:
                await send_error(scope, send, error)
        finally:
            self._metrics.in_progress.value -= 1
        self._metrics.count_http_request(route_of(scope["path"]), answered.status or 499)  # 499: the client left first

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> ApiError | None:
        """Run the application. Returns the error that the client must get, unless an answer has begun."""
        try:
            if is_work(scope["path"]) and TENANT_KEY not in scope:  # a batch's requests have its tenant
                scope[TENANT_KEY] = self._keys.tenant_of(authorization_of(scope))
            await self._app(scope, receive, send)
        except ApiError as error:
            return error
        except UserError as error:
            return from_user_error(error)
        except ClientGone:
            self._metrics.disconnected.value += 1
        except asyncio.CancelledError:  # the server waits no longer for this request: it still gets an answer
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return shutting_down()
        except Exception:
            log.exception("failed on %s %s", scope["method"], scope["path"])
            return internal()
        return None


def authorization_of(scope: Scope) -> str | None:
    """As clients of OpenAI and of Anthropic send their key."""
    key = header(scope, b"x-api-key")
    return header(scope, b"authorization") or (None if key is None else f"Bearer {key}")


async def send_error(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer with ``error``, in the form of the interface that was asked."""
    await send_json(send, error.status, _encode_error(error, scope), error.headers)


def _encode_error(error: ApiError, scope: Scope) -> bytes:
    """In the form of the interface that was asked."""
    if not is_message_path(scope["path"]):
        return error.encode_body()
    return msgspec.json.encode(message_error(error, scope.get(REQUEST_ID_KEY)))


def _send_with_id(scope: Scope, send: Send) -> Send:
    """``send``, with the request's id under Anthropic's name as well."""

    async def send_naming(message: Message) -> None:
        if message["type"] == "http.response.start":
            id_field = (b"request-id", scope.get(REQUEST_ID_KEY, "").encode())
            message = {**message, "headers": [*message.get("headers", ()), id_field]}
        await send(message)

    return send_naming


def json_page(value: object, status: int = 200) -> Response:
    """An answer of JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own errors (unknown route, wrong method) in OpenAI's form."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    shown = echo(f"{request.method} {request.url.path}")
    message = {404: f"Unknown request URL: {shown}", 405: f"Not allowed to {shown}"}.get(status, "Request failed")
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    if status == 404 and (reason := why_unserved(request.url.path)):
        message, code = reason, "not_served"
    body = _encode_error(ApiError(status, message, code=code), request.scope)
    return Response(body, status, headers, "application/json")


EXPOSED = b"x-request-id, request-id, retry-after"
"""Headers of answers that a page may read."""

METHODS = b"GET, POST, PUT, DELETE, OPTIONS"
PREFLIGHT_S = b"600"
"""How long a browser may remember the answer to a preflight."""

_FIELDS = re.compile(r"[A-Za-z0-9_-]+(?: *, *[A-Za-z0-9_-]+)*")
_FIELDS_CHARS_MAX = 1000
_USUAL_FIELDS = "authorization, content-type, x-api-key, anthropic-version, x-request-id, x-memserve-explain"


class Cors:
    """ASGI middleware. Without origins it does nothing, and browsers block pages of other origins."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._allows_all = "*" in origins
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" and self._origins else None
        if headers is None or (origin := headers.get("origin")) is None:
            await self._app(scope, receive, send)
            return
        allowed = self._allow_headers(origin)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, allowed, send)
            return

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *allowed]}
            await send(message)

        await self._app(scope, receive, send_with_origin)

    def _allow_headers(self, origin: str) -> list[tuple[bytes, bytes]]:
        """The headers that let a page of ``origin`` read the answer; for others only what caches must know."""
        if self._allows_all:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        vary = (b"vary", b"origin")
        if origin.lower() not in self._origins:
            return [vary]
        allow_origin = (b"access-control-allow-origin", origin.encode("latin-1"))
        return [allow_origin, (b"access-control-expose-headers", EXPOSED), vary]


async def _preflight(headers: Headers, allowed: list[tuple[bytes, bytes]], send: Send) -> None:
    """Answer a browser's preflight, which comes before the request and without its key."""
    requested_fields = headers.get("access-control-request-headers", "").strip()
    fields = (
        requested_fields
        if len(requested_fields) <= _FIELDS_CHARS_MAX and _FIELDS.fullmatch(requested_fields)
        else _USUAL_FIELDS
    )
    answer = [
        *allowed,
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", fields.encode("latin-1")),
        (b"access-control-max-age", PREFLIGHT_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body", "body": b""})


REPLY_KEY = "memserve.reply"
"""Where an endpoint leaves its :class:`Reply` in the ASGI scope."""

TRACE_KEY = "memserve.trace"
"""Where the ASGI scope has the id of a request's trace, 32 hexadecimal digits; absent without traces."""

LINES_MAX = 4096
"""Lines that may wait while stderr is read too slowly; further ones are left out and counted."""

CLOSE_S = 2.0

Line = dict[str, str | int | float | bool | list[str] | None]


class LineWriter:
    """Writes lines from its own thread, so that a stalled reader of stderr cannot block the event loop."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(LINES_MAX)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write_lines, name="memserve-request-log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Never blocks."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Give waiting lines a moment to be written."""
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            left_out, self._left_out = self._left_out, 0
            try:
                if left_out:
                    self._stream.write(f"{left_out} lines about requests were left out: stderr is read too slowly\n")
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                return  # the reader is gone, or the stream is closed


class RequestLog:
    """ASGI middleware around the whole application: a line for each request of a client (:func:`is_work`)."""

    def __init__(self, app: ASGIApp, kind: RequestLogFormat, model: str, writer: LineWriter) -> None:
        """``model``: its served name."""
        self._app, self._kind, self._model, self._writer = app, kind, model, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_work(scope["path"]):
            await self._app(scope, receive, send)
            return
        started_ns = time.monotonic_ns()
        answered, send = wrap_send(scope, send)
        try:
            await self._app(scope, receive, send)
        finally:
            line = self._log_line(scope, answered.status or 499, started_ns)
            is_json = self._kind is RequestLogFormat.JSON
            self._writer.write(msgspec.json.encode(line).decode() if is_json else plain(line))

    def _log_line(self, scope: Scope, status: int, started_ns: int) -> Line:
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
        if (trace_id := scope.get(TRACE_KEY)) is not None:
            line["trace_id"] = trace_id
        reply = scope.get(REPLY_KEY)
        return (
            line | account_fields(reply.make_account(), self._model, started_ns) if isinstance(reply, Reply) else line
        )


def account_fields(account: Account, model: str, started_ns: int) -> Line:
    """The counts and times of one answer. ``finish_reason`` of several sequences: each reason once, in order;
    ``incomplete``: the client left, the deadline passed, or the server ended."""
    shown = dict.fromkeys(reason.value if reason is not None else "incomplete" for reason in account.finish_reasons)
    first_ns = account.first_ns
    return {
        "model": model,
        "stream": account.stream,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.cached_tokens,
        "output_tokens": account.output_tokens,
        "finish_reason": ",".join(shown),
        "ttft_ms": round((first_ns - started_ns) / NS_PER_MS, 1) if first_ns is not None else None,
        "instances": account.instances,
    }


def plain(line: Line) -> str:
    """``name=value`` pairs; no value needs quotes. An unknown or empty value is ``-``."""
    return " ".join(f"{name}={_word(value)}" for name, value in line.items())


def _word(value: object) -> str:
    if isinstance(value, list):
        return ",".join(value) or "-"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value is None or value == "" else str(value).replace(" ", "_")

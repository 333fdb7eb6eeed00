"""Requests of clients, handed on to engines of other projects byte for byte.

::

    body --model, prompt's tokens--> the machine's decision --> engine A --fault--> engine B --first byte--> the client

Where engines have roles, a prompt may be computed by an engine before another one answers (``fleet/relay.py``).
Until the client has its first byte, an engine that fails is replaced by another one; an answer that is no stream is
sent when it is whole, so it is never broken. A stream is sent in whole events, and one that its engine breaks off ends
with one error event. Each wait has a deadline.

What an engine is sent that only computes a prompt, and what the engine gets that answers.

The words are vLLM's, whatever connector moves the KV: the first answers with ``kv_transfer_params``, which the second
is given. Nothing else of the client's request changes, and nothing of the answer.

Why a request of a fleet went where it went: a header of the answer, so that its bytes stay the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from memserve.api.http.client import NOT_SENT_BACK, NOT_SENT_ON, HttpCall, HttpFault
from memserve.api.http.errors import ApiError, echo, rejected, shutting_down
from memserve.api.http.limits import TENANT_KEY, ClientGone, Edge, json_body, wait_for_disconnect
from memserve.api.http.request import REQUEST_ID_KEY
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.endpoints import EXPLAIN_HEADER, wants_explanation
from memserve.api.ui.timelines import FORWARDED_KEY
from memserve.base.units import MIB
from memserve.fleet.host import FleetHost, Ticket
from memserve.fleet.messages import (
    AnswerBegan,
    AttemptFailed,
    ForwardRequest,
    GiveUp,
    Prefill,
    PromptComputed,
    PromptSpace,
)
from memserve.fleet.prompts import PromptReader, read_field, read_fields
from memserve.host.engine import rejection_of

_ASKS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
_OF_ANSWERS = (
    "n", "best_of", "min_tokens", "stream_options", "logprobs", "top_logprobs", "max_completion_tokens",
    "response_format", "structured_outputs",
)  # fmt: skip
"""Fields that say how to answer: one token needs none of them, and some of them forbid it."""
_encode = msgspec.json.encode


def prefill_body(body: bytes) -> bytes:
    """The request of ``body``, a JSON object, for an engine that shall compute its prompt and keep the KV."""
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    chats = "max_completion_tokens" in fields
    for name in _OF_ANSWERS:
        fields.pop(name, None)
    if chats:
        fields["max_completion_tokens"] = 1
    return _encode({**fields, "max_tokens": 1, "stream": False, "kv_transfer_params": _ASKS})


def answering_body(body: bytes, computed: bytes) -> bytes:
    """The request of ``body`` for the engine that answers; ``computed``: what the first one said. Without its word the
    request goes on as it came."""
    params = msgspec.json.decode(computed, type=dict[str, msgspec.Raw]).get("kv_transfer_params")
    if params is None or not bytes(params).startswith(b"{"):
        return body
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return _encode({**fields, "kv_transfer_params": params})


REASON_CHARS_MAX = 200


def explanation(decision: ForwardRequest, failed: Mapping[str, str]) -> tuple[bytes, bytes]:
    """The header, with a JSON object in ASCII. ``failed``: why each engine that was tried before gave no answer."""
    details = {
        "engine": decision.engine,
        "reason": decision.reason,
        "compared_by": decision.space,
        "prompt_tokens": decision.prompt_tokens,
        "matched_tokens": decision.matched_tokens,
        "failed": {name: reason[:REASON_CHARS_MAX] for name, reason in failed.items()},
    }
    return EXPLAIN_HEADER, json.dumps(details).encode()


def timeline_entry(decision: ForwardRequest | Prefill, failed: Mapping[str, str]) -> dict[str, Any]:
    """A decision, for a timeline. Counts of tokens only where the prompt was compared by its tokens."""
    entry: dict[str, Any] = {"instances": [decision.engine]}
    if not isinstance(decision, ForwardRequest):
        return entry
    if decision.space is PromptSpace.TOKENS:
        entry |= {"prompt_tokens": decision.prompt_tokens, "cached_tokens": decision.matched_tokens}
    facts = {"reason": decision.reason, "compared_by": decision.space.value}
    facts |= {f"failed_at {name}": reason[:REASON_CHARS_MAX] for name, reason in failed.items()}
    return entry | {"story": [{"fact": fact, "value": value} for fact, value in facts.items()]}


ANSWER_BYTES_MAX = 64 * MIB
EVENT_BYTES_MAX = 4 * MIB
_ELSEWHERE = (404, 408, 425, 429)
"""Client errors that another engine may not make. All other ones are the client's own."""
_NOT_ENGINES = frozenset((b"authorization", b"x-request-id", b"cookie"))
"""Of a client, and not for engines of others."""
_FIELDS = (b"data:", b":", b"event:", b"id:", b"retry:")
_DONE = b"[DONE]"


class Relay:
    """The ASGI application of the generating routes, and what the server must know of its requests."""

    def __init__(self, host: FleetHost, edge: Edge, metrics: ApiMetrics, silence_s: float, has_keys: bool) -> None:
        """``silence_s``: how long an engine may say nothing in the middle of a request. ``has_keys``: keys of clients
        are the router's, and no engine's."""
        self._host, self._edge, self._metrics = host, edge, metrics
        self._silence_s, self._has_keys = silence_s, has_keys
        self._prompts = PromptReader(host)
        self.draining = False

    @property
    def calls_open(self) -> int:
        """Requests that are being answered."""
        return self._host.requests_open

    def end_all(self) -> int:
        """End all of them with a 503. Returns their number."""
        return self._host.end_all(shutting_down())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.draining:
            raise shutting_down()
        async with contextlib.AsyncExitStack() as stack:
            body = await stack.enter_async_context(json_body(scope, receive, self._edge))
            fields = read_fields(body)
            ticket = self._host.submit_prompt(await self._prompts.read_prompt(fields, scope[TENANT_KEY]))
            watcher = asyncio.create_task(_end_on_disconnect(ticket, receive))
            is_cut = False
            try:
                answer = await self._first_answer(ticket, scope, body, read_field(fields, "stream", bool) or False)
                self._host.post_event(AnswerBegan(ticket.request_id))
                del body, fields
                await stack.aclose()  # the body must not stay in memory while the answer is sent
                is_cut = await answer.send_to_client(ticket, send)
            finally:
                watcher.cancel()
                if ticket.call is not None:
                    ticket.call.close()
                self._host.finish_request(ticket, is_cut=is_cut)

    async def _first_answer(self, ticket: Ticket, scope: Scope, body: bytes, stream: bool) -> _Answer:
        """The first answer that an engine gives. Raises :class:`ApiError` when none does."""
        call = ForwardedCall(scope["path"], self._forwarded_headers(scope), self._silence_s)
        attempts = Attempts(self._host, ticket, call, self._metrics)
        while True:
            decision = await attempts.next_decision()
            scope[FORWARDED_KEY] = partial(timeline_entry, decision, attempts.failures)
            if isinstance(decision, Prefill):
                body = await attempts.compute_prompt(decision, body)
                continue
            answer = await attempts.send_request(decision.engine, body, stream=stream)
            if answer is not None:
                answer.headers += [explanation(decision, attempts.failures)] if wants_explanation(scope) else []
                return answer

    def _forwarded_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Of the client, without those of its connection; the engine's key instead of the client's."""
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_SENT_ON | _NOT_ENGINES]
        headers += [(b"accept-encoding", b"identity"), (b"x-request-id", scope[REQUEST_ID_KEY].encode("latin-1"))]
        if (key := self._host.engine_key) is not None:
            headers.append((b"authorization", b"Bearer %b" % key.encode()))
        elif not self._has_keys:
            headers += [header for header in scope["headers"] if header[0] == b"authorization"]
        return headers


@dataclass(frozen=True, slots=True)
class ForwardedCall:
    """What engines are sent of a request, but for its body."""

    path: str
    headers: list[tuple[bytes, bytes]]
    silence_s: float
    """How long an engine may say nothing in the middle of it."""


class Attempts:
    """What the machine decides for one request, and the engines that it is sent to."""

    def __init__(self, host: FleetHost, ticket: Ticket, call: ForwardedCall, metrics: ApiMetrics) -> None:
        self._host, self._ticket, self._call, self._metrics = host, ticket, call, metrics
        #: why each engine that was tried gave no answer
        self.failures: dict[str, str] = {}

    async def next_decision(self) -> ForwardRequest | Prefill:
        """Which engine does what next. Raises :class:`ApiError` where none does."""
        decision = await self._ticket.next_decision()
        if isinstance(decision, GiveUp):
            raise give_up_error(decision)
        if not isinstance(decision, ForwardRequest | Prefill):
            self._metrics.rejected.value += 1
            raise rejected(rejection_of(decision))
        return decision

    async def compute_prompt(self, decision: Prefill, body: bytes) -> bytes:
        """Have the engine compute the prompt of ``body``. Returns the body for the one that answers: the machine
        decides anew, whether it was computed or not."""
        answer = await self.send_request(decision.engine, prefill_body(body))
        if answer is None:
            return body
        assert self._ticket.call is not None
        self._ticket.call.close()
        self._host.post_event(PromptComputed(self._ticket.request_id))
        return answering_body(body, answer.first) if answer.status == 200 else body

    async def send_request(self, engine: str, body: bytes, *, stream: bool = False) -> _Answer | None:
        """The answer of ``engine``. None: it gave none, and the machine decides anew."""
        ticket, silence_s = self._ticket, self._call.silence_s
        ticket.call = HttpCall(self._host.specs[engine].url)
        try:
            await ticket.call.send_request("POST", self._call.path, self._call.headers, body, silence_s)
            return await _answer_of(ticket.call, stream, silence_s)
        except HttpFault as fault:
            ticket.call.close()
            self.failures[engine] = fault.reason
            if ticket.end_error is not None:
                raise ticket.end_error from None
            self._host.post_event(
                AttemptFailed(ticket.request_id, fault.reason, fault.status, fault.retry_after_s, fault.refuses)
            )
            return None


async def _end_on_disconnect(ticket: Ticket, receive: Receive) -> None:
    await wait_for_disconnect(receive)
    ticket.end_request(ClientGone())


def give_up_error(action: GiveUp) -> ApiError:
    """The error of a request that no engine could answer."""
    headers = {} if action.retry_after_s is None else {"retry-after": str(max(1, round(action.retry_after_s)))}
    code = {404: "model_not_found", 429: "rate_limit_exceeded", 503: "no_engine"}.get(action.status, "engine_failed")
    kind = "rate_limit_error" if action.status == 429 else "server_error"
    return ApiError(action.status, action.reason, kind=kind, code=code, headers=headers)


# -- answers


@dataclass(slots=True)
class _Answer:
    """An answer that has begun: nothing of it was sent yet."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    rest: AsyncIterator[bytes] | None = None
    """The further events of a stream; ``None``: ``first`` is the whole body."""

    async def send_to_client(self, ticket: Ticket, send: Send) -> bool:
        """Send it. Returns whether its engine broke it off."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        if self.rest is None:
            await send({"type": "http.response.body", "body": self.first})
            return False
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        last, is_cut = b"", False
        try:
            async for events in self.rest:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except HttpFault as fault:
            if ticket.end_error is not None and not isinstance(ticket.end_error, ApiError):
                raise ticket.end_error from None
            is_cut = ticket.end_error is None
            message = f"The stream ends here: {fault.reason}"
            error = ticket.end_error or ApiError(fault.status, message, kind="server_error", code="engine_failed")
            assert isinstance(error, ApiError)
            last = b"data: " + error.encode_body() + b"\n\ndata: " + _DONE + b"\n\n"
        await send({"type": "http.response.body", "body": last})
        return is_cut


async def _answer_of(call: HttpCall, stream: bool, silence_s: float) -> _Answer:
    """The answer, as far as it must be known before anything is sent. Raises :class:`HttpFault` for one that another
    engine may give better."""
    headers = [header for header in call.headers if header[0] not in NOT_SENT_BACK]
    kind = call.header(b"content-type").partition(";")[0].strip().lower()
    if call.status == 200 and stream:
        if kind != "text/event-stream":
            raise HttpFault(f"it answered a stream with {echo(kind) or 'no content type'}")
        rest = whole_events(call.body_pieces(silence_s))
        try:
            return _Answer(200, headers, await anext(rest), rest)
        except StopAsyncIteration:
            raise HttpFault("its stream is empty") from None
    body = await call.read_body(ANSWER_BYTES_MAX, silence_s)
    if call.status == 200:
        _check_object(body, kind)
    elif is_failure(call.status):
        busy = call.status in (429, 503)
        status = call.status if busy or call.status == 404 else 502
        excerpt = echo(body.decode("utf-8", "replace"), 120)
        wait_s = _seconds(call.header(b"retry-after")) if busy else None
        raise HttpFault(f"it said {call.status}: {excerpt}", status=status, retry_after_s=wait_s)
    return _Answer(call.status, headers, body)


def is_failure(status: int) -> bool:
    """Whether another engine may answer better than with this status, which is not 200."""
    return not 400 <= status < 500 or status in _ELSEWHERE


def _seconds(text: str) -> float:
    return min(60.0, float(text)) if text.isdecimal() and text.isascii() else 1.0


def _check_object(body: bytes, kind: str) -> None:
    try:
        msgspec.json.decode(body, type=Mapping[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        raise HttpFault(f"its answer is no JSON object ({echo(kind) or 'no content type'})") from None


async def whole_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream in whole events, byte for byte. Raises :class:`HttpFault` where it is no stream of events, or ends
    without ``[DONE]``."""
    buffer, is_done = bytearray(), False
    async for piece in pieces:
        buffer += piece
        end = max(buffer.rfind(b"\n\n") + 2, buffer.rfind(b"\r\n\r\n") + 4)
        if end < 4:
            if len(buffer) > EVENT_BYTES_MAX:
                raise HttpFault("an event of its stream never ends")
            continue
        events = bytes(buffer[:end])
        del buffer[:end]
        is_done = _check_events(events) or is_done
        yield events
    if buffer.strip():
        raise HttpFault("its stream ended in the middle of an event")
    if not is_done:
        raise HttpFault("its stream ended too early")


def _check_events(events: bytes) -> bool:
    """Whether the stream's end is among them."""
    is_done = False
    for line in events.splitlines():
        if line and not line.startswith(_FIELDS):
            raise HttpFault("its stream is no stream of events")
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == _DONE:
                is_done = True
            elif not (data.startswith(b"{") and data.endswith(b"}")):
                raise HttpFault("an event of its stream is no JSON object")
    return is_done

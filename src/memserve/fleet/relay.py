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
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from memserve.api.http.client import NOT_SENT_BACK, NOT_SENT_ON, HttpCall, HttpFault
from memserve.api.http.errors import ApiError, bad_request, echo, rejected, shutting_down
from memserve.api.http.limits import TENANT_KEY, ClientGone, Edge, header, json_body, wait_for_disconnect
from memserve.api.http.request import REQUEST_ID_KEY
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.endpoints import EXPLAIN_HEADER, wants_explanation
from memserve.api.openai.response.idempotency import EVENT_HEADER, KEY_HEADER
from memserve.api.ui.timelines import FORWARDED_KEY
from memserve.fleet.answers import ANSWER_BYTES_MAX, EngineAnswer, EventForm, ResponseEvents
from memserve.fleet.engine_client import LOOK_S
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
from memserve.fleet.pairs import CallRequest, PartnerFault, paired_body, paired_headers
from memserve.fleet.prompts import PromptReader, RequestFields, read_field, read_fields
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
        **({"computed_by": decision.computed_by} if decision.computed_by else {}),
        "reason": decision.reason,
        "compared_by": decision.space,
        "prompt_tokens": decision.prompt_tokens,
        "matched_tokens": decision.matched_tokens,
        "failed": {name: reason[:REASON_CHARS_MAX] for name, reason in failed.items()},
    }
    return EXPLAIN_HEADER, json.dumps(details).encode()


def timeline_entry(decision: ForwardRequest | Prefill, failed: Mapping[str, str]) -> dict[str, Any]:
    """A decision, for a timeline. Counts of tokens only where the prompt was compared by its tokens."""
    if not isinstance(decision, ForwardRequest):
        return {"instances": [decision.engine]}
    entry: dict[str, Any] = {"instances": [*filter(None, [decision.computed_by]), decision.engine]}
    if decision.space is PromptSpace.TOKENS:
        entry |= {"prompt_tokens": decision.prompt_tokens, "cached_tokens": decision.matched_tokens}
    facts = {"reason": decision.reason, "compared_by": decision.space.value}
    facts |= {f"failed_at {name}": reason[:REASON_CHARS_MAX] for name, reason in failed.items()}
    return entry | {"story": [{"fact": fact, "value": value} for fact, value in facts.items()]}


_RESPONSES = "/v1/responses"
_STORED = re.compile(rf"{_RESPONSES}/[A-Za-z0-9_-]{{1,256}}(/cancel|/input_items)?")
"""What is asked of engines by an id: nothing else that a client invents becomes a part of their addresses."""
RELAYED_PATHS = ("/v1/completions", "/v1/chat/completions", _RESPONSES)
_NOT_ENGINES = frozenset((b"authorization", b"x-request-id", b"cookie"))
"""Of a client, and not for engines of others."""


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
        refuse_keys(scope)
        async with contextlib.AsyncExitStack() as stack:
            body = await stack.enter_async_context(json_body(scope, receive, self._edge))
            fields = read_fields(body)
            is_response = scope["path"] == _RESPONSES
            if is_response:
                refuse_stored(scope, fields)
            prompt = await self._prompts.read_prompt(fields, scope[TENANT_KEY], has_tokens=not is_response)
            ticket = self._host.submit_prompt(prompt)
            watcher = asyncio.create_task(_end_on_disconnect(ticket, receive))
            is_cut = False
            try:
                is_stream = read_field(fields, "stream", bool) or False
                answer = await self._first_answer(ticket, scope, body, events_of(scope) if is_stream else None)
                self._host.post_event(AnswerBegan(ticket.request_id))
                del body, fields
                await stack.aclose()  # the body must not stay in memory while the answer is sent
                is_cut = await answer.send_to_client(ticket, send)
            finally:
                watcher.cancel()
                ticket.close_calls()
                self._host.finish_request(ticket, is_cut=is_cut)

    # -- answering

    async def _first_answer(self, ticket: Ticket, scope: Scope, body: bytes, events: EventForm | None) -> EngineAnswer:
        """The first answer that an engine gives. ``events``: of the stream that is asked for. Raises :class:`ApiError`
        when none does."""
        attempts = Attempts(self._host, ticket, self._metrics, self._silence_s)
        headers = self._forwarded_headers(scope)
        while True:
            decision = await attempts.next_decision(scope["path"])
            scope[FORWARDED_KEY] = partial(timeline_entry, decision, attempts.failures)
            request = CallRequest(scope["path"], headers, body, self._silence_s)
            if isinstance(decision, Prefill):
                body = await attempts.compute_prompt(decision, request)
                continue
            answer = await attempts.ask_engines(decision, request, events)
            if answer is not None:
                answer.headers += [explanation(decision, attempts.failures)] if wants_explanation(scope) else []
                return answer

    async def find_response(self, request: HttpRequest) -> Response:
        """``/v1/responses/{id}``, and what lies below it: as the first engine answers that knows it."""
        scope, path = request.scope, request.scope["path"]
        if not _STORED.fullmatch(path):
            raise response_not_found(path, "that is no id of a response")
        if scope[TENANT_KEY]:
            raise response_not_found(path, "those of engines are not kept by key")
        query = scope.get("query_string", b"").decode("latin-1")
        target = f"{path}{'?' if query else ''}{query}"
        headers, reasons = self._forwarded_headers(scope), list[str]()
        for view in self._host.machine.engine_views():
            if not view.up or (spec := self._host.specs.get(view.name)) is None:
                continue
            call = HttpCall(spec.url)
            watcher = asyncio.create_task(_abort_on_disconnect(call, request.receive))
            try:
                await call.send_request(request.method, spec.base_path + target, headers, b"", LOOK_S)
                if call.status not in (404, 405, 501):
                    body = await call.read_body(ANSWER_BYTES_MAX, self._silence_s)
                    answer = Response(body, call.status)
                    answer.raw_headers += [header for header in call.headers if header[0] not in NOT_SENT_BACK]
                    return answer
                reasons.append(f"{view.name} does not know it")
            except HttpFault as fault:
                if watcher.done():
                    raise ClientGone from None
                reasons.append(f"{view.name}: {fault.reason}")
            finally:
                watcher.cancel()
                call.close()
        raise response_not_found(path, "; ".join(reasons) or "no engine takes requests")

    def _forwarded_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Of the client, without those of its connection; the engine's key instead of the client's."""
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_SENT_ON | _NOT_ENGINES]
        headers += [(b"accept-encoding", b"identity"), (b"x-request-id", scope[REQUEST_ID_KEY].encode("latin-1"))]
        if (key := self._host.engine_key) is not None:
            headers.append((b"authorization", b"Bearer %b" % key.encode()))
        elif not self._has_keys:
            headers += [header for header in scope["headers"] if header[0] == b"authorization"]
        return headers


class Attempts:
    """What the machine decides for one request, and the engines that it is sent to."""

    def __init__(self, host: FleetHost, ticket: Ticket, metrics: ApiMetrics, silence_s: float) -> None:
        """``silence_s``: how long an engine may say nothing in the middle of it."""
        self._host, self._ticket, self._metrics, self._silence_s = host, ticket, metrics, silence_s
        #: why each engine that was tried gave no answer
        self.failures: dict[str, str] = {}

    async def next_decision(self, path: str) -> ForwardRequest | Prefill:
        """Which engine does what next. Raises :class:`ApiError` where none does; ``path``: of the request."""
        decision = await self._ticket.next_decision()
        if isinstance(decision, GiveUp):
            raise give_up_error(decision, path)
        if not isinstance(decision, ForwardRequest | Prefill):
            self._metrics.rejected.value += 1
            raise rejected(rejection_of(decision))
        return decision

    async def compute_prompt(self, decision: Prefill, request: CallRequest) -> bytes:
        """Have the engine compute the prompt of ``request``. Returns the body for the one that answers: the machine
        decides anew, whether it was computed or not."""
        computing = replace(request, body=prefill_body(request.body))
        try:
            answer = await computing.ask_engine(self._ticket, self._host.specs[decision.engine], None)
        except HttpFault as fault:
            self._note_fault(decision, fault)
            return request.body
        self._ticket.close_calls()
        self._host.post_event(PromptComputed(self._ticket.request_id))
        return answering_body(request.body, answer.first) if answer.status == 200 else request.body

    async def ask_engines(
        self, decision: ForwardRequest, request: CallRequest, events: EventForm | None
    ) -> EngineAnswer | None:
        """The engine's answer; of a pair, both are asked. None: there is none, and the machine decides anew."""
        engine, ticket = self._host.specs[decision.engine], self._ticket
        try:
            if not decision.computed_by:
                return await request.ask_engine(ticket, engine, events)
            partner = self._host.specs[decision.computed_by]
            paired = replace(request, headers=paired_headers(request.headers), body=paired_body(request.body, partner))
            on_computed = partial(self._host.post_event, PromptComputed(ticket.request_id))
            return await paired.ask_pair(ticket, engine, partner, events, on_computed)
        except HttpFault as fault:
            self._note_fault(decision, fault)
            return None

    def _note_fault(self, decision: ForwardRequest | Prefill, fault: HttpFault) -> None:
        self._ticket.close_calls()
        self._host.post_event(_failure_of(self._ticket, decision, fault, self.failures))


def _failure_of(
    ticket: Ticket, decision: ForwardRequest | Prefill, fault: HttpFault, failures: dict[str, str]
) -> AttemptFailed:
    """What the machine is told of an attempt that failed, noted in ``failures`` by engine. Raises why the request
    needs no answer any more, if it does not."""
    if ticket.end_error is not None:
        raise ticket.end_error from None
    engine, is_of_partner = decision.engine, isinstance(fault, PartnerFault)
    if is_of_partner and isinstance(decision, ForwardRequest):
        engine = decision.computed_by
    failures[engine] = fault.reason
    of_call = fault.reason, fault.status, fault.retry_after_s, fault.refuses
    return AttemptFailed(ticket.request_id, *of_call, is_of_partner)


def events_of(scope: Scope) -> EventForm:
    """How the stream that is asked for ends."""
    return ResponseEvents() if scope["path"] == _RESPONSES else EventForm()


def refuse_keys(scope: Scope) -> None:
    """Raise :class:`ApiError` 400 for an ``Idempotency-Key``: engines keep no answers, and what is asked for again
    would be computed again."""
    for name, title in ((KEY_HEADER, "Idempotency-Key"), (EVENT_HEADER, "Last-Event-ID")):
        if header(scope, name.encode()) is not None:
            message = "engines of --engine keep no answers, and a request that comes again is computed again"
            raise bad_request(f"{title} is not for this model: {message}", name, "unsupported_parameter")


def refuse_stored(scope: Scope, fields: RequestFields) -> None:
    """Raise :class:`ApiError` 400 where a response of an engine is to go on that another key's client may have made:
    engines know no tenants."""
    for name in ("previous_response_id", "conversation"):
        if scope[TENANT_KEY] and bytes(fields.get(name, b"null")) != b"null":
            message = "what engines store is not kept by key: send the whole input"
            raise bad_request(f"{name} is not for this model: {message}", name, "unsupported_parameter")


def response_not_found(path: str, why: str) -> ApiError:
    """404: no engine knows a stored response."""
    name = path.removeprefix(f"{_RESPONSES}/").partition("/")[0]
    message = f"No response {echo(name)!r} is stored: {why}"
    return ApiError(404, message, param="response_id", code="response_not_found")


async def _abort_on_disconnect(call: HttpCall, receive: Receive) -> None:
    await wait_for_disconnect(receive)
    call.abort_call("the client left")


async def _end_on_disconnect(ticket: Ticket, receive: Receive) -> None:
    await wait_for_disconnect(receive)
    ticket.end_request(ClientGone())


def no_engine() -> ApiError:
    """503: no engine has answered yet."""
    return ApiError(
        503, "No engine has answered yet", kind="server_error", code="no_engine", headers={"retry-after": "5"}
    )


def give_up_error(action: GiveUp, path: str) -> ApiError:
    """The error of a request for ``path`` that no engine could answer."""
    headers = {} if action.retry_after_s is None else {"retry-after": str(max(1, round(action.retry_after_s)))}
    unknown = "not_found" if path == _RESPONSES else "model_not_found"
    code = {404: unknown, 429: "rate_limit_exceeded", 503: "no_engine"}.get(action.status, "engine_failed")
    kind = "rate_limit_error" if action.status == 429 else "server_error"
    return ApiError(action.status, action.reason, kind=kind, code=code, headers=headers)

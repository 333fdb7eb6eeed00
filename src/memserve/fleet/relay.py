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
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from memserve.api.http.client import NOT_SENT_BACK, NOT_SENT_ON, HttpCall, HttpFault
from memserve.api.http.errors import ApiError, bad_request, echo, model_not_found, rejected, shutting_down
from memserve.api.http.limits import TENANT_KEY, ClientGone, Edge, json_body, wait_for_disconnect
from memserve.api.http.request import REQUEST_ID_KEY
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.endpoints import EXPLAIN_HEADER, wants_explanation
from memserve.api.ui.timelines import FORWARDED_KEY
from memserve.base.types import VOCAB_MAX, Request, StopParams, TokenArray
from memserve.base.units import MIB
from memserve.fleet.host import FleetHost, Ticket
from memserve.fleet.messages import (
    AnswerBegan,
    AttemptFailed,
    ForwardRequest,
    GiveUp,
    Prefill,
    PromptArrived,
    PromptComputed,
    PromptSpace,
)
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
_WHOLE = ("kv_transfer_params", "echo", "prompt_logprobs", "use_beam_search")
"""With these a request is not split: its client does so itself, or the engine that answers reads no KV of others."""
_NOTHING = (b"null", b"false")
_encode = msgspec.json.encode


def may_split(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether one engine may compute the prompt and another one answer: it is one prompt, and nothing forbids it."""
    prompt = bytes(fields.get("prompt", b"")).lstrip()
    is_list = prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b"[", b'"')
    return not is_list and all(bytes(fields.get(name, b"null")) in _NOTHING for name in _WHOLE)


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


RELAYED_PATHS = ("/v1/completions", "/v1/chat/completions")
TOKENIZE_S = 1.0
"""How long an engine has to tokenize a prompt; without its tokens the prompt's text is compared."""
TEXT_BYTES_MAX = 4 * MIB
ANSWER_BYTES_MAX = 64 * MIB
EVENT_BYTES_MAX = 4 * MIB
OUTPUT_TOKENS_USUAL = 256
_ELSEWHERE = (404, 408, 425, 429)
"""Client errors that another engine may not make. All other ones are the client's own."""
_NOT_ENGINES = frozenset((b"authorization", b"x-request-id", b"cookie"))
"""Of a client, and not for engines of others."""
_FOR_TOKENS = ("prompt", "messages", "tools", "tool_choice", "add_special_tokens", "add_generation_prompt",
               "continue_final_message", "chat_template", "reasoning_effort")  # fmt: skip
_FOR_TEMPLATE = ("reasoning_effort", "documents")
_FIELDS = (b"data:", b":", b"event:", b"id:", b"retry:")
_DONE = b"[DONE]"
RequestFields = dict[str, msgspec.Raw]


def read_fields(body: bytes) -> RequestFields:
    """The fields of a request. Raises :class:`ApiError` 400 for anything but a JSON object."""
    try:
        return msgspec.json.decode(body, type=RequestFields)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"The request body is not a JSON object: {error}") from None


def _read_field(fields: RequestFields, name: str, kind: type[Any]) -> Any | None:
    """A field, if it is there and of that kind; what is wrong with it the engine says better."""
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except (KeyError, msgspec.DecodeError, RecursionError):
        return None


def text_numbers(fields: RequestFields) -> TokenArray:
    """The prompt's text as int32, four bytes each. What continues a prompt begins with its numbers."""
    prompt = fields.get("messages", fields.get("prompt", msgspec.Raw(b"")))
    text = (bytes(fields.get("tools", b"")) + bytes(prompt).rstrip(b"] \n\"'"))[:TEXT_BYTES_MAX]
    numbers = np.frombuffer(text[: len(text) // 4 * 4], np.int32) & np.int32(VOCAB_MAX - 1)
    return numbers if len(numbers) else np.zeros(1, np.int32)


class Relay:
    """The ASGI application of the generating routes, and what the server must know of its requests."""

    def __init__(self, host: FleetHost, edge: Edge, metrics: ApiMetrics, silence_s: float, has_keys: bool) -> None:
        """``silence_s``: how long an engine may say nothing in the middle of a request. ``has_keys``: keys of clients
        are the router's, and no engine's."""
        self._host, self._edge, self._metrics = host, edge, metrics
        self._silence_s, self._has_keys = silence_s, has_keys
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
            ticket = self._host.submit_prompt(await self._read_prompt(scope, fields))
            watcher = asyncio.create_task(_end_on_disconnect(ticket, receive))
            is_cut = False
            try:
                answer = await self._first_answer(ticket, scope, body, _read_field(fields, "stream", bool) or False)
                self._host.post_event(AnswerBegan(ticket.request_id))
                del body, fields
                await stack.aclose()  # the body must not stay in memory while the answer is sent
                is_cut = await answer.send_to_client(ticket, send)
            finally:
                watcher.cancel()
                if ticket.call is not None:
                    ticket.call.close()
                self._host.finish_request(ticket, is_cut=is_cut)

    # -- what is asked

    async def _read_prompt(self, scope: Scope, fields: RequestFields) -> PromptArrived:
        model = self._requested_model(fields)
        space, tokens = await self._prompt_numbers(fields, model)
        most = _read_field(fields, "max_completion_tokens", int) or _read_field(fields, "max_tokens", int)
        salt = _read_field(fields, "cache_salt", str)
        request = Request(
            uuid.uuid4().hex,
            tokens,
            stop=StopParams(max(1, most or OUTPUT_TOKENS_USUAL)),
            n=min(128, max(1, _read_field(fields, "n", int) or 1)),
            tenant=scope[TENANT_KEY],
            salt=blake2b(salt.encode(), digest_size=16).hexdigest() if salt else "",
        )
        return PromptArrived(request, model, space, may_split(fields))

    def _requested_model(self, fields: RequestFields) -> str:
        models = self._host.engines_by_model()
        if not models:
            raise no_engine()
        name: str | None = _read_field(fields, "model", str)
        if name is None and len(models) == 1:
            return str(next(iter(models)))
        if name is None:
            raise bad_request(f"Name one of the models: {echo(', '.join(models))}", "model")
        if name not in models:
            raise model_not_found(name, ", ".join(models))
        return name

    async def _prompt_numbers(self, fields: RequestFields, model: str) -> tuple[PromptSpace, TokenArray]:
        token_ids = _read_field(fields, "prompt", list[int]) or next(
            iter(_read_field(fields, "prompt", list[list[int]]) or ()), None
        )
        if token_ids and all(0 <= token < VOCAB_MAX for token in token_ids):
            return PromptSpace.TOKENS, np.array(token_ids, np.int32)
        engine = self._host.machine.tokenizing_engine(model)
        if engine is not None:
            tokens = await self._tokenize_prompt(engine, fields, model)
            if tokens is not None:
                return PromptSpace.TOKENS, tokens
        return PromptSpace.TEXT, text_numbers(fields)

    async def _tokenize_prompt(self, engine: str, request_fields: RequestFields, model: str) -> TokenArray | None:
        fields: dict[str, Any] = {name: request_fields[name] for name in _FOR_TOKENS if name in request_fields}
        template = _read_field(request_fields, "chat_template_kwargs", RequestFields) or {}
        template |= {name: request_fields[name] for name in _FOR_TEMPLATE if name in request_fields}
        fields |= {"chat_template_kwargs": template} if template else {}
        several = _read_field(request_fields, "prompt", list[str])
        if several:
            fields["prompt"] = several[0]
        with contextlib.suppress(HttpFault, msgspec.DecodeError, ValueError):
            body = _encode({"model": model, **fields})
            status, page = await self._host.fetch_page(self._host.specs[engine], "POST", "/tokenize", body, TOKENIZE_S)
            tokens = msgspec.json.decode(page, type=_Tokens).tokens if status == 200 else []
            if tokens and all(0 <= token < VOCAB_MAX for token in tokens):
                return np.array(tokens, np.int32)
        return None

    # -- answering

    async def _first_answer(self, ticket: Ticket, scope: Scope, body: bytes, stream: bool) -> _Answer:
        """The first answer that an engine gives. Raises :class:`ApiError` when none does."""
        headers, failures = self._forwarded_headers(scope), dict[str, str]()
        while True:
            decision = await ticket.next_decision()
            if isinstance(decision, GiveUp):
                raise give_up_error(decision)
            if not isinstance(decision, ForwardRequest | Prefill):
                self._metrics.rejected.value += 1
                raise rejected(rejection_of(decision))
            ticket.call = HttpCall(self._host.specs[decision.engine].url)
            is_answer = isinstance(decision, ForwardRequest)
            scope[FORWARDED_KEY] = partial(timeline_entry, decision, failures)
            try:
                sent_body = body if is_answer else prefill_body(body)
                await ticket.call.send_request("POST", scope["path"], headers, sent_body, self._silence_s)
                answer = await _answer_of(ticket.call, stream and is_answer, self._silence_s)
                if isinstance(decision, ForwardRequest):
                    answer.headers += [explanation(decision, failures)] if wants_explanation(scope) else []
                    return answer
                ticket.call.close()
                if answer.status == 200:
                    body = answering_body(body, answer.first)
                self._host.post_event(PromptComputed(ticket.request_id))
            except HttpFault as fault:
                ticket.call.close()
                failures[decision.engine] = fault.reason
                if ticket.end_error is not None:
                    raise ticket.end_error from None
                failed = AttemptFailed(
                    ticket.request_id, fault.reason, fault.status, fault.retry_after_s, fault.refuses
                )
                self._host.post_event(failed)

    def _forwarded_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Of the client, without those of its connection; the engine's key instead of the client's."""
        headers = [(name, value) for name, value in scope["headers"] if name not in NOT_SENT_ON | _NOT_ENGINES]
        headers += [(b"accept-encoding", b"identity"), (b"x-request-id", scope[REQUEST_ID_KEY].encode("latin-1"))]
        if (key := self._host.engine_key) is not None:
            headers.append((b"authorization", b"Bearer %b" % key.encode()))
        elif not self._has_keys:
            headers += [header for header in scope["headers"] if header[0] == b"authorization"]
        return headers


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def _end_on_disconnect(ticket: Ticket, receive: Receive) -> None:
    await wait_for_disconnect(receive)
    ticket.end_request(ClientGone())


def no_engine() -> ApiError:
    """503: no engine has answered yet."""
    return ApiError(
        503, "No engine has answered yet", kind="server_error", code="no_engine", headers={"retry-after": "5"}
    )


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
    elif not 400 <= call.status < 500 or call.status in _ELSEWHERE:
        busy = call.status in (429, 503)
        status = call.status if busy or call.status == 404 else 502
        excerpt = echo(body.decode("utf-8", "replace"), 120)
        wait_s = _seconds(call.header(b"retry-after")) if busy else None
        raise HttpFault(f"it said {call.status}: {excerpt}", status=status, retry_after_s=wait_s)
    return _Answer(call.status, headers, body)


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

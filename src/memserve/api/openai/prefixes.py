"""Routes of named prefixes: ``/v1/documents``, computed once for many requests, ``/v1/sessions``, conversations whose
KV is kept, and ``/v1/kv_hints``, what else is to be done with cached KV."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive

from memserve.api.http.errors import ApiError, bad_request, echo, engine_silent
from memserve.api.http.limits import TENANT_KEY, json_body
from memserve.api.http.middleware import json_page
from memserve.api.openai.documents import Document, DocumentMemory, Documents, prepare_document
from memserve.api.openai.endpoints import EndpointParts, addressed
from memserve.api.openai.interfaces import ModelNames, PinningEngine, ServingEngine
from memserve.api.openai.kv_hints import (
    VERSION,
    HintPayload,
    HintTarget,
    KvHintsEnvelope,
    PlannedHint,
    plan_hint,
)
from memserve.api.openai.request.messages import check_messages
from memserve.api.openai.request.plan import Caller, digest_salt, prefix_handle, session_handle, session_of
from memserve.api.openai.request.schema import ChatBody, DocumentBody, parse_body
from memserve.api.openai.response.responders import run_requests
from memserve.base.types import NamedPrefix, Request, SamplingParams, StopParams, TokenOutput, salt_of
from memserve.base.units import NS_PER_S, ns_from_s
from memserve.system.loop import EngineStopped

PIN_ANSWER_S = 2.0
"""How long ``PUT`` waits to learn how much is pinned; the document is pinned in any case. Its TTL counts from the
answer, so the pin lasts this much longer."""
_POLL_S = 0.02

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class DocumentRoutes:
    """The handlers. A document, like its KV, is visible to its tenant alone."""

    def __init__(self, shared: EndpointParts, names: ModelNames, documents: Documents) -> None:
        self._shared, self._names, self._documents = shared, names, documents
        self._memory = DocumentMemory(shared.hub.engine)
        self._memory.restore_documents(documents)

    async def put_document(self, request: HttpRequest) -> Response:
        """``PUT /v1/documents/{id}``: 201 when it is new, 200 when it existed; its TTL starts again."""
        document_id, tenant = request.path_params["document_id"], request.scope[TENANT_KEY]
        if not _ID.fullmatch(document_id):
            raise bad_request("a document's id has 1 to 128 letters, digits, or _ . : -", "id")
        model = self._shared.model
        encoder = self._shared.encoder
        async with json_body(request.scope, request.receive, self._shared.edge) as data:

            def prepared(data: bytes = data) -> Document:
                body = parse_body(data, DocumentBody)
                adapter = addressed(body.model, self._names, Caller(tenant)).adapter
                document = prepare_document(body, document_id, encoder, model)
                if adapter is None:
                    return document
                return replace(document, adapter=adapter.digest, model=adapter.name)

            document = await encoder.run_work(tenant, len(data), data, prepared)
        # both hold the body, which may be as large as the document
        del data, prepared
        existed = self._documents.has_document(tenant, document_id)
        cached_tokens = await self._compute_document(document, tenant, request.receive)
        entry = self._documents.put_document(tenant, document, PIN_ANSWER_S)
        await self._memory.store_document(tenant, entry)
        self._pin_document(entry, tenant)
        pinned = await self._pinned_soon(entry, tenant)
        # the answer begins it: computing, writing and pinning may have taken minutes
        self._documents.restart_ttl(tenant, entry)
        return json_page(
            _document_card(entry, pinned, entry.ttl_s) | {"cached_tokens": cached_tokens}, 200 if existed else 201
        )

    async def list_documents(self, request: HttpRequest) -> Response:
        """``GET /v1/documents``: the tenant's own, oldest first."""
        tenant = request.scope[TENANT_KEY]
        documents = self._documents.list_documents(tenant)
        pinned = await self._pinned_tokens(documents, tenant)
        cards = [
            _document_card(document, tokens, self._remaining_s(document))
            for document, tokens in zip(documents, pinned, strict=True)
        ]
        return json_page({"object": "list", "data": cards})

    async def get_document(self, request: HttpRequest) -> Response:
        """``GET /v1/documents/{id}``."""
        tenant = request.scope[TENANT_KEY]
        document = self._documents.get_document(tenant, request.path_params["document_id"])
        (pinned,) = await self._pinned_tokens([document], tenant)
        return json_page(_document_card(document, pinned, self._remaining_s(document)))

    async def delete_document(self, request: HttpRequest) -> Response:
        """``DELETE /v1/documents/{id}``: its KV may be evicted from now on."""
        tenant = request.scope[TENANT_KEY]
        document = self._documents.delete_document(tenant, request.path_params["document_id"])
        engine = self._shared.hub.engine
        if isinstance(engine, PinningEngine):
            engine.unpin_prefix(document.handle, tenant)
        await self._memory.drop_document(tenant, document.document_id)
        return json_page({"id": document.document_id, "object": "document.deleted", "deleted": True})

    async def _compute_document(self, document: Document, tenant: str, receive: Receive) -> int:
        """Run the document through the model: its KV stays in the cache. Returns the tokens that were cached before."""
        request = Request(
            request_id=f"doc-{uuid.uuid4().hex}",
            prompt=document.tokens,
            sampling=SamplingParams(temperature=0.0),
            # a prompt is computed for a token that is drawn; this one is thrown away
            stop=StopParams(max_tokens=1),
            tenant=tenant,
            session=document.handle,
            salt=self._document_salt(document),
        )
        cached_tokens = 0

        def take_output(_: int, output: TokenOutput) -> None:
            nonlocal cached_tokens
            cached_tokens = max(cached_tokens, output.cached_tokens)

        await run_requests(self._shared.hub, [request], receive, take_output)
        return cached_tokens

    def _pin_document(self, document: Document, tenant: str) -> None:
        engine = self._shared.hub.engine
        if isinstance(engine, PinningEngine):
            ttl_ns = ns_from_s(document.ttl_s + PIN_ANSWER_S)
            engine.pin_prefix(document.handle, tenant, document.tokens, ttl_ns, self._document_salt(document))

    def _document_salt(self, document: Document) -> str:
        """A document's KV serves prompts of its own adapter and regime of positions."""
        return salt_of("", document.adapter, self._shared.model.position_regimes.regime_of(len(document.tokens)))

    async def _pinned_soon(self, document: Document, tenant: str) -> int | None:
        """As :meth:`_pinned_tokens`, but waits up to ``PIN_ANSWER_S`` for an engine that does not know yet."""
        if not isinstance(self._shared.hub.engine, PinningEngine):
            return None
        deadline_s = time.monotonic() + PIN_ANSWER_S
        while True:
            (pinned,) = await self._pinned_tokens([document], tenant)
            if pinned is not None or time.monotonic() >= deadline_s:
                return pinned
            await asyncio.sleep(_POLL_S)

    async def _pinned_tokens(self, documents: Sequence[Document], tenant: str) -> Sequence[int | None]:
        """Pinned tokens of each document, from one query to the engine; ``None``: unknown."""
        engine, unknown = self._shared.hub.engine, [None] * len(documents)
        if not isinstance(engine, PinningEngine):
            return unknown
        try:
            handles = [document.handle for document in documents]
            return await asyncio.to_thread(engine.pinned_tokens, handles, tenant)
        except (TimeoutError, EngineStopped):
            return unknown

    def _remaining_s(self, document: Document) -> float:
        return min(document.ttl_s, self._documents.expires_in_s(document))


def _document_card(document: Document, pinned_tokens: int | None, remaining_s: float) -> dict[str, Any]:
    return {
        "id": document.document_id,
        "object": "document",
        "created": document.created_s,
        "endpoint": document.endpoint,
        **({"model": document.model} if document.adapter else {}),
        "tokens": len(document.tokens),
        "pinned_tokens": pinned_tokens,
        "ttl_s": document.ttl_s,
        "expires_in_s": round(remaining_s, 3),
    }


_PlannedTarget = tuple[PlannedHint, HintTarget | None, str]


class SessionRoutes:
    """The handlers. A session is visible to its tenant alone. Sessions of one name with different ``cache_salt`` are
    listed separately and end together, because salts are never shown."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    async def list_sessions(self, request: HttpRequest) -> Response:
        """``GET /v1/sessions``: the sessions with pinned KV, least recently used first."""
        sessions, now_ns = await self._named_sessions(request), time.monotonic_ns()
        cards = [_session_card(name, prefix, now_ns) for name, prefix in sessions]
        return json_page({"object": "list", "data": cards})

    async def delete_session(self, request: HttpRequest) -> Response:
        """``DELETE /v1/sessions/{name}``: its KV may be evicted from now on."""
        name = request.path_params["name"]
        handles = [prefix.handle for session, prefix in await self._named_sessions(request) if session == name]
        if not handles:
            message = f"There is no session {echo(name)!r}: it kept no KV, was deleted, or has expired"
            raise ApiError(404, message, param="name", code="session_not_found")
        if isinstance(self._engine, PinningEngine):
            for handle in handles:
                self._engine.unpin_prefix(handle, request.scope[TENANT_KEY])
        return json_page({"id": name, "object": "session.deleted", "deleted": True})

    async def _named_sessions(self, request: HttpRequest) -> Sequence[tuple[str, NamedPrefix]]:
        """The tenant's sessions by name."""
        if not isinstance(self._engine, PinningEngine):
            return []
        try:
            prefixes = await asyncio.to_thread(self._engine.named_prefixes, request.scope[TENANT_KEY])
        except (TimeoutError, EngineStopped):
            raise engine_silent() from None
        return [(name, prefix) for prefix in prefixes if (name := session_of(prefix.handle)) is not None]


def _session_card(name: str, prefix: NamedPrefix, now_ns: int) -> dict[str, Any]:
    remaining_s = max(0.0, (prefix.expires_ns - now_ns) / NS_PER_S)
    return {
        "id": name,
        "object": "session",
        "pinned_tokens": prefix.pinned_tokens,
        "expires_in_s": round(remaining_s, 3),
    }


class HintRoutes:
    """The handlers of hints on KV. An envelope is visible to its tenant alone."""

    def __init__(self, shared: EndpointParts, names: ModelNames, documents: Documents) -> None:
        self._shared, self._names, self._documents = shared, names, documents

    async def post_hints(self, request: HttpRequest) -> Response:
        """``POST /v1/kv_hints``: do what an envelope asks for, and say what became of it."""
        tenant, shared = request.scope[TENANT_KEY], self._shared
        async with json_body(request.scope, request.receive, shared.edge) as data:

            def planned(data: bytes = data) -> tuple[KvHintsEnvelope, list[_PlannedTarget]]:
                body = parse_body(data, KvHintsEnvelope)
                return body, [self._target_of(plan_hint(hint, in_request=False), tenant) for hint in body.actions]

            body, targets = await shared.encoder.run_work(tenant, len(data), data, planned)
        del data, planned
        hints = shared.hints
        hints.open_message(tenant, body.message_id)
        for planned_hint, target, reason in targets:
            if target is None:
                hints.reject_hint(tenant, body.message_id, planned_hint, reason)
            else:
                hints.give_hint(shared.hub.engine, body.message_id, planned_hint, target)
        deadline_s = time.monotonic() + PIN_ANSWER_S
        while not await self._update_results(tenant, body.message_id) and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        answer = self._answer(tenant, body.message_id)
        shared.metrics.count_hints(answer["results"])
        return json_page(answer)

    async def get_hints(self, request: HttpRequest) -> Response:
        """``GET /v1/kv_hints/{message_id}``: what became of an envelope, of a call or of a request."""
        tenant, message_id = request.scope[TENANT_KEY], request.path_params["message_id"]
        if not self._shared.hints.knows_message(tenant, message_id):
            message = f"There are no hints {echo(message_id)!r}: they were never given, or are forgotten"
            raise ApiError(404, message, param="message_id", code="kv_hints_not_found")
        await self._update_results(tenant, message_id)
        return json_page(self._answer(tenant, message_id))

    async def _update_results(self, tenant: str, message_id: str) -> bool:
        try:
            engine, hints = self._shared.hub.engine, self._shared.hints
            return await asyncio.to_thread(hints.update_results, engine, tenant, message_id)
        except (TimeoutError, EngineStopped):
            raise engine_silent() from None

    def _answer(self, tenant: str, message_id: str) -> dict[str, Any]:
        results = self._shared.hints.cards_of(tenant, message_id)
        return {
            "object": "kv_hints.results",
            "protocol_version": VERSION,
            "message_id": message_id,
            "results": results,
        }

    def _target_of(self, planned: PlannedHint, tenant: str) -> _PlannedTarget:
        """Which prefix an action is for; or why it is not done."""
        if planned.action is None:
            return planned, None, planned.reason
        try:
            return planned, self._find_target(planned.payload, tenant), ""
        except ApiError as error:
            return planned, None, error.message

    def _find_target(self, payload: HintPayload, tenant: str) -> HintTarget:
        if payload.document is not None:
            document = self._documents.get_document(tenant, payload.document)
            salt = self._salt(len(document.tokens), adapter=document.adapter)
            return HintTarget(tenant, document.handle, document.tokens, salt)
        own_salt = digest_salt(payload.cache_salt)
        if payload.session is not None:
            salt = salt_of(own_salt, "", self._shared.model.position_regimes.regime_of(0))
            return HintTarget(tenant, session_handle(payload.session, salt), None, salt)
        encoder = self._shared.encoder
        if payload.messages is not None:
            chat = ChatBody(model=self._names.served, tools=payload.tools, add_generation_prompt=False)
            tokens = encoder.chat_prompt(chat, check_messages(payload.messages), tenant).tokens
        else:
            text_or_ids = payload.tokens if payload.prompt is None else payload.prompt
            (prompt,) = encoder.completion_prompts(text_or_ids, add_special_tokens=True, echo=False, is_cut=False)
            tokens = prompt.tokens
        salt = self._salt(len(tokens), own_salt)
        return HintTarget(tenant, prefix_handle(tokens, salt), tokens, salt)

    def _salt(self, tokens: int, own_salt: str = "", adapter: str = "") -> str:
        return salt_of(own_salt, adapter, self._shared.model.position_regimes.regime_of(tokens))

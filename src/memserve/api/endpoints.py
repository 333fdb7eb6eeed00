"""The two generating endpoints (level 4)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from memserve.api.body import TENANT_KEY, json_body
from memserve.api.documents import Document, Documents
from memserve.api.edge import Edge
from memserve.api.errors import bad_request, model_not_found
from memserve.api.hub import Hub
from memserve.api.messages import check_messages
from memserve.api.metrics import ApiMetrics
from memserve.api.parse import parse_body
from memserve.api.plan import Caller, Generation, plan_chat, plan_completion
from memserve.api.prompts import Prompt, PromptEncoder
from memserve.api.reply import Reply
from memserve.api.respond import answer, new_envelope
from memserve.api.schema import ChatBody, CompletionBody, GenerationBody
from memserve.api.served import ModelNames, PinningEngine, ServedModel, ServingEngine
from memserve.api.shapes import Shape

EXPLAIN_HEADER = "x-memserve-explain"


class Planner(Protocol):
    """What one endpoint does with a body: parse it, tokenize it, plan it."""

    @property
    def id_prefix(self) -> str:
        """How the ids of its responses begin."""

    async def plan(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        """The engine requests for a body. Raises :class:`ApiError` 400 and 404."""


class CompletionPlanner:
    """``POST /v1/completions``."""

    id_prefix = "cmpl-"

    def __init__(self, model: ServedModel, names: ModelNames, encoder: PromptEncoder, documents: Documents) -> None:
        self._model, self._names, self._encoder, self._documents = model, names, encoder, documents

    async def plan(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        """The engine requests for a body, one a prompt."""
        body = parse_body(data, CompletionBody)
        _check_model(body.model, self._names)
        if not isinstance(body.prompt, (str, list)):
            raise bad_request("'prompt' is required: text or token ids", "prompt", "missing_required_parameter")
        document = _document(body, caller, self._documents)
        add_special_tokens = body.add_special_tokens is not False and document is None  # they stand in the document
        prompts = await self._encoder.completion_prompts(body.prompt, add_special_tokens=add_special_tokens)
        if body.echo:
            prompts = [self._with_text(prompt) for prompt in prompts]
        if document is not None:
            prompts = [document.before_prompt(prompt) for prompt in prompts]
        return plan_completion(body, prompts, self._model, caller, response_id)

    def _with_text(self, prompt: Prompt) -> Prompt:
        """Prompts that came as token ids are decoded: the client wants to see them."""
        return prompt if prompt.text is not None else Prompt(prompt.tokens, self._encoder.decode(prompt.tokens))


class ChatPlanner:
    """``POST /v1/chat/completions``."""

    id_prefix = "chatcmpl-"

    def __init__(self, model: ServedModel, names: ModelNames, encoder: PromptEncoder, documents: Documents) -> None:
        self._model, self._names, self._encoder, self._documents = model, names, encoder, documents

    async def plan(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        """The engine request for a body: one prompt, through the chat template."""
        body = parse_body(data, ChatBody)
        _check_model(body.model, self._names)
        messages = check_messages(body.messages)
        if (document := _document(body, caller, self._documents)) is not None:
            messages = document.before_messages(messages)
        prompt = await self._encoder.chat_prompt(body, messages)
        return plan_chat(body, prompt, self._model, caller, response_id)


def _document(body: GenerationBody, caller: Caller, documents: Documents) -> Document | None:
    """What the request begins with. Raises :class:`ApiError` 404 when the caller has no such document."""
    if body.document is None:
        return None
    if body.cache_salt is not None:
        raise bad_request("cache_salt and document exclude each other: a salt hides what is cached", "cache_salt")
    return documents.get(caller.tenant, body.document)


def _check_model(name: str, names: ModelNames) -> None:
    if name not in names:
        raise model_not_found(name, names.served)


@dataclass(frozen=True, slots=True)
class Shared:
    """What all generating endpoints of a server share."""

    hub: Hub
    model: ServedModel
    encoder: PromptEncoder
    metrics: ApiMetrics
    edge: Edge


class GenerationEndpoint:
    """The ASGI application of one generating route."""

    def __init__(self, shared: Shared, planner: Planner, shape: Shape) -> None:
        self._shared, self._planner, self._shape = shared, planner, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared = self._shared
        response_id = self._planner.id_prefix + uuid.uuid4().hex
        explain = Headers(scope=scope).get(EXPLAIN_HEADER, "").lower() in ("1", "true", "yes")
        async with json_body(scope, receive, shared.edge) as data:
            plan = await self._planner.plan(data, Caller(scope[TENANT_KEY], explain), response_id)
        del data  # a long answer must not keep a long question's text
        reply = Reply(plan, shared.encoder.tokenizer, shared.metrics)
        envelope = new_envelope(response_id, shared.model.name)
        await answer(shared.hub, reply, self._shape, envelope, receive, send)
        _keep_session(shared.hub.engine, reply)


def _keep_session(engine: ServingEngine, reply: Reply) -> None:
    """Pin what the session's next request will begin with: the prompt, and the answer where there is one only."""
    plan = reply.plan
    if plan.session_ttl_ns is None or not isinstance(engine, PinningEngine):
        return
    request = plan.requests[-1]
    tokens = request.prompt
    if len(reply.sequences) == 1:
        tokens = np.concatenate((tokens, np.array(reply.sequences[0].stream.tokens, dtype=np.int32)))
    engine.pin(request.session, request.tenant, tokens, plan.session_ttl_ns, request.salt)

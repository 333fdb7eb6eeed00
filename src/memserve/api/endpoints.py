"""The two generating endpoints (level 4)."""

from __future__ import annotations

import dataclasses
import uuid

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from memserve.api.body import read_json_body
from memserve.api.errors import bad_request, model_not_found
from memserve.api.hub import Hub
from memserve.api.metrics import ApiMetrics
from memserve.api.parse import parse_body
from memserve.api.plan import Caller, Generation, plan_chat, plan_completion
from memserve.api.prompts import PromptEncoder
from memserve.api.reply import Reply
from memserve.api.respond import answer, new_envelope
from memserve.api.schema import ChatBody, CompletionBody
from memserve.api.served import ServedModel, TokenNames
from memserve.api.shapes import ChatShape, CompletionShape, Shape

TENANT_KEY = "memserve.tenant"
"""Where the guard leaves the tenant in the ASGI scope."""

EXPLAIN_HEADER = "x-memserve-explain"


class _Endpoint:
    """What both share: an ASGI application for one route."""

    def __init__(
        self,
        hub: Hub,
        model: ServedModel,
        encoder: PromptEncoder,
        names: TokenNames,
        metrics: ApiMetrics,
        body_bytes_max: int,
    ) -> None:
        self._hub = hub
        self._model = model
        self._encoder = encoder
        self._metrics = metrics
        self._body_bytes_max = body_bytes_max
        self._shape = self._make_shape(names)

    def _make_shape(self, names: TokenNames) -> Shape:
        raise NotImplementedError

    async def _plan(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        raise NotImplementedError

    @property
    def _id_prefix(self) -> str:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = await read_json_body(scope, receive, self._body_bytes_max)
        response_id = self._id_prefix + uuid.uuid4().hex
        explain = Headers(scope=scope).get(EXPLAIN_HEADER, "").lower() in ("1", "true", "yes")
        plan = await self._plan(data, Caller(scope[TENANT_KEY], explain), response_id)
        reply = Reply(plan, self._encoder.tokenizer, self._metrics)
        envelope = new_envelope(response_id, self._model.name)
        await answer(self._hub, reply, self._shape, envelope, receive, send)

    def _check_model(self, name: str) -> None:
        if name != self._model.name:
            raise model_not_found(name, self._model.name)


class CompletionsEndpoint(_Endpoint):
    """``POST /v1/completions``."""

    _id_prefix = "cmpl-"

    def _make_shape(self, names: TokenNames) -> Shape:
        return CompletionShape(names)

    async def _plan(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        body = parse_body(data, CompletionBody)
        self._check_model(body.model)
        if not isinstance(body.prompt, (str, list)):
            raise bad_request("'prompt' is required: text or token ids", "prompt", "missing_required_parameter")
        prompts = await self._encoder.completion_prompts(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
        if body.echo:
            prompts = [
                dataclasses.replace(prompt, text=self._encoder.decode(prompt.tokens)) if prompt.text is None else prompt
                for prompt in prompts
            ]
        return plan_completion(body, prompts, self._model, caller, response_id)


class ChatEndpoint(_Endpoint):
    """``POST /v1/chat/completions``."""

    _id_prefix = "chatcmpl-"

    def _make_shape(self, names: TokenNames) -> Shape:
        return ChatShape(names)

    async def _plan(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        body = parse_body(data, ChatBody)
        self._check_model(body.model)
        prompt = await self._encoder.chat_prompt(body)
        return plan_chat(body, prompt, self._model, caller, response_id)

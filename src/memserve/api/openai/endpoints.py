"""The two generating endpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from msgspec import structs
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memserve._core import json_cut_ids
from memserve.api.http.config import ApiConfig
from memserve.api.http.errors import bad_request, model_not_found
from memserve.api.http.limits import TENANT_KEY, Edge, header, json_body
from memserve.api.http.middleware import REPLY_KEY
from memserve.api.http.request import new_id
from memserve.api.metrics.http import ApiMetrics
from memserve.api.openai.documents import Document, Documents
from memserve.api.openai.interfaces import ModelNames, PinningEngine, ServedModel
from memserve.api.openai.kv_hints import GivenHints, HintTarget, plan_hint
from memserve.api.openai.paths import answer_as_owner, owner_field
from memserve.api.openai.request.known_texts import Owner, TextPieces
from memserve.api.openai.request.messages import check_messages
from memserve.api.openai.request.plan import Caller, Generation, plan_chat, plan_completion, prefix_handle
from memserve.api.openai.request.prompts import CHECKING, PARSING, Prompt, PromptEncoder, is_token_list
from memserve.api.openai.request.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Leniency,
    parse_leniently,
    refuse_shape,
    refuse_unsupported,
    without_effect,
)
from memserve.api.openai.request.structured_output import work_of
from memserve.api.openai.request.tool_calls import CallPlan, call_plan, style_of
from memserve.api.openai.response.idempotency import key_of
from memserve.api.openai.response.reasoning import thoughts_after
from memserve.api.openai.response.reply import Reply
from memserve.api.openai.response.responders import AnswerFactory, answer, new_envelope
from memserve.api.openai.streams import Hub

EXPLAIN_HEADER = b"x-memserve-explain"


def wants_explanation(scope: Scope) -> bool:
    """By its header."""
    return (header(scope, EXPLAIN_HEADER) or "").lower() in ("1", "true", "yes")


class RequestPlanner(Protocol):
    """What one endpoint does with a body: parse it, tokenize it, plan it."""

    @property
    def id_prefix(self) -> str:
        """The beginning of its responses' ids."""

    async def plan_request(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        """The engine requests for a body. Raises :class:`ApiError` 400 and 404."""


_decode_completion = msgspec.json.Decoder(CompletionBody).decode


def parse_completion(data: bytes, leniency: Leniency) -> tuple[CompletionBody, tuple[str, ...]]:
    """As :func:`parse_leniently`; a prompt of token ids is an int32 array instead of a list of as many objects."""
    cut = json_cut_ids(data, "prompt")
    if cut is None:
        return parse_leniently(data, CompletionBody, leniency)
    rest, prompt = cut
    ids = np.frombuffer(prompt, np.int32)
    refuse_shape(rest, more_values=len(ids), more_containers=1)
    try:
        body = _decode_completion(rest)
    except ValueError:  # of another kind, no JSON, no UTF-8: all of it is read once more, for what it is
        return parse_leniently(data, CompletionBody, leniency)
    structs.force_setattr(body, "prompt", ids)  # no other code has seen the body yet
    refuse_unsupported(body)
    return body, without_effect(body)


def _work_of_document(document: Document | None) -> int:
    """Roughly, the bytes of text that a request with this document adds to the work."""
    return 0 if document is None else 4 * len(document.prompt.tokens)


class _PromptPlanner:
    """What planners of both kinds of prompts have."""

    def __init__(
        self, model: ServedModel, names: ModelNames, encoder: PromptEncoder, documents: Documents, config: ApiConfig
    ) -> None:
        self._model, self._names, self._encoder, self._documents = model, names, encoder, documents
        self._config, self.leniency = config, Leniency(all_fields=config.lenient)


class CompletionPlanner(_PromptPlanner):
    """``POST /v1/completions``."""

    id_prefix = "cmpl-"

    async def plan_request(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        """The engine requests for a body, one per prompt."""
        workers = self._encoder.workers
        await workers.wait_turn(caller.tenant)
        load = len(data) // PARSING
        parsed = workers.run_work(caller.tenant, load, lambda: parse_completion(data, self.leniency))
        body, ignored = await parsed
        caller = addressed(body.model, self._names, caller)
        if not isinstance(body.prompt, (str, list, np.ndarray)):
            raise bad_request("'prompt' is required: text or token ids", "prompt", "missing_required_parameter")
        document = _document(body, caller, self._documents, "completions")

        owner = caller.tenant, body.cache_salt or ""
        pieces = self._encoder.find_pieces(body.prompt, owner)

        def planned() -> Generation:
            prompts = self._encode_prompts(body, document, owner, pieces)
            return _as_configured(
                plan_completion(body, prompts, self._model, caller, response_id), self._config, ignored
            )

        text_bytes = len(data) // (CHECKING if is_token_list(body.prompt) and not body.echo else 1)
        if pieces is not None:  # what is known costs as little as ids
            text_bytes = text_bytes // CHECKING + text_bytes * pieces.unknown_chars // len(body.prompt)
        return await workers.run_work(caller.tenant, work_of(body, text_bytes) + _work_of_document(document), planned)

    def _encode_prompts(
        self, body: CompletionBody, document: Document | None, owner: Owner, pieces: TextPieces | None
    ) -> list[Prompt]:
        add_special_tokens = body.add_special_tokens is not False and document is None  # the document begins with them
        echo = bool(body.echo)
        is_cut = body.truncate_prompt_tokens is not None
        prompts = self._encoder.completion_prompts(
            body.prompt, add_special_tokens=add_special_tokens, echo=echo, is_cut=is_cut, owner=owner, pieces=pieces
        )
        return prompts if document is None else document.before_prompts(prompts)


class ChatPlanner(_PromptPlanner):
    """``POST /v1/chat/completions``."""

    id_prefix = "chatcmpl-"

    async def plan_request(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        """The engine request for a body: one prompt, through the chat template."""
        workers = self._encoder.workers
        await workers.wait_turn(caller.tenant)
        load = len(data) // PARSING
        parsed = workers.run_work(caller.tenant, load, lambda: parse_leniently(data, ChatBody, self.leniency))
        body, ignored = await parsed
        caller = addressed(body.model, self._names, caller)
        document = _document(body, caller, self._documents, "chat")

        def planned() -> Generation:
            return self.plan_body(body, document, caller, response_id, ignored)

        nbytes = work_of(body, len(data)) + _work_of_document(document)
        return await self._encoder.run_work(caller.tenant, nbytes, data, planned)

    def plan_body(
        self, body: ChatBody, document: Document | None, caller: Caller, response_id: str, ignored: tuple[str, ...]
    ) -> Generation:
        """The engine request for a checked body. Raises :class:`ApiError` 400."""
        calls = self._call_plan(body)
        messages = check_messages(body.messages)
        messages = messages if document is None else document.before_messages(messages)
        prompt = self._encoder.chat_prompt(body, messages, caller.tenant)
        plan = plan_chat(body, prompt, self._model, caller, response_id, calls)
        if not plan.requests[0].sampling.grammar:  # a grammar leaves no place for thoughts
            thoughts = thoughts_after(prompt.ending, self._config.reasoning_parser, self._chat_template())
            plan = structs.replace(plan, thoughts=thoughts)
        return _as_configured(plan, self._config, ignored)

    def count_tokens(self, body: ChatBody, tenant: str) -> int:
        """How many tokens the prompt of a checked body has. Raises :class:`ApiError` 400."""
        return len(self._encoder.chat_prompt(body, check_messages(body.messages), tenant).tokens)

    def _chat_template(self) -> str:
        return str(getattr(self._model.tokenizer, "chat_template", None) or "")

    def _call_plan(self, body: ChatBody) -> CallPlan | None:
        style = self._config.tool_call_parser
        if style == "auto":
            style = style_of(self._chat_template())
        parallel = body.parallel_tool_calls is not False
        return call_plan(body.tools, body.tool_choice, parallel=parallel, style=style)


def _document(body: GenerationBody, caller: Caller, documents: Documents, endpoint: str) -> Document | None:
    """The document that the request begins with. Raises :class:`ApiError` 404 when the caller has no such document,
    400 when it was put for another endpoint: no KV of it is cached for ``endpoint``."""
    if body.document is None:
        return None
    if body.cache_salt is not None:
        raise bad_request("cache_salt and document exclude each other: a salt hides what is cached", "cache_salt")
    document = documents.get_document(caller.tenant, body.document)
    if document.adapter != (caller.adapter.digest if caller.adapter is not None else ""):
        whose = f"by the adapter {document.model!r} as it was then" if document.adapter else "without an adapter"
        message = f"The document {document.document_id!r} was computed {whose}: none of its KV is of use here."
        raise bad_request(f'{message} Put it again, with the "model" that requests ask for', "document")
    if document.endpoint != endpoint:
        message = f"The document {document.document_id!r} is for {document.endpoint}: none of its KV is cached for"
        raise bad_request(f'{message} {endpoint}; put one with "endpoint": "{endpoint}" under another id', "document")
    return document


def _as_configured(plan: Generation, config: ApiConfig, ignored: tuple[str, ...]) -> Generation:
    forced = config.enable_force_include_usage and plan.stream
    if not (forced or ignored or config.return_tokens_as_token_ids):
        return plan
    return structs.replace(
        plan,
        ignored=ignored,
        include_usage=plan.include_usage or forced,
        continuous_usage=plan.continuous_usage or forced,
        names_token_ids=plan.names_token_ids or config.return_tokens_as_token_ids,
    )


def addressed(name: str | None, names: ModelNames, caller: Caller) -> Caller:
    """``caller`` with the adapter that it asks for by ``name``; None: the served model itself. Raises :class:`ApiError`
    404 for a name of nothing."""
    if name is None:
        return caller
    if name not in names:
        raise model_not_found(name, names.served)
    adapter = names.find_adapter(name)
    return caller if adapter is caller.adapter else structs.replace(caller, adapter=adapter)


@dataclass(frozen=True, slots=True)
class EndpointParts:
    """What all generating endpoints of a server share."""

    hub: Hub
    model: ServedModel
    encoder: PromptEncoder
    metrics: ApiMetrics
    edge: Edge
    hints: GivenHints


class GenerationEndpoint:
    """The ASGI application of one generating route."""

    def __init__(self, shared: EndpointParts, planner: RequestPlanner, make_writer: AnswerFactory) -> None:
        self._shared, self._planner, self._make_writer = shared, planner, make_writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared = self._shared
        prefix, fresh_id = self._planner.id_prefix, new_id()
        explain = wants_explanation(scope)
        async with json_body(scope, receive, shared.edge) as data:
            shared.hub.check_busy(scope[TENANT_KEY], data)
            if (field := owner_field(shared.hub.engine, data)) is not None:
                await answer_as_owner(shared.hub, field, scope, receive, send, data)
                return
            key = key_of(scope, prefix, data)
            caller = Caller(scope[TENANT_KEY], explain, seed=None if key is None else key.seed)
            response_id = prefix + (fresh_id if key is None else key.response_id)
            plan = await self._planner.plan_request(
                data, caller, response_id if key is None else f"{response_id}~{fresh_id[:12]}"
            )
            plan = plan if key is None else key.apply_to(plan)
        del data  # the body must not stay in memory while the answer is generated
        reply = Reply(plan, shared.encoder.tokenizer, shared.metrics)
        scope[REPLY_KEY] = reply
        envelope = new_envelope(response_id, plan.model or shared.model.name)
        await answer(shared.hub, reply, self._make_writer, envelope, scope, receive, send)
        keep_prefixes(shared, reply)


def keep_prefixes(shared: EndpointParts, reply: Reply) -> None:
    """Pin what the session's next request will begin with (the prompt, and the answer if there is just one), and the
    prefixes that the request asks to keep; and give its hints."""
    plan, engine = reply.plan, shared.hub.engine
    keeps = plan.session_ttl_ns is not None or plan.kept_prefixes or plan.kv_hints
    if not keeps or not isinstance(engine, PinningEngine):
        return
    request = plan.requests[-1]
    tokens = request.prompt
    if len(reply.sequences) == 1:
        tokens = np.concatenate((tokens, np.array(reply.sequences[0].stream.tokens, dtype=np.int32)))
    if plan.session_ttl_ns is not None:
        engine.pin_prefix(request.session, request.tenant, tokens, plan.session_ttl_ns, request.salt)
    if plan.kv_hints is not None:
        handle = request.session or prefix_handle(tokens, request.salt)
        target = HintTarget(request.tenant, handle, tokens, request.salt)
        hints, message_id = shared.hints, plan.kv_hints.message_id
        hints.open_message(request.tenant, message_id)
        for hint in plan.kv_hints.actions:
            hints.give_hint(engine, message_id, plan_hint(hint, in_request=True), target)
        shared.metrics.count_hints(hints.cards_of(request.tenant, message_id))
    for prefix in plan.kept_prefixes:
        tokens = request.prompt[: prefix.tokens]
        engine.pin_prefix(prefix_handle(tokens, request.salt), request.tenant, tokens, prefix.ttl_ns, request.salt)


ADAPTER_HEADER = b"x-amzn-sagemaker-adapter-identifier"


class InvocationsEndpoint:
    """``POST /invocations``: what Amazon SageMaker calls. What is asked is told by the body's fields."""

    def __init__(self, edge: Edge, apps: dict[bytes, ASGIApp], default: ASGIApp) -> None:
        """``apps``: by a field's name in quotes; the first one that stands in a body."""
        self._edge, self._apps, self._default = edge, apps, default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with json_body(scope, receive, self._edge) as data:
            app = next((app for field, app in self._apps.items() if field in data), self._default)
            if (adapter := header(scope, ADAPTER_HEADER)) is not None:
                data = _with_model(data, adapter)
        await app(scope, _replay_body(data, receive), send)


def _with_model(data: bytes, name: str) -> bytes:
    """A body that asks for the model ``name``; one that is no object stays as it is."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return data
    return msgspec.json.encode({**body, "model": name}) if isinstance(body, dict) else data


def _replay_body(data: bytes, receive: Receive) -> Receive:
    """A body that was read, to be read once more; what comes after it is ``receive``'s."""
    messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received

"""``/v1/responses``: created, read again, cancelled, deleted.

Responses that are kept for their clients: to be read again, continued, or cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memserve.api.http.errors import ApiError, bad_request
from memserve.api.http.limits import TENANT_KEY, ClientGone, json_body
from memserve.api.http.middleware import REPLY_KEY, json_page
from memserve.api.http.request import new_id
from memserve.api.openai.endpoints import ChatPlanner, EndpointParts, addressed, keep_prefixes
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.request.plan import Caller, Generation
from memserve.api.openai.request.schema import parse_leniently
from memserve.api.openai.request.structured_output import work_of
from memserve.api.openai.response.formats import ChatShape
from memserve.api.openai.response.reply import Delta, Reply
from memserve.api.openai.response.responders import (
    AnswerEnvelope,
    AnswerWriter,
    answer,
    frame_event,
    read_whole,
    send_json,
    told_headers,
)
from memserve.api.openai.responses.body import Items, Messages, ResponsesBody, chat_of, messages_of
from memserve.api.openai.streams import StreamCall
from memserve.base.types import FinishReason
from memserve.base.units import ns_from_s

KEPT_MAX, KEPT_BYTES_MAX = 1000, 64 << 20
"""Of one tenant; the oldest are forgotten first."""
BACKGROUND_MAX = 64
"""Of one tenant, at a time."""

Json = dict[str, Any]


@dataclass(slots=True)
class StoredResponse:
    """One response, and what continues it."""

    response: Json
    messages: list[Json]
    """Input and output as messages of a chat, without instructions."""
    session: str
    nbytes: int
    task: asyncio.Task[None] | None = None
    """Computes a response in the background."""


@dataclass(slots=True)
class _Tenant:
    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    nbytes: int = 0


class ResponseStore:
    """By tenant. Lives in the event loop, and as long as the server."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def put_response(self, tenant: str, entry: StoredResponse) -> None:
        """Keep a response, in place of an earlier state of it."""
        tenant_state = self._tenants.setdefault(tenant, _Tenant())
        self._drop_response(tenant_state, entry.response["id"])
        tenant_state.responses[entry.response["id"]] = entry
        tenant_state.nbytes += entry.nbytes
        self._drop_oldest(tenant_state)

    def complete_response(self, tenant: str, entry: StoredResponse, response: Json, messages: list[Json]) -> None:
        """What is kept of a response in the background is larger at its end."""
        entry.response, entry.messages = response, messages
        tenant_state = self._tenants.get(tenant, _Tenant())
        if tenant_state.responses.get(response["id"]) is entry:  # else it was forgotten meanwhile, and stays so
            nbytes = _stored_bytes(response, messages)
            tenant_state.nbytes += nbytes - entry.nbytes
            entry.nbytes = nbytes
            tenant_state.responses.move_to_end(response["id"])
            self._drop_oldest(tenant_state)

    def _drop_oldest(self, tenant_state: _Tenant) -> None:
        # the newest one stays, however large it is: its client may go on from it
        while len(tenant_state.responses) > 1 and (
            len(tenant_state.responses) > KEPT_MAX or tenant_state.nbytes > KEPT_BYTES_MAX
        ):
            self._drop_response(tenant_state, next(iter(tenant_state.responses)))

    def get_response(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises :class:`ApiError` 404 for one that was never stored, or is forgotten, or another tenant's."""
        tenant_state = self._tenants.get(tenant)
        if tenant_state is None or response_id not in tenant_state.responses:
            shown = response_id[:100]
            raise ApiError(
                404, f"Response with id {shown!r} not found.", param="response_id", code="response_not_found"
            )
        return tenant_state.responses[response_id]

    def delete_response(self, tenant: str, response_id: str) -> None:
        """Raises :class:`ApiError` 404, as :meth:`get_response`."""
        entry = self.get_response(tenant, response_id)
        if entry.task is not None:
            entry.task.cancel()
        self._drop_response(self._tenants[tenant], response_id)

    def cancel_response(self, tenant: str, response_id: str) -> Json:
        """End a response in the background; one that has ended stays as it is. Returns its state."""
        entry = self.get_response(tenant, response_id)
        if entry.task is None:
            raise bad_request("Cannot cancel a synchronous response.", "response_id")
        if entry.response["status"] in ("queued", "in_progress"):
            entry.response = {**entry.response, "status": "cancelled"}
            entry.task.cancel()
        return entry.response

    def count_running(self, tenant: str) -> int:
        """Responses in the background that have not ended."""
        tenant_state = self._tenants.get(tenant)
        tasks = [entry.task for entry in tenant_state.responses.values()] if tenant_state is not None else []
        return sum(task is not None and not task.done() for task in tasks)

    @staticmethod
    def _drop_response(tenant_state: _Tenant, response_id: str) -> None:
        if (entry := tenant_state.responses.pop(response_id, None)) is not None:
            tenant_state.nbytes -= entry.nbytes


SESSION_TTL_S = 600.0
"""How long the KV of a continued response is kept from eviction."""

_encode = msgspec.json.Encoder().encode


def _stored_bytes(response: Json, messages: list[Json]) -> int:
    return len(_encode(response)) + len(_encode(messages))


@dataclass(frozen=True, slots=True)
class _PlannedResponse:
    """One request, ready to run."""

    body: ResponsesBody
    plan: Generation
    messages: Messages
    """Before the answer, without instructions."""
    session: str
    response: Json
    """As it begins."""
    tenant: str
    items: Items


class ResponsesRoutes:
    """All routes below ``/v1/responses``."""

    def __init__(self, shared: EndpointParts, planner: ChatPlanner, names: ModelNames, shape: ChatShape) -> None:
        self._shared, self._planner, self._names, self._shape = shared, planner, names, shape
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        """As the application has them."""
        return [
            Route("/v1/responses", _Create(self), methods=["POST"]),
            Route("/v1/responses/{response_id}", self._get_response),
            Route("/v1/responses/{response_id}", self._delete_response, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", self._cancel_response, methods=["POST"]),
        ]

    async def _get_response(self, request: Request) -> Response:
        return json_page(
            self._store.get_response(request.scope[TENANT_KEY], request.path_params["response_id"]).response
        )

    async def _cancel_response(self, request: Request) -> Response:
        return json_page(self._store.cancel_response(request.scope[TENANT_KEY], request.path_params["response_id"]))

    async def _delete_response(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._store.delete_response(request.scope[TENANT_KEY], response_id)
        return json_page({"id": response_id, "object": "response", "deleted": True})

    async def create_response(self, scope: Scope, receive: Receive, send: Send) -> None:
        """``POST /v1/responses``."""
        shared, tenant = self._shared, scope[TENANT_KEY]
        async with json_body(scope, receive, shared.edge) as data:
            shared.hub.check_busy(tenant, data)
            job = await self._prepare_job(data, tenant)
        # the body must not stay in memory while the answer is generated
        del data
        reply = Reply(job.plan, shared.encoder.tokenizer, shared.metrics)
        scope[REPLY_KEY] = reply
        if job.body.background:
            queued = self._start_background(job, reply)
            await send_json(send, 200, _encode(queued), told_headers(reply))
            return
        response = job.response
        envelope = AnswerEnvelope(response["id"], response["model"], response["created_at"])
        make_writer = partial(_ResponseWriter, self, job)
        await answer(shared.hub, reply, make_writer, envelope, scope, receive, send)

    async def _prepare_job(self, data: bytes, tenant: str) -> _PlannedResponse:
        workers = self._shared.encoder.workers
        await workers.wait_turn(tenant)
        leniency = self._planner.leniency
        body, ignored = await workers.run_work(
            tenant, len(data), lambda: parse_leniently(data, ResponsesBody, leniency)
        )
        caller = addressed(body.model, self._names, Caller(tenant))
        if body.background and body.store is False:
            raise bad_request("background can only be used when `store` is true", "background")
        if body.background and body.stream:
            raise bad_request(
                "background and stream exclude each other: read the response when it is done", "background"
            )
        if body.background and self._store.count_running(tenant) >= BACKGROUND_MAX:
            raise bad_request(f"{BACKGROUND_MAX} responses of this key run in the background: wait", "background")
        before = (
            self._store.get_response(tenant, body.previous_response_id)
            if body.previous_response_id is not None
            else None
        )
        response_id = f"resp_{new_id()}"
        messages = [*(before.messages if before is not None else []), *messages_of(body.input)]
        instructions = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
        session = before.session if before is not None else response_id
        chat = chat_of(
            body, self._names.served, [*instructions, *messages], session if body.store is not False else None
        )

        def planned() -> Generation:
            return self._planner.plan_body(chat, None, caller, response_id, ignored)

        nbytes = work_of(chat, len(data)) + (before.nbytes if before is not None else 0)
        plan = await self._shared.encoder.run_work(tenant, nbytes, data, planned)
        if before is not None and body.store is not False:
            plan = structs.replace(plan, session_ttl_ns=ns_from_s(SESSION_TTL_S))
        return _PlannedResponse(
            body,
            plan,
            messages,
            session,
            _initial_response(body, plan, response_id, plan.model or self._names.served),
            tenant,
            Items(plan, self._shape),
        )

    def _start_background(self, job: _PlannedResponse, reply: Reply) -> Json:
        """A response in the background: a task that outlives its request."""
        queued = {**job.response, "status": "queued"}
        entry = StoredResponse(queued, job.messages, job.session, _stored_bytes(queued, job.messages))

        async def work() -> None:
            call = self._shared.hub.open_call(job.plan.requests)
            try:
                entry.response = {**queued, "status": "in_progress"}
                await read_whole(call, reply, job.items.take_delta)
                self.store_response(job, reply, self.finish_response(job, reply), entry)
                reply.record_totals()
            except (ApiError, ClientGone) as error:
                message = error.message if isinstance(error, ApiError) else "the server has ended"
                failed = {"code": "server_error", "message": message}
                entry.response = {**queued, "status": "failed", "error": failed}
            finally:
                self._shared.hub.close_call(call)

        entry.task = asyncio.create_task(work())
        self._store.put_response(job.tenant, entry)
        return queued

    def finish_response(self, job: _PlannedResponse, reply: Reply) -> Json:
        """The response with its output."""
        (sequence,) = reply.best_sequences()
        complete = sequence.stream.finish_reason is not FinishReason.LENGTH
        # its events are for streams; here the items matter that it closes
        for _ in job.items.finish_items(complete=complete):
            pass
        return self.with_output(job, reply, complete=complete)

    def with_output(self, job: _PlannedResponse, reply: Reply, *, complete: bool) -> Json:
        """The response with the items that are done."""
        usage, prompt = reply.usage_fields(), job.plan.prompts[0]
        response = {
            **job.response,
            "status": "completed" if complete else "incomplete",
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": job.items.closed_items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens or 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        if job.body.enable_response_messages:
            output_tokens = reply.sequences[0].stream.tokens
            decode = self._shared.encoder.tokenizer.decode
            for name, tokens in (("input_messages", prompt.tokens.tolist()), ("output_messages", output_tokens)):
                text = decode(tokens, skip_special_tokens=False)
                response[name] = [{"type": "raw_message_tokens", "message": text, "tokens": tokens}]
        return response

    def store_response(
        self, job: _PlannedResponse, reply: Reply, response: Json, entry: StoredResponse | None = None
    ) -> None:
        """Keep ``response``, and the KV that what continues it begins with. ``entry``: of one in the background."""
        keep_prefixes(self._shared, reply)
        if job.body.store is False:
            return
        messages = [*job.messages, *messages_of(job.items.closed_items)]
        if entry is not None:
            self._store.complete_response(job.tenant, entry, response, messages)
            return
        nbytes = _stored_bytes(response, messages)
        self._store.put_response(job.tenant, StoredResponse(response, messages, job.session, nbytes))


class _Create:
    """The ASGI application of ``POST /v1/responses``."""

    def __init__(self, routes: ResponsesRoutes) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes.create_response(scope, receive, send)


class _ResponseWriter(AnswerWriter):
    """One response: its items, and what is stored of it before its client has read the end."""

    def __init__(
        self,
        routes: ResponsesRoutes,
        job: _PlannedResponse,
        reply: Reply,
        envelope: AnswerEnvelope,
        call: StreamCall,
        send: Send,
    ) -> None:
        super().__init__(reply, envelope, call, send)
        self._routes, self._job = routes, job
        self._number = 0

    def _take_delta(self, delta: Delta) -> None:
        self._job.items.take_delta(delta)

    async def _encode_whole(self) -> bytes:
        response = self._routes.finish_response(self._job, self._reply)
        self._routes.store_response(self._job, self._reply, response)
        return _encode(response)

    def _encode_chunks(self, delta: Delta) -> Iterator[bytes]:
        if not self._number:
            for kind in ("response.created", "response.in_progress"):
                yield self._encode_event({"type": kind, "response": self._job.response})
        for event in self._job.items.push_delta(delta):
            yield self._encode_event(event)

    def _last_chunks(self) -> bytes:
        (sequence,) = self._reply.sequences
        complete = sequence.stream.finish_reason is not FinishReason.LENGTH
        last = [self._encode_event(event) for event in self._job.items.finish_items(complete=complete)]
        response = self._routes.with_output(self._job, self._reply, complete=complete)
        self._routes.store_response(self._job, self._reply, response)
        kind = "response.completed" if complete else "response.incomplete"
        return b"".join([*last, self._encode_event({"type": kind, "response": response})])

    def _encode_error(self, error: ApiError) -> bytes:
        return self._encode_event({"type": "error", "code": error.code, "message": error.message, "param": error.param})

    def _encode_event(self, event: Json) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return frame_event(numbered)


def _initial_response(body: ResponsesBody, plan: Generation, response_id: str, model: str) -> Json:
    sampling, stop = plan.requests[0].sampling, plan.requests[0].stop
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens or stop.max_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": body.reasoning,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }

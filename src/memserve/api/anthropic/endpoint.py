"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import msgspec
from msgspec import structs
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memserve.api.anthropic.answer import MessageWriter
from memserve.api.anthropic.body import MARKS, Breakpoints, MessagesBody, chat_of
from memserve.api.http.errors import bad_request
from memserve.api.http.limits import TENANT_KEY, json_body
from memserve.api.openai.endpoints import ChatPlanner, EndpointParts, GenerationEndpoint, addressed
from memserve.api.openai.interfaces import ModelNames
from memserve.api.openai.paths import owner_url
from memserve.api.openai.request.plan import Caller, Generation, KeptPrefix
from memserve.api.openai.request.prompts import PARSING, Prompt
from memserve.api.openai.request.schema import ChatBody, parse_leniently
from memserve.api.openai.request.structured_output import work_of_form
from memserve.api.openai.response.responders import send_json
from memserve.base.units import ns_from_s


class MessagePlanner:
    """``POST /v1/messages``: a chat, asked for in another form."""

    id_prefix = "msg_"

    def __init__(self, shared: EndpointParts, chats: ChatPlanner, names: ModelNames) -> None:
        self._shared, self._chats, self._names = shared, chats, names

    async def plan_request(self, data: bytes, caller: Caller, response_id: str) -> Generation:
        """The engine request for a body. Raises :class:`ApiError` 400 and 404."""
        body, ignored = await self._parse_body(data, caller.tenant)
        if body.max_tokens is None:
            raise bad_request("The field 'max_tokens' is required", "max_tokens", "missing_required_parameter")
        caller = addressed(body.model, self._names, caller)

        def planned() -> Generation:
            breakpoints = Breakpoints()
            chat = chat_of(body, self._names.served, breakpoints)
            without_effect = (*ignored, *self._further_ignored(body, breakpoints))
            plan = self._chats.plan_body(chat, None, caller, response_id, without_effect)
            prefixes = self._kept_prefixes(body, chat, breakpoints, plan.prompts[0], caller.tenant)
            return structs.replace(plan, generates=body.max_tokens != 0, kept_prefixes=prefixes)

        has_form = bool(body.tool_choice or body.output_config or body.structured_outputs)
        load = work_of_form(len(data)) if has_form else len(data)
        return await self._shared.encoder.run_work(caller.tenant, load, data, planned)

    async def count_tokens(self, data: bytes, caller: Caller) -> int:
        """The tokens of the prompt that a body asks for. Raises as :meth:`plan_request`."""
        body, _ = await self._parse_body(data, caller.tenant)
        addressed(body.model, self._names, caller)

        def count() -> int:
            return self._chats.count_tokens(chat_of(body, self._names.served, Breakpoints()), caller.tenant)

        return await self._shared.encoder.run_work(caller.tenant, len(data), data, count)

    async def _parse_body(self, data: bytes, tenant: str) -> tuple[MessagesBody, tuple[str, ...]]:
        workers, leniency = self._shared.encoder.workers, self._chats.leniency
        await workers.wait_turn(tenant)
        return await workers.run_work(
            tenant, len(data) // PARSING, lambda: parse_leniently(data, MessagesBody, leniency)
        )

    def _further_ignored(self, body: MessagesBody, breakpoints: Breakpoints) -> tuple[str, ...]:
        """What a field holds that has no effect."""
        budget = ("thinking.budget_tokens",) if (body.thinking or {}).get("budget_tokens") is not None else ()
        unkept = ("cache_control",) if breakpoints.ttls_s and not self._keeps_prefixes(body) else ()
        return (*budget, *unkept)

    def _keeps_prefixes(self, body: MessagesBody) -> bool:
        """Whether ``cache_control`` has an effect: prefixes are the owner's to keep, not another router's."""
        return body.use_cache is not False and owner_url(self._shared.hub.engine) is None

    def _kept_prefixes(
        self, body: MessagesBody, chat: ChatBody, breakpoints: Breakpoints, prompt: Prompt, tenant: str
    ) -> tuple[KeptPrefix, ...]:
        """How much of ``prompt`` is kept, and for how long."""
        if not breakpoints.ttls_s or not self._keeps_prefixes(body):
            return ()
        marked_chat = chat_of(body, self._names.served, Breakpoints(is_marking=True))
        lengths = self._shared.encoder.prefix_lengths(chat, marked_chat, MARKS, prompt, tenant)
        if body.cache_control is not None:
            lengths[str(len(breakpoints.ttls_s) - 1)] = len(prompt.tokens)
        prefixes = [KeptPrefix(tokens, ns_from_s(breakpoints.ttls_s[int(name)])) for name, tokens in lengths.items()]
        return tuple(sorted(prefixes, key=lambda prefix: prefix.tokens))


class MessagesRoutes:
    """Both routes."""

    def __init__(self, shared: EndpointParts, chats: ChatPlanner, names: ModelNames) -> None:
        self._shared, self._planner = shared, MessagePlanner(shared, chats, names)

    def routes(self) -> list[Route]:
        """As the application has them."""
        create = GenerationEndpoint(self._shared, self._planner, MessageWriter)
        return [
            Route("/v1/messages", create, methods=["POST"]),
            Route("/v1/messages/count_tokens", _TokenCounter(self._shared, self._planner), methods=["POST"]),
        ]


class _TokenCounter:
    """The ASGI application of ``POST /v1/messages/count_tokens``."""

    def __init__(self, shared: EndpointParts, planner: MessagePlanner) -> None:
        self._shared, self._planner = shared, planner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with json_body(scope, receive, self._shared.edge) as data:
            count = await self._planner.count_tokens(data, Caller(scope[TENANT_KEY]))
        await send_json(send, 200, msgspec.json.encode({"input_tokens": count}))

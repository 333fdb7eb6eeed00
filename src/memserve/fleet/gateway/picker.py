"""The endpoint picker: gateways ask it over Envoy's external processing where a request shall go.

The fleet machine decides as for a request that the router relays; what differs is that the gateway sends it, tries the
fallbacks by itself, and tells what became of it: the engine that answered, the status, the end.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np

from memserve.api.http.errors import ApiError, bad_request, shutting_down, too_large
from memserve.api.http.limits import BodyLease, ClientGone, Edge
from memserve.api.http.middleware import KeyRing
from memserve.api.openai.endpoints import EXPLAIN_HEADER
from memserve.base.types import Request, StopParams
from memserve.fleet.answers import is_failure
from memserve.fleet.gateway.ext_proc import (
    BodyMode,
    Pick,
    RequestHead,
    continued_headers,
    passed_on,
    picked,
    read_head,
    read_served,
    read_status,
    refused,
)
from memserve.fleet.host import FleetHost, Ticket
from memserve.fleet.messages import (
    AnswerBegan,
    AnsweredElsewhere,
    EngineSpec,
    ForwardRequest,
    Prefill,
    PromptArrived,
    PromptSpace,
)
from memserve.fleet.pairs import CallRequest
from memserve.fleet.prompts import OUTPUT_TOKENS_USUAL, RESPONSES, PromptReader, read_fields
from memserve.fleet.relay import NOT_BY_KEY, Attempts, explanation, refuse_stored, response_not_found

ADDRESS_S = 5.0
"""How long an address that a name server gave is taken to be right."""
Write = Callable[[Any], Awaitable[None]]


class EngineAddresses:
    """Engines as gateways know them: ``IP:PORT``, whatever ``--engine`` says."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, float]] = {}

    async def address_of(self, spec: EngineSpec) -> str | None:
        """Of one engine; None: its name is not known to the name server now."""
        parts = urlsplit(spec.url)
        host, port = parts.hostname or "", parts.port or 80
        with suppress(ValueError):
            return _with_port(str(ipaddress.ip_address(host)), port)
        address, until_s = self._entries.get(host, ("", 0.0))
        if until_s < time.monotonic():
            try:
                entries = await asyncio.get_running_loop().getaddrinfo(host, port)
            except OSError:
                return None
            address = str(entries[0][4][0])
            self._entries[host] = address, time.monotonic() + ADDRESS_S
        return _with_port(address, port)


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Picker:
    """What all streams of gateways share."""

    def __init__(
        self, host: FleetHost, edge: Edge, keys: KeyRing, silence_s: float, *, has_engine_key: bool = True
    ) -> None:
        """``keys``: of clients, as the router's own; without any the engines check them. ``silence_s``: as of
        :class:`Relay`. ``has_engine_key``: the key of ``host`` is for requests of clients, too."""
        self.host, self.edge, self.keys, self.silence_s = host, edge, keys, silence_s
        self._has_engine_key = has_engine_key
        self.prompts, self.addresses = PromptReader(host), EngineAddresses()
        self.draining = False

    @property
    def is_ready(self) -> bool:
        """Whether a request would be given an endpoint now."""
        views = self.host.machine.engine_views()
        return not self.draining and any(view.up and self.host.specs[view.name].may_be_handed_out for view in views)

    def key_headers(self) -> dict[str, str]:
        """What becomes of a client's key: engines get their own, or none where the key was the router's."""
        if self._has_engine_key and (key := self.host.engine_key) is not None:
            return {"authorization": f"Bearer {key}"}
        return {} if self.keys.is_open else {"authorization": ""}

    async def allowed_engines(self, subset: frozenset[str] | None) -> frozenset[str] | None:
        """The names of the engines that have an address in ``subset``. None: all."""
        if subset is None:
            return None
        pairs = [(name, await self.addresses.address_of(spec)) for name, spec in list(self.host.specs.items())]
        return frozenset(name for name, address in pairs if address in subset)

    async def answer_stream(self, messages: AsyncIterator[Any], write: Write, peer: str) -> None:
        """One stream, which is one request; ``peer``: the gateway."""
        request = GatewayRequest(self, Inbox(messages), write, peer)
        status = 200
        try:
            await request.run()
        except ApiError as error:
            status = error.status
            await write(refused(error))
        except ClientGone:
            status = 499
        finally:
            self.edge.metrics.picks.inc((str(status),))
            request.finish()


class Inbox:
    """The messages of a stream, of which the next one may be waited for while something else goes on."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self._reading: asyncio.Task[Any] | None = None

    def watch(self, on_end: Callable[[], None]) -> None:
        """Read the next message already, and call ``on_end`` if there is none."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_message())
        self._reading.add_done_callback(lambda task: on_end() if task.cancelled() or task.result() is None else None)

    async def next_message(self) -> Any | None:
        """None: the stream has ended."""
        task, self._reading = self._reading, None
        return await (task or self._read_message())

    async def _read_message(self) -> Any | None:
        with suppress(StopAsyncIteration):
            return await anext(self._messages)
        return None

    def close(self) -> None:
        """Read nothing any more."""
        if self._reading is not None:
            self._reading.cancel()


class GatewayRequest:
    """One request of a gateway.

    ::

        head --body?--> the machine's decision --endpoints--> answered by one of them --end--> the machine is told
    """

    def __init__(self, picker: Picker, inbox: Inbox, write: Write, peer: str) -> None:
        self._picker, self._inbox, self._write, self._peer = picker, inbox, write, peer
        self._ticket: Ticket | None = None
        self._names: dict[str, str] = {}
        self._has_trailers = self._has_begun = self._is_cut = False

    async def run(self) -> None:
        """Until the stream ends. Raises :class:`ApiError` for a request that has no endpoint, and :class:`ClientGone`
        where the gateway gives it up before it has one."""
        first = await self._inbox.next_message()
        if first is None:
            raise ClientGone
        head = read_head(first)
        if self._picker.draining:
            raise shutting_down()
        tenant = self._picker.keys.tenant_of(head.headers.get("authorization"))
        if head.body is BodyMode.WHOLE and not head.ends:
            await self._write(continued_headers())
        lease = self._picker.edge.bodies.open_lease(tenant or self._peer)
        try:
            decision = await self._choose(head, tenant, lease)
        finally:
            # the gateway keeps the body: here it was read for the choice alone
            lease.release_bytes()
        has_reason = head.headers.get(EXPLAIN_HEADER.decode(), "").lower() in ("1", "true", "yes")
        reasons = [explanation(decision, {})] if has_reason else []
        answer_headers = {name.decode(): value.decode() for name, value in reasons}
        while (message := await self._inbox.next_message()) is not None:
            self._note_progress(message, head)
            await self._write(passed_on(message, head, answer_headers))

    def finish(self) -> None:
        """The stream has ended, however it did."""
        self._inbox.close()
        if self._ticket is not None:
            self._ticket.close_calls()
            self._picker.host.finish_request(self._ticket, is_cut=self._is_cut)
            self._ticket = None

    # -- the choice

    async def _choose(self, head: RequestHead, tenant: str, lease: BodyLease) -> ForwardRequest:
        picker = self._picker
        body = await self._read_body(lease) if head.body_comes_first else b""
        prompt = await self._read_prompt(head, body, tenant)
        allowed = await picker.allowed_engines(head.subset)
        prompt = replace(prompt, engines=allowed, is_handed_out=True)
        ticket = self._ticket = picker.host.submit_prompt(prompt)
        # a stream that ends before it has an endpoint: nothing waits for the choice any more
        self._inbox.watch(lambda: ticket.end_request(ClientGone()))
        call = CallRequest(head.path, _prefill_headers(head, picker.key_headers()), body, picker.silence_s)
        attempts = Attempts(picker.host, ticket, call, picker.edge.metrics)
        # no gateway would do that: it sends a request once. So the picker has the prompt computed itself
        while isinstance(decision := await attempts.next_decision(), Prefill):
            await attempts.compute_prompt(decision)
        new_body = attempts.request.body if attempts.request.body is not body else None
        pick = Pick(await self._endpoints_of(decision), picker.key_headers(), new_body)
        for response in picked(head, pick, body, has_trailers=self._has_trailers):
            await self._write(response)
        return decision

    async def _endpoints_of(self, decision: ForwardRequest) -> tuple[str, ...]:
        specs = self._picker.host.specs
        for name in (decision.engine, *decision.fallbacks):
            address = await self._picker.addresses.address_of(specs[name]) if name in specs else None
            if address is not None:
                self._names[address] = name
        if not self._names:
            raise ApiError(503, f"{decision.engine} has no address now", kind="server_error", code="no_engine")
        return tuple(self._names)

    async def _read_prompt(self, head: RequestHead, body: bytes, tenant: str) -> PromptArrived:
        """What is asked. A request without a body in JSON may go to any engine."""
        path = head.path.partition("?")[0]
        if tenant and path.startswith(f"{RESPONSES}/"):
            raise response_not_found(path, NOT_BY_KEY)
        is_json = head.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        if head.body_comes_first and is_json:
            fields = read_fields(body)
            if path == RESPONSES:
                refuse_stored(fields, tenant)
            return await self._picker.prompts.read_prompt(path, fields, tenant)
        # of no model and no text: any engine may have it, and it counts as load all the same
        request = Request(uuid4().hex, np.zeros(1, np.int32), stop=StopParams(OUTPUT_TOKENS_USUAL), tenant=tenant)
        return PromptArrived(request, "", PromptSpace.TEXT, may_split=False)

    async def _read_body(self, lease: BodyLease) -> bytes:
        """All of it. Raises :class:`ApiError` 413, 429 and 503 for one that is too large, 408 for one that does not
        come in time."""
        limits, body, is_complete = self._picker.edge.limits, bytearray(), False
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                while not is_complete:
                    message = await self._inbox.next_message()
                    if message is None:
                        raise ClientGone
                    kind = message.WhichOneof("request")
                    if kind not in ("request_body", "request_trailers"):
                        raise bad_request("A request's body must follow its headers")
                    self._has_trailers = kind == "request_trailers"
                    is_complete = self._has_trailers or message.request_body.end_of_stream
                    if len(body) + len(message.request_body.body) > limits.body_bytes_max:
                        raise too_large(limits.body_bytes_max)
                    lease.grow_to(len(body) + len(message.request_body.body))
                    body += message.request_body.body
        except TimeoutError:
            raise ApiError(408, "The request's body did not come in time", kind="timeout") from None
        return bytes(body)

    # -- what became of it

    def _note_progress(self, message: Any, head: RequestHead) -> None:
        """Tell the machine what the gateway says of the answer."""
        if self._ticket is None:
            return
        kind, request_id = message.WhichOneof("request"), self._ticket.request_id
        self._ticket.last_seen_ns = time.monotonic_ns()
        if kind == "response_headers":
            first = self._ticket.engine = next(iter(self._names.values()))
            status, name = read_status(message), self._names.get(read_served(message))
            # a fallback has answered: the load is its, and the first one has failed this request
            if name is not None and name != first:
                self._ticket.engine = name
                self._picker.host.post_event(AnsweredElsewhere(request_id, name))
            self._is_cut = status >= 300 and is_failure(status)
            self._has_begun = self._is_cut
        # only answers end a request: its own trailers come before there is one
        part = getattr(message, kind)
        has_bytes = kind == "response_body" and bool(part.body)
        # an engine may send its headers before it computes: what it has computed begins with the first bytes
        if not self._has_begun and (has_bytes or (kind == "response_headers" and head.answer_body is BodyMode.NONE)):
            self._has_begun = True
            self._picker.host.post_event(AnswerBegan(request_id))
        if kind == "response_trailers" or (kind.startswith("response") and part.end_of_stream):
            self._picker.host.finish_request(self._ticket, is_cut=self._is_cut)
            self._ticket = None


def _prefill_headers(head: RequestHead, key_headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """For an engine that computes the prompt for another one."""
    sent = {name: head.headers[name] for name in ("authorization", "content-type") if name in head.headers}
    sent |= {**key_headers, "accept-encoding": "identity"}
    return [(name.encode(), value.encode("latin-1")) for name, value in sent.items() if value]

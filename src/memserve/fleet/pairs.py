"""Calls of engines for one request: of one, or of two at the same time.

SGLang's servers with roles are asked in pairs, and meet in a room whose number both are told::

    client --request--> relay --with bootstrap_host, _port, _room--> prefill: computes, sends KV into the room
                              --the same--------------------------> decode: goes there, waits for KV, answers

The client gets what the second one says. That the first one fails is known here first: the other one would wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from memserve.api.http.client import Headers, HttpCall, HttpFault
from memserve.fleet.answers import EngineAnswer, EventForm, answer_of
from memserve.fleet.host import Ticket
from memserve.fleet.messages import EngineSpec

ROOM_BITS = 63
SEQUENCES_MAX = 4096
"""Rooms of one request: more prompts than that are for the engine to refuse."""
_OVERRIDES = b"x-override-"
"""Headers by which SGLang takes another room, or another server to get KV from, than the body says."""


class PartnerFault(HttpFault):
    """The engine that computes the prompt of a pair did not."""

    def __init__(self, fault: HttpFault) -> None:
        super().__init__(fault.reason, status=fault.status, refuses=fault.refuses, retry_after_s=fault.retry_after_s)


def paired_headers(headers: Headers) -> Headers:
    """Those of a client for a pair: where the two meet is not the client's to say."""
    return [header for header in headers if not header[0].startswith(_OVERRIDES)]


def paired_body(body: bytes, computing: EngineSpec) -> bytes:
    """The request of ``body``, a JSON object, for a pair of which ``computing`` computes the prompt: in rooms that are
    new, one for each sequence."""
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    count = min(SEQUENCES_MAX, _count_sequences(fields))
    room: Any = secrets.randbits(ROOM_BITS)
    if count == 1:
        meeting = {"bootstrap_host": computing.host, "bootstrap_port": computing.bootstrap_port, "bootstrap_room": room}
        return msgspec.json.encode({**fields, **meeting})
    rooms = {room}
    while len(rooms) < count:
        rooms.add(secrets.randbits(ROOM_BITS))
    meetings = {
        "bootstrap_host": [computing.host] * count,
        "bootstrap_port": [computing.bootstrap_port] * count,
        "bootstrap_room": list(rooms),
    }
    return msgspec.json.encode({**fields, **meetings})


def _count_sequences(fields: dict[str, Any]) -> int:
    """Prompts, times the answers to each."""
    prompts, n = 1, 1
    with contextlib.suppress(KeyError, msgspec.DecodeError, RecursionError):
        texts = msgspec.json.decode(fields["prompt"], type=list[msgspec.Raw])
        # a list of numbers is one prompt in tokens
        prompts = len(texts) if texts and bytes(texts[0])[:1] in (b"[", b'"') else 1
    with contextlib.suppress(KeyError, msgspec.DecodeError, RecursionError):
        n = msgspec.json.decode(fields["n"], type=int)
    return max(1, prompts * n)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What engines are sent for a client."""

    path: str
    headers: Headers
    body: bytes
    silence_s: float
    """How long an engine may say nothing."""

    async def ask_engine(self, ticket: Ticket, engine: EngineSpec, events: EventForm | None) -> EngineAnswer:
        """The answer of ``engine``. ``events``: of the stream that is asked for. Raises :class:`HttpFault`."""
        return await answer_of(await self._call_engine(ticket, engine), events, self.silence_s)

    async def ask_pair(
        self, ticket: Ticket, answering: EngineSpec, computing: EngineSpec, events: EventForm | None,
        on_computed: Callable[[], None],
    ) -> EngineAnswer:  # fmt: skip
        """The answer of ``answering``, to which ``computing`` computes the prompt; ``on_computed`` is called when that
        is done and the answer has not begun. Raises :class:`HttpFault` of the one, :class:`PartnerFault` of the other;
        the one that waits for it is given up then."""
        computed = asyncio.create_task(self._compute_prompt(ticket, computing))
        answer = asyncio.create_task(self.ask_engine(ticket, answering, events))
        ticket.tasks += [computed, answer]
        await asyncio.wait((computed, answer), return_when=asyncio.FIRST_COMPLETED)
        # the prompt is done first: the other one can answer now, or waits for what will not come
        if not answer.done():
            try:
                refusal = computed.result()
            except HttpFault as fault:
                raise PartnerFault(fault) from None
            if refusal is not None:
                return refusal
            on_computed()
        # the one that answers fails because its partner did: that one is to be left out next time
        elif answer.exception() is not None and computed.done():
            cause = computed.exception()
            if isinstance(cause, HttpFault):
                raise PartnerFault(cause)
        return await answer

    async def _compute_prompt(self, ticket: Ticket, engine: EngineSpec) -> EngineAnswer | None:
        """Wait until it is computed. Returns why it is not where that is the client's own error. Raises
        :class:`HttpFault`."""
        call = await self._call_engine(ticket, engine)
        if call.status != 200:
            return await answer_of(call, None, self.silence_s)
        async for _ in call.body_pieces(self.silence_s):
            pass  # its answer is the first token at most, which the other one says too
        return None

    async def _call_engine(self, ticket: Ticket, engine: EngineSpec) -> HttpCall:
        """The call, when the head of the answer is there."""
        call = ticket.calls[engine.name] = HttpCall(engine.url)
        await call.send_request("POST", engine.base_path + self.path, self.headers, self.body, self.silence_s)
        return call

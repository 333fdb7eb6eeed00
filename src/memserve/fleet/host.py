"""Hosts the fleet machine in one event loop: asks engines whether they are well, hears their KV events, keeps time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from memserve.api.http.client import HttpCall, HttpFault
from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.units import NS_PER_S
from memserve.fleet.engine_client import LOOK_EVERY_S, EngineClient
from memserve.fleet.machine import Fleet
from memserve.fleet.messages import (
    PREFILL_TOKENS,
    Abort,
    AnswerEnded,
    EngineAnswered,
    EngineGone,
    EngineJoined,
    EngineKind,
    EngineLeft,
    EngineMissed,
    EngineReport,
    EngineSpec,
    FleetAction,
    FleetEvent,
    ForwardRequest,
    GiveUp,
    Prefill,
    PromptArrived,
    RequestReplay,
    TimePassed,
)
from memserve.kv.identity import DEFAULT_KEY
from memserve.protocol.events import RejectRequest, Send
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer
from memserve.system.secrets import Followed

log = logging.getLogger(__name__)

Decision = ForwardRequest | Prefill | RejectRequest | GiveUp


class Ticket:
    """A request on its way: what the machine decides for it, and the call that can be given up."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._decisions: asyncio.Queue[Decision | None] = asyncio.Queue()
        #: why it needs no answer any more: its client left, or the server ends; ``None``: it does
        self.end_error: Exception | None = None
        #: the attempt that is under way, and that of the engine that computes its prompt at the same time; by engine
        self.calls: dict[str, HttpCall] = {}
        #: what waits for them besides the request itself
        self.tasks: list[asyncio.Task[Any]] = []
        #: of an attempt that a gateway has under way: the engine, and when bytes came from it last
        self.engine, self.last_seen_ns = "", 0

    def last_heard_ns(self, engine: str) -> int:
        """When bytes came last from this engine; 0: it has no part in the request, or none have come."""
        if engine in self.calls:
            return self.calls[engine].last_seen_ns
        return self.last_seen_ns if self.engine == engine else 0

    async def next_decision(self) -> Decision:
        """The next decision; the machine's timers see to it that there is one. Raises what :meth:`end_request` was
        given."""
        decision = await self._decisions.get()
        if decision is None or self.end_error is not None:
            raise self.end_error or RuntimeError("a ticket without a reason to end")
        return decision

    def put_decision(self, decision: Decision) -> None:
        self._decisions.put_nowait(decision)

    def end_request(self, error: Exception) -> None:
        """Wait for nothing any more, because of ``error``."""
        # the first reason is the one that its client is told
        self.end_error = self.end_error or error
        self._decisions.put_nowait(None)
        for call in self.calls.values():
            call.abort_call(str(error))

    def abort_attempt(self, engine: str, reason: str) -> None:
        if engine in self.calls:
            self.calls[engine].abort_call(reason)

    def close_calls(self) -> None:
        """Give up what is under way."""
        for task in self.tasks:
            task.cancel()
            task.add_done_callback(_drop_result)
        for call in self.calls.values():
            call.close()
        self.calls.clear()
        self.tasks.clear()


def _drop_result(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


class RouterLinks(Protocol):
    """Connections to the other routers of these engines."""

    async def open(self) -> None:
        """Begin to connect."""

    def send_message(self, to: Peer, message: AnyMessage) -> None:
        """What ``to`` is told, if it is there still."""

    async def close(self) -> None:
        """End all."""


class FleetHost:
    """The machine and what it needs of the world. All of it in one event loop."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        config: ClusterConfig,
        *,
        identity_key: bytes = DEFAULT_KEY,
        engine_key: str | Followed[str] | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        listed: Callable[[], Sequence[EngineSpec]] | None = None,
    ) -> None:
        """``engine_key``: the engines' own API key. ``prefill_tokens``: see :class:`Fleet`. ``listed``: the engines
        that there are to be, for what follows them; None: they join and leave here."""
        self.specs = {spec.name: spec for spec in specs}
        self._engine_key = engine_key if isinstance(engine_key, Followed) else Followed.of_constant(engine_key)
        self.machine = Fleet(
            list(specs),
            config,
            identity_key=identity_key,
            prefill_tokens=prefill_tokens,
            is_follower=listed is not None,
        )
        #: to the other routers that share an admission; None: there are none
        self.links: RouterLinks | None = None
        self._tickets: dict[str, Ticket] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._replays: dict[str, asyncio.Task[None]] = {}
        self.client = EngineClient(self._engine_key, self.post_event)
        self._timer: asyncio.TimerHandle | None = None
        self._listed, self._list_tasks = listed, list[asyncio.Task[None]]()
        self._leaving: set[str] = set()
        #: of the router that lets engines join and leave; None: this one
        self.owner_url: str | None = None
        #: called with the engines that there are to be, when one has joined or leaves
        self.on_engines_changed: Callable[[Sequence[EngineSpec]], None] = lambda specs: None
        #: what this server calls a model of its own that would be asked by this name, in the place of an engine's
        self.find_own: Callable[[str], str | None] = lambda name: None
        self._hidden = set[tuple[str, str]]()

    @property
    def engine_key(self) -> str | None:
        """The engines' own API key, as it is now."""
        return self._engine_key.value()

    # -- life

    async def start(self) -> None:
        """Look at every engine once, and go on looking. Raises :class:`UserError` where other routers could not reach
        this one."""
        if self.links is not None:
            await self.links.open()
        await asyncio.gather(*(self._follow_engine(spec) for spec in self.specs.values()))
        for view in self.machine.engine_views():
            if not view.up:
                # no error: a fleet may start before its engines
                log.warning("engine %s does not answer yet", view.name)
        if self._listed is not None:
            self._list_tasks.append(asyncio.create_task(self._follow_list(self._listed)))

    async def _follow_list(self, listed: Callable[[], Sequence[EngineSpec]]) -> None:
        """Let engines join and leave as they do elsewhere."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            specs = {spec.name: spec for spec in listed()}
            # one with other options now leaves, too, and joins again at the next look
            for name in [name for name, spec in self.specs.items() if specs.get(name) != spec]:
                if name not in self._leaving:
                    self.leave_engine(name)
            for name in [name for name in specs if name not in self.specs]:
                await self.join_engine(specs[name])

    async def _follow_engine(self, spec: EngineSpec) -> None:
        """Look at it once, and go on looking and listening."""
        tasks = self._tasks[spec.name] = [asyncio.create_task(self.client.read_kv_events(spec))] if spec.events else []
        await self._poll_engine(spec)
        if self.specs.get(spec.name) is spec:  # it may have left meanwhile
            tasks.append(asyncio.create_task(self._poll_regularly(spec)))

    async def join_engine(self, spec: EngineSpec) -> None:
        """One more engine. Raises :class:`UserError` for one that is known."""
        if spec.name in self.specs:
            raise UserError(f"{spec.name} has joined already", hint="let it leave first", param="engine")
        self.specs[spec.name] = spec
        self.post_event(EngineJoined(spec))
        self._tell_engines()
        await self._follow_engine(spec)

    def leave_engine(self, name: str) -> None:
        """It gets no new requests, and is gone when its last one has ended. Raises :class:`UserError` for one that is
        not known."""
        if name not in self.specs:
            raise UserError(f"{name[:200]} is no engine here", hint=f"one of {', '.join(self.specs)}", param="engine")
        self._leaving.add(name)
        self.post_event(EngineLeft(name))
        self._tell_engines()

    def _tell_engines(self) -> None:
        self.on_engines_changed([spec for name, spec in self.specs.items() if name not in self._leaving])

    async def close(self) -> None:
        """Stop looking and listening, when the routers that ask this one for admission have ended."""
        if self.links is not None:
            await self.links.close()
        tasks = [*itertools.chain.from_iterable(self._tasks.values()), *self._replays.values(), *self._list_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self.client.close()

    # -- models

    def engines_by_model(self) -> dict[str, list[str]]:
        """Every model that is asked of an engine, with the engines that have it and take requests."""
        by_model = self.machine.engines_by_model()
        return {name: engines for name, engines in by_model.items() if self.find_own(name) is None}

    def _note_hidden(self, engine: str, models: Iterable[str]) -> None:
        """Say once of each model of ``engine`` that it is not asked for."""
        for model in models:
            own_name = self.find_own(model)
            if own_name is not None and (engine, model) not in self._hidden:
                self._hidden.add((engine, model))
                text = (
                    "engine %s has a model %s, and this server its own, %s: that one answers, the engine's is not asked"
                )
                log.warning(text, engine, model, own_name)

    # -- requests

    @property
    def requests_open(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    def submit_prompt(self, prompt: PromptArrived) -> Ticket:
        """A request for the machine. Call :meth:`finish_request` when it has ended, however it did."""
        ticket = self._tickets[prompt.request.request_id] = Ticket(prompt.request.request_id)
        self.post_event(prompt)
        return ticket

    def finish_request(self, ticket: Ticket, *, is_cut: bool = False) -> None:
        """The request has ended. ``is_cut``: its engine broke the answer off."""
        self._tickets.pop(ticket.request_id, None)
        self.post_event(AnswerEnded(ticket.request_id, is_cut))

    def end_all(self, error: Exception) -> int:
        """End every request with ``error``. Returns their number."""
        for ticket in list(self._tickets.values()):
            ticket.end_request(error)
        return len(self._tickets)

    def post_event(self, event: FleetEvent) -> None:
        """Tell the machine, and do what it asks for."""
        for action in self.machine.handle(event, time.monotonic_ns()):
            self._perform_action(action)
        self._arm_timer()

    def _perform_action(self, action: FleetAction) -> None:
        if isinstance(action, RequestReplay):
            self._replays[action.engine] = asyncio.create_task(
                self.client.read_replay(self.specs[action.engine], action.first)
            )
            return
        if isinstance(action, Send):
            if self.links is not None:
                self.links.send_message(action.to, action.message)
            return
        if isinstance(action, EngineGone):
            del self.specs[action.name]
            self._leaving.discard(action.name)
            for task in [*self._tasks.pop(action.name, ()), *filter(None, [self._replays.pop(action.name, None)])]:
                task.cancel()
            return
        ticket = self._tickets.get(action.request_id)
        if ticket is None:
            return
        if isinstance(action, Abort):
            ticket.abort_attempt(action.engine, action.reason)
        else:
            ticket.put_decision(action)

    def _arm_timer(self) -> None:
        due_ns = self.machine.next_deadline_ns
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ns is not None:
            in_s = max(0.0, (due_ns - time.monotonic_ns()) / NS_PER_S)
            self._timer = asyncio.get_running_loop().call_later(in_s, self.post_event, TimePassed())

    # -- health

    async def _poll_regularly(self, spec: EngineSpec) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S * (2 if spec.kind is EngineKind.OPENAI else 1))
            await self._poll_engine(spec)

    async def _poll_engine(self, spec: EngineSpec) -> None:
        report: EngineReport | HttpFault
        try:
            report = await self.client.read_report(spec)
        except HttpFault as fault:
            report = fault
        # it left while it was asked, and another one may have its name by now
        if self.specs.get(spec.name) is not spec:
            return
        if isinstance(report, HttpFault):
            # an engine that streams is alive, however late its pages are
            last_seen_ns = max((ticket.last_heard_ns(spec.name) for ticket in self._tickets.values()), default=0)
            self.post_event(EngineMissed(spec.name, report.reason, report.refuses, last_seen_ns))
        else:
            self.post_event(EngineAnswered(spec.name, report))
            self._note_hidden(spec.name, report.models)

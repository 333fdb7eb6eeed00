"""Hosts the fleet machine in one event loop: asks engines whether they are well, hears their KV events, keeps time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
import ssl
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from memserve.api.http.client import HttpCall, HttpFault
from memserve.base.config import ClusterConfig
from memserve.base.errors import UserError
from memserve.base.units import MIB, NS_PER_S
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
    KvReceived,
    Prefill,
    PromptArrived,
    ReplayEnded,
    RequestReplay,
    TimePassed,
)
from memserve.kv.identity import DEFAULT_KEY
from memserve.protocol.events import RejectRequest
from memserve.system.secrets import Followed

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOOK_S = 2.0
"""How long an engine has to say that it is well."""
REPLAY_S = 5.0
"""How long an engine has for the next batch of a replay."""
PAGE_BYTES_MAX = 8 * MIB
END_SEQUENCE = b"\xff" * 8
Decision = ForwardRequest | Prefill | RejectRequest | GiveUp

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_METRICS = {
    EngineKind.VLLM: ("vllm:num_requests_running", "vllm:num_requests_waiting",
                      ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
    EngineKind.SGLANG: ("sglang:num_running_reqs", "sglang:num_queue_reqs", ("sglang:token_usage",)),
    EngineKind.MEMSERVE: ("memserve_instance_sequences_running", "memserve_instance_requests_waiting", ()),
}  # fmt: skip
"""Running, waiting, and the share of KV memory in use, by newer and older names."""


class Ticket:
    """A request on its way: what the machine decides for it, and the call that can be given up."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._decisions: asyncio.Queue[Decision | None] = asyncio.Queue()
        #: why it needs no answer any more: its client left, or the server ends; ``None``: it does
        self.end_error: Exception | None = None
        #: the attempt that is under way
        self.call: HttpCall | None = None

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
        self.end_error = self.end_error or error
        self._decisions.put_nowait(None)
        self.abort_attempt(str(error))

    def abort_attempt(self, reason: str) -> None:
        if self.call is not None:
            self.call.abort_call(reason)


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
        self.machine = Fleet(list(specs), config, identity_key=identity_key, prefill_tokens=prefill_tokens)
        self._tickets: dict[str, Ticket] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._replays: dict[str, asyncio.Task[None]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listed, self._list_tasks = listed, list[asyncio.Task[None]]()
        self._leaving: set[str] = set()
        #: of the router that lets engines join and leave; None: this one
        self.owner_url: str | None = None
        #: for engines at ``https``; None: their certificates are checked
        self.tls: ssl.SSLContext | None = None
        #: called with the engines that there are to be, when one has joined or leaves
        self.on_engines_changed: Callable[[Sequence[EngineSpec]], None] = lambda specs: None

    @property
    def engine_key(self) -> str | None:
        """The engines' own API key, as it is now."""
        return self._engine_key.value()

    # -- life

    async def start(self) -> None:
        """Look at every engine once, and go on looking."""
        self._context = zmq.asyncio.Context()
        await asyncio.gather(*(self._follow_engine(spec) for spec in self.specs.values()))
        for view in self.machine.engine_views():
            if not view.up:
                log.warning("engine %s does not answer yet", view.name)
        if self._listed is not None:
            self._list_tasks.append(asyncio.create_task(self._follow_list(self._listed)))

    async def _follow_list(self, listed: Callable[[], Sequence[EngineSpec]]) -> None:
        """Let engines join and leave as they do elsewhere."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            specs = {spec.name: spec for spec in listed()}
            for name in [name for name, spec in self.specs.items() if specs.get(name) != spec]:
                if name not in self._leaving:
                    self.leave_engine(name)
            for name in [name for name in specs if name not in self.specs]:
                await self.join_engine(specs[name])

    async def _follow_engine(self, spec: EngineSpec) -> None:
        """Look at it once, and go on looking and listening."""
        tasks = self._tasks[spec.name] = [asyncio.create_task(self._read_kv_events(spec))] if spec.events else []
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
        """Stop looking and listening."""
        tasks = [*itertools.chain.from_iterable(self._tasks.values()), *self._replays.values(), *self._list_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        if self._context is not None:
            self._context.destroy(linger=0)

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
            self._replays[action.engine] = asyncio.create_task(self._read_replay(action))
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
            ticket.abort_attempt(action.reason)
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
            await asyncio.sleep(LOOK_EVERY_S)
            await self._poll_engine(spec)

    async def _poll_engine(self, spec: EngineSpec) -> None:
        report: EngineReport | HttpFault
        try:
            report = await self._read_report(spec)
        except HttpFault as fault:
            report = fault
        if self.specs.get(spec.name) is not spec:
            return
        if isinstance(report, HttpFault):
            calls = [ticket.call for ticket in self._tickets.values() if ticket.call is not None]
            last_seen_ns = max((call.last_seen_ns for call in calls if call.url == spec.url), default=0)
            self.post_event(EngineMissed(spec.name, report.reason, report.refuses, last_seen_ns))
        else:
            self.post_event(EngineAnswered(spec.name, report))

    async def _read_report(self, spec: EngineSpec) -> EngineReport:
        status, _ = await self.fetch_page(spec, "GET", "/health", b"", LOOK_S)
        if status != 200:
            raise HttpFault(f"its /health says {status}", refuses=True)
        status, body = await self.fetch_page(spec, "GET", "/v1/models", b"", LOOK_S)
        if status != 200:
            raise HttpFault(f"its /v1/models says {status}", refuses=True)
        models = models_of(body)
        try:
            status, body = await self.fetch_page(spec, "GET", "/metrics", b"", LOOK_S)
        except HttpFault:  # what it says about its load is of use, but not needed
            return EngineReport(models)
        return report_of(spec.kind, models, body.decode("utf-8", "replace") if status == 200 else "")

    async def fetch_page(
        self, spec: EngineSpec, method: str, path: str, body: bytes, deadline_s: float
    ) -> tuple[int, bytes]:
        """Status and body of a small answer. Raises :class:`HttpFault`."""
        headers = [(b"accept", b"*/*"), (b"content-type", b"application/json")]
        if (key := self.engine_key) is not None:
            headers.append((b"authorization", b"Bearer %b" % key.encode()))
        call = HttpCall(spec.url, self.tls)
        try:
            async with asyncio.timeout(deadline_s):
                await call.send_request(method, path, headers, body, deadline_s)
                return call.status, await call.read_body(PAGE_BYTES_MAX, deadline_s)
        except TimeoutError:
            raise HttpFault(f"{path} took longer than {deadline_s:g} s", status=504) from None
        finally:
            call.close()

    # -- KV events

    async def _read_kv_events(self, spec: EngineSpec) -> None:
        socket = self._open_socket(zmq.SUB, spec.events, lambda new_socket: new_socket.setsockopt(zmq.SUBSCRIBE, b""))
        with contextlib.closing(socket):
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == 8:
                    self.post_event(KvReceived(spec.name, int.from_bytes(frames[1], "big"), frames[2]))

    async def _read_replay(self, action: RequestReplay) -> None:
        spec = self.specs[action.engine]
        socket = self._open_socket(zmq.DEALER, spec.replay, lambda new_socket: None)
        try:
            await socket.send_multipart([b"", action.first.to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(REPLAY_S):
                    frames = await socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == END_SEQUENCE:
                    break
                if len(frames[-2]) == 8:
                    number = int.from_bytes(frames[-2], "big")
                    self.post_event(KvReceived(spec.name, number, frames[-1], replayed=True))
        except TimeoutError:
            log.warning("engine %s did not repeat its KV events", spec.name)
        finally:
            socket.close(linger=0)
        self.post_event(ReplayEnded(spec.name))

    def _open_socket(
        self, kind: int, address: str, prepare: Callable[[zmq.asyncio.Socket], None]
    ) -> zmq.asyncio.Socket:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        prepare(socket)
        socket.connect(address)
        return socket


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def models_of(body: bytes) -> dict[str, str]:
    """``/v1/models``: names, and the weights behind each; an adapter has weights of its own. Raises
    :class:`HttpFault`."""
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, RecursionError):
        raise HttpFault("its /v1/models is no list of models", refuses=True) from None
    cards.sort(key=lambda card: card.parent is not None)
    return {card.id: card.id if card.parent is not None else card.root or card.id for card in cards}


def report_of(kind: EngineKind, models: dict[str, str], page: str) -> EngineReport:
    """What ``/metrics`` says; numbers that make no sense are left out. Samples of several ranks are added up, shares
    averaged."""
    samples: dict[str, list[float]] = {}
    kv_tokens = 0
    for line in page.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        if name == "vllm:cache_config_info":
            kv_tokens += _cache_tokens(dict(_LABEL.findall(labels or "")))
        with contextlib.suppress(ValueError):
            number = float(value)
            if math.isfinite(number) and 0 <= number < 1e15:
                samples.setdefault(name, []).append(number)
    running, waiting, shares = _METRICS[kind]
    share = next((samples[name] for name in shares if name in samples), [])
    return EngineReport(
        models,
        int(sum(samples[running])) if running in samples else None,
        int(sum(samples.get(waiting, []))),
        min(1.0, sum(share) / len(share)) if share else 0.0,
        kv_tokens or int(sum(samples.get("sglang:max_total_num_tokens", []))),
        max(samples.get("process_start_time_seconds", [0.0])),
    )


def _cache_tokens(labels: dict[str, str]) -> int:
    block, blocks = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
    return int(block) * int(blocks) if block.isdecimal() and blocks.isdecimal() else 0

"""Runs an engine's membership in a cluster, in one event loop: from the engine's first answer to the end, and anew each
time that the engine was away.

::

    WAITING --the engine is well, and serves the model--> MEMBER --it is silent, or refuses--> leaves, WAITING
                                                            |
                                                            +--drained, or ended by its operator--> the process ends

Before it joins, the engine is asked how it cuts some texts into tokens: requests come in token ids, so its tokenizer
has to be the cluster's. That its weights are those of the model is its operator's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from memserve.api.http.client import HttpCall, HttpFault
from memserve.base.config import MemberConfig
from memserve.base.errors import UserError
from memserve.base.types import ClockTicked, Role
from memserve.base.units import MIB, NS_PER_S, ns_from_s
from memserve.fleet.engine_client import LOOK_EVERY_S, LOOK_S, EngineClient, context_of, slot_context
from memserve.fleet.members.dialects import END_OF_STREAM, Dialect, SequenceCall, dialect_of, event_data
from memserve.fleet.members.events import (
    Actions,
    CallBroke,
    EndCall,
    EngineMemberEvent,
    GenerationBegun,
    PieceArrived,
    RepeatEvents,
    ReportRead,
    StartCall,
)
from memserve.fleet.members.machine import EngineMember
from memserve.fleet.members.work import EngineTerms
from memserve.fleet.messages import EngineReport, EngineSpec
from memserve.host.stats import EngineStats
from memserve.protocol.events import EmitTokens, MessageArrived, RejectRequest, Send
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    DrainRequested,
    ForwardMessage,
    GenerationChanged,
    Joined,
    Left,
    LoadRead,
    LogWarning,
    MemberAction,
    MemberEvent,
    ReadLoad,
    RemovePeer,
)
from memserve.protocol.messages import AnyMessage, RequestRefused, Tokens
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.follower import NO_KV
from memserve.system.memory import resident_bytes
from memserve.system.process import HealthState, SignalCounter, ending_signals, new_generation
from memserve.system.secrets import Followed
from memserve.transport.links.shared_memory import this_host
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.member_place import MemberPlace, health_of, next_incarnation

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""An engine that does not answer for so long is given up."""
CALL_SILENCE_S = 120.0
"""How long an engine may say nothing in the middle of an answer. The router tries elsewhere after a minute."""
REFUSAL_BYTES_MAX = MIB
PROBE_TEXTS = (
    "Hello, world!",
    "  Two  spaces,\ttabs\n\n\nand lines.\r\n",
    "naïve café — 中文, かな, русский, عربى, 🙂👩‍🚀",
    "def f(x):\n    return x**2 + 3.14159 # 1234567890",
    "<|im_start|>user\n<s></s><bos><eos><|endoftext|>",
)
"""Cut alike by equal tokenizers, and hardly by others."""


EngineKey = Followed[str] | Followed[str | None]
"""An engine's own API key; None: it asks for none."""


@dataclass(frozen=True, slots=True)
class EngineMemberOptions:
    """An engine's place in a cluster."""

    spec: EngineSpec
    tokenize: Callable[[str], list[int]]
    """The cluster's tokenizer: names of special tokens are those, and nothing is put before the text."""
    block_tokens: int
    """Of the cluster's instances."""
    place: MemberPlace


class EngineProcess:
    """One engine, as a member of a cluster."""

    def __init__(self, options: EngineMemberOptions, key: EngineKey, say: Callable[[str], None]) -> None:
        """``key``: the engine's own API key. ``say`` takes a line whenever it joins or waits. Raises
        :class:`UserError` for an engine that does not speak in tokens."""
        dialect = dialect_of(options.spec.kind)
        if dialect is None:
            hint = "leave model= out: it answers by itself, for the models that it lists"
            raise UserError(f"{options.spec.kind} servers cannot be members", hint=hint, param="engine")
        self.options, self._dialect, self._key, self._say = options, dialect, key, say
        self.client = EngineClient(key, lambda event: self._post_if_member(event))
        self._membership: _Membership | None = None
        self._health = options.place.open_health()
        self._counter = SignalCounter()
        self._ends = asyncio.Event()

    @property
    def router(self) -> Peer | None:
        """The router whose member it is; None: it is none."""
        return self._membership.router if self._membership is not None else None

    async def run(self) -> None:
        """Be a member whenever the engine is well, until the end is asked for, or the router drains or refuses it.
        Raises :class:`UserError` when the router refuses it."""
        self._follow_signals()
        try:
            while not self._ends.is_set():
                terms = await self._wait_until_well()
                if terms is None:
                    return
                self._membership = _Membership(self, terms, self._dialect, self._key)
                is_over = await self._membership.run(self._on_joined)
                self._membership = None
                if is_over:
                    return
        finally:
            self.client.close()
            if self._health is not None:
                self._health.remove_file()

    def _on_joined(self) -> None:
        self._say(f"{self.options.spec.name} is a member of {', '.join(self.options.place.join)}")

    def _post_if_member(self, event: EngineMemberEvent) -> None:
        if self._membership is not None:
            self._membership.post_event(event)

    def _follow_signals(self) -> None:
        loop = asyncio.get_running_loop()
        signals = [signal.SIGTERM] if self.options.place.is_supervised else ending_signals()
        for sig in signals:
            loop.add_signal_handler(sig, self._on_signal, int(sig))

    def _on_signal(self, sig: int) -> None:
        if not self._counter.count_signal(sig):
            return
        self._ends.set()
        if self._membership is not None:
            self._membership.leave(self._counter.patience_s(self.options.place.drain_s), self._counter.names[-1])

    def write_health(self, state: HealthState) -> None:
        """Where it has been given a file for that."""
        if self._health is not None:
            self._health.write_state(state)

    # -- before it is a member

    async def _wait_until_well(self) -> EngineTerms | None:
        """What the engine is, once it answers; None: the end was asked for."""
        reason, spec = "", self.options.spec
        while not self._ends.is_set():
            try:
                return await self._read_terms()
            except HttpFault as fault:
                if fault.reason != reason:
                    reason = fault.reason
                    self._say(f"waiting for {spec.name}: {reason}")
            self.write_health(HealthState.OUTSIDE)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), LOOK_EVERY_S)
        return None

    async def _read_terms(self) -> EngineTerms:
        options, spec = self.options, self.options.spec
        report = await self.client.read_report(spec)
        model = engine_model(report, spec)
        context_tokens = await self._read_context(model)
        await self._check_tokenizer(model)
        return EngineTerms(spec, model, context_tokens, options.place.identity_key, options.block_tokens)

    async def _read_context(self, model: str) -> int:
        """The longest sequence that the engine runs."""
        spec = self.options.spec
        status, page = await self.client.fetch_page(spec, "GET", "/v1/models", b"", LOOK_S)
        # vLLM and SGLang say it beside the model's name, llama.cpp of its slots
        tokens = context_of(page, model) if status == 200 else 0
        if not tokens:
            status, page = await self.client.fetch_page(spec, "GET", "/props", b"", LOOK_S)
            tokens = slot_context(page) if status == 200 else 0
        if not tokens:
            raise HttpFault("it does not say how long its context is")
        return tokens

    async def _check_tokenizer(self, model: str) -> None:
        spec, dialect = self.options.spec, self._dialect
        for text in PROBE_TEXTS:
            body = dialect.tokenize_body(text, model)
            status, page = await self.client.fetch_page(spec, "POST", dialect.tokenize_path, body, LOOK_S)
            if status != 200:
                raise HttpFault(f"its {dialect.tokenize_path} says {status}: whether its tokens are ours is not known")
            if _tokens_in(page) != self.options.tokenize(text):
                own_name = self.options.place.model or "the model"
                raise HttpFault(f"it has another tokenizer than {own_name}: it serves another model")


class _Membership:
    """From joining to leaving, once."""

    def __init__(self, process: EngineProcess, terms: EngineTerms, dialect: Dialect, key: EngineKey) -> None:
        self._process, self._dialect, self._key = process, dialect, key
        self._options, self._client = process.options, process.client
        self._place = process.options.place
        self._loop = asyncio.get_running_loop()
        self_peer = Peer(self._place.name, new_generation())
        self._engine = EngineMember(terms, dialect, self_peer)
        self._mailbox = ZmqMailbox(self_peer, self._place, self._on_message)
        self._mailbox.read_in(self._loop)
        self._terms = terms
        self._member: MemberMachine | None = None  # until the engine's first report
        self._on_joined: Callable[[], None] = lambda: None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._left = asyncio.Event()
        self._refused, self._engine_lost = "", False
        self._answered_s = time.monotonic()

    @property
    def router(self) -> Peer | None:
        return self._member.router if self._member is not None else None

    async def run(self, on_joined: Callable[[], None]) -> bool:
        """Whether that is all: False, where the engine was lost and may come back. Raises :class:`UserError` when the
        router refuses it."""
        self._on_joined = on_joined
        try:
            report = await self._client.read_report(self._options.spec)
            self._member = MemberMachine(self._describe(report), self._place.join, MemberConfig())
            self.post_event(ReportRead(report))
            self._perform_member(self._member.start(time.monotonic_ns()))
            self._tasks = [asyncio.create_task(self._poll_engine())]
            if self._options.spec.events:
                self._tasks.append(asyncio.create_task(self._client.read_kv_events(self._options.spec)))
            await self._left.wait()
        except HttpFault:  # it was well a moment ago
            self._engine_lost = True
        finally:
            await self._close()
        if self._refused:
            raise UserError(f"the router refuses {self._options.spec.name}: {self._refused}", param="join")
        return not self._engine_lost

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks, *self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._mailbox.close()

    def leave(self, patience_s: float, why: str) -> None:
        """Take nothing new, finish what is here for ``patience_s`` at most, then leave."""
        if self._member is not None:
            self._post_member(DrainRequested(ns_from_s(patience_s), why))
        else:
            self._left.set()

    def _describe(self, report: EngineReport) -> PeerInfo:
        spec, tokens = self._options.spec, report.kv_tokens or self._terms.context_tokens
        return PeerInfo(
            self._engine.self_peer,
            Role.ENGINE,
            self._mailbox.address,
            "",
            NO_KV,
            # so many blocks as an instance would have: routers reserve in these
            tokens // self._options.block_tokens,
            0,
            self._terms.context_tokens,
            caching=True,
            host_id=this_host(),
            pid=os.getpid(),
            publishes_events=bool(spec.events),
            model=self._place.model,
        )

    # -- the two machines

    def _on_message(self, sender: Peer, message: AnyMessage) -> None:
        self._post_member(MessageArrived(sender, message))

    def _post_member(self, event: MemberEvent) -> None:
        if self._member is not None and not self._left.is_set():
            self._perform_member(self._member.handle(event, time.monotonic_ns()))
            self._arm_timer()

    def post_event(self, event: EngineMemberEvent) -> None:
        """Tell the engine's machine, and do what it asks for."""
        self._perform_engine(self._engine.handle(event, time.monotonic_ns()))
        self._arm_timer()

    def _perform_member(self, actions: Sequence[MemberAction]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self._mailbox.send(to, message)
                case ForwardMessage(sender, message):
                    self.post_event(MessageArrived(sender, message))
                case ConnectRouter(router, address):
                    self._mailbox.connect(router, address)
                case AddPeer(info):
                    self._mailbox.connect(info.peer, info.address)
                case RemovePeer(peer):
                    self._mailbox.disconnect(peer)
                case ReadLoad(with_stats):
                    # not at once: the machine is in the middle of the actions of one event
                    self._loop.call_soon(self._post_load, with_stats)
                case ChangeGeneration():
                    self._loop.call_soon(self._change_generation, action)
                case Joined():
                    self._on_joined()
                case LogWarning(text):
                    log.warning("%s", text)
                case Left(refused):
                    self._refused = refused
                    self._left.set()

    def _post_load(self, with_stats: bool) -> None:
        reading: LoadRead = self._engine.heartbeat_load(time.monotonic_ns())
        if with_stats:
            own_stats = EngineStats(
                instance=self._engine.stats(), resident_bytes=resident_bytes(), read_at_ns=time.time_ns()
            )
            reading = replace(reading, stats=own_stats.encode())
        self._post_member(reading)
        if self._member is not None:
            self._process.write_health(health_of(self._member))

    def _change_generation(self, order: ChangeGeneration) -> None:
        assert self._member is not None
        self_peer = next_incarnation(self._engine.self_peer, order)
        self.post_event(GenerationBegun(self_peer))
        self._mailbox.restart_as(self_peer)
        self._post_member(GenerationChanged(msgspec.structs.replace(self._member.info, peer=self_peer)))

    def _perform_engine(self, actions: Actions) -> None:
        for action in actions:
            match action:
                case EmitTokens(outputs):
                    self._send_to_owner(Tokens(tuple(outputs)))
                case RejectRequest(request_id, reason, retry_after_s):
                    self._send_to_owner(RequestRefused(request_id, reason, retry_after_s))
                case Send(to, message):
                    self._mailbox.send(to, message)
                case StartCall(call_id, call):
                    self._calls[call_id] = asyncio.create_task(self._answer_call(call_id, call))
                case EndCall(call_id):
                    if (task := self._calls.pop(call_id, None)) is not None:
                        task.cancel()
                case RepeatEvents(first):
                    self._tasks.append(asyncio.create_task(self._client.read_replay(self._options.spec, first)))

    def _send_to_owner(self, message: AnyMessage) -> None:
        owner = self._engine.router
        if owner is not None and self._member is not None and owner == self._member.router:
            self._mailbox.send(owner, message)

    def _arm_timer(self) -> None:
        deadlines = (self._engine.next_deadline_ns, self._member.next_deadline_ns if self._member else None)
        due_ns = min((due_ns for due_ns in deadlines if due_ns is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ns is not None and not self._left.is_set():
            # a deadline that is over already must not turn the loop without a pause
            in_s = max(0.001, (due_ns - time.monotonic_ns()) / NS_PER_S)
            self._timer = self._loop.call_later(in_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.post_event(ClockTicked())
        self._post_member(ClockTicked())

    # -- the engine

    async def _poll_engine(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # replays end, and this lives for months
            self._tasks = [task for task in self._tasks if not task.done()]
            try:
                report = await self._client.read_report(self._options.spec)
            except HttpFault as fault:
                # a closed port is certain; a page that is late may be the load
                if fault.refuses or time.monotonic() - self._answered_s >= SILENT_S:
                    log.warning("%s is lost: %s", self._options.spec.name, fault.reason)
                    self._engine_lost = True
                    self.leave(0.0, "")
                    return
                continue
            self._answered_s = time.monotonic()
            self.post_event(ReportRead(report))

    async def _answer_call(self, call_id: int, call: SequenceCall) -> None:
        """Ask the engine, and post what it answers."""
        http_call = HttpCall(self._options.spec.url)
        try:
            read, path = self._dialect.reader(call), self._options.spec.base_path + self._dialect.path
            headers = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
            if key := self._key.value():
                headers.append((b"authorization", b"Bearer %b" % key.encode()))
            await http_call.send_request("POST", path, headers, self._dialect.body(call), CALL_SILENCE_S)
            if http_call.status != 200:
                await self._post_refusal(call_id, http_call)
                return
            async for data in event_data(http_call.body_pieces(CALL_SILENCE_S)):
                # bytes of an answer are a sign of life, too: under load the engine's pages come late
                self._answered_s = time.monotonic()
                if (piece := read(data)) is not None:
                    self.post_event(PieceArrived(call_id, piece))
            # vLLM's last piece waits for the usage behind it, which may not have come
            if (piece := read(END_OF_STREAM)) is not None:
                self.post_event(PieceArrived(call_id, piece))
            self.post_event(CallBroke(call_id, "its stream ended too early"))  # nothing, where it had ended
        except HttpFault as fault:
            self.post_event(CallBroke(call_id, fault.reason))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:  # of what the reader was given
            log.warning("%s answers what cannot be read: %r", self._options.spec.name, error)
            self.post_event(CallBroke(call_id, "its answer cannot be read"))
        finally:
            http_call.close()
            self._calls.pop(call_id, None)

    async def _post_refusal(self, call_id: int, http_call: HttpCall) -> None:
        text = (await http_call.read_body(REFUSAL_BYTES_MAX, CALL_SILENCE_S)).decode("utf-8", "replace")
        # these three are of the moment: too late, too early, too much
        is_final = 400 <= http_call.status < 500 and http_call.status not in (408, 425, 429)
        self.post_event(CallBroke(call_id, f"it said {http_call.status}: {text[:200]}", is_final))


# -- what an engine says of itself


def engine_model(report: EngineReport, spec: EngineSpec) -> str:
    """The engine's own name of the model: the same, or the only one. Raises :class:`HttpFault` where it is neither."""
    if spec.model in report.models:
        return spec.model
    bases = [name for name, weights in report.models.items() if name == weights] or list(report.models)
    if len(bases) != 1:
        shown = ", ".join(list(report.models)[:8]) or "none"
        raise HttpFault(f"it serves {shown}, and not {spec.model!r} (start it with that --served-model-name)")
    return bases[0]


def _tokens_in(page: bytes) -> list[int] | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return [int(token) for token in json.loads(page)["tokens"]]
    return None

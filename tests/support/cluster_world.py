"""A cluster of simple instances on a bad network, in virtual time, for tests of the router's machine.

Each instance draws the next token as a hash of everything before it, so any right answer is known in advance. It does
what is asked of it step by step; the world decides when, and may kill, pause, mute and confuse it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from memserve.base.config import ClusterConfig
from memserve.base.types import FinishReason, KVGeometry, Request, Role, SamplingParams, StopParams, Tier, TokenOutput
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.kv.identity import block_identities, namespace_id
from memserve.protocol.messages import (
    AdaptersHeld,
    AttemptsUnknown,
    Cancel,
    Dispatch,
    Drain,
    Expelled,
    HandedOver,
    Heartbeat,
    HoldAdapters,
    Join,
    JoinAccepted,
    KvChange,
    KvEvents,
    Leave,
    PeerGone,
    Pin,
    Pinned,
    QueryAttempts,
    RequestRefused,
    StopSequence,
    Tokens,
    Unpin,
)
from memserve.protocol.peers import Load, Peer, PeerInfo
from memserve.router.events import (
    AdapterAnswered,
    ClockTicked,
    EmitTokens,
    MessageArrived,
    RejectRequest,
    ReportMember,
    RequestArrived,
    RequestCancelled,
    Send,
    SequenceStopped,
)
from memserve.router.machine import Cluster

BLOCK = 4
GEOMETRY = KVGeometry(2, 2, 8, 8, "float32", BLOCK)
CONTEXT = 256
VOCAB = 50


def next_token(prompt, seed, index, out) -> int:
    """Any token after ``prompt`` and ``out``."""
    return zlib.crc32(repr((list(map(int, prompt)), seed, index, list(out))).encode()) % VOCAB


def lone_answer(request: Request, index: int) -> tuple[list[int], FinishReason]:
    """What sequence ``index`` says when nothing ever goes wrong."""
    out: list[int] = []
    while len(out) < request.stop.max_tokens:
        out.append(next_token(request.prompt, request.sampling.seed, index, out))
        if out[-1] in request.stop.stop_token_ids:
            return out, FinishReason.STOP
    return out, FinishReason.LENGTH


def a_request(name, prompt, *, max_tokens=4, seed=0, n=1, stops=(), prompt_logprobs=False, **rest) -> Request:
    sampling = SamplingParams(seed=seed, prompt_logprobs=prompt_logprobs)
    stop = StopParams(max_tokens, 0, tuple(stops))
    return Request(name, np.asarray(prompt, np.int32), sampling, stop, n, **rest)


def info(name: str, role: Role, generation: int = 1, **rest) -> PeerInfo:
    fields = {"address": f"tcp://{name}", "namespace": "ns", "geometry": GEOMETRY, "hbm_blocks": 64, "dram_blocks": 0}
    fields |= {"context_tokens": CONTEXT, "caching": True, "host_id": "host"}
    return PeerInfo(Peer(name, generation), role, **(fields | rest))


@dataclass
class Running:
    """One attempt at one instance."""

    dispatch: Dispatch
    out: list[list[int]]
    ended: set[int]
    prefilled: bool = False
    first: bool = True


@dataclass
class FakeInstance:
    """Runs what it is told, one step of everything at a time."""

    name: str
    role: Role
    generation: int = 1
    alive: bool = True
    paused: bool = False
    #: what the router sends it is lost, what it says about requests is lost; all else goes through
    deaf: bool = False
    mute: bool = False
    member: bool = False
    draining: bool = False
    refuses: tuple[str, float | None] | None = None
    #: digests of adapters that it cannot load, with the reason
    unfit: dict[str, str] = field(default_factory=dict)
    adapters: set[str] = field(default_factory=set)
    running: dict[str, Running] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    #: what the router and others have said, while it was paused
    inbox: list = field(default_factory=list)
    #: to the router
    outbox: list = field(default_factory=list)
    handoffs: list = field(default_factory=list)  # (peer, dispatch, out, ended)
    heard: list = field(default_factory=list)
    #: totals for heartbeats
    dispatches_heard: int = 0
    answers_told: int = 0

    @property
    def peer(self) -> Peer:
        return Peer(self.name, self.generation)

    def hear(self, message) -> None:
        self.heard.append(message)
        if isinstance(message, JoinAccepted):
            self.member = True
        elif isinstance(message, Expelled):
            self.running.clear()
            self.pins.clear()
            self.generation += 1
            self.member = self.draining = False
            self.dispatches_heard = self.answers_told = 0
        elif isinstance(message, Dispatch):
            self.dispatches_heard += 1
            self._dispatched(message)
        elif isinstance(message, QueryAttempts):
            unknown = tuple(name for name in message.attempts if name not in self.running)
            self.outbox.append(AttemptsUnknown(unknown, message.dispatches, self.dispatches_heard, self.answers_told))
        elif isinstance(message, Cancel):
            self.running.pop(message.request_id, None)
        elif isinstance(message, StopSequence):
            if message.request_id in self.running:
                self._end(message.request_id, message.index)
        elif isinstance(message, Drain):
            self.draining = True
        elif isinstance(message, Pin):
            self.pins[message.handle] = message
            self.outbox.append(Pinned(message.handle, len(message.tokens) // BLOCK * BLOCK))
        elif isinstance(message, Unpin):
            self.pins.pop(message.handle, None)
        elif isinstance(message, HoldAdapters):
            asked = {files.digest for files in message.adapters}
            self.adapters = asked - self.unfit.keys()
            failed = tuple((digest, self.unfit[digest]) for digest in sorted(asked & self.unfit.keys()))
            self.outbox.append(AdaptersHeld(tuple(sorted(self.adapters)), failed))

    def _dispatched(self, dispatch: Dispatch) -> None:
        request = dispatch.request
        assert not request.adapter or request.adapter in self.adapters, f"{self.name} does not have its adapter"
        if self.refuses is not None or self.draining:
            reason, retry_after_s = self.refuses or ("it drains", 0.0)
            self.outbox.append(RequestRefused(request.request_id, reason, retry_after_s))
            return
        out = [list(tokens) for tokens in dispatch.generated] or [[] for _ in range(request.n)]
        self.running[request.request_id] = Running(dispatch, out, set(dispatch.ended))

    def take_over(self, dispatch: Dispatch, out, ended) -> None:
        """A handoff has arrived."""
        request_id = dispatch.request.request_id
        self.running[request_id] = Running(dispatch, [list(t) for t in out], set(ended), prefilled=True, first=False)
        self.outbox.append(HandedOver(request_id))

    def step(self) -> None:
        """Every request gets a token for each of its sequences."""
        outputs = []
        for request_id, job in list(self.running.items()):
            outputs += self._step(request_id, job)
        if outputs:
            self.outbox.append(Tokens(tuple(outputs)))

    def _step(self, request_id: str, job: Running) -> list[TokenOutput]:
        dispatch, outputs = job.dispatch, []
        request = dispatch.request
        for index in range(request.n):
            if index not in job.ended:
                outputs.append(self._draw(request_id, job, index))
        job.first = False
        if request_id not in self.running:
            return outputs
        if not job.prefilled and dispatch.decode_at not in (None, self.peer):
            self.handoffs.append((dispatch.decode_at, dispatch, [list(t) for t in job.out], set(job.ended)))
            del self.running[request_id]
        job.prefilled = True
        return outputs

    def _draw(self, request_id: str, job: Running, index: int) -> TokenOutput:
        request, out = job.dispatch.request, job.out[index]
        offset = len(out)
        out.append(next_token(request.prompt, request.sampling.seed, index, out))
        reason = FinishReason.LENGTH if len(out) >= request.stop.max_tokens else None
        if out[-1] in request.stop.stop_token_ids and request.stop.max_tokens:
            reason = FinishReason.STOP
        rich = {"cached_tokens": 8, "queue_ns": 7, "prompt_logprobs": (None,)} if job.first else {}
        if self.role is Role.ENGINE:  # of a server of another project: with its last word, and of nothing resumed
            is_told = reason is not None and not any(job.dispatch.generated)
            rich = {"cached_tokens": 8} if is_told else {}
        if reason is not None:
            self._end(request_id, index)
        tokens = (out[-1],) if request.stop.max_tokens else ()  # 0: only the prompt's logprobs were wanted
        return TokenOutput(request_id, index, tokens, finish_reason=reason, offset=offset, **rich)

    def _end(self, request_id: str, index: int) -> None:
        job = self.running[request_id]
        job.ended.add(index)
        if len(job.ended) == job.dispatch.request.n:
            del self.running[request_id]


class Client:
    """The client of one request: compares every token with the lone answer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.got: list[list[int]] = [[] for _ in range(request.n)]
        self.reasons: list[FinishReason | None] = [None] * request.n
        self.rejected: RejectRequest | None = None
        self.introduced = [0] * request.n
        self.cached = [0] * request.n
        self.outputs: list[TokenOutput] = []
        self.asked_to_end = False

    @property
    def done(self) -> bool:
        return self.rejected is not None or None not in self.reasons

    def take(self, output: TokenOutput, now_ns: int) -> None:
        index, request = output.index, self.request
        assert self.rejected is None and self.reasons[index] is None, f"{output} after the end"
        got = self.got[index]
        assert output.offset == len(got), f"{output}: the client has {len(got)} tokens"
        got.extend(output.tokens)
        answer, ending = lone_answer(request, index)
        assert got == answer[: len(got)], f"{request.request_id}: {got} instead of {answer}"
        self.introduced[index] += output.queue_ns is not None
        self.cached[index] += output.cached_tokens == 8
        assert (output.prompt_logprobs is not None) == (output.queue_ns is not None)
        assert output.queue_ns is None or output.cached_tokens == 8
        assert max(self.introduced[index], self.cached[index]) <= 1, "what comes once came twice"
        self.reasons[index] = reason = output.finish_reason
        self.outputs.append(output)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert self.asked_to_end or (got, reason) == (answer, ending)
        elif reason is FinishReason.DEADLINE:
            assert request.deadline_ns is not None and request.deadline_ns <= now_ns
        elif reason is FinishReason.CANCELLED:
            assert self.asked_to_end


class World:
    """The router, its instances, its clients, and the time."""

    def __init__(self, instances=(), **config) -> None:
        self.config = ClusterConfig(**config)
        self.cluster = Cluster(self.config)
        self.instances: dict[str, FakeInstance] = {}
        self.clients: dict[str, Client] = {}
        self.now = 0
        self.diary: list = []
        self.reports: list[ReportMember] = []
        self.answers: dict[int, AdapterAnswered] = {}
        for name, role in instances:
            self.add(name, role)

    def add(self, name: str, role: Role, generation: int = 1, **rest) -> FakeInstance:
        instance = FakeInstance(name, role, generation)
        self.instances[name] = instance
        self.hear(instance.peer, Join(info(name, role, generation, **rest)))
        return instance

    # -- the router

    def post(self, event) -> list:
        """``event`` happens at the router; what it sends arrives at once, what clients get is compared."""
        if isinstance(event, RequestArrived):
            self.clients[event.request.request_id] = Client(event.request)
        actions = self.cluster.handle(event, self.now)
        self.diary.append((self.now, event, repr(actions)))
        self.cluster.check_invariants()
        for action in actions:
            if isinstance(action, EmitTokens):
                for output in action.outputs:
                    self.clients[output.request_id].take(output, self.now)
            elif isinstance(action, RejectRequest):
                client = self.clients[action.request_id]
                assert not client.outputs and client.rejected is None, f"{action} after {client.outputs}"
                client.rejected = action
            elif isinstance(action, ReportMember):
                self.reports.append(action)
            elif isinstance(action, AdapterAnswered):
                assert action.call_id not in self.answers
                self.answers[action.call_id] = action
            else:
                self._deliver(action)
        return actions

    def _deliver(self, action: Send) -> None:
        instance = self.instances.get(action.to.name)
        if instance is not None and instance.peer == action.to and instance.alive:
            if instance.paused:
                instance.inbox.append(action.message)
            elif not (instance.deaf and isinstance(action.message, Dispatch)):
                instance.hear(action.message)

    def hear(self, sender: Peer, message) -> list:
        return self.post(MessageArrived(sender, message))

    def ask(self, request: Request) -> Client:
        self.post(RequestArrived(request))
        return self.clients[request.request_id]

    def cancel(self, name: str) -> None:
        self.clients[name].asked_to_end = True
        self.post(RequestCancelled(name))

    def stop(self, name: str, index: int) -> None:
        self.clients[name].asked_to_end = True
        self.post(SequenceStopped(name, index))

    # -- time and instances

    def say_all(self, instance: FakeInstance) -> None:
        """What ``instance`` has to say arrives at the router and at other instances."""
        messages, instance.outbox = instance.outbox, []
        for message in messages:
            instance.answers_told += isinstance(message, Tokens | RequestRefused)
            if not (instance.mute and isinstance(message, Tokens | RequestRefused)):
                self.hear(instance.peer, message)
        handoffs, instance.handoffs = instance.handoffs, []
        for to, dispatch, out, ended in handoffs:
            taker = self.instances.get(to.name)
            if taker is not None and taker.peer == to and taker.alive and not taker.paused:
                taker.take_over(dispatch, out, ended)

    def step(self, *names: str) -> None:
        """Each of these (default: all that run) computes a step, and says what came of it."""
        for instance in [self.instances[name] for name in names] or list(self.instances.values()):
            if instance.alive and not instance.paused:
                instance.step()
                self.say_all(instance)

    def beat(self) -> None:
        for instance in list(self.instances.values()):
            if instance.alive and not instance.paused:
                if not instance.member:
                    self.hear(instance.peer, Join(info(instance.name, instance.role, instance.generation)))
                else:
                    waiting = sum(len(r.dispatch.request.prompt) for r in instance.running.values() if not r.prefilled)
                    load = Load(
                        prefill_tokens_queued=waiting,
                        hbm_blocks_available=64,
                        dispatches_heard=instance.dispatches_heard,
                        answers_told=instance.answers_told,
                    )
                    self.hear(instance.peer, Heartbeat(load))
                    if any(isinstance(message, AttemptsUnknown) for message in instance.outbox):
                        self.say_all(instance)
                    if instance.draining and not instance.running:
                        self.leave(instance)

    def leave(self, instance: FakeInstance) -> None:
        self.hear(instance.peer, Leave())
        instance.alive = False

    def wait(self, ns: int, *, beats: bool = True) -> None:
        """Time passes in steps of half a second; those that run beat."""
        end = self.now + ns
        while self.now < end:
            self.now = min(end, self.now + NS_PER_S // 2)
            if beats:
                self.beat()
            self.post(ClockTicked())

    def run(self, limit: int = 400) -> None:
        """Until every client has its answer."""
        while not all(client.done for client in self.clients.values()):
            self.now += NS_PER_MS
            self.step()
            limit -= 1
            assert limit, (
                f"no end: {self.cluster}, {[c.request.request_id for c in self.clients.values() if not c.done]}"
            )

    def kill(self, name: str) -> None:
        self.instances[name].alive = False

    def resume(self, name: str) -> None:
        instance = self.instances[name]
        instance.paused = False
        messages, instance.inbox = instance.inbox, []
        for message in messages:
            instance.hear(message)

    # -- looking

    def sent(self, actions, kind) -> list:
        return [(a.to.name, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]

    def gone(self, actions) -> list[str]:
        return [message.peer.name for _, message in self.sent(actions, PeerGone)]

    def check_repeatable(self) -> None:
        """The same diary gives the same actions again."""
        twin = Cluster(self.config)
        for now_ns, event, actions in self.diary:
            assert repr(twin.handle(event, now_ns)) == actions


def dispatches(world, actions):
    return world.sent(actions, Dispatch)


def cached(world, name, prompt, tier=Tier.HBM, tenant=""):
    """``name`` says that it has cached the whole blocks of ``prompt``."""
    view = next(v for v in world.cluster.instances() if v.peer.name == name)
    tokens = a_request("", prompt).prompt
    names = b"".join(block_identities(namespace_id(tenant, "ns"), tokens, BLOCK))
    world.hear(view.peer, KvEvents(view.next_event, (KvChange("stored", tier, names),)))

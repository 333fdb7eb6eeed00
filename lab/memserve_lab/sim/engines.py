"""A server of another project in virtual time, and the process that is a member of the cluster for it.

The server draws the tokens that any instance would, call by call; it keeps blocks of its own size, names them by
numbers of its own, and publishes what it stores and gives up. Of what it publishes some is lost on the way, and is
repeated when it is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import msgspec

from memserve.base.config import ExchangeConfig
from memserve.base.types import Role, TokenLogprobs
from memserve.base.units import NS_PER_MS
from memserve.fleet.members.dialects import AnswerPiece, SequenceCall, dialect_of
from memserve.fleet.members.events import (
    CallBroke,
    EndCall,
    EngineMemberAction,
    GenerationBegun,
    PieceArrived,
    RepeatEvents,
    ReportRead,
    StartCall,
)
from memserve.fleet.members.machine import EngineMember
from memserve.fleet.members.work import EngineTerms
from memserve.fleet.messages import EngineKind, EngineReport, EngineSpec, KvReceived, ReplayEnded
from memserve.kv.identity import DEFAULT_KEY
from memserve.protocol.events import EmitTokens, RejectRequest, Send
from memserve.protocol.member_events import (
    ChangeGeneration,
    DrainRequested,
    GenerationChanged,
)
from memserve.protocol.messages import AnyMessage, RequestRefused, Tokens
from memserve.protocol.peers import Peer, PeerInfo
from memserve.router.follower import NO_KV
from memserve_lab.sim.nodes import Host, WorkerNode
from memserve_lab.sim.reference.oracle import lone_tokens

LOOK_NS = 100 * NS_PER_MS
"""Between two looks of a member at its server."""
KEPT_BATCHES = 256
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """A server."""

    block_tokens: int
    blocks: int
    """Of its cache."""
    context_tokens: int
    publishes: bool
    repeats: bool
    loses_share: float
    """Of the batches that it publishes, what is lost."""
    caches: bool
    vocab: int


class Block:
    """A block of the server's cache: what it is called, and the text up to its end."""

    def __init__(self, name: int, parent: int | None, tokens: tuple[int, ...]) -> None:
        self.name, self.parent, self.tokens = name, parent, tokens


class ServerCache:
    """Blocks by salt and text, least recently used first, and the batches that tell of them."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._blocks: OrderedDict[tuple[str, tuple[int, ...]], Block] = OrderedDict()
        self._named = 0
        #: all batches of this life, the last ones alone with their payload
        self.batches: list[bytes] = []

    def matched_tokens(self, salt: str, tokens: Sequence[int]) -> int:
        """Of a prompt: whole blocks, and not all of it."""
        size, count = self._setup.block_tokens, 0
        while (end := (count + 1) * size) < len(tokens) and (salt, tuple(tokens[:end])) in self._blocks:
            self._blocks.move_to_end((salt, tuple(tokens[:end])))
            count += 1
        return count * size

    def store_text(self, salt: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """The whole blocks of a text are cached now. What has changed."""
        size, events = self._setup.block_tokens, list[dict[str, Any]]()
        parent: int | None = None
        for end in range(size, len(tokens) + 1, size):
            key = salt, tuple(tokens[:end])
            block = self._blocks.get(key)
            if block is None:
                self._named += 1
                block = self._blocks[key] = Block(self._named, parent, tuple(tokens[end - size : end]))
                events.append(_stored(block, size, salt))
            self._blocks.move_to_end(key)
            parent = block.name
        while len(self._blocks) > self._setup.blocks:
            (salt, _), block = self._blocks.popitem(last=False)
            events.append({"type": "BlockRemoved", "block_hashes": [block.name], "medium": "GPU"})
        return events

    def publish(self, events: list[dict[str, Any]]) -> tuple[int, bytes]:
        """A batch, with its number."""
        self.batches.append(_encode([1.5, events, 0]))
        return len(self.batches) - 1, self.batches[-1]


def _stored(block: Block, size: int, salt: str) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [block.name], "parent_block_hash": block.parent}
    private = {"extra_keys": [[salt]]} if salt else {}
    return event | {"token_ids": list(block.tokens), "block_size": size, "medium": "GPU"} | private


class EngineHost(Host, Protocol):
    """A world with servers of other projects."""

    random: Random


class EngineNode(WorkerNode):
    """Hosts a ``MemberMachine`` and an ``EngineMember``, as ``fleet/members/host`` does, and their server."""

    host: EngineHost
    machine: EngineMember

    def __init__(self, host: EngineHost, name: str, setup: EngineSetup, block_tokens: int) -> None:
        """Boots at once. ``block_tokens``: of the cluster's instances."""
        super().__init__(host, Peer(name, 0))
        self.setup, self._block_tokens = setup, block_tokens
        self.spec = EngineSpec(
            EngineKind.VLLM, "http://engine:1", "tcp://e:1" * setup.publishes, "tcp://e:2" * setup.repeats, model="m"
        )
        self.answers = 0
        """Sequences that it has ended."""
        self.is_up = True
        self._server_life = 0
        self._calls: dict[int, SequenceCall] = {}
        self._drawn: dict[int, int] = {}
        self.start_server()
        self.boot_process()

    # -- the server

    def start_server(self) -> None:
        """With nothing in memory."""
        self._server_life += 1
        self.is_up, self.cache = True, ServerCache(self.setup)

    def kill_server(self) -> None:
        """All its connections break; it is noticed by that, and at the next look."""
        self._server_life += 1
        self.is_up = False
        for call_id in list(self._calls):
            self._break_call(call_id, "the connection is gone")

    def break_calls(self) -> None:
        """It goes on, and what it was answering is lost."""
        for call_id in list(self._calls):
            self._break_call(call_id, "it said 500")

    def _break_call(self, call_id: int, reason: str) -> None:
        if self._calls.pop(call_id, None) is not None:
            self.submit_event(CallBroke(call_id, reason))

    def _start_call(self, call_id: int, call: SequenceCall) -> None:
        self._calls[call_id] = call
        if not self.is_up:
            self.call_later(self._span_ns(), self._break_call, call_id, "no connection")
            return
        prompt = call.prompt
        salt = call.cache_salt if self.setup.caches else str(call_id)
        cached = self.cache.matched_tokens(salt, prompt) if self.setup.caches else 0
        request = call.request
        drawn_by = request.sampling.seed, call.sequence_index, self.setup.vocab
        tokens = lone_tokens(request.prompt.tolist(), call.max_tokens, *drawn_by)
        self.call_later(self._span_ns(), self._draw, self._server_life, call_id, salt, tokens, cached)

    def _span_ns(self) -> int:
        return self.host.random.randint(NS_PER_MS // 2, 8 * NS_PER_MS)

    def _draw(self, server_life: int, call_id: int, salt: str, tokens: list[int], cached: int) -> None:
        """One or two tokens more. The text so far is cached before they are told."""
        call = self._calls.get(call_id)
        if call is None or server_life != self._server_life:
            return
        request, place = call.request, len(call.generated) + self._drawn.get(call_id, 0)
        count = min(self.host.random.choice([1, 1, 1, 2]), len(tokens) - place)
        self._drawn[call_id] = place + count - len(call.generated)
        new_tokens = tuple(tokens[place : place + count])
        text = [*request.prompt.tolist(), *tokens[: place + count - 1]]
        if self.setup.caches:
            self._publish(self.cache.store_text(salt, text))
        stops = [
            end
            for end, token in enumerate(new_tokens, place + 1)
            if token in request.stop.stop_token_ids and end >= request.stop.min_tokens
        ]
        finish = "stop" if stops else "length" if place + count >= len(tokens) else ""
        logprobs = [TokenLogprobs(token, -1.0) for token in new_tokens] if request.sampling.logprobs is not None else ()
        if finish:
            self._calls.pop(call_id)
            self.answers += 1
        piece = AnswerPiece(new_tokens, logprobs, finish, cached if finish else None)
        self.post_event(PieceArrived(call_id, piece))
        if call_id in self._calls:
            self.call_later(self._span_ns(), self._draw, server_life, call_id, salt, tokens, cached)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        if not events or not self.setup.publishes:
            return
        number, payload = self.cache.publish(events)
        if self.host.random.random() >= self.setup.loses_share:
            self.submit_event(KvReceived(self.spec.name, number, payload))

    def _repeat_events(self, first: int) -> None:
        kept = range(max(first, len(self.cache.batches) - KEPT_BATCHES), len(self.cache.batches))
        for number in kept if self.is_up else ():
            self.post_event(KvReceived(self.spec.name, number, self.cache.batches[number], replayed=True))
        self.post_event(ReplayEnded(self.spec.name))

    # -- life of the member's process

    def boot_process(self) -> None:
        """A new process under the same name."""
        self.begin_life()
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self._calls.clear()
        self._drawn.clear()
        self._join()

    def _join(self) -> None:
        """Begin to ask for membership, with nothing that runs."""
        exchange = ExchangeConfig(event_capacity=64)
        terms = EngineTerms(self.spec, "m", self.setup.context_tokens, DEFAULT_KEY, self._block_tokens, exchange)
        dialect = dialect_of(self.spec.kind)
        assert dialect is not None
        self.machine = EngineMember(terms, dialect, self.peer)
        blocks = self.setup.blocks * self.setup.block_tokens // self._block_tokens
        self.info = PeerInfo(
            self.peer, Role.ENGINE, f"virtual://{self.peer.name}", "", NO_KV, blocks, 0, self.setup.context_tokens,
            caching=self.setup.caches, publishes_events=self.setup.publishes,
        )  # fmt: skip
        self.start_member(self.info)
        self.call_later(LOOK_NS, self._look)

    def _look(self) -> None:
        """At the server: where it is gone the member leaves, and is back when it is."""
        if not self.is_up:
            self.tell_member(DrainRequested(0))
            return
        running = len(self._calls)
        kv_tokens = self.setup.blocks * self.setup.block_tokens
        report = EngineReport({"m": "m"}, running, kv_tokens=kv_tokens, started_s=self._server_life)
        self.post_event(ReportRead(report))
        self.call_later(LOOK_NS, self._look)

    def _rejoin(self) -> None:
        if self.is_up:
            self.boot_process()
        else:
            self.call_later(LOOK_NS, self._rejoin)

    # -- as a member

    def begin_generation(self, order: ChangeGeneration) -> None:
        self.peer = Peer(self.peer.name, order.generation_min)
        self.post_event(GenerationBegun(self.peer))
        self.tell_member(GenerationChanged(msgspec.structs.replace(self.info, peer=self.peer)))

    def on_end(self, refused: str) -> None:
        self.begin_life()  # its calls end, and it waits for the server
        self._calls.clear()
        self.call_later(LOOK_NS, self._rejoin)

    def post_event(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self.host.on_handled(self, event, actions)
        for action in actions:
            self._perform_action(action)
        self.ticking.plan_tick(self.machine.next_deadline_ns)

    def _perform_action(self, action: EngineMemberAction) -> None:
        match action:
            case Send(to, message):
                self.send_message(to, message)
            case EmitTokens(outputs):
                self._tell_owner(Tokens(tuple(outputs)))
            case RejectRequest(request_id, reason, retry_after_s):
                self._tell_owner(RequestRefused(request_id, reason, retry_after_s))
            case StartCall(call_id, call):
                self._start_call(call_id, call)
            case EndCall(call_id):
                self._calls.pop(call_id, None)
            case RepeatEvents(first):
                self.call_later(self._span_ns(), self._repeat_events, first)

    def _tell_owner(self, message: AnyMessage) -> None:
        owner = self.machine.router
        if owner is not None and owner == self.member.router:
            self.send_message(owner, message)

    @property
    def is_idle(self) -> bool:
        """Whether it runs, and answers nothing."""
        return self.alive and not self.paused and not self._calls

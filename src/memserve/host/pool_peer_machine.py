"""What a :class:`PoolPeer` does, without threads and sockets: a memory, an exchange, and the machine of its
membership (:class:`PeerGroup`), which it hosts. That is of a group without a router::

    --AddRequested, or PeerJoined of a peer--> sends PeerJoined --any answer--> exchanges heartbeats
    --silence, Leave, RemoveRequested--------> the peer is gone, and whatever it held is freed
    --Expelled by a peer---------------------> ChangeGeneration ... GenerationChanged: PeerJoined to all peers again

Each member does for its peers what a router does for its instances: it notices silence, and expels a process that was
lost and speaks as if nothing had happened. As a member that is expelled it does what
:class:`~memserve.protocol.member.MemberMachine` does, in the words of that machine. The host, too, does what the host
of that machine does: ``AddPeer`` and ``RemovePeer`` open and close lines and tell the exchange, ``ForwardMessage``
hands it a message, ``ChangeGeneration`` has it drop all work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from memserve import _core
from memserve.base.errors import UserError, check
from memserve.base.types import ClockTicked, Tier, TokenArray
from memserve.kv.mempool import Addresses, AddressList, MemPool
from memserve.kv.transfer.context import ExchangeAction
from memserve.kv.transfer.events import (
    Delivered,
    FetchEnded,
    HandoffOffered,
    Inserted,
    Outcome,
    PagesPulled,
    PagesSealed,
    Released,
    RemoteAllocated,
)
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member_events import AddPeer, ChangeGeneration, ForwardMessage, GenerationChanged, RemovePeer
from memserve.protocol.messages import AnyMessage, Expelled, Heartbeat, Leave, PeerJoined
from memserve.protocol.peers import Load, Peer, PeerInfo

_BEATS = 5
"""Heartbeats in the time after which a silent peer is lost."""


@dataclass(frozen=True, slots=True)
class AddRequested:
    """Event: get to know the process that says this of itself."""

    info: PeerInfo


@dataclass(frozen=True, slots=True)
class RemoveRequested:
    """Event: end all dealings with a peer."""

    peer: Peer


@dataclass(slots=True)
class _Neighbour:
    info: PeerInfo
    last_seen_ns: int
    has_answered: bool = False


GroupEvent = AddRequested | RemoveRequested | GenerationChanged | MessageArrived | ClockTicked
GroupAction = Send | AddPeer | RemovePeer | ForwardMessage | ChangeGeneration


class PeerGroup:
    """One mutator, :meth:`handle`."""

    def __init__(self, info: PeerInfo, silent_ns: int) -> None:
        """``info`` is what others are told of this process. A peer that is silent for ``silent_ns`` is lost."""
        self.info = info
        self._silent_ns = silent_ns
        self._next_heartbeat_ns = 0
        self._neighbours: dict[str, _Neighbour] = {}
        self._removed_peers: set[Peer] = set()  # peers that were parted from on purpose
        #: name -> latest generation that was lost or left: what it had promised is void, and so it stays
        self._dead_generations: dict[str, int] = {}
        self._next_peer: PeerInfo | None = None  # to be met by the next incarnation
        self._is_generation_ready = True  # False between ChangeGeneration and GenerationChanged
        self._actions: list[GroupAction] = []

    @property
    def next_deadline_ns(self) -> int | None:
        """The next heartbeat; None: there are no peers."""
        return self._next_heartbeat_ns if self._neighbours else None

    def live_peers(self) -> list[Peer]:
        """All peers that are not lost."""
        return [neighbour.info.peer for neighbour in self._neighbours.values()]

    def find_peer(self, name: str) -> Peer | None:
        """The peer of this name."""
        neighbour = self._neighbours.get(name)
        return neighbour.info.peer if neighbour is not None else None

    def has_answered(self, name: str) -> bool:
        """Whether the peer of this name knows this process."""
        return name in self._neighbours and self._neighbours[name].has_answered

    def handle(self, event: GroupEvent, now_ns: int) -> list[GroupAction]:
        """Take ``event`` into account at time ``now_ns`` (ns); the actions are to be done in order."""
        match event:
            case MessageArrived(sender, message) if (
                self._is_generation_ready
            ):  # else it was said to the incarnation that ends
                self._on_message(sender, message, now_ns)
            case AddRequested(info):
                self._add_peer(info, now_ns)
            case RemoveRequested(peer) if self.find_peer(peer.name) == peer:
                self._removed_peers.add(peer)
                self._drop_peer(peer)
                self._actions.append(Send(peer, Leave()))  # behind RemovePeer, which drops what is queued
            case GenerationChanged(info):
                self._start_generation(info, now_ns)
        if now_ns >= self._next_heartbeat_ns:
            self._on_heartbeat_due(now_ns)
        actions, self._actions = self._actions, []
        return actions

    # -- what others say

    def _on_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        if isinstance(message, PeerJoined):
            self._on_greeting(sender, message.info, now_ns)
        neighbour = self._neighbours.get(sender.name)
        if neighbour is None or neighbour.info.peer != sender:
            if not isinstance(message, Expelled | Leave):
                was_removed = sender in self._removed_peers
                self._actions.append(
                    Send(sender, Leave() if was_removed else Expelled("silent for too long, or unknown"))
                )
            return
        neighbour.last_seen_ns, neighbour.has_answered = now_ns, True
        match message:
            case Leave():
                self._drop_peer(sender)
            case Expelled(reason):
                self._end_incarnation(sender, reason)
            case _:
                self._actions.append(ForwardMessage(sender, message))

    def _on_greeting(self, sender: Peer, info: PeerInfo, now_ns: int) -> None:
        """Where the KV differs the exchange refuses what is offered."""
        is_honest = info.peer == sender and sender.name != self.info.peer.name
        if is_honest and not self._is_dead(sender) and self._remember_peer(info, now_ns):
            self._send_sign_of_life(self._neighbours[sender.name])

    def _is_dead(self, peer: Peer) -> bool:
        return peer.generation <= self._dead_generations.get(peer.name, -1)

    # -- incarnations

    def _add_peer(self, info: PeerInfo, now_ns: int) -> None:
        if self._is_dead(info.peer):  # and may not know it: this process starts over, since it is the one that asks
            self._next_peer = info
            self._end_incarnation(info.peer, f"{info.peer.name} was lost here, and is to be met again")
            return
        self._remember_peer(info, now_ns)
        self._send_sign_of_life(self._neighbours[info.peer.name])

    def _end_incarnation(self, expelling_peer: Peer, reason: str) -> None:
        """``expelling_peer`` has freed all that was held there. What this incarnation has promised others is void as
        well."""
        self._is_generation_ready = False
        self._actions.append(ChangeGeneration(expelling_peer, reason, self.info.peer.generation + 1))

    def _start_generation(self, info: PeerInfo, now_ns: int) -> None:
        check(info.peer.generation > self.info.peer.generation, f"{info.peer} is not newer than {self.info.peer}")
        former, self._neighbours = list(self._neighbours.values()), {}
        self.info, self._is_generation_ready = info, True
        self._dead_generations.clear()
        self._removed_peers.clear()
        self._actions += [RemovePeer(neighbour.info.peer) for neighbour in former]
        for neighbour in former:
            self._add_peer(neighbour.info, now_ns)
        next_peer, self._next_peer = self._next_peer, None
        if next_peer is not None:
            self._add_peer(next_peer, now_ns)

    # -- membership

    def _remember_peer(self, info: PeerInfo, now_ns: int) -> bool:
        """Whether this incarnation was not known."""
        neighbour = self._neighbours.get(info.peer.name)
        if neighbour is not None and neighbour.info.peer.generation >= info.peer.generation:
            return False
        if neighbour is not None:
            self._drop_peer(neighbour.info.peer)
        self._removed_peers.discard(info.peer)
        self._neighbours[info.peer.name] = _Neighbour(info, now_ns)
        self._actions.append(AddPeer(info))
        self._next_heartbeat_ns = min(self._next_heartbeat_ns, now_ns + self._silent_ns // _BEATS)
        return True

    def _drop_peer(self, peer: Peer) -> None:
        del self._neighbours[peer.name]
        self._dead_generations[peer.name] = max(peer.generation, self._dead_generations.get(peer.name, -1))
        self._actions.append(RemovePeer(peer))

    def _send_sign_of_life(self, neighbour: _Neighbour) -> None:
        """Send hellos until there is an answer, then send heartbeats."""
        peer = neighbour.info.peer
        if neighbour.has_answered:
            self._actions.append(Send(peer, Heartbeat(Load())))
        else:  # to the process that has that name by now, in whichever incarnation
            self._actions.append(Send(Peer(peer.name, 0), PeerJoined(self.info)))

    def _on_heartbeat_due(self, now_ns: int) -> None:
        was_stopped = now_ns - self._next_heartbeat_ns > self._silent_ns // 2  # this process: it could hear no peer
        self._next_heartbeat_ns = now_ns + self._silent_ns // _BEATS
        for neighbour in list(self._neighbours.values()):
            neighbour.last_seen_ns = now_ns if was_stopped else neighbour.last_seen_ns
            if now_ns - neighbour.last_seen_ns > self._silent_ns:
                self._drop_peer(neighbour.info.peer)
            else:
                self._send_sign_of_life(neighbour)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree."""
        check(self.info.peer.name not in self._neighbours, f"{self.info.peer} is its own peer")
        for name, neighbour in self._neighbours.items():
            check(neighbour.info.peer.name == name, f"{neighbour.info.peer} is listed as {name}")
            check(not self._is_dead(neighbour.info.peer), f"{neighbour.info.peer} is a peer, and gone")


@dataclass(frozen=True, slots=True)
class Transferred:
    """How a transfer ended."""

    done: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.done


@dataclass(frozen=True, slots=True)
class PoolCall:
    """Event: a thread of the application wants something; ``do(now)`` runs in the machine's thread."""

    do: Callable[[int], Any]
    answer: Future[Any]


@dataclass(frozen=True, slots=True)
class Arrived:
    """Action: tell the application what a peer has sent."""

    outcome: Delivered | Inserted


PoolEvent = PoolCall | MessageArrived | PagesSealed | PagesPulled | ClockTicked
PoolAction = ExchangeAction | AddPeer | RemovePeer | GenerationChanged | Arrived

Answer = TypeVar("Answer")
RemotePlace = tuple[int, Tier, int]
"""A block of a peer: its generation, tier, block."""


def _resolve_future(future: Future[Any], result: Any) -> None:
    """Answer a call, unless its future was cancelled."""
    try:
        future.set_result(result)
    except InvalidStateError:
        return


def _transfer_result(released: Released | None) -> Transferred:
    if released is None:
        return Transferred(False, "this peer was silent for too long")
    return Transferred(released.used, released.reason)


def _ignore(outcome: Outcome) -> None:
    """No call waits for it: an answer to a peer's fetch was released."""


class RemoteBlocks:
    """Blocks of peers that the application holds, by the call that allocated them."""

    def __init__(self) -> None:
        self._call: dict[RemotePlace, str] = {}
        self._blocks_held: Counter[str] = Counter()  # blocks of a call that are still held

    def hold_blocks(self, call_id: str, places: Sequence[RemotePlace]) -> None:
        """A call has got these blocks."""
        self._blocks_held[call_id] = len(places)
        self._call |= dict.fromkeys(places, call_id)

    def release_block(self, place: RemotePlace) -> str | None:
        """The call to be freed, if ``place`` was the last one that was held of it. Else None."""
        call_id = self._call.pop(place, None)
        if call_id is None:
            return None
        self._blocks_held[call_id] -= 1
        if self._blocks_held[call_id]:
            return None
        del self._blocks_held[call_id]
        return call_id

    def find_unheld(self, places: Sequence[RemotePlace]) -> RemotePlace | None:
        """The first of ``places`` that is not held, or named twice."""
        checked_places: set[RemotePlace] = set()
        for place in places:
            if place in checked_places or place not in self._call:
                return place
            checked_places.add(place)
        return None

    def forget_generation(self, generation: int) -> None:
        """The owner of this generation is gone."""
        for place in [place for place in self._call if place[0] == generation]:
            self._blocks_held.pop(self._call.pop(place), None)


class PoolMachine:
    """One mutator, ``handle(event, now_ns)``; the methods of calls are for ``PoolCall.do`` only."""

    def __init__(self, memory: MemPool, exchange: Exchange, info: PeerInfo, silent_ns: int) -> None:
        self.memory = memory
        self.exchange = exchange
        self._group = PeerGroup(info, silent_ns)
        self._steps = 0
        self._actions: list[PoolAction] = []
        self._outcomes: list[Outcome] = []
        #: calls of ``meet`` that wait for the peer's answer, by its name
        self._meeting: dict[str, Future[None]] = {}
        #: calls that wait, by transfer or call id: they get the outcome, or None when there will be none
        self._waiting: dict[str, Callable[[Any], None]] = {}
        self._remote = RemoteBlocks()
        #: peers at which blocks that the application held went back without being given up: this peer started over
        self._reset_peers: set[Peer] = set()

    @property
    def info(self) -> PeerInfo:
        """What others are told of this peer."""
        return self._group.info

    def handle(self, event: PoolEvent, now_ns: int) -> list[PoolAction]:
        """Take ``event`` into account at time ``now_ns`` (ns) and say what is to be done, in order."""
        if isinstance(event, PoolCall):
            self._run_call(event, now_ns)
        elif isinstance(event, PagesSealed | PagesPulled):
            self._outcomes += self.exchange.handle(event, now_ns)
        else:
            self._handle_group_event(event, now_ns)
        due_ns = self._group.next_deadline_ns
        if due_ns is not None and now_ns >= due_ns:
            self._handle_group_event(ClockTicked(), now_ns)
        self._outcomes += self.exchange.advance_transfers(now_ns)
        self._outcomes += self._do_copies(now_ns)
        self._deliver_outcomes()
        self._actions += self.exchange.take_actions()
        actions, self._actions = self._actions, []
        return actions

    @property
    def next_deadline_ns(self) -> int | None:
        """The next heartbeat or, if sooner, the end of a lease. None: alone and idle."""
        ends = (self.exchange.next_deadline_ns, self._group.next_deadline_ns)
        return min((end for end in ends if end is not None), default=None)

    def _run_call(self, call: PoolCall, now_ns: int) -> None:
        try:
            result = call.do(now_ns)
        except Exception as error:  # the caller's to know; the machine goes on
            call.answer.set_exception(error)
        else:
            _resolve_future(call.answer, result)

    def _do_copies(self, now_ns: int) -> list[Outcome]:
        """The copies that the exchange decided on are done here and now: a plan that is finished when it is made."""
        self._steps += 1
        self.memory.run_copies()
        self.exchange.plan_made(self._steps)
        return self.exchange.plan_finished(self._steps, now_ns)

    # -- the group

    def require_peer(self, name: str) -> Peer:
        """The peer called ``name``; raises :class:`UserError` when there is none."""
        peer = self._group.find_peer(name)
        if peer is None:
            raise UserError(f"no peer {name!r}", hint=f"connect to it first; known: {self.peer_names()}", param="id")
        return peer

    def peer_names(self) -> list[str]:
        return sorted(peer.name for peer in self._group.live_peers())

    def add_peer(self, info: PeerInfo, now_ns: int) -> Future[None]:
        """Send a peer a hello; the future ends when it has answered, and is cancelled when it is lost."""
        name, self_info = info.peer.name, self.info
        if name == self_info.peer.name:
            raise UserError(f"both are called {name!r}", hint="give every peer a name of its own", param="info")
        if (info.namespace, info.geometry) != (self_info.namespace, self_info.geometry):
            own_shape, peer_shape = (self_info.namespace, self_info.geometry), (info.namespace, info.geometry)
            raise UserError(f"{name} has other KV: {peer_shape}", hint=f"this peer has {own_shape}", param="info")
        self._handle_group_event(AddRequested(info), now_ns)
        answered: Future[None] = self._meeting.setdefault(name, Future())
        self._resolve_meetings()
        return answered

    def remove_peer(self, name: str, now_ns: int) -> None:
        """End all dealings with a peer."""
        self._handle_group_event(RemoveRequested(self.require_peer(name)), now_ns)

    def close(self, now_ns: int) -> None:
        """Leave all peers; what still waits gets its "no"."""
        for name in self.peer_names():
            self.remove_peer(name, now_ns)
        self._outcomes += self.exchange.everything_failed(now_ns)

    def _handle_group_event(self, event: GroupEvent, now_ns: int) -> None:
        for action in self._group.handle(event, now_ns):
            match action:
                case ForwardMessage(sender, message):
                    self._outcomes += self.exchange.handle(MessageArrived(sender, message), now_ns)
                case AddPeer(info):
                    self._actions.append(action)
                    self._outcomes += self.exchange.peer_joined(info, now_ns)
                case RemovePeer(peer):
                    self._on_peer_removed(peer, now_ns)
                case ChangeGeneration(generation_min=generation):
                    self._change_generation(generation, now_ns)
                case Send():
                    self._actions.append(action)
        self._resolve_meetings()

    def _on_peer_removed(self, peer: Peer, now_ns: int) -> None:
        self._outcomes += self.exchange.peer_removed(peer, now_ns)
        self._remote.forget_generation(peer.generation)
        if peer.name in self._meeting:
            self._meeting.pop(peer.name).cancel()
        self._actions += [*self.exchange.take_actions(), RemovePeer(peer)]

    def _change_generation(self, generation: int, now_ns: int) -> None:
        info = replace(self.info, peer=Peer(self.info.peer.name, generation))
        self.exchange.restart_as(info.peer)
        self._actions += [*self.exchange.take_actions(), GenerationChanged(info)]
        self._remote = RemoteBlocks()
        self._reset_peers = set(self._group.live_peers())
        for end in self._waiting.values():
            end(None)
        self._waiting.clear()
        self._handle_group_event(GenerationChanged(info), now_ns)

    def _resolve_meetings(self) -> None:
        for name in [name for name in self._meeting if self._group.has_answered(name)]:
            _resolve_future(self._meeting.pop(name), None)

    # -- calls of the application

    def start_offer(self, to: Peer, offered: OfferedBlocks, now_ns: int, terms: OfferTerms) -> Future[Transferred]:
        """Offer blocks that hold their final bytes; see :meth:`Exchange.offer_blocks`."""
        if self.require_peer(to.name) != to:
            raise UserError(f"{to.name} has been restarted", hint="connect to it again", param="id")
        self.memory.require_held([(offered.tier, offered.blocks)])
        transfer_id = self.exchange.offer_blocks(to, offered, now_ns, terms)
        transfer_result = self._wait_for(transfer_id, _transfer_result)
        first_layer, end_layer = terms.layers or (0, None)
        self.exchange.announce_computed(transfer_id, 0, len(offered.blocks), first_layer, end_layer, fence=0)
        return transfer_result

    def start_fetch(self, name: str, tokens: TokenArray, now_ns: int, within_ns: int) -> Future[int]:
        """Ask a peer for what is not here of the whole blocks of ``tokens``; gives the cached prefix, in tokens."""
        memory, block_tokens, holder = self.memory, self.memory.geometry.block_tokens, self.require_peer(name)
        first, end = memory.cached_tokens(tokens) // block_tokens, len(tokens) // block_tokens
        if first >= end:
            nothing: Future[int] = Future()
            nothing.set_result(first * block_tokens)
            return nothing
        transfer_id = self.exchange.fetch_blocks(holder, memory.tenant, tokens, first, end, now_ns, now_ns + within_ns)
        return self._wait_for(transfer_id, lambda _: memory.cached_tokens(tokens))

    def start_allocation(
        self, name: str, count: int, tier: Tier, now_ns: int, within_ns: int
    ) -> Future[Addresses | None]:
        """Ask a peer for blocks."""
        call_id = self.exchange.allocate_at(self.require_peer(name), count, tier, now_ns, now_ns + within_ns)
        return self._wait_for(call_id, self._hold_allocated)

    def _wait_for(self, call_id: str, result: Callable[[Any], Answer]) -> Future[Answer]:
        """What ``result`` makes of the outcome of a call, when that is there."""
        waiter: Future[Answer] = Future()
        self._waiting[call_id] = lambda outcome: _resolve_future(waiter, result(outcome))
        return waiter

    def free_at(self, generation: int, addresses: AddressList) -> None:
        """Give up blocks of a peer; a call's blocks go back when the last of them is given up.

        Blocks that went back with their owner, or because this peer was silent, are ignored. Raises
        :class:`UserError` for others that are not held; then nothing has changed.
        """
        places = [(generation, address.tier, address.block) for address in addresses]
        owner = next((peer for peer in self._group.live_peers() if peer.generation == generation), None)
        lacking = self._remote.find_unheld(places)
        if lacking is not None and owner is not None and owner not in self._reset_peers:
            _, tier, block = lacking
            raise UserError(
                f"{Tier(tier).name} block {block} of {owner.name} is not held: freed already",
                hint="free what alloc_mem(..., id=...) gave, once",
                param="addresses",
            )
        for place in places:
            call_id = self._remote.release_block(place)
            if call_id is not None:
                self.exchange.free_at(call_id)

    def _hold_allocated(self, answer: RemoteAllocated | None) -> Addresses | None:
        if answer is None or answer.blocks is None:
            return None
        generation = answer.peer.generation
        self._remote.hold_blocks(answer.call_id, [(generation, answer.tier, block) for block in answer.blocks])
        return Addresses(answer.tier, _core.BlockIds(answer.blocks), generation)

    # -- outcomes

    def _deliver_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            if isinstance(outcome, Delivered):
                self.memory.hold_blocks(outcome.offer.dst_tier, _core.BlockIds(outcome.blocks))
            if isinstance(outcome, Delivered | Inserted):
                self._actions.append(Arrived(outcome))
            elif isinstance(outcome, HandoffOffered):
                self.exchange.give_up(outcome.transfer_id, "there is no model here")
            elif isinstance(outcome, Released | FetchEnded):
                self._waiting.pop(outcome.transfer_id, _ignore)(outcome)
            elif isinstance(outcome, RemoteAllocated):
                self._waiting.pop(outcome.call_id, _ignore)(outcome)

"""What a :class:`PoolPeer` does, without threads and sockets (level 3): a memory, an exchange, and who else is there.

Membership without a router: who is told of a peer says ``PeerJoined`` to it and is answered in kind; then both send
heartbeats. One that was silent for too long is gone, and whatever it held is freed; should it speak again, it is told
(``Expelled``), and starts over as a new generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from memserve import _core
from memserve.errors import UserError
from memserve.kv_transfer.events import (
    Delivered,
    FetchEnded,
    HandoffOffered,
    Inserted,
    Outcome,
    Released,
    RemoteAllocated,
)
from memserve.kv_transfer.exchange import Exchange
from memserve.mempool.addresses import Addresses
from memserve.mempool.mempool import AddressList, MemPool
from memserve.messages import Expelled, Heartbeat, Leave, Load, Peer, PeerInfo, PeerJoined
from memserve.runtime.pool_words import Arrived, Call, Lost, Met, PoolAction, PoolEvent, Reborn, Transferred
from memserve.serving import ClockTicked, MessageArrived, Send
from memserve.types import Tier, TokenArray

RemotePlace = tuple[int, Tier, int]
"""A block of a peer: its generation, tier, block."""


@dataclass(slots=True)
class _Neighbour:
    info: PeerInfo
    heard_ns: int
    answered: Future[None]
    forgot: bool = False
    """Whether blocks of it that the application held went back without being given up: it freed them, or this peer
    started over."""


def _settle(future: Future[Any], result: Any) -> None:
    """Answer somebody, unless he has cancelled the future."""
    try:
        future.set_result(result)
    except InvalidStateError:
        return


def _transferred(ended: Released | None) -> Transferred:
    if ended is None:
        return Transferred(False, "this peer was silent for too long")
    return Transferred(ended.used, ended.reason)


def _ignore(outcome: Outcome) -> None:
    """Nobody waits for it (an answer to a peer's fetch was released)."""


class RemoteBlocks:
    """Blocks of peers that the application holds, by the call that allocated them."""

    def __init__(self) -> None:
        self._call: dict[RemotePlace, str] = {}
        self._left: Counter[str] = Counter()  # blocks of a call that are still held

    def hold(self, call_id: str, places: Sequence[RemotePlace]) -> None:
        """A call has got these."""
        self._left[call_id] = len(places)
        self._call |= dict.fromkeys(places, call_id)

    def give_up(self, place: RemotePlace) -> str | None:
        """The call to be freed, if this was the last one that was held of it."""
        call_id = self._call.pop(place, None)
        if call_id is None:
            return None
        self._left[call_id] -= 1
        if self._left[call_id]:
            return None
        del self._left[call_id]
        return call_id

    def lacking(self, places: Sequence[RemotePlace]) -> RemotePlace | None:
        """The first of ``places`` that is not held, or named twice."""
        seen: set[RemotePlace] = set()
        for place in places:
            if place in seen or place not in self._call:
                return place
            seen.add(place)
        return None

    def forget(self, generation: int) -> None:
        """Their owner is gone."""
        for place in [place for place in self._call if place[0] == generation]:
            self._left.pop(self._call.pop(place), None)


class PoolMachine:
    """One mutator, ``handle(event, now)``; the methods of calls are for ``Call.do`` only."""

    def __init__(self, memory: MemPool, exchange: Exchange, info: PeerInfo, silent_ns: int) -> None:
        self.memory = memory
        self.exchange = exchange
        self.info = info
        self._silent_ns = silent_ns
        self._beat_ns = silent_ns // 5
        self._next_beat_ns = 0
        self._steps = 0
        self._actions: list[PoolAction] = []
        #: by name
        self._neighbours: dict[str, _Neighbour] = {}
        #: peers that were left on purpose
        self._left: set[Peer] = set()
        #: name -> latest generation that was lost or left: what it had promised is void, and so it stays
        self._gone: dict[str, int] = {}
        #: calls that wait, by transfer or call id: they get the outcome, or ``None`` when there will be none
        self._waiting: dict[str, Callable[[Any], None]] = {}
        self._remote = RemoteBlocks()

    def handle(self, event: PoolEvent, now: int) -> list[PoolAction]:
        """Take ``event`` into account at time ``now`` (ns) and say what is to be done, in order."""
        outcomes: list[Outcome] = []
        if isinstance(event, Call):
            self._call(event, now)
        elif isinstance(event, MessageArrived):
            outcomes += self._hear(event, now)
        elif not isinstance(event, ClockTicked):
            outcomes += self.exchange.handle(event, now)
        if now >= self._next_beat_ns:
            outcomes += self._beat(now)
        outcomes += self.exchange.advance(now)
        outcomes += self._do_copies(now)
        self._tell(outcomes)
        self._actions += self.exchange.take_actions()
        actions, self._actions = self._actions, []
        return actions

    @property
    def next_deadline_ns(self) -> int | None:
        """The next heartbeat or, if sooner, the end of a lease; ``None`` = alone and idle."""
        ends = [end for end in (self.exchange.next_deadline_ns,) if end is not None]
        if self._neighbours:
            ends.append(self._next_beat_ns)
        return min(ends, default=None)

    def _call(self, call: Call, now: int) -> None:
        try:
            result = call.do(now)
        except Exception as error:  # the caller's to know; the machine goes on
            call.answer.set_exception(error)
        else:
            _settle(call.answer, result)

    def _do_copies(self, now: int) -> list[Outcome]:
        """The copies that the exchange decided on are done here and now: a plan that is finished when it is made."""
        self._steps += 1
        self.memory.run_copies()
        self.exchange.plan_made(self._steps)
        return self.exchange.plan_finished(self._steps, now)

    # -- who is there

    def known(self, name: str) -> Peer:
        """The peer called ``name``; raises :class:`UserError` when there is none."""
        if name not in self._neighbours:
            raise UserError(f"no peer {name!r}", hint=f"connect to it first; known: {self.names()}", param="id")
        return self._neighbours[name].info.peer

    def names(self) -> list[str]:
        """All peers."""
        return sorted(self._neighbours)

    def meet(self, info: PeerInfo, now: int) -> Future[None]:
        """Say hello to a peer; the future ends when it has answered."""
        if info.peer.name == self.info.peer.name:
            raise UserError(
                f"both are called {info.peer.name!r}", hint="give every peer a name of its own", param="info"
            )
        if (info.namespace, info.geometry) != (self.info.namespace, self.info.geometry):
            mine, its = (self.info.namespace, self.info.geometry), (info.namespace, info.geometry)
            raise UserError(f"{info.peer.name} has other KV: {its}", hint=f"this peer has {mine}", param="info")
        if self._is_gone(info.peer):  # and does not know it, perhaps: whoever wants to start over is the new one
            self._be_reborn(now)
        self._remember(info, now)
        neighbour = self._neighbours[info.peer.name]
        self._say(neighbour)
        return neighbour.answered

    def leave(self, name: str, now: int) -> None:
        """End all dealings with a peer."""
        peer = self.known(name)
        self._left.add(peer)
        self._tell(self._lose(peer, now))
        self._actions.append(Send(peer, Leave()))  # behind `Lost`, which drops what is queued

    def close(self, now: int) -> None:
        """Leave everybody; what still waits gets its "no"."""
        for name in self.names():
            self.leave(name, now)
        self._tell(self.exchange.everything_failed(now))

    def _remember(self, info: PeerInfo, now: int) -> bool:
        """Whether this is news."""
        known = self._neighbours.get(info.peer.name)
        if known is not None and known.info.peer.generation >= info.peer.generation:
            return False
        if known is not None:
            self._tell(self._lose(known.info.peer, now))
        self._left.discard(info.peer)
        self._neighbours[info.peer.name] = _Neighbour(info, now, Future())
        self._actions.append(Met(info))
        self._tell(self.exchange.peer_joined(info, now))
        self._next_beat_ns = min(self._next_beat_ns, now + self._beat_ns)
        return True

    def _hear(self, event: MessageArrived, now: int) -> list[Outcome]:
        sender, message = event.sender, event.message
        if isinstance(message, PeerJoined):
            self._greet(sender, message.info, now)
        neighbour = self._neighbours.get(sender.name)
        if neighbour is None or neighbour.info.peer != sender:
            if not isinstance(message, Expelled | Leave):
                left = sender in self._left
                self._actions.append(Send(sender, Leave() if left else Expelled("silent for too long, or unknown")))
            return []
        neighbour.heard_ns = now
        if not neighbour.answered.done():
            neighbour.answered.set_result(None)
        if isinstance(message, Leave):
            return self._lose(sender, now)
        if isinstance(message, Expelled):
            self._be_reborn(now)
            return []
        return self.exchange.handle(event, now)

    def _is_gone(self, peer: Peer) -> bool:
        return peer.generation <= self._gone.get(peer.name, -1)

    def _greet(self, sender: Peer, info: PeerInfo, now: int) -> None:
        """Somebody has got to know this peer. (Where the KV differs the exchange will refuse what is offered.)"""
        honest = info.peer == sender and sender.name != self.info.peer.name
        if honest and not self._is_gone(sender) and self._remember(info, now):
            self._say(self._neighbours[sender.name])

    def _be_reborn(self, now: int) -> None:
        """Somebody has freed all that was ours there. What this generation has promised anybody is void."""
        peer = self.info.peer
        self.info = replace(self.info, peer=Peer(peer.name, peer.generation + 1))
        self.exchange.reborn(self.info.peer)
        self._actions += [*self.exchange.take_actions(), Reborn(self.info)]
        former, self._neighbours = self._neighbours, {}
        self._gone.clear()
        self._left.clear()
        self._remote = RemoteBlocks()
        for end in self._waiting.values():
            end(None)
        self._waiting.clear()
        for neighbour in former.values():
            neighbour.answered.cancel()
            self._actions.append(Lost(neighbour.info.peer))
            self.meet(neighbour.info, now)
            self._neighbours[neighbour.info.peer.name].forgot = True

    def _say(self, neighbour: _Neighbour) -> None:
        """Hello until there is an answer, then heartbeats."""
        peer = neighbour.info.peer
        if neighbour.answered.done():
            self._actions.append(Send(peer, Heartbeat(Load())))
        else:  # to whoever has that name by now
            self._actions.append(Send(Peer(peer.name, 0), PeerJoined(self.info)))

    def _beat(self, now: int) -> list[Outcome]:
        asleep = now - self._next_beat_ns > self._silent_ns // 2  # this process was stopped: it heard nobody
        self._next_beat_ns = now + self._beat_ns
        outcomes: list[Outcome] = []
        for neighbour in list(self._neighbours.values()):
            neighbour.heard_ns = now if asleep else neighbour.heard_ns
            if now - neighbour.heard_ns > self._silent_ns:
                outcomes += self._lose(neighbour.info.peer, now)
            else:
                self._say(neighbour)
        return outcomes

    def _lose(self, peer: Peer, now: int) -> list[Outcome]:
        neighbour = self._neighbours.pop(peer.name)
        neighbour.answered.cancel()
        self._gone[peer.name] = max(peer.generation, self._gone.get(peer.name, -1))
        outcomes = self.exchange.peer_gone(peer, now)
        self._remote.forget(peer.generation)
        self._actions += self.exchange.take_actions()
        self._actions.append(Lost(peer))
        return outcomes

    # -- calls of the application

    def start_offer(
        self, waiter: Future[Transferred], to: Peer, blocks: Sequence[int], now: int, tokens: TokenArray, **terms: Any
    ) -> None:
        """Offer blocks that hold their final bytes; ``terms`` as in :meth:`Exchange.offer`."""
        if self.known(to.name) != to:
            raise UserError(f"{to.name} has been restarted", hint="connect to it again", param="id")
        self.memory.require_held([(terms["tier"], blocks)])
        transfer_id = self.exchange.offer(to, self.memory.tenant, tokens, blocks, now, **terms)
        self._waiting[transfer_id] = lambda ended: _settle(waiter, _transferred(ended))
        self.exchange.computed(transfer_id, 0, len(blocks), fence=0)

    def start_fetch(self, waiter: Future[int], holder: Peer, tokens: TokenArray, now: int, within_ns: int) -> None:
        """Ask a peer for what is not here of the whole blocks of ``tokens``."""
        memory, block_tokens = self.memory, self.memory.geometry.block_tokens
        first, end = memory.cached_tokens(tokens) // block_tokens, len(tokens) // block_tokens
        if first >= end:
            _settle(waiter, first * block_tokens)
            return
        transfer_id = self.exchange.fetch(holder, memory.tenant, tokens, first, end, now, now + within_ns)
        self._waiting[transfer_id] = lambda _: _settle(waiter, memory.cached_tokens(tokens))

    def start_allocation(
        self, waiter: Future[Addresses | None], at: Peer, count: int, tier: Tier, now: int, within_ns: int
    ) -> None:
        """Ask a peer for blocks."""
        call_id = self.exchange.allocate_at(at, count, tier, now, now + within_ns)
        self._waiting[call_id] = lambda answer: _settle(waiter, self._allocated(answer))

    def free_at(self, generation: int, addresses: AddressList) -> None:
        """Give up blocks of a peer; a call's blocks go back when the last of them is given up.

        Blocks that went back with their owner, or because this peer was silent, are ignored. Raises
        :class:`UserError` for others that are not held; then nothing has changed.
        """
        places = [(generation, address.tier, address.block) for address in addresses]
        owner = next((n for n in self._neighbours.values() if n.info.peer.generation == generation), None)
        lacking = self._remote.lacking(places)
        if lacking is not None and owner is not None and not owner.forgot:
            _, tier, block = lacking
            raise UserError(
                f"{Tier(tier).name} block {block} of {owner.info.peer.name} is not held: freed already",
                hint="free what alloc_mem(..., id=...) gave, once",
                param="addresses",
            )
        for place in places:
            call_id = self._remote.give_up(place)
            if call_id is not None:
                self.exchange.free_at(call_id)

    def _allocated(self, answer: RemoteAllocated | None) -> Addresses | None:
        if answer is None or answer.blocks is None:
            return None
        generation = answer.peer.generation
        self._remote.hold(answer.call_id, [(generation, answer.tier, block) for block in answer.blocks])
        return Addresses(answer.tier, _core.BlockIds(answer.blocks), generation)

    # -- outcomes

    def _tell(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Delivered):
                self.memory.hold(outcome.offer.dst_tier, _core.BlockIds(outcome.blocks))
            if isinstance(outcome, Delivered | Inserted):
                self._actions.append(Arrived(outcome))
            elif isinstance(outcome, HandoffOffered):
                self.exchange.give_up(outcome.transfer_id, "there is no model here")
            elif isinstance(outcome, Released | FetchEnded):
                self._waiting.pop(outcome.transfer_id, _ignore)(outcome)
            elif isinstance(outcome, RemoteAllocated):
                self._waiting.pop(outcome.call_id, _ignore)(outcome)

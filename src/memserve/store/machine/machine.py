"""A store: keeps KV blocks of a cluster's instances, and values of clients, in memory and on disks.

One mutator, ``handle(event, now_ns) -> actions``; no thread, file or socket. Its parts:

=============  ================================================================================
``values``     one set of keys: the memory tier, the disks, what is told of them
``loads``      from disks into memory, each value once
``kv``         KV blocks: the exchange with instances
``moves``      KV blocks that other stores are to keep
``clients``    clients and their calls
``member``     joining, heartbeats, leaving, as instances have it
=============  ================================================================================

A store that was told of no router serves clients alone until one calls it, and again when that router is gone.

A store that knows no model yet (``info.namespace`` empty) serves clients. The first member with a model tells it what
KV looks like (``ServeModel``): the host starts it again, with memory in blocks of that size.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from memserve.base.errors import check
from memserve.base.types import ClockTicked, KVGeometry, Role
from memserve.base.units import NS_PER_S
from memserve.kv.events import KvFeed
from memserve.kv.transfer.events import PagesPulled, PagesSealed
from memserve.kv.transfer.exchange import Exchange
from memserve.protocol.events import MessageArrived
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import (
    ChangeGeneration,
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
from memserve.protocol.messages import AnyMessage, JoinAccepted, Leave, PeerGone, PeerJoined, QueryKvEvents
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo
from memserve.protocol.store import BlocksHeld, ForgetKv, KvModel, KvUsed, QueryBlocks, StoreMessage
from memserve.store.disks.disks import Disks
from memserve.store.disks.events import (
    DiskDone,
    DiskFull,
    DiskHasRoom,
    Dropped,
    ExtentFree,
    ReadEnded,
    Verified,
    Written,
)
from memserve.store.machine.block_pool import StorePool
from memserve.store.machine.clients import Clients, StoreIdentity
from memserve.store.machine.events import (
    Ended,
    ExtentsSealed,
    Jobs,
    ServeModel,
    StoreAction,
    StoreConfig,
    StoreCounters,
    StoreEvent,
    ValuesSent,
    ValuesTaken,
)
from memserve.store.machine.kv_blocks import KvBlocks
from memserve.store.machine.loads import Loads
from memserve.store.machine.moves import ShareMoves
from memserve.store.machine.values import Values

if TYPE_CHECKING:
    from memserve._core import MemoryTier


class StoreMachine:
    """The machine of one store."""

    def __init__(
        self,
        tier: MemoryTier,
        disks: Disks,
        info: PeerInfo,
        key: bytes,
        member: MemberMachine,
        config: StoreConfig | None = None,
    ) -> None:
        """``info``: what members are told; ``info.geometry`` has the size of the tier's blocks. ``key``: of the
        cluster's identities, 16 bytes."""
        config = config or StoreConfig()
        self.counters = StoreCounters()
        self.jobs = Jobs()
        self.member = member
        self.values = Values(tier, disks, self.counters)
        self.loads = Loads(self.values, self.jobs, config)
        pool = StorePool(tier, info.geometry.block_bytes, info.geometry.block_tokens, info.namespace, key)
        check(pool.block_bytes == tier.block_bytes, "the memory has blocks of another size than the geometry")
        exchange = Exchange(pool, info.geometry, config.exchange, info.peer, info.namespace)
        self.kv = KvBlocks(pool, exchange, self.values, self.loads, self.jobs, config)
        self.moves = ShareMoves(self.values, self.loads, exchange, self.jobs, config)
        identity = StoreIdentity(key, info.host_id, KvModel(info.namespace, info.geometry))
        self.clients = Clients(self.values, self.loads, self.jobs, config, identity, self._on_client_model)
        self._feed = KvFeed(self.values.log, config.exchange.event_capacity)
        self.info = info
        self._fits_a_model = False  # a member with this namespace and geometry was seen
        self._model_requested = False
        self._write_out: deque[bytes] | None = None  # None: the end was not asked for
        self._ends_at_ns = 0
        self._disks_closed = False
        self._has_ended = False
        self._refused = ""

    def start(self, now_ns: int) -> list[StoreAction]:
        """Ask to join."""
        self._perform_member_actions(self.member.start(now_ns), now_ns)
        return self._finish_step(now_ns)

    def handle(self, event: StoreEvent, now_ns: int) -> list[StoreAction]:
        """Take ``event`` into account at time ``now_ns`` (ns) and say what is to be done, in order."""
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, now_ns)
            case PagesSealed() | PagesPulled():
                self.kv.pages_done(event, now_ns)
            case DiskDone():
                self.values.disks.handle(event, now_ns)
                self.values.write_waiting(now_ns)
            case ExtentsSealed():
                is_handled = (
                    self.loads.sealed(event, now_ns)
                    or self.kv.sealed(event, now_ns)
                    or self.clients.sweeps.sealed(event)
                )
                check(is_handled, f"job {event.job} seals nothing")
            case ValuesTaken():
                self.clients.values_taken(event, now_ns)
            case ValuesSent():
                self.clients.values_sent(event)
            case DrainRequested():
                self._begin_end(event, now_ns)
            case GenerationChanged(info):
                self._on_generation_changed(event, info, now_ns)
        return self._finish_step(now_ns)

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending. None: nothing has a deadline."""
        due = [
            self.kv.next_deadline_ns,
            self.clients.next_deadline_ns,
            self.moves.next_deadline_ns,
            self.values.disks.next_deadline_ns,
            self.member.next_deadline_ns,
            self._ends_at_ns if self._write_out is not None and not self._has_ended else None,
        ]
        return min((due_ns for due_ns in due if due_ns is not None), default=None)

    def _finish_step(self, now_ns: int) -> list[StoreAction]:
        """What follows from any event."""
        self.values.disks.advance_time(now_ns)
        self.kv.advance_time(now_ns)
        self.clients.advance_time(now_ns)
        for released in self.kv.take_released():
            self.moves.on_released(released.transfer_id, released.used, now_ns)
        self.moves.note_lent(self.kv.take_lent(), now_ns)
        if self._write_out is None or self.moves.is_giving_away:
            self.moves.advance_time(now_ns)
        due_ns = self.member.next_deadline_ns
        if due_ns is not None and now_ns >= due_ns:
            self._perform_member_actions(self.member.handle(ClockTicked(), now_ns), now_ns)
        self.loads.start_loads(now_ns)
        self._continue_end(now_ns)
        while self._handle_disk_outcomes(now_ns):
            self._continue_end(now_ns)
        self.values.settle_evicted()
        self._send_updates()
        actions = self.jobs.take_actions()
        for exchange_action in self.kv.exchange.take_actions():
            actions.append(exchange_action)
        actions += self.values.disks.take_actions()
        return actions

    def _handle_disk_outcomes(self, now_ns: int) -> bool:
        outcomes = self.values.disks.take_outcomes()
        for outcome in outcomes:
            match outcome:
                case Written():
                    self.values.on_written(outcome, now_ns)
                case ReadEnded():
                    self.loads.read_ended(outcome, now_ns)
                case ExtentFree():
                    self.loads.extent_free(outcome)
                case Dropped():
                    self.values.on_dropped(outcome)
                case Verified():
                    self.clients.sweeps.disks_verified(outcome)
                case DiskFull(number, why):
                    pause_s = self.values.disks.config.full_pause_ns / NS_PER_S
                    text = f"--ssd number {number + 1} has no room for what is written ({why}): it is read, and not"
                    self.jobs.add_action(LogWarning(f"{text} written but for a try every {pause_s:.0f} s"))
                case DiskHasRoom(number):
                    self.jobs.add_action(LogWarning(f"--ssd number {number + 1} has room again: it is written"))
        return bool(outcomes)

    # -- messages

    def _on_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        if isinstance(message, ForgetKv):
            if self.kv.exchange.incompatibility(sender) is None:
                self.kv.forget_blocks(message.identities, now_ns)
        elif isinstance(message, KvUsed):
            if self.kv.exchange.incompatibility(sender) is None:
                self.values.use_values(message.identities, now_ns)
        elif isinstance(message, QueryBlocks | BlocksHeld):
            self._on_store_message(sender, message, now_ns)
        elif isinstance(message, StoreMessage):
            self.clients.on_message(sender, message, now_ns)
        elif isinstance(message, Leave) and self.clients.on_leave(sender):
            pass
        elif self.member.is_detached and sender.name != ROUTER:
            self.counters.refused += 1
        else:
            self._perform_member_actions(self.member.handle(MessageArrived(sender, message), now_ns), now_ns)

    def _on_store_message(self, sender: Peer, message: QueryBlocks | BlocksHeld, now_ns: int) -> None:
        """Another store of the cluster says something."""
        if self.kv.exchange.incompatibility(sender) is not None:
            self.counters.refused += 1
        elif isinstance(message, QueryBlocks):
            self.moves.on_query(sender, message, now_ns)
        else:
            self.moves.on_held(sender, message, now_ns)

    # -- the cluster

    def _perform_member_actions(self, actions: list[MemberAction], now_ns: int) -> None:
        """Do what the membership says; what needs the host goes on to it."""
        for action in actions:
            match action:
                case ForwardMessage(sender, message):
                    self._on_member_message(sender, message, now_ns)
                case ReadLoad(with_stats):
                    load = Load(transfers_open=self.kv.exchange.transfers_open + self.moves.is_giving_away)
                    stats = msgspec.msgpack.encode(self.clients.collect_numbers()) if with_stats else b""
                    news, routers = self._feed.next_event, self.member.followers.values()
                    self._handle_member_event(
                        LoadRead(load, news, stats, tuple((peer, load, news) for peer in routers)), now_ns
                    )
                case Joined():
                    pass
                case Left(refused):
                    self._refused = refused
                    if self._write_out is None:
                        self._begin_end(DrainRequested(0), now_ns)
                case RemovePeer(peer):
                    self._remove_peer(peer, now_ns)
                    self.jobs.add_action(action)
                case ChangeGeneration():
                    self.kv.drop_fetches()
                    self.jobs.add_action(action)
                case _:
                    self.jobs.add_action(action)

    def _handle_member_event(self, event: MemberEvent, now_ns: int) -> None:
        self._perform_member_actions(self.member.handle(event, now_ns), now_ns)

    def _on_member_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        if sender.name != ROUTER:
            if isinstance(message, Leave):
                self._remove_peer(sender, now_ns)
            elif isinstance(message, QueryKvEvents) and self.member.followers.get(sender.name) == sender:
                self._send_changes(message.first, sender)
            else:
                self.kv.on_message(sender, message, now_ns)
            return
        match message:
            case JoinAccepted(peers, _, copies):
                self._fits_a_model = False  # those of an earlier router are no members any more
                self._check_models(peers)
                self.kv.on_outcomes(self.kv.exchange.set_members(peers, now_ns), now_ns)
                self._send_changes(None, sender)
                self.moves.set_members(self.info, peers, copies, now_ns)
            case PeerJoined(info):
                self._check_models((info,))
                if info.peer.name != self.info.peer.name:
                    self.kv.on_outcomes(self.kv.exchange.peer_joined(info, now_ns), now_ns)
                    self.moves.add_member(self.info, info, now_ns)
            case PeerGone(peer):
                self._remove_peer(peer, now_ns)
            case QueryKvEvents(first):
                self._send_changes(first, sender)
            case _:
                pass

    def _remove_peer(self, peer: Peer, now_ns: int) -> None:
        self.kv.remove_peer(peer, now_ns)
        self.moves.remove_member(self.info, peer, now_ns)

    def _send_changes(self, first: int | None, to: Peer) -> None:
        self._send_updates()
        if (rest := self._feed.answer_query(first)) is not None:
            self.jobs.send_message(to, rest)

    def _send_updates(self) -> None:
        """Every router hears what has changed."""
        news = self._feed.take_changes()
        for router in (self.member.router, *self.member.followers.values()):
            if news is not None and router is not None:
                self.jobs.send_message(router, news)

    def _check_models(self, members: tuple[PeerInfo, ...]) -> None:
        """Members with a model say what KV looks like. What this store was started with stays once one has it."""
        models = [info for info in members if info.role is not Role.STORE and info.namespace]
        own_model = (self.info.namespace, self.info.geometry)
        self._fits_a_model = self._fits_a_model or any(
            (model.namespace, model.geometry) == own_model for model in models
        )
        if models and not self._fits_a_model:
            self._request_model(models[0].namespace, models[0].geometry, models[0].peer.name)

    def _on_client_model(self, client: Peer, model: KvModel) -> None:
        """A client has KV blocks of this model, which is this store's, or this store's until a member has another."""
        if not self.info.namespace:
            self._request_model(model.namespace, model.geometry, client.name)

    def _request_model(self, namespace: str, geometry: KVGeometry, of: str) -> None:
        if not self._model_requested:
            self._model_requested = True
            self.jobs.add_action(ServeModel(namespace, geometry, of))

    def _on_generation_changed(self, event: GenerationChanged, info: PeerInfo, now_ns: int) -> None:
        """The store was expelled and is a new incarnation: what it keeps stays."""
        self.info = info
        self.kv.drop_fetches()
        self.moves.drop_offers()
        self.kv.exchange.restart_as(info.peer)
        self._handle_member_event(event, now_ns)

    # -- the end

    def _begin_end(self, request: DrainRequested, now_ns: int) -> None:
        """Write what is in memory alone and wanted on a disk, then close the disks, for ``patience_ns`` at most."""
        if self._write_out is None:
            self._write_out = deque(self.values.unwritten_keys() if request.patience_ns else ())
            self._log_end(request)
            self.clients.drop_all()
            if request.patience_ns and not self.values.disks.capacity_bytes:
                self.moves.begin_leaving(self.info, now_ns)
        self._ends_at_ns = now_ns + request.patience_ns
        if not request.patience_ns:
            self._write_out.clear()
        self._perform_member_actions(self.member.handle(replace(request, why=""), now_ns), now_ns)

    def _log_end(self, request: DrainRequested) -> None:
        if not request.why:
            return
        numbers, writes_left = self.clients.collect_numbers(), len(self._write_out or ()) + self.values.writes_open
        text = f"{request.why}: store {self.info.peer.name} ends; it keeps {numbers['disk_records']:,} values on disks"
        if writes_left:
            text += f" and writes {writes_left:,} more, for {request.patience_ns / NS_PER_S:.0f} s at most"
        self.jobs.add_action(LogWarning(text))

    def _continue_end(self, now_ns: int) -> None:
        if self._write_out is None or self._has_ended:
            return
        is_late = now_ns >= self._ends_at_ns
        while self._write_out and self.values.may_write_out and not is_late:
            self.values.write_out(self._write_out.popleft(), now_ns)
        writes_left = len(self._write_out) + self.values.writes_open
        if (writes_left or self.moves.is_giving_away) and not is_late:
            return
        disks = self.values.disks
        if not self._disks_closed:
            self._disks_closed = True
            if writes_left:
                self.jobs.add_action(
                    LogWarning(f"the time is over: store {self.info.peer.name} has not written {writes_left:,} values")
                )
            disks.close(now_ns)
        if disks.is_idle or is_late:
            self._has_ended = True
            self.jobs.add_action(Ended(self._refused))

    # -- books

    def count_references(self) -> Counter[int]:
        """Every reference that parts of the machine hold, by extent; the table's own come on top."""
        return Counter(self._list_references())

    def _list_references(self) -> list[int]:
        clients = self.clients
        parts = (self.values, self.loads, self.kv, self.moves, clients.puts, clients.gets, clients.sweeps)
        return [extent for part in parts for extent in part.referenced_extents()]

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` when the books do not balance. For tests; slow."""
        tier = self.values.tier
        tier.check_invariants()
        self.values.disks.check_invariants()
        self.values.check_invariants()
        self.loads.check_invariants()
        self.kv.exchange.check_invariants()
        self.moves.check_invariants()
        extents = self._list_references()
        keys = tier.keys()
        for offset in range(0, len(keys), 16):
            place = tier.find(keys[offset : offset + 16], counts=False)
            if place is not None:
                tier.release(place.offset)
                extents.append(place.offset)
        for extent, held in Counter(extents).items():
            count = tier.ref_count(extent)
            check(count == held, "extent {}: {} references, {} held", extent, count, held)

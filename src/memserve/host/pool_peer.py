"""PoolPeer: MemServe's Table 1 across processes, without an engine.

    with PoolPeer(geometry, name="a", secret=SECRET, hbm_bytes=64 << 20) as a:
        a.connect(info_of_b)                              # bytes of `PoolPeer.info()`, by whatever way
        held = a.alloc_mem(4)
        a.view(held[0])[...] = ...
        a.transfer_with_insert("b", tokens, held)         # b's index has the prefix: `match` finds it there
        there = a.alloc_mem(4, id="b")                    # memory of b, held by a: both transfers take it as `dst`
        a.transfer("b", held, there, private=b"for b's application")
        a.free_mem(there)
        a.free_mem(held)

Addresses carry the generation of their owner, so they say where they lie. Every call may be used from any thread.

The threads and ports of a :class:`PoolPeer`: one loop for the machine, a mailbox, a data port.

application --Call--> [loop: PoolMachine] --Send--> mailbox;  --SealPages, PullPages--> data port
mailbox, data port --events--> [loop] --Arrived--> [delivery thread: the application's callback]
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.config import ExchangeConfig
from memserve.base.errors import UserError
from memserve.base.types import KVGeometry, Role, Tier, TokenArray, TransferMode
from memserve.base.units import ns_from_s
from memserve.host.lent_memory import LentMemory
from memserve.host.pool_peer_machine import Arrived, PoolAction, PoolCall, PoolEvent, PoolMachine, Transferred
from memserve.kv.events import PoolReport
from memserve.kv.identity import identity_key
from memserve.kv.mempool import Address, Addresses, AddressList, MemPool, as_tokens
from memserve.kv.transfer.events import Delivered, ExchangeCounters, Inserted, PagesPulled, PagesSealed
from memserve.kv.transfer.exchange import Exchange, OfferedBlocks, OfferTerms
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member_events import AddPeer, GenerationChanged, RemovePeer
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer, PeerInfo
from memserve.system.loop import MachineLoop
from memserve.transport.data_port import open_data_port
from memserve.transport.mailbox import ZmqMailbox
from memserve.transport.network_devices import ListenAddress

log = logging.getLogger(__name__)

_CALL_S = 30.0
"""How long a call waits for the loop, which itself never waits."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class PeerTerms:
    """How a pool deals with its peers."""

    namespace: str
    """Peers have the same."""
    link: str
    """How pages come here: one of ``memserve.base.types.LINKS``."""
    lease_ns: int
    """How long a peer may hold blocks here, or leave an offer unanswered."""
    silent_ns: int
    """A peer that was not heard of for so long is gone."""


class PoolHost:
    """Runs a :class:`PoolMachine` until it is closed."""

    def __init__(
        self,
        memory: MemPool,
        self_peer: Peer,
        where: ListenAddress,
        terms: PeerTerms,
        on_arrival: Callable[[Delivered | Inserted], None],
    ) -> None:
        self._on_arrival = on_arrival
        self._closed = False
        self._deliveries = ThreadPoolExecutor(1, thread_name_prefix="memserve-delivery")
        arenas = {tier: arena for tier, arena in memory.arenas.items() if isinstance(arena, _core.SharedArena)}
        self._data = open_data_port(terms.link, memory.geometry, arenas, self._on_pages, where, kv_codec="auto")
        self._mailbox = ZmqMailbox(self_peer, where, self._on_message)
        info = self._data.describe(_describe_pool(memory, self_peer, terms.namespace, self._mailbox.address))
        config = ExchangeConfig(lease_ns=terms.lease_ns, room_wait_ns=0)
        exchange = Exchange(memory.pool, memory.geometry, config, self_peer, terms.namespace)
        self.machine = PoolMachine(memory, exchange, info, terms.silent_ns)
        self._loop: MachineLoop[PoolEvent] = MachineLoop(
            self.machine, self._perform_actions, on_broken=self._on_broken, name="memserve-pool-peer"
        )
        self._loop.start()

    # -- calls, from any thread

    def call_machine(self, do: Callable[[int], Answer]) -> Answer:
        """The result of ``do(now)``, called in the loop's thread; what it raises is raised here."""
        if self._closed:
            raise UserError("this pool peer is closed", hint="make another one")
        call = PoolCall(do, Future())
        self._loop.post_event(call)
        answer: Answer = call.answer.result(_CALL_S)
        return answer

    def close(self) -> None:
        """Leave all peers, stop threads and ports. Calls that wait end; later ones raise :class:`UserError`."""
        if self._closed:
            return
        self.call_machine(lambda now_ns: self.machine.close(now_ns))
        self._closed = True
        self._loop.close(_CALL_S)
        self._mailbox.close()
        self._data.close()
        self._deliveries.shutdown()

    # -- other threads

    def _on_message(self, sender: Peer, message: AnyMessage) -> None:
        self._loop.post_event(MessageArrived(sender, message))

    def _on_pages(self, event: PagesSealed | PagesPulled) -> None:
        self._loop.post_event(event)

    def _perform_actions(self, event: PoolEvent, actions: list[PoolAction], spent_ns: int) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self._mailbox.send(to, message)
                case AddPeer(info):
                    self._mailbox.connect(info.peer, info.address)
                    self._data.add_peer(info)
                case RemovePeer(peer):
                    self._data.remove_peer(peer)
                    self._mailbox.disconnect(peer)
                case GenerationChanged(info):
                    self._mailbox.restart_as(info.peer)
                    self._data.describe(info)
                case Arrived(outcome):
                    self._deliveries.submit(self._deliver_outcome, outcome)
                case _:
                    self._data.start(action)

    def _deliver_outcome(self, outcome: Delivered | Inserted) -> None:
        try:
            self._on_arrival(outcome)
        except Exception:
            log.exception("the application's delivery callback raised")

    def _on_broken(self) -> None:
        """The loop has ended: later calls are refused."""
        self._closed = True


def _describe_pool(memory: MemPool, self_peer: Peer, namespace: str, address: str) -> PeerInfo:
    """What others must know of a pool without a model."""
    tiers = memory.report().by_tier
    return PeerInfo(
        peer=self_peer,
        role=Role.STORE,
        address=address,
        namespace=namespace,
        geometry=memory.geometry,
        hbm_blocks=tiers[Tier.HBM].blocks_total,
        dram_blocks=tiers[Tier.DRAM].blocks_total,
        context_tokens=0,
        caching=True,
        pid=os.getpid(),
        publishes_events=False,
    )


_NO_TOKENS = np.empty(0, dtype=np.int32)
Layers = tuple[int, int]
"""The first one, and that behind the last."""


class TransferFlag(enum.Flag):
    """Where a transfer goes, and in which pieces."""

    NONE = 0
    TO_DRAM = enum.auto()
    """The receiver allocates in its DRAM. What is inserted lies there until the receiver's ``match`` brings it up."""
    BY_PAGE = enum.auto()
    """Move each layer of each block on its own, as a layout without aggregation has to."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Blocks or cached KV that a peer has sent unasked."""

    sender: str
    addresses: Addresses | None
    """Of a raw transfer: the receiver holds these blocks until ``free_mem``. None: they were inserted, so
    ``match`` them."""
    tokens: TokenArray
    """What was inserted; empty for a raw transfer."""
    private: bytes


class PoolPeer:
    """A pool with blocks that other processes can get, and which can get theirs."""

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        name: str,
        secret: str,
        hbm_bytes: int,
        dram_bytes: int = 0,
        tenant: str = "",
        namespace: str = "default",
        host: str = "127.0.0.1",
        port: int = 0,
        link: str = "auto",
        lease_s: float = 60.0,
        silent_s: float = 5.0,
        on_delivery: Callable[[Delivery], None] | None = None,
    ) -> None:
        """Memory in shared arenas, a mailbox at ``host:port`` (0: any port) that takes peers with this ``secret``.

        ``link`` is how pages come here: one of ``memserve.base.types.LINKS``. What a peer holds here, or was offered
        and has not taken, goes back after ``lease_s``, or when it was not heard of for ``silent_s``. ``on_delivery`` is
        called, one delivery at a time, in a thread of its own; without it raw transfers that choose no blocks are
        given back at once.
        """
        generation = time.time_ns()
        self._self_peer = Peer(name, generation)
        self._on_delivery = on_delivery
        self._memory = MemPool(
            geometry,
            hbm_bytes=hbm_bytes,
            dram_bytes=dram_bytes,
            tenant=tenant,
            namespace=namespace,
            generation=generation,
            new_arena=_core.SharedArena,
            identity_key=identity_key(secret),
        )
        self._link, self._lent = link, list[LentMemory]()
        self._where = where = ListenAddress(secret, host, port=port)
        terms = PeerTerms(namespace, link, lease_ns=ns_from_s(lease_s), silent_ns=ns_from_s(silent_s))
        self._host = PoolHost(self._memory, self._self_peer, where, terms, self._on_outcome)
        self._machine = self._host.machine

    # -- peers

    @property
    def name(self) -> str:
        """What others call it."""
        return self._self_peer.name

    def info(self) -> bytes:
        """What another process needs for :meth:`connect`."""
        return msgspec.msgpack.encode(self._machine.info)

    def connect(self, info: bytes, timeout_s: float = 5.0) -> str:
        """Get to know a peer, and be known to it; returns its name, the ``id`` of the other calls.

        Raises :class:`UserError` when ``info`` is no peer's, when that peer's KV has another shape or namespace, and
        when there is no answer: the peer is gone, or has another secret.
        """
        try:
            peer_info = msgspec.msgpack.decode(info, type=PeerInfo)
        except (msgspec.MsgspecError, UserError) as error:
            hint = "give the bytes of PoolPeer.info()"
            raise UserError(f"not a peer's info: {error}", hint=hint, param="info") from error
        name = peer_info.peer.name
        answered = self._host.call_machine(lambda now_ns: self._machine.add_peer(peer_info, now_ns))
        try:
            answered.result(timeout_s)
        except (TimeoutError, CancelledError) as error:
            hint = "is it running, and does it have this peer's secret?"
            raise UserError(f"no answer from {name} at {peer_info.address}", hint=hint, param="info") from error
        return name

    def disconnect(self, id: str) -> None:
        """End all dealings with a peer: each side frees what the other held."""
        self._host.call_machine(lambda now_ns: self._machine.remove_peer(id, now_ns))

    def peers(self) -> list[str]:
        """Names of the peers that are known and not silent."""
        return self._host.call_machine(lambda now_ns: self._machine.peer_names())

    # -- Table 1: memory blocks

    def alloc_mem(
        self, size: int, tier: Tier = Tier.HBM, id: str | None = None, timeout_s: float = 5.0
    ) -> Addresses | None:
        """``size`` blocks here or, with ``id``, of a peer, held until :meth:`free_mem`. None: no room.

        Blocks of a peer also go back when their lease (``lease_s`` of this peer) ends. Raises :class:`UserError` when
        there is no peer ``id``; a peer that does not answer in time has no room.
        """
        if id is None:
            return self._host.call_machine(lambda now_ns: self._memory.alloc_mem(size, tier))
        if size < 1:
            raise UserError(f"cannot allocate {size} blocks at {id!r}", hint="size must be positive", param="size")
        within_ns = ns_from_s(timeout_s)
        return self._host.call_machine(
            lambda now_ns: self._machine.start_allocation(id, size, tier, now_ns, within_ns)
        ).result()

    def free_mem(self, addresses: AddressList) -> None:
        """Give up blocks from :meth:`alloc_mem`, :meth:`match` or a delivery, wherever they lie.

        Blocks of a peer go back together, when the last one of its ``alloc_mem`` is given up. Those of a peer that is
        gone are gone.
        """
        for generation, group in _group_by_owner(addresses):
            if generation == self._self_peer.generation:
                self._host.call_machine(partial(self._free_own, group))
            else:
                self._host.call_machine(partial(self._free_remote, generation, group))

    def view(self, address: Address) -> NDArray[np.uint8]:
        """The bytes of an own block, ``[num_layers, page_bytes]`` uint8, writable, without a copy."""
        return self._memory.view(address)

    # -- Table 1: index and tiers of the own pool (see `MemPool`)

    def insert(self, tokens: TokenArray, addresses: AddressList) -> int:
        """See :meth:`MemPool.insert`."""
        return self._host.call_machine(lambda now_ns: self._memory.insert(tokens, addresses))

    @overload
    def match(self, tokens: TokenArray, tiers: None = None) -> Addresses: ...
    @overload
    def match(self, tokens: TokenArray, tiers: Collection[Tier]) -> AddressList: ...
    def match(self, tokens: TokenArray, tiers: Collection[Tier] | None = None) -> AddressList:
        """See :meth:`MemPool.match`."""
        if tiers is None:
            return self._host.call_machine(lambda now_ns: self._memory.match(tokens))
        return self._host.call_machine(lambda now_ns: self._memory.match(tokens, tiers))

    def cached_tokens(self, tokens: TokenArray) -> int:
        """See :meth:`MemPool.cached_tokens`."""
        return self._host.call_machine(lambda now_ns: self._memory.cached_tokens(tokens))

    def delete(self, tokens: TokenArray) -> int:
        """See :meth:`MemPool.delete`."""
        return self._host.call_machine(lambda now_ns: self._memory.delete(tokens))

    def swap_out(self, num_blocks: int) -> int:
        """See :meth:`MemPool.swap_out`."""
        return self._host.call_machine(lambda now_ns: self._memory.swap_out(num_blocks))

    def swap_out_blocks(self, addresses: AddressList) -> Addresses | None:
        """See :meth:`MemPool.swap_out_blocks`."""
        return self._host.call_machine(lambda now_ns: self._memory.swap_out_blocks(addresses))

    def swap_in(self, addresses: AddressList) -> Addresses | None:
        """See :meth:`MemPool.swap_in`."""
        return self._host.call_machine(lambda now_ns: self._memory.swap_in(addresses))

    # -- Table 1: transfers

    def transfer(
        self,
        id: str,
        src_addresses: AddressList,
        dst_addresses: AddressList | None = None,
        flags: TransferFlag = TransferFlag.NONE,
        private: bytes = b"",
        layers: Layers | None = None,
    ) -> Transferred:
        """Copy own blocks to the peer ``id``: into ``dst_addresses`` (from its ``alloc_mem``), or where it allocates.

        Returns when the peer has them and its application was told of them and of ``private``, or will not have them
        (no room, gone, the lease has ended): see ``reason``. The caller keeps its hold on the source. ``layers``
        ``(first, end)``: of each block these pages alone, into ``dst_addresses``, whose other pages stay as they are;
        one transfer at a time, and the peer's application is not told. :meth:`transfer_with_insert` brings the last.
        """
        return self.transfer_later(id, src_addresses, dst_addresses, flags, private, layers).result()

    def transfer_later(
        self,
        id: str,
        src_addresses: AddressList,
        dst_addresses: AddressList | None = None,
        flags: TransferFlag = TransferFlag.NONE,
        private: bytes = b"",
        layers: Layers | None = None,
    ) -> Future[Transferred]:
        """As :meth:`transfer`, without waiting. The source may be freed at once, but what is sent of it not be written
        to."""
        return self._start_offer(id, _NO_TOKENS, src_addresses, dst_addresses, flags, private, layers)

    def transfer_with_insert(
        self,
        id: str,
        tokens: TokenArray,
        src_addresses: AddressList,
        dst_addresses: AddressList | None = None,
        flags: TransferFlag = TransferFlag.NONE,
        private: bytes = b"",
        layers: Layers | None = None,
    ) -> Transferred:
        """As :meth:`transfer`, and the peer's index has the whole blocks of ``tokens`` when this returns.

        One message carries tokens, addresses and ``private``. Where the peer allocates, what it has already is not
        moved. With ``dst_addresses`` all blocks are moved there, and the peer's index takes those whose tokens it
        does not have; the caller's hold on them stays the caller's. ``layers``: the last ones to come; all others must
        have been transferred there before.
        """
        return self.transfer_with_insert_later(
            id, tokens, src_addresses, dst_addresses, flags, private, layers
        ).result()

    def transfer_with_insert_later(
        self,
        id: str,
        tokens: TokenArray,
        src_addresses: AddressList,
        dst_addresses: AddressList | None = None,
        flags: TransferFlag = TransferFlag.NONE,
        private: bytes = b"",
        layers: Layers | None = None,
    ) -> Future[Transferred]:
        """As :meth:`transfer_with_insert`, without waiting."""
        tokens, block_tokens = as_tokens(tokens), self._memory.geometry.block_tokens
        whole = len(tokens) // block_tokens
        for addresses in (src_addresses, dst_addresses):
            if whole < 1 or (addresses is not None and len(addresses) < whole):
                raise UserError(
                    f"{len(addresses or ())} addresses for {whole} blocks of tokens", hint="one a whole block"
                )
        dst = None if dst_addresses is None else dst_addresses[:whole]
        src = src_addresses[:whole]
        return self._start_offer(id, tokens[: whole * block_tokens], src, dst, flags, private, layers)

    def fetch(self, id: str, tokens: TokenArray, timeout_s: float = 5.0) -> int:
        """Get into the own index what the peer ``id`` has of ``tokens``; returns the cached prefix in tokens then.

        What does not come in time, or with a wrong checksum, is not there.
        """
        wanted_tokens, within_ns = as_tokens(tokens), ns_from_s(timeout_s)
        return self._host.call_machine(
            lambda now_ns: self._machine.start_fetch(id, wanted_tokens, now_ns, within_ns)
        ).result()

    # -- a cluster

    def lend_memory(self, nbytes: int, join: str, *, secret: str = "", timeout_s: float = 30.0) -> LentMemory:
        """Let the cluster of the router at ``join`` (``HOST:PORT``) have ``nbytes`` of this host's memory, beside this
        pool's own, until the result is closed: KV that leaves its instances goes there, and they fetch it back.

        There it is a store of this peer's name. ``secret``: the cluster's, if it is not this peer's. Raises
        :class:`UserError` where the router refuses it, or has not answered within ``timeout_s``.
        """
        own = self._where
        lent = LentMemory(nbytes, join, name=self.name, secret=secret or own.secret, host=own.host, link=self._link)
        try:
            lent.wait_member(timeout_s)
        except UserError:
            with suppress(UserError):  # the same
                lent.close()
            raise
        self._lent.append(lent)
        return lent

    # -- state

    def report(self) -> PoolReport:
        """The state of the memory."""
        return self._host.call_machine(lambda now_ns: self._memory.report())

    def counters(self) -> ExchangeCounters:
        """What was exchanged so far."""
        return self._host.call_machine(lambda now_ns: replace(self._machine.exchange.counters))

    def check_invariants(self) -> None:
        """Raise :class:`memserve.base.errors.InvariantError` when the books do not balance."""
        self._host.call_machine(lambda now_ns: self._memory.check_invariants())
        self._host.call_machine(lambda now_ns: self._machine.exchange.check_invariants())

    def close(self) -> None:
        """Tell the peers, stop the threads, give the memory back, lent memory too. Waiting calls end."""
        for lent in self._lent:
            with suppress(UserError):  # that the cluster had refused it was said when it was lent
                lent.close()
        self._host.close()

    def __enter__(self) -> PoolPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PoolPeer {self.name} peers={self.peers()}>"

    # -- inside

    def _start_offer(
        self,
        id: str,
        tokens: TokenArray,
        src: AddressList,
        dst: AddressList | None,
        flags: TransferFlag,
        private: bytes,
        layers: Layers | None,
    ) -> Future[Transferred]:
        tier, blocks = self._own_blocks(src)
        to, dst_tier, dst_blocks = (
            self._host.call_machine(lambda now_ns: self._machine.require_peer(id)),
            Tier.HBM,
            tuple[int, ...](),
        )
        if dst is not None:
            dst_tier, dst_blocks = _blocks_of(to, dst)
            if len(dst_blocks) != len(blocks):
                raise UserError(f"{len(blocks)} blocks to {len(dst_blocks)} addresses", hint="as many as there are")
            if TransferFlag.TO_DRAM in flags and dst_tier is not Tier.DRAM:
                raise UserError("TO_DRAM, and addresses in HBM", hint="leave the flag out: addresses name their tier")
        elif TransferFlag.TO_DRAM in flags:
            dst_tier = Tier.DRAM
        self._check_layers(layers, dst)
        offered = OfferedBlocks(self._memory.tenant, tokens, blocks, tier)
        terms = OfferTerms(
            TransferMode.BY_REQUEST if TransferFlag.BY_PAGE in flags else TransferMode.BY_REQUEST_AGG,
            insert=len(tokens) > 0,
            private=private,
            dst_blocks=dst_blocks,
            dst_tier=dst_tier,
            layers=layers,
        )
        return self._host.call_machine(lambda now_ns: self._machine.start_offer(to, offered, now_ns, terms))

    def _check_layers(self, layers: Layers | None, dst: AddressList | None) -> None:
        if layers is None:
            return
        first, end = layers
        if not 0 <= first < end <= self._memory.geometry.num_layers:
            hint = f"(first, end) of {self._memory.geometry.num_layers} layers"
            raise UserError(f"no layers {layers}", hint=hint, param="layers")
        if dst is None:
            hint = "give dst_addresses, of alloc_mem(..., id=...)"
            raise UserError("some layers of blocks that are not chosen", hint=hint, param="layers")

    def _free_own(self, addresses: AddressList, now_ns: int) -> None:
        self._memory.free_mem(addresses)

    def _free_remote(self, generation: int, addresses: AddressList, now_ns: int) -> None:
        self._machine.free_at(generation, addresses)

    def _own_blocks(self, src: AddressList) -> tuple[Tier, tuple[int, ...]]:
        if not len(src):
            raise UserError("nothing to transfer", hint="give at least one source address", param="src_addresses")
        return _blocks_of(self._self_peer, src)

    def _on_outcome(self, outcome: Delivered | Inserted) -> None:
        """In the delivery thread."""
        offer, addresses = outcome.offer, None
        if isinstance(outcome, Delivered):
            addresses = Addresses(offer.dst_tier, _core.BlockIds(outcome.blocks), self._self_peer.generation)
        if self._on_delivery is not None:
            self._on_delivery(Delivery(outcome.sender.name, addresses, offer.tokens, offer.private))
        elif addresses is not None:
            self.free_mem(addresses)


def _group_by_owner(addresses: AddressList) -> list[tuple[int, AddressList]]:
    """Addresses by the generation of their owner."""
    if isinstance(addresses, Addresses):
        return [(addresses.generation, addresses)] if len(addresses) else []
    owners: dict[int, list[Address]] = {}
    for address in addresses:
        owners.setdefault(address.generation, []).append(address)
    return list(owners.items())


def _blocks_of(owner: Peer, addresses: AddressList) -> tuple[Tier, tuple[int, ...]]:
    """Block ids of addresses that all belong to ``owner`` and lie on one tier."""
    tiers = {address.tier for address in addresses}
    if any(address.generation != owner.generation for address in addresses):
        raise UserError(f"not addresses of {owner.name}", hint="allocate or match again: it may have been restarted")
    if len(tiers) > 1:
        raise UserError("addresses on two tiers", hint="transfer those in HBM and those in DRAM one after the other")
    return (tiers.pop() if tiers else Tier.HBM), tuple(address.block for address in addresses)

"""The threads and ports of a :class:`PoolPeer` (level 3): one loop for the machine, a mailbox, a data port.

application --Call--> [loop: PoolMachine] --Send--> mailbox;  --SealPages, PullPages--> data port
mailbox, data port --events--> [loop] --Arrived--> [delivery thread: the application's callback]
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from memserve import _core
from memserve.config import ExchangeConfig
from memserve.errors import UserError
from memserve.kv_transfer.events import Delivered, ExchangeCounters, Inserted, PagesPulled, PagesSealed
from memserve.kv_transfer.exchange import Exchange
from memserve.mempool.addresses import Addresses
from memserve.mempool.mempool import AddressList, MemPool
from memserve.messages import AnyMessage, Peer, PeerInfo
from memserve.runtime.links.data import open_data_port
from memserve.runtime.links.mailbox import ZmqMailbox
from memserve.runtime.loop import MachineLoop
from memserve.runtime.pool_machine import PoolMachine
from memserve.runtime.pool_words import Arrived, Call, Lost, Met, PoolAction, PoolEvent, Reborn, Transferred
from memserve.serving import MessageArrived, Send
from memserve.types import Role, Tier, TokenArray

log = logging.getLogger(__name__)

_CALL_S = 30.0
"""How long a call waits for the loop, which never waits for anybody."""

Answer = TypeVar("Answer")


class PoolHost:
    """Runs a :class:`PoolMachine` until it is closed."""

    def __init__(
        self,
        memory: MemPool,
        me: Peer,
        namespace: str,
        config: ExchangeConfig,
        *,
        secret: str,
        address: tuple[str, int],
        link: str,
        silent_ns: int,
        on_arrival: Callable[[Delivered | Inserted], None],
    ) -> None:
        self._on_arrival = on_arrival
        self._closed = False
        self._deliveries = ThreadPoolExecutor(1, thread_name_prefix="memserve-delivery")
        arenas = {tier: arena for tier, arena in memory.arenas.items() if isinstance(arena, _core.SharedArena)}
        self._data = open_data_port(link, memory.geometry, arenas, self._pages_done, address[0])
        self._mailbox = ZmqMailbox(me, secret, *address, self._heard)
        info = self._data.describe(_info(memory, me, namespace, self._mailbox.address))
        exchange = Exchange(memory.pool, memory.geometry, config, me, namespace)
        self._machine = PoolMachine(memory, exchange, info, silent_ns)
        self._loop: MachineLoop[PoolEvent] = MachineLoop(
            self._machine, self._perform, on_broken=self._broken, name="memserve-pool-peer"
        )
        self._loop.start()

    # -- calls, from any thread

    def ask(self, do: Callable[[int], Answer]) -> Answer:
        """The result of ``do(now)``, called in the loop's thread; what it raises is raised here."""
        if self._closed:
            raise UserError("this pool peer is closed", hint="make another one")
        call = Call(do, Future())
        self._loop.post(call)
        answer: Answer = call.answer.result(_CALL_S)
        return answer

    def info_bytes(self) -> bytes:
        """See :meth:`PoolPeer.info`."""
        return msgspec.msgpack.encode(self._machine.info)

    def connect(self, packed: bytes, timeout_s: float) -> str:
        """See :meth:`PoolPeer.connect`."""
        try:
            info = msgspec.msgpack.decode(packed, type=PeerInfo)
        except (msgspec.MsgspecError, UserError) as error:
            raise UserError(
                f"not a peer's info: {error}", hint="give the bytes of PoolPeer.info()", param="info"
            ) from error
        answered = self.ask(lambda now: self._machine.meet(info, now))
        try:
            answered.result(timeout_s)
        except (TimeoutError, CancelledError) as error:
            hint = "is it running, and has it the same secret?"
            raise UserError(f"no answer from {info.peer.name} at {info.address}", hint=hint, param="info") from error
        return info.peer.name

    def leave(self, name: str) -> None:
        """See :meth:`PoolPeer.disconnect`."""
        self.ask(lambda now: self._machine.leave(name, now))

    def names(self) -> list[str]:
        """See :meth:`PoolPeer.peers`."""
        return self.ask(lambda now: self._machine.names())

    def known(self, name: str) -> Peer:
        """The peer of that name; raises :class:`UserError` when there is none."""
        return self.ask(lambda now: self._machine.known(name))

    def offer(self, to: Peer, blocks: Sequence[int], **terms: Any) -> Future[Transferred]:
        """Offer own blocks; ``terms`` as in :meth:`Exchange.offer`."""
        waiter: Future[Transferred] = Future()
        self.ask(lambda now: self._machine.start_offer(waiter, to, blocks, now, **terms))
        return waiter

    def fetch(self, name: str, tokens: TokenArray, within_ns: int) -> Future[int]:
        """Ask a peer for cached KV."""
        waiter: Future[int] = Future()
        self.ask(lambda now: self._machine.start_fetch(waiter, self._machine.known(name), tokens, now, within_ns))
        return waiter

    def allocate_at(self, name: str, count: int, tier: Tier, within_ns: int) -> Future[Addresses | None]:
        """Ask a peer for blocks."""
        waiter: Future[Addresses | None] = Future()
        machine = self._machine
        self.ask(lambda now: machine.start_allocation(waiter, machine.known(name), count, tier, now, within_ns))
        return waiter

    def free_at(self, generation: int, addresses: AddressList) -> None:
        """Give up blocks of a peer."""
        self.ask(lambda now: self._machine.free_at(generation, addresses))

    def counters(self) -> ExchangeCounters:
        """A copy of the totals."""
        return self.ask(lambda now: replace(self._machine.exchange.counters))

    def check_invariants(self) -> None:
        """Of the memory and of the exchange."""
        self.ask(lambda now: self._machine.memory.check_invariants())
        self.ask(lambda now: self._machine.exchange.check_invariants())

    def close(self) -> None:
        """Say goodbye, stop threads and ports. Later calls raise; waiting ones get their "no"."""
        if self._closed:
            return
        self.ask(lambda now: self._machine.close(now))
        self._closed = True
        self._loop.close(_CALL_S)
        self._mailbox.close()
        self._data.close()
        self._deliveries.shutdown()

    # -- other threads

    def _heard(self, sender: Peer, message: AnyMessage) -> None:
        self._loop.post(MessageArrived(sender, message))

    def _pages_done(self, event: PagesSealed | PagesPulled) -> None:
        self._loop.post(event)

    def _perform(self, event: PoolEvent, actions: list[PoolAction], spent_ns: int) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._mailbox.send(action.to, action.message)
            elif isinstance(action, Met):
                self._mailbox.connect(action.info.peer, action.info.address)
                self._data.add_peer(action.info)
            elif isinstance(action, Lost):
                self._data.remove_peer(action.peer)
                self._mailbox.disconnect(action.peer)
            elif isinstance(action, Reborn):
                self._mailbox.become(action.info.peer)
                self._data.describe(action.info)
            elif isinstance(action, Arrived):
                self._deliveries.submit(self._deliver, action.outcome)
            else:
                self._data.start(action)

    def _deliver(self, outcome: Delivered | Inserted) -> None:
        try:
            self._on_arrival(outcome)
        except Exception:
            log.exception("the application's delivery callback raised")

    def _broken(self) -> None:
        """The loop has ended: nobody shall wait for it."""
        self._closed = True


def _info(memory: MemPool, me: Peer, namespace: str, address: str) -> PeerInfo:
    """What others must know of a pool without a model."""
    tiers = memory.report().by_tier
    return PeerInfo(
        peer=me,
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

"""The threads and ports of a :class:`PoolPeer`: one loop for the machine, a mailbox, a data port.

application --Call--> [loop: PoolMachine] --Send--> mailbox;  --SealPages, PullPages--> data port
mailbox, data port --events--> [loop] --Arrived--> [delivery thread: the application's callback]
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from memserve import _core
from memserve.config import ExchangeConfig
from memserve.errors import UserError
from memserve.instance.events import MeetPeer, PartFromPeer, Reborn
from memserve.kv_transfer.events import Delivered, Inserted, PagesPulled, PagesSealed
from memserve.kv_transfer.exchange import Exchange
from memserve.mempool.mempool import MemPool
from memserve.messages import AnyMessage, Peer, PeerInfo
from memserve.runtime.links.answering import Listening
from memserve.runtime.links.data import open_data_port
from memserve.runtime.links.mailbox import ZmqMailbox
from memserve.runtime.loop import MachineLoop
from memserve.runtime.pool_machine import Arrived, Call, PoolAction, PoolEvent, PoolMachine
from memserve.serving import MessageArrived, Send
from memserve.types import Role, Tier

log = logging.getLogger(__name__)

_CALL_S = 30.0
"""How long a call waits for the loop, which itself never waits."""

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
        self._data = open_data_port(link, memory.geometry, arenas, self._pages_done, Listening(secret, address[0]))
        self._mailbox = ZmqMailbox(me, secret, *address, self._heard)
        info = self._data.describe(_info(memory, me, namespace, self._mailbox.address))
        exchange = Exchange(memory.pool, memory.geometry, config, me, namespace)
        self.machine = PoolMachine(memory, exchange, info, silent_ns)
        self._loop: MachineLoop[PoolEvent] = MachineLoop(
            self.machine, self._perform, on_broken=self._broken, name="memserve-pool-peer"
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

    def close(self) -> None:
        """Leave all peers, stop threads and ports. Calls that wait end; later ones raise :class:`UserError`."""
        if self._closed:
            return
        self.ask(lambda now: self.machine.close(now))
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
            match action:
                case Send(to, message):
                    self._mailbox.send(to, message)
                case MeetPeer(info):
                    self._mailbox.connect(info.peer, info.address)
                    self._data.add_peer(info)
                case PartFromPeer(peer):
                    self._data.remove_peer(peer)
                    self._mailbox.disconnect(peer)
                case Reborn(info):
                    self._mailbox.become(info.peer)
                    self._data.describe(info)
                case Arrived(outcome):
                    self._deliveries.submit(self._deliver, outcome)
                case _:
                    self._data.start(action)

    def _deliver(self, outcome: Delivered | Inserted) -> None:
        try:
            self._on_arrival(outcome)
        except Exception:
            log.exception("the application's delivery callback raised")

    def _broken(self) -> None:
        """The loop has ended: later calls are refused."""
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

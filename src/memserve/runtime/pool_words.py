"""What a :class:`PoolPeer`'s machine hears and says (level 3), beside what exchanges do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from memserve.kv_transfer.context import ExchangeAction
from memserve.kv_transfer.events import Delivered, Inserted, PagesPulled, PagesSealed
from memserve.messages import Peer, PeerInfo
from memserve.serving import ClockTicked, MessageArrived


@dataclass(frozen=True, slots=True)
class Transferred:
    """How a transfer ended."""

    done: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.done


@dataclass(frozen=True, slots=True)
class Call:
    """Event: a thread of the application wants something; ``do(now)`` runs in the machine's thread."""

    do: Callable[[int], Any]
    answer: Future[Any]


@dataclass(frozen=True, slots=True)
class Met:
    """Action: from now on messages and pages go to and come from this peer."""

    info: PeerInfo


@dataclass(frozen=True, slots=True)
class Lost:
    """Action: the peer is gone."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Reborn:
    """Action: from now on this process is ``info.peer``."""

    info: PeerInfo


@dataclass(frozen=True, slots=True)
class Arrived:
    """Action: tell the application what a peer has sent."""

    outcome: Delivered | Inserted


PoolEvent = Call | MessageArrived | PagesSealed | PagesPulled | ClockTicked
PoolAction = ExchangeAction | Met | Lost | Reborn | Arrived

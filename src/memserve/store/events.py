"""What a store's machine is told, and what it asks its host for, beside messages, pages and disks.

An *extent* is an offset in the store's arena. The machine keeps the extents of a job referenced until the job's answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.instance.events import (
    BecomeNew,
    DialRouter,
    DrainAsked,
    MeetPeer,
    Notice,
    PartFromPeer,
    Reborn,
)
from memserve.kv_transfer.context import ExchangeAction
from memserve.kv_transfer.events import PagesPulled, PagesSealed
from memserve.messages import Peer
from memserve.serving import ClockTicked, MessageArrived, Send
from memserve.store.disk_events import DiskAction, DiskDone
from memserve.store_messages import StoreDone, StoreHello
from memserve.types import KVGeometry

# -- actions


@dataclass(frozen=True, slots=True)
class SealExtents:
    """Compute the checksum of each ``(extent, bytes)``; ``ExtentsSealed``."""

    job: int
    extents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A value that a client gives."""

    extent: int
    length: int
    offset: int
    """In the client's arena."""
    data: bytes | None
    """The value itself. None: it lies in the arena."""


@dataclass(frozen=True, slots=True)
class TakeValues:
    """Copy values of ``client``, which ``MeetClient`` has named, into extents; ``ValuesTaken``."""

    job: int
    client: Peer
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a value that go into an answer."""

    index: int
    """In ``StoreDone.values``."""
    extent: int
    length: int


@dataclass(frozen=True, slots=True)
class SendValues:
    """Send ``answer`` to ``to`` with these bytes in its ``values``, which are empty; ``ValuesSent``."""

    job: int
    to: Peer
    answer: StoreDone
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class MeetClient:
    """Messages go to ``client`` from now on, and values come out of its arena."""

    client: Peer
    hello: StoreHello


@dataclass(frozen=True, slots=True)
class PartFromClient:
    """A client is gone."""

    client: Peer


@dataclass(frozen=True, slots=True)
class ServeModel:
    """Members keep KV of another shape or namespace than this store: start it again with theirs."""

    namespace: str
    geometry: KVGeometry
    of: str
    """The name of the process that said so."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The process may end: what was to be written is written, or the time is over."""

    refused: str = ""
    """Why the router refuses the store. Empty: the end was asked for."""


StoreAction = (
    Send | ExchangeAction | DiskAction | SealExtents | TakeValues | SendValues | MeetClient | PartFromClient
    | DialRouter | MeetPeer | PartFromPeer | BecomeNew | Notice | ServeModel | Ended
)  # fmt: skip

# -- events


@dataclass(frozen=True, slots=True)
class ExtentsSealed:
    """The answer to ``SealExtents``, in its order; 0 for an empty extent."""

    job: int
    seals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ValuesTaken:
    """The answer to ``TakeValues``: the checksum of what was copied, in the order of the parts. None: it could not be
    read."""

    job: int
    seals: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ValuesSent:
    """The answer to ``SendValues``: the extents are read no more."""

    job: int


StoreEvent = (
    MessageArrived | ClockTicked | PagesSealed | PagesPulled | DiskDone | ExtentsSealed | ValuesTaken | ValuesSent
    | DrainAsked | Reborn
)  # fmt: skip

"""What a store's machine is told, and what it asks its host for, beside messages, pages and disks.

An *extent* is an offset in the store's arena. The machine keeps the extents of a job referenced until the job's answer.

Numbers and actions that the parts of a store's machine share.

What a store's machine is set to, and what it counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from memserve.base.config import ExchangeConfig
from memserve.base.metrics import counter
from memserve.base.types import ClockTicked, KVGeometry
from memserve.base.units import MIB, NS_PER_S
from memserve.kv.transfer.context import ExchangeAction
from memserve.kv.transfer.events import PagesPulled, PagesSealed
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    DrainRequested,
    GenerationChanged,
    LogWarning,
    RemovePeer,
)
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer
from memserve.protocol.store import StoreDone, StoreHello
from memserve.store.disks.events import DiskAction, DiskDone

# -- actions


@dataclass(frozen=True, slots=True)
class SealExtents:
    """Compute the checksum of each ``(extent, bytes)``; ``ExtentsSealed``."""

    job: int
    extents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ValuePart:
    """A value that a client gives."""

    extent: int
    length: int
    offset: int
    """In the client's arena."""
    data: bytes | None
    """The value itself. None: it lies in the arena."""


@dataclass(frozen=True, slots=True)
class TakeValues:
    """Copy values of ``client``, which ``AddClient`` has named, into extents; ``ValuesTaken``."""

    job: int
    client: Peer
    parts: tuple[ValuePart, ...]


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
class AddClient:
    """Messages go to ``client`` from now on, and values come out of its arena."""

    client: Peer
    hello: StoreHello


@dataclass(frozen=True, slots=True)
class RemoveClient:
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
    Send | ExchangeAction | DiskAction | SealExtents | TakeValues | SendValues | AddClient | RemoveClient
    | ConnectRouter | AddPeer | RemovePeer | ChangeGeneration | LogWarning | ServeModel | Ended
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
    | DrainRequested | GenerationChanged
)  # fmt: skip


class Jobs:
    """Jobs for the host, and everything else that it is asked for, in order."""

    def __init__(self) -> None:
        self._number = 0
        self._actions: list[StoreAction] = []

    def next_job(self) -> int:
        """The number of a job."""
        self._number += 1
        return self._number

    def add_action(self, action: StoreAction) -> None:
        """Have the host do something."""
        self._actions.append(action)

    def send_message(self, to: Peer, message: AnyMessage) -> None:
        self._actions.append(Send(to, message))

    def take_actions(self) -> list[StoreAction]:
        """What was asked for since the last call."""
        actions, self._actions = self._actions, []
        return actions


@dataclass(frozen=True, slots=True)
class MoveConfig:
    """How KV blocks go from one of several stores to another, beside the load."""

    bytes_per_s: int = 256 * MIB
    """No more than this is given to other stores, so that requests have the links."""
    batch_bytes: int = 16 * MIB
    """What is given at once. So much memory is held for it, here and there."""
    scan_keys: int = 4096
    """Blocks of which other stores are asked at a time."""
    answer_ns: int = 5 * NS_PER_S
    """How long an answer is waited for, and for how long a block that another store was to give is expected."""
    again_ns: int = 5 * NS_PER_S
    """When what did not go is tried again."""
    passes_max: int = 4
    """Times that all blocks are looked at after a change, if some did not go before."""
    hot_lends: int = 8
    """A block that is given to instances so often in one window gets one copy more."""
    hot_window_ns: int = 60 * NS_PER_S
    hot_part: int = 16
    """Of the blocks of memory, at most one in so many gets another copy in one window."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Settings of a store's machine."""

    exchange: ExchangeConfig = field(default_factory=lambda: ExchangeConfig(pulls_in_flight=8, room_wait_ns=0))
    """How KV blocks are taken and lent."""
    fetch_deadline_ns: int = 2 * NS_PER_S
    """How long a fetch waits for reads from disks; then what has come is lent. A fetch may ask for less."""
    fetch_read_share: float = 0.75
    """How much of the time that an instance waits may pass with reads; the rest is for moving what has come."""
    loads_max: int = 128
    """Reads and comparisons that are given to the host at once; others wait."""
    silent_ns: int = 10 * NS_PER_S
    """A client that says nothing for this long is dropped."""
    forget_ns: int = 10 * NS_PER_S
    """How long a call that deletes may take until a restart knows of it."""
    clients_max: int = 1024
    calls_max: int = 256
    """Calls of one client that are under way; another one is answered with ``NO_ROOM``."""
    fetches_max: int = 4096
    """Fetches that wait for reads; another one gets what is in memory."""
    value_bytes_max: int = 1 << 30
    """Longest value of a client. A quarter of the memory, if that is less."""
    sweep_keys: int = 2048
    """Keys that a purge or a verification looks at between two other events."""
    moves: MoveConfig = field(default_factory=MoveConfig)
    """How blocks go to other stores when those that are to keep them have changed."""


@dataclass(slots=True)
class StoreCounters:
    """Totals since the start."""

    kv_stored: int = counter("store_kv_blocks_stored", "KV blocks that the store took from instances")
    kv_known: int = counter("store_kv_blocks_known", "KV blocks that instances offered and the store had already")
    kv_lent: int = counter("store_kv_blocks_lent", "KV blocks that the store gave to instances")
    kv_asked: int = counter("store_kv_blocks_asked", "KV blocks that instances asked the store for")
    kv_moved: int = counter(
        "store_kv_blocks_moved", "KV blocks that the store gave to other stores, which are to keep these blocks"
    )
    kv_copied: int = counter(
        "store_kv_blocks_copied", "KV blocks of which the store gave one more copy, since they are asked for often"
    )
    kv_given_up: int = counter(
        "store_kv_blocks_given_up", "KV blocks that the store dropped since others keep them from now on"
    )
    fetches: int = counter("store_fetches", "Prefixes that instances asked the store for")
    fetches_cut: int = counter(
        "store_fetches_cut",
        "Prefixes of which instances got less than the store has: a disk failed or was late, or memory was short",
    )
    puts: int = counter("store_puts", "Values that clients put into the store")
    put_bytes: int = 0
    gets: int = counter("store_gets", "Values that clients asked the store for")
    get_bytes: int = 0
    deleted: int = 0
    loads: int = counter("store_loads", "Values that were read from a disk into the memory of the store")
    loads_failed: int = counter(
        "store_loads_failed", "Values on a disk of the store that could not be read in time and intact"
    )
    loads_joined: int = 0
    """Callers that waited for a read which another one had begun."""
    compared: int = 0
    """Values adopted from an earlier life, or verified, with the right checksum."""
    damaged: int = counter(
        "store_damaged", "Values in the memory of the store with a wrong checksum, which were dropped"
    )
    no_room: int = 0
    clients_dropped: int = 0
    refused: int = 0
    """Messages of unknown peers, and of members with another namespace."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

"""What may happen to the router, and what it asks its host to do.

Events and actions that instances share are in :mod:`memserve.protocol.events`; those of a router alone are declared
here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memserve.base.types import ClockTicked, Role
from memserve.protocol.events import (
    AdapterAnswered,
    AdapterNamed,
    AdapterNamesChanged,
    AdapterUnnamed,
    EmitTokens,
    MessageArrived,
    PrefixPinned,
    PrefixUnpinned,
    RejectRequest,
    RequestArrived,
    RequestCancelled,
    Send,
    SequenceStopped,
    ToolCalled,
)
from memserve.protocol.kv_hints import KvHinted
from memserve.protocol.peers import Peer
from memserve.protocol.records import AnyRecord, RecoveredState
from memserve.protocol.store import STORE


@dataclass(frozen=True, slots=True)
class InstanceDrained:
    """An operator asked for the end of the instance ``name``: it finishes what it has, gets nothing new, and leaves."""

    name: str


@dataclass(frozen=True, slots=True)
class InstanceDied:
    """The process of the instance ``name`` has ended, as its supervisor knows: no heartbeat has to be missed first."""

    name: str
    how: str
    """``was ended by signal 9``: a sentence without its subject."""


@dataclass(frozen=True, slots=True)
class StateRecovered:
    """The first event of a machine that remembers: what the last router knew, and the name of this one.

    ``router.generation`` must be higher than the last one's. Recovered members count as members when they have joined
    again.
    """

    recovered: RecoveredState
    router: Peer
    address: str
    """Where members reach this router."""
    clock_offset_ns: int = 0
    """Nanoseconds since 1970, minus the machine's clock."""


@dataclass(frozen=True, slots=True)
class Remember:
    """Make ``records`` durable, in order, *before* any action that stands behind this one is performed."""

    records: tuple[AnyRecord, ...]


@dataclass(frozen=True, slots=True)
class StoreNamed:
    """The host has a line to a store that is to be a member; it reaches this router at ``address``."""

    address: str
    store: Peer = STORE
    """Under which the host knows the store: ``STORE``, or ``store_at`` of its number."""


@dataclass(frozen=True, slots=True)
class RouterEnds:
    """The last event: this router ends in good order, and no other takes its place as far as it knows."""


class MemberChange(enum.Enum):
    """What happened to a member, or to a process that wanted to be one."""

    JOINED = "joined"
    RETURNED = "returned"  # a member of the last router, or a new incarnation of one that was a member here
    LEFT = "left"
    DIED = "died"
    REFUSED = "refused"  # asked to join, and may not
    EXPELLED = "expelled"  # took itself for a member, and is none
    DECLINED = "declined"  # a store that was asked to join belongs to another router


@dataclass(frozen=True, slots=True)
class ReportMember:
    """News of ``peer`` for operators. Nothing depends on this action."""

    change: MemberChange
    peer: Peer
    address: str
    """Address of its mailbox; empty: not known."""
    why: str = ""
    """The reason, as a sentence without subject or a noun phrase; empty: the change says it all."""
    role: Role | None = None
    """``None``: it has not introduced itself."""


@dataclass(frozen=True, slots=True)
class Note:
    """Make ``records`` durable, in order, when it is convenient: nothing depends on them."""

    records: tuple[AnyRecord, ...]


ClusterEvent = (
    RequestArrived
    | RequestCancelled
    | SequenceStopped
    | ToolCalled
    | ClockTicked
    | MessageArrived
    | InstanceDrained
    | InstanceDied
    | PrefixPinned
    | PrefixUnpinned
    | KvHinted
    | StateRecovered
    | StoreNamed
    | AdapterNamed
    | AdapterUnnamed
    | RouterEnds
)
ClusterAction = (
    Send | EmitTokens | RejectRequest | Remember | Note | ReportMember | AdapterAnswered | AdapterNamesChanged
)

__all__ = [
    "AdapterAnswered",
    "AdapterNamed",
    "AdapterNamesChanged",
    "AdapterUnnamed",
    "ClockTicked",
    "ClusterAction",
    "ClusterEvent",
    "EmitTokens",
    "InstanceDied",
    "InstanceDrained",
    "MemberChange",
    "MessageArrived",
    "Note",
    "PrefixPinned",
    "PrefixUnpinned",
    "RejectRequest",
    "Remember",
    "ReportMember",
    "RequestArrived",
    "RequestCancelled",
    "RouterEnds",
    "Send",
    "SequenceStopped",
    "StateRecovered",
    "StoreNamed",
    "ToolCalled",
]

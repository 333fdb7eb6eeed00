"""What a cluster must remember, as records, and what it remembers, as one value.

The ``Cluster`` machine reports what has happened as records; ``journal/`` keeps them and folds them into a
:class:`RecoveredState`, from which a router that was started anew goes on. Records are facts, each right by itself:
repeated or late ones do no harm.

Some look like messages (``peers`` are members there as well), but are not: a message lives for a moment between
processes of one protocol version, a record is read by whatever version comes next. Each may change without the other.

Two kinds, by the cost of losing one:

* *ahead*: durable before anything that the machine asks for behind it in the same answer. The start of a router (its
  generation must never be given again), members that enter, drain or go (others act on it), pins, documents and
  adapters that are put or dropped (promised to a client).
* *lazy*: durable soon. Cache entries, their use, and routes of sessions: an instance reports what it holds when it is
  asked to rejoin, so a lost record costs a little time and never a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from memserve.protocol.messages import KvChange
from memserve.protocol.peers import Name, Natural, Peer, PeerInfo


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of all records. Arrays on disk, fields in order, tagged by the class's name; new fields come last, with a
    default. Times are ns on the clock of the last router started before the record."""


class RouterStarted(Record, frozen=True, tag=True):
    """A router has started: always its first record."""

    router: Peer
    address: str
    """Where its mailbox listens."""
    clock_offset_ns: int = 0
    """Nanoseconds since 1970, minus its clock: so that times survive it."""


class MemberEntered(Record, frozen=True, tag=True):
    """A new member; an older incarnation of its name is gone."""

    info: PeerInfo
    at_ns: int


class MemberDrained(Record, frozen=True, tag=True):
    """A member gets no new requests from now on."""

    peer: Peer


class MemberGone(Record, frozen=True, tag=True):
    """An incarnation is no longer a member, and never will be again."""

    peer: Peer


class EntriesChanged(Record, frozen=True, tag=True):
    """Changes number ``first``, ``first + 1``, ... of what a member has cached."""

    peer: Peer
    first: Natural
    changes: tuple[KvChange, ...]
    at_ns: int


class EntriesReplaced(Record, frozen=True, tag=True):
    """All that a member has cached, right before its change number ``next_event``; 16 bytes an identity."""

    peer: Peer
    next_event: Natural
    hbm: bytes
    dram: bytes
    at_ns: int
    ssd: bytes = b""


class EntriesKept(Record, frozen=True, tag=True):
    """All that a member has cached, with times and uses, in a checkpoint."""

    peer: Peer
    next_event: Natural
    identities: bytes
    stamps: bytes
    """Tier and times, eight bytes (``<u8``) an entry, see ``journal/state.py``."""
    hits: bytes = b""
    """For each entry that was used: its index in ``identities`` and its number of uses; ``<u4`` each."""


class EntryUsed(Record, frozen=True, tag=True):
    """A request with the prefix that ends with this block was routed to a member that has it."""

    peer: Peer
    identity: bytes
    at_ns: int


class SessionRouted(Record, frozen=True, tag=True):
    """A session's last request was routed to these members."""

    tenant: str
    session: str
    peers: tuple[Peer, ...]


class HandlePinned(Record, frozen=True, tag=True):
    """A named prefix must be kept until ``expires_ns``; ``tokens``: little-endian int32."""

    tenant: str
    handle: str
    tokens: bytes
    expires_ns: int
    salt: str = ""  # digest of the client's ``cache_salt``
    priority: float | None = None  # it is retained; None: pinned


class HandleDropped(Record, frozen=True, tag=True):
    """A named prefix was given up, or has expired."""

    tenant: str
    handle: str


class DocumentPut(Record, frozen=True, tag=True):
    """A tenant's document; the edge alone knows what ``body`` means."""

    tenant: str
    document_id: Name
    body: bytes
    expires_unix_ns: int


class DocumentDropped(Record, frozen=True, tag=True):
    """A document was deleted, or has expired."""

    tenant: str
    document_id: Name


class AdapterPut(Record, frozen=True, tag=True):
    """Requests may name this LoRA adapter, which every instance has."""

    name: Name
    folder: str
    digest: str


class AdapterDropped(Record, frozen=True, tag=True):
    """They may not any more."""

    name: Name


AnyRecord: TypeAlias = (
    RouterStarted | MemberEntered | MemberDrained | MemberGone | EntriesChanged | EntriesReplaced | EntriesKept
    | EntryUsed | SessionRouted | HandlePinned | HandleDropped | DocumentPut | DocumentDropped
    | AdapterPut | AdapterDropped
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecoveredMember:
    """One member, and what it had cached."""

    info: PeerInfo
    is_draining: bool
    next_event: int
    """All of its KV events before this one are in ``hbm`` and ``dram``."""
    hbm: bytes
    dram: bytes
    """Identities of its cached blocks, 16 bytes each."""
    used: tuple[tuple[int, int], ...] = ()
    """Pairs of the time of last use and a number of blocks in ``hbm``, least recently used first; within one second,
    blocks that were used less often first, then older ones."""
    ssd: bytes = b""
    """Of a store: blocks that lie on its disks alone."""


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """Everything that the last router knew and a new one needs. Times are on the new one's clock."""

    router: Peer | None = None
    """The last router; ``None``: there was none, and nothing is remembered."""
    address: str = ""
    """Where the last router listened."""
    members: tuple[RecoveredMember, ...] = ()
    """In the order of joining."""
    dead_peers: tuple[Peer, ...] = ()
    """Incarnations that must not come back, oldest first; bounded."""
    sessions: tuple[SessionRouted, ...] = ()
    """The session that was idle longest comes first."""
    handles: tuple[HandlePinned, ...] = ()
    documents: tuple[DocumentPut, ...] = field(default=())
    adapters: tuple[AdapterPut, ...] = ()

    @property
    def entries(self) -> int:
        """Cached blocks of all members."""
        return sum(len(member.hbm) + len(member.dram) + len(member.ssd) for member in self.members) // 16

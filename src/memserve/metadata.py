"""What a cluster must remember, as records, and what it remembers, as one value.

The ``Cluster`` machine says what has happened in records; ``meta/`` keeps them and folds them into a
:class:`RecoveredState`, from which a router that was started anew goes on. Records are facts, each right by itself:
repeated or late ones do no harm.

Some look like messages (``peers`` are members there as well), and are none: a message lives for a moment between
processes of one protocol version, a record is read by whatever version comes next. Neither's shape follows the other's.

Two kinds, by what a lost one costs:

* *ahead*: durable before anything that the machine asks for behind it in the same answer. The start of a router (its
  generation must never be given again), members that enter, drain or go (others act on it), pins and documents that
  are put or dropped (a client was promised).
* *lazy*: durable soon. Cache entries, their use, and the ways of sessions: an instance tells what it holds when it is
  called back, so a lost one costs a little time and never a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from memserve.messages import KvChange
from memserve.peers import Name, Natural, Peer, PeerInfo


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of all. Arrays on the disk, fields in order, tagged by the class's name; new fields come last, with a
    default. Times are ns on the clock of the router that was started last before it."""


class RouterStarted(Record, frozen=True, tag=True):
    """A router starts: always its first record."""

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
    """An incarnation is no member any more, and never will be again."""

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


class EntriesKept(Record, frozen=True, tag=True):
    """All that a member has cached, with times and uses, in a checkpoint."""

    peer: Peer
    next_event: Natural
    identities: bytes
    stamps: bytes
    """Tier and times, eight bytes (``<u8``) an entry, see ``meta/entries.py``."""
    hits: bytes = b""
    """Of entries that were used: place in ``identities``, and how often; ``<u4`` each."""


class EntryUsed(Record, frozen=True, tag=True):
    """A prefix that ends with this block was routed to a member that has it."""

    peer: Peer
    identity: bytes
    at_ns: int


class SessionRouted(Record, frozen=True, tag=True):
    """A session's last request was routed to these members."""

    tenant: str
    session: str
    peers: tuple[Peer, ...]


class HandlePinned(Record, frozen=True, tag=True):
    """A named prefix is to be kept until ``expires_ns``; ``tokens``: little-endian int32."""

    tenant: str
    handle: str
    tokens: bytes
    expires_ns: int
    salt: str = ""  # digest of the client's ``cache_salt``


class HandleDropped(Record, frozen=True, tag=True):
    """A named prefix was given up, or its time is over."""

    tenant: str
    handle: str


class DocumentPut(Record, frozen=True, tag=True):
    """A tenant's document; the edge alone knows what ``body`` means."""

    tenant: str
    document_id: Name
    body: bytes
    expires_unix_ns: int


class DocumentDropped(Record, frozen=True, tag=True):
    """A document was deleted, or its time is over."""

    tenant: str
    document_id: Name


AnyRecord: TypeAlias = (
    RouterStarted | MemberEntered | MemberDrained | MemberGone | EntriesChanged | EntriesReplaced | EntriesKept
    | EntryUsed | SessionRouted | HandlePinned | HandleDropped | DocumentPut | DocumentDropped
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
    """When blocks of ``hbm`` were last used, and how many then: least recently used first; of one second those
    that were used less often first, and of these the older ones."""


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """Everything that the last router knew and a new one needs. Times are on the new one's clock."""

    router: Peer | None = None
    """The last one; ``None``: there was none, and nothing is remembered."""
    address: str = ""
    """Where it listened."""
    members: tuple[RecoveredMember, ...] = ()
    """In the order in which they joined."""
    gone: tuple[Peer, ...] = ()
    """Incarnations that must not come back, oldest first; bounded."""
    sessions: tuple[SessionRouted, ...] = ()
    """The one that was silent longest comes first."""
    handles: tuple[HandlePinned, ...] = ()
    documents: tuple[DocumentPut, ...] = field(default=())

    @property
    def entries(self) -> int:
        """Cached blocks of all members."""
        return sum(len(member.hbm) + len(member.dram) for member in self.members) // 16

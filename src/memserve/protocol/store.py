"""What clients and a store say to each other, beside ``memserve.protocol.messages``.

::

    client                                      store
    StoreHello(tenant, arena)            -->                             repeated as the client's sign of life
                                         <--  StoreWelcome | Refused
    StorePut(pairs)                      -->  pulls out of the client's arena, or takes the bytes in the message
                                         <--  StoreDone
    StoreGet(keys)                       -->  brings the values into memory: a client on the same host reads in place
                                         <--  StoreDone
    Leave                                -->

Values are found by keys of 16 bytes, ``_core.value_keys(welcome.key, b"", names)``; a value's name, the client's own
key, is compared as well. The answer to a client that the store does not know (any more) is ``Expelled``: then the
client says ``StoreHello`` again. Calls are numbered by the client; each is answered once, at its deadline at the
latest.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from memserve.base.types import KVGeometry
from memserve.protocol.peers import ArenaPlace, Message, Name, Natural, Peer

STORE = Peer("store", 0)
"""Whichever store listens at an address: for those that know the address alone."""


def store_at(number: int) -> Peer:
    """Whichever store listens at the address with this number, of several; number 0: :data:`STORE`."""
    return STORE if not number else Peer(f"{STORE.name} {number}", 0)


KEY_BYTES = 16
NAME_BYTES_MAX = 1024
CALL_KEYS_MAX = 65_536
"""Keys of one call."""
INLINE_BYTES_MAX = 16 << 20
"""Bytes of values inside one message."""
LIST_MAX = 4096
"""Entries of one ``StoreListing``."""

CallNumber = Natural
Seal = Annotated[int, msgspec.Meta(ge=0)]
"""64 bits."""
Keys = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * CALL_KEYS_MAX)]
"""16 bytes a key, one behind the other."""
ValueName = Annotated[bytes, msgspec.Meta(max_length=NAME_BYTES_MAX)]
Names = Annotated[tuple[ValueName, ...], msgspec.Meta(max_length=CALL_KEYS_MAX)]


class StoreCode(enum.IntEnum):
    """What became of one key of a call."""

    DONE = 0
    """Put: stored. Get: the value is in memory, and inline if that was asked for. Delete: deleted."""
    PRESENT = 1
    """Put without ``replace``: the key has a value already."""
    ABSENT = 2
    """There is no such value; or it was on a disk that failed, or was damaged there."""
    NO_ROOM = 3
    """Everything in memory is in use: try again."""
    TOO_LARGE = 4
    """Longer than ``StoreWelcome.value_bytes_max``, or than fits into a message."""
    LATE = 5
    """The deadline came first: try again."""
    UNREADABLE = 6
    """Put: the client's arena could not be read."""
    BAD_CALL = 7
    """Keys and names do not fit together, or another tenant's value has this key."""
    LATER = 8
    """Get inline: the answer is full; ask again, for this key first."""


class KvModel(Message, frozen=True):
    """Whose KV blocks they are: what a member with a model says of it."""

    namespace: str
    geometry: KVGeometry


class StoreHello(Message, frozen=True, tag=True):
    """A client introduces itself; repeated every second. A client that is silent for ten seconds is dropped."""

    address: str
    """Where the client's mailbox listens."""
    tenant: Name = "default"
    pid: Natural = 0
    host_id: str = ""
    arena: ArenaPlace | None = None
    """Shared memory (``_core.SharedArena``) out of which puts are pulled. None: values come inside of messages."""
    kv: KvModel | None = None
    """The client's values are KV blocks of this model, as instances compute them: keys are block identities, names are
    empty, and every value has ``geometry.block_bytes`` bytes. Refused where the store keeps KV of another model."""


class StoreWelcome(Message, frozen=True, tag=True):
    """The client is known: the answer to each ``StoreHello``. Another ``number`` than before: the store had forgotten
    the client, whose pins are void; it opens the files again."""

    number: Natural
    key: bytes
    """16 bytes: the secret of this tenant's keys."""
    dram_bytes: Natural
    value_bytes_max: Natural
    data_path: str = ""
    """For ``_core.TierReader``; empty: the client is on another host."""
    index_path: str = ""
    client_path: str = ""


class StorePair(Message, frozen=True):
    """One value to be put."""

    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    name: ValueName
    length: Natural
    offset: Natural = 0
    """From the start of the client's arena. The bytes there stay as they are until ``StoreDone``."""
    data: bytes | None = None
    """The value itself. None: it lies in the arena."""


class StorePut(Message, frozen=True, tag=True):
    """Keep these values. Answer: ``StoreDone``; what it calls done can be read from then on."""

    call: CallNumber
    pairs: Annotated[tuple[StorePair, ...], msgspec.Meta(max_length=CALL_KEYS_MAX)]
    replace: bool = True
    """False: a key that has a value keeps it (``PRESENT``)."""
    deadline_in_ns: Natural = 10_000_000_000


class StoreGet(Message, frozen=True, tag=True):
    """Bring these values into memory, and with ``inline`` send them."""

    call: CallNumber
    keys: Keys
    names: Names
    inline: bool = False
    deadline_in_ns: Natural = 10_000_000_000
    first_byte: Natural = 0
    """Of each value: send what follows this byte. For values longer than ``INLINE_BYTES_MAX``, one a call."""


class StoreDone(Message, frozen=True, tag=True):
    """The answer to ``StorePut``, ``StoreGet``, ``StoreDelete``, ``StorePurge``: in the order of the keys asked for."""

    call: CallNumber
    codes: bytes
    """A :class:`StoreCode` a key."""
    lengths: tuple[Natural, ...] = ()
    """Get: bytes of each whole value, 0 where there is none."""
    seals: tuple[Seal, ...] = ()
    """Get inline, or of KV blocks: of each whole value, as ``_core.seal_ranges`` gives it (0: empty)."""
    values: tuple[bytes, ...] = ()
    """Get inline."""
    count: Natural = 0
    """Purge: values that are gone."""


class StoreLook(Message, frozen=True, tag=True):
    """Where are these? Nothing is read."""

    call: CallNumber
    keys: Keys


class StorePlaces(Message, frozen=True, tag=True):
    """A byte a key: 0 absent, 1 in memory, 2 on a disk."""

    call: CallNumber
    where: bytes


class StoreDelete(Message, frozen=True, tag=True):
    """Forget these values."""

    call: CallNumber
    keys: Keys
    names: Names


class StorePurge(Message, frozen=True, tag=True):
    """Forget all values of the client's tenant."""

    call: CallNumber
    everything: bool = False
    """True: those of all tenants, and all KV blocks."""


class StoreStat(Message, frozen=True, tag=True):
    """How is the store?"""

    call: CallNumber


class StoreVerify(Message, frozen=True, tag=True):
    """Read and compare everything that is kept; what is damaged is dropped. Answered at once by ``StoreStatus``, whose
    ``verify_...`` tell how far it has come; the client asks again until ``verify_running`` is 0."""

    call: CallNumber
    start: bool = True
    """False: only say how far the last one has come."""


class StoreStatus(Message, frozen=True, tag=True):
    """Sizes and totals by name, as in ``memserve store stat``."""

    call: CallNumber
    numbers: dict[str, int]


class StoreList(Message, frozen=True, tag=True):
    """Which values are there? ``after`` 0 begins anew; else the ``StoreListing.after`` of the last answer."""

    call: CallNumber
    after: Natural = 0
    count: Annotated[int, msgspec.Meta(ge=1, le=LIST_MAX)] = LIST_MAX
    everything: bool = False
    """True: of all tenants, KV blocks too."""


class StoreEntry(Message, frozen=True):
    """One value."""

    key: bytes
    name: bytes
    """Empty: a KV block, or a value on a disk whose name was not read."""
    length: Natural
    scope: Natural
    """The tenant's tag; 0: a KV block."""
    where: Natural
    """1: in memory. 2: on a disk. 3: both."""


class StoreListing(Message, frozen=True, tag=True):
    """Some of the values, in no order. ``after`` 0: that was all."""

    call: CallNumber
    after: Natural
    entries: tuple[StoreEntry, ...]


class ForgetKv(Message, frozen=True, tag=True):
    """An instance does not trust its own KV of these blocks any more: give them to no other instance."""

    identities: bytes
    """16 bytes a block."""


class KvUsed(Message, frozen=True, tag=True):
    """Sequences of an instance have gone on from what it has of these blocks, the first one before all others: they are
    worth as much as if it had asked for them."""

    identities: Keys


class QueryBlocks(Message, frozen=True, tag=True):
    """A store to another one, which is to keep these KV blocks: which of them do you lack? Answer: ``BlocksHeld``."""

    query: CallNumber
    identities: Keys


class BlocksHeld(Message, frozen=True, tag=True):
    """A byte a block: 0, it is not here; 1, it is; 2, another store is about to give it."""

    query: CallNumber
    held: Annotated[bytes, msgspec.Meta(max_length=CALL_KEYS_MAX)]


class JoinRequest(Message, frozen=True, tag=True):
    """A router listens at this address, and its operator has named this store: join it, unless you have another router.
    Repeated for ever, also as a sign of life."""

    address: str


StoreMessage: TypeAlias = (
    StoreHello | StoreWelcome | StorePut | StoreGet | StoreDone | StoreLook | StorePlaces | StoreDelete | StorePurge
    | StoreStat | StoreVerify | StoreStatus | StoreList | StoreListing | ForgetKv
    | KvUsed | QueryBlocks | BlocksHeld
)  # fmt: skip
"""Every message between a client and a store, but for ``Refused``, ``Expelled`` and ``Leave``; ``ForgetKv`` and
``KvUsed``; and what stores say to each other."""

"""What an instance tells its router about its index, beside ``memserve.messages``."""

from __future__ import annotations

from memserve.peers import Load, Message, Natural
from memserve.types import Tier


class KvChange(Message, frozen=True):
    """One change of an instance's index; see ``memserve.mempool.events.KvEvent``."""

    kind: str  # stored | moved | evicted
    tier: Tier
    identities: bytes
    """16 bytes a block, one behind the other."""


class KvEvents(Message, frozen=True, tag=True):
    """Changes number ``first``, ``first + 1``, ... of this generation."""

    first: Natural
    changes: tuple[KvChange, ...]
    load: Load | None = None
    """How busy the instance is, where other routers have placed something there. None: nothing new is said of that."""


class KvSnapshot(Message, frozen=True, tag=True):
    """Everything that the index holds, right before change number ``next_event``."""

    next_event: Natural
    hbm: bytes
    dram: bytes
    ssd: bytes = b""


class AskEvents(Message, frozen=True, tag=True):
    """Changes were missed: send them again from number ``first``, or a snapshot when they are gone."""

    first: Natural

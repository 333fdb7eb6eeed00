"""What a :class:`~memserve.instance.member.MemberMachine` hears and wants done (level 2)."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.messages import AnyMessage, Load, Peer, PeerInfo
from memserve.serving import ClockTicked, MessageArrived, Send

# -- events, beside MessageArrived and ClockTicked


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The process wants to leave: finish what runs here, for ``patience_ns`` at most."""

    patience_ns: int
    why: str = ""
    """For the log; empty: nothing is logged."""


@dataclass(frozen=True, slots=True)
class LoadRead:
    """The answer to ``ReadLoad``: how busy the instance is."""

    load: Load
    next_event: int
    stats: bytes = b""


@dataclass(frozen=True, slots=True)
class Reborn:
    """The answer to ``BecomeNew``: the instance has dropped its work, and is ``info.peer`` from now on."""

    info: PeerInfo


# -- actions, beside Send


@dataclass(frozen=True, slots=True)
class DialRouter:
    """Messages to ``router`` go to ``address`` from now on. ``router.generation`` 0: to the router that is there."""

    router: Peer
    address: str


@dataclass(frozen=True, slots=True)
class MeetPeer:
    """Another member: messages and pages go to it and come from it from now on."""

    info: PeerInfo


@dataclass(frozen=True, slots=True)
class PartFromPeer:
    """It is no member any more."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand a message to the instance machine."""

    sender: Peer
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class ReadLoad:
    """Answer with ``LoadRead``, soon; with what was read last where the instance is too busy to say."""

    with_stats: bool


@dataclass(frozen=True, slots=True)
class BecomeNew:
    """Drop all work, keep the cache, take a new generation, and answer with ``Reborn``."""

    router: Peer
    reason: str
    generation_min: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A router has accepted the instance."""


@dataclass(frozen=True, slots=True)
class Left:
    """The process may end: it has said goodbye, or no router takes it."""

    refused: str = ""
    """Why the router refuses it; empty: it left in order."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A line for the operator's log."""

    text: str


MemberEvent = MessageArrived | ClockTicked | DrainAsked | LoadRead | Reborn
MemberAction = Send | DialRouter | MeetPeer | PartFromPeer | Deliver | ReadLoad | BecomeNew | Joined | Left | Notice

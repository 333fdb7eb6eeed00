"""What the member's half of joining takes in and asks for (``protocol/member.py``)."""

from __future__ import annotations

from dataclasses import dataclass

from memserve.base.types import ClockTicked
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Load, Peer, PeerInfo

# -- events of the member machine, beside MessageArrived and ClockTicked


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The process wants to leave: finish what runs here, for ``patience_ns`` at most."""

    patience_ns: int
    why: str = ""
    """For the log. Empty: nothing is logged."""


@dataclass(frozen=True, slots=True)
class LoadRead:
    """The answer to ``ReadLoad``: how busy the instance is."""

    load: Load
    next_event: int
    """A change of the index before this one that the owner has not heard of was lost."""
    stats: bytes = b""
    followers: tuple[tuple[Peer, Load, int], ...] = ()
    """What each router is told that is not the owner: the load with the totals of its link, and its ``next_event``."""
    costs: bytes = b""
    """What it has learnt of its costs (``CostModel.to_json``). Empty: nothing yet."""
    offers_wait: bool = False
    """Whether cached KV waits to be offered to a store, which takes some at a time."""


@dataclass(frozen=True, slots=True)
class GenerationChanged:
    """The answer to ``ChangeGeneration``: the instance has dropped its work, and is ``info.peer`` from now on."""

    info: PeerInfo


# -- actions of the member machine, beside Send


@dataclass(frozen=True, slots=True)
class ConnectRouter:
    """Send messages for ``router`` to ``address`` from now on. ``router.generation`` 0: any router at that address."""

    router: Peer
    address: str


@dataclass(frozen=True, slots=True)
class AddPeer:
    """Exchange messages and pages with another member from now on."""

    info: PeerInfo


@dataclass(frozen=True, slots=True)
class RemovePeer:
    """``peer`` is no member any more."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class ForwardMessage:
    """Hand a message to the instance machine."""

    sender: Peer
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class ReadLoad:
    """Answer with ``LoadRead`` soon: with the last one read where the instance is too busy."""

    with_stats: bool


@dataclass(frozen=True, slots=True)
class ChangeGeneration:
    """Drop all work, keep the cache, take a new generation, and answer with ``GenerationChanged``."""

    router: Peer
    reason: str
    generation_min: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A router has accepted the instance."""


@dataclass(frozen=True, slots=True)
class Left:
    """The process may end: it has left the cluster, or no router accepts it."""

    refused: str = ""
    """Why the router refuses the instance. Empty: the instance left in order."""


@dataclass(frozen=True, slots=True)
class LogWarning:
    """A line for the operator's log."""

    text: str


MemberEvent = MessageArrived | ClockTicked | DrainRequested | LoadRead | GenerationChanged
MemberAction = (
    Send
    | ConnectRouter
    | AddPeer
    | RemovePeer
    | ForwardMessage
    | ReadLoad
    | ChangeGeneration
    | Joined
    | Left
    | LogWarning
)

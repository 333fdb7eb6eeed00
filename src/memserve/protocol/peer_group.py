"""A process as a member of a group without a router: the membership of a ``PoolPeer``.

::

    --AddRequested, or PeerJoined of a peer--> sends PeerJoined --any answer--> exchanges heartbeats
    --silence, Leave, RemoveRequested--------> the peer is gone, and whatever it held is freed
    --Expelled by a peer---------------------> ChangeGeneration ... GenerationChanged: PeerJoined to all peers again

Each member does for its peers what a router does for its instances: it notices silence, and expels a process that was
lost and speaks as if nothing had happened. As a member that is expelled it does what
:class:`~memserve.protocol.member.MemberMachine` does, in the words of that machine. The host, too, does what the host
of that machine does: ``AddPeer`` and ``RemovePeer`` open and close lines and tell the exchange, ``ForwardMessage``
hands it a message, ``ChangeGeneration`` has it drop all work.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.base.errors import check
from memserve.base.types import ClockTicked
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member_events import AddPeer, ChangeGeneration, ForwardMessage, GenerationChanged, RemovePeer
from memserve.protocol.messages import AnyMessage, Expelled, Heartbeat, Leave, PeerJoined
from memserve.protocol.peers import Load, Peer, PeerInfo

_BEATS = 5
"""Heartbeats in the time after which a silent peer is lost."""


@dataclass(frozen=True, slots=True)
class AddRequested:
    """Event: get to know the process that says this of itself."""

    info: PeerInfo


@dataclass(frozen=True, slots=True)
class RemoveRequested:
    """Event: end all dealings with a peer."""

    peer: Peer


@dataclass(slots=True)
class _Neighbour:
    info: PeerInfo
    heard_ns: int
    has_answered: bool = False


GroupEvent = AddRequested | RemoveRequested | GenerationChanged | MessageArrived | ClockTicked
GroupAction = Send | AddPeer | RemovePeer | ForwardMessage | ChangeGeneration


class PeerGroup:
    """One mutator, :meth:`handle`."""

    def __init__(self, info: PeerInfo, silent_ns: int) -> None:
        """``info`` is what others are told of this process. A peer that is silent for ``silent_ns`` is lost."""
        self.info = info
        self._silent_ns = silent_ns
        self._next_beat_ns = 0
        self._neighbours: dict[str, _Neighbour] = {}
        self._left: set[Peer] = set()  # peers that were parted from on purpose
        #: name -> latest generation that was lost or left: what it had promised is void, and so it stays
        self._gone: dict[str, int] = {}
        self._wanted: PeerInfo | None = None  # to be met by the next incarnation
        self._is_reborn = True  # False between ChangeGeneration and GenerationChanged
        self._actions: list[GroupAction] = []

    @property
    def next_deadline_ns(self) -> int | None:
        """The next heartbeat; None: there are no peers."""
        return self._next_beat_ns if self._neighbours else None

    def peers(self) -> list[Peer]:
        """All peers that are not lost."""
        return [neighbour.info.peer for neighbour in self._neighbours.values()]

    def find(self, name: str) -> Peer | None:
        """The peer of this name."""
        neighbour = self._neighbours.get(name)
        return neighbour.info.peer if neighbour is not None else None

    def has_answered(self, name: str) -> bool:
        """Whether the peer of this name knows this process."""
        return name in self._neighbours and self._neighbours[name].has_answered

    def handle(self, event: GroupEvent, now_ns: int) -> list[GroupAction]:
        """Take ``event`` into account at time ``now_ns`` (ns); the actions are to be done in order."""
        match event:
            case MessageArrived(sender, message) if self._is_reborn:  # else it was said to the incarnation that ends
                self._hear(sender, message, now_ns)
            case AddRequested(info):
                self._meet(info, now_ns)
            case RemoveRequested(peer) if self.find(peer.name) == peer:
                self._left.add(peer)
                self._lose(peer)
                self._actions.append(Send(peer, Leave()))  # behind RemovePeer, which drops what is queued
            case GenerationChanged(info):
                self._begin_anew(info, now_ns)
        if now_ns >= self._next_beat_ns:
            self._beat(now_ns)
        actions, self._actions = self._actions, []
        return actions

    # -- what others say

    def _hear(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        if isinstance(message, PeerJoined):
            self._greeted(sender, message.info, now_ns)
        neighbour = self._neighbours.get(sender.name)
        if neighbour is None or neighbour.info.peer != sender:
            if not isinstance(message, Expelled | Leave):
                left = sender in self._left
                self._actions.append(Send(sender, Leave() if left else Expelled("silent for too long, or unknown")))
            return
        neighbour.heard_ns, neighbour.has_answered = now_ns, True
        match message:
            case Leave():
                self._lose(sender)
            case Expelled(reason):
                self._end_incarnation(sender, reason)
            case _:
                self._actions.append(ForwardMessage(sender, message))

    def _greeted(self, sender: Peer, info: PeerInfo, now_ns: int) -> None:
        """Where the KV differs the exchange refuses what is offered."""
        is_honest = info.peer == sender and sender.name != self.info.peer.name
        if is_honest and not self._is_gone(sender) and self._remember(info, now_ns):
            self._speak(self._neighbours[sender.name])

    def _is_gone(self, peer: Peer) -> bool:
        return peer.generation <= self._gone.get(peer.name, -1)

    # -- incarnations

    def _meet(self, info: PeerInfo, now_ns: int) -> None:
        if self._is_gone(info.peer):  # and may not know it: this process starts over, since it is the one that asks
            self._wanted = info
            self._end_incarnation(info.peer, f"{info.peer.name} was lost here, and is to be met again")
            return
        self._remember(info, now_ns)
        self._speak(self._neighbours[info.peer.name])

    def _end_incarnation(self, other: Peer, reason: str) -> None:
        """``other`` has freed all that was held there. What this incarnation has promised others is void as well."""
        self._is_reborn = False
        self._actions.append(ChangeGeneration(other, reason, self.info.peer.generation + 1))

    def _begin_anew(self, info: PeerInfo, now_ns: int) -> None:
        check(info.peer.generation > self.info.peer.generation, f"{info.peer} is not newer than {self.info.peer}")
        former, self._neighbours = list(self._neighbours.values()), {}
        self.info, self._is_reborn = info, True
        self._gone.clear()
        self._left.clear()
        self._actions += [RemovePeer(neighbour.info.peer) for neighbour in former]
        for neighbour in former:
            self._meet(neighbour.info, now_ns)
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._meet(wanted, now_ns)

    # -- membership

    def _remember(self, info: PeerInfo, now_ns: int) -> bool:
        """Whether this incarnation was not known."""
        known = self._neighbours.get(info.peer.name)
        if known is not None and known.info.peer.generation >= info.peer.generation:
            return False
        if known is not None:
            self._lose(known.info.peer)
        self._left.discard(info.peer)
        self._neighbours[info.peer.name] = _Neighbour(info, now_ns)
        self._actions.append(AddPeer(info))
        self._next_beat_ns = min(self._next_beat_ns, now_ns + self._silent_ns // _BEATS)
        return True

    def _lose(self, peer: Peer) -> None:
        del self._neighbours[peer.name]
        self._gone[peer.name] = max(peer.generation, self._gone.get(peer.name, -1))
        self._actions.append(RemovePeer(peer))

    def _speak(self, neighbour: _Neighbour) -> None:
        """Greet until there is an answer, then send heartbeats."""
        peer = neighbour.info.peer
        if neighbour.has_answered:
            self._actions.append(Send(peer, Heartbeat(Load())))
        else:  # to the process that has that name by now, in whichever incarnation
            self._actions.append(Send(Peer(peer.name, 0), PeerJoined(self.info)))

    def _beat(self, now_ns: int) -> None:
        was_stopped = now_ns - self._next_beat_ns > self._silent_ns // 2  # this process: it could hear no peer
        self._next_beat_ns = now_ns + self._silent_ns // _BEATS
        for neighbour in list(self._neighbours.values()):
            neighbour.heard_ns = now_ns if was_stopped else neighbour.heard_ns
            if now_ns - neighbour.heard_ns > self._silent_ns:
                self._lose(neighbour.info.peer)
            else:
                self._speak(neighbour)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree."""
        check(self.info.peer.name not in self._neighbours, f"{self.info.peer} is its own peer")
        for name, neighbour in self._neighbours.items():
            check(neighbour.info.peer.name == name, f"{neighbour.info.peer} is listed as {name}")
            check(not self._is_gone(neighbour.info.peer), f"{neighbour.info.peer} is a peer, and gone")

"""Membership at a follower: the owner decides which members there are, and a follower works with those that it hears.

::

    owner: JoinAccepted, PeerJoined --> KNOWN --a message of it--> a member here --silence--> KNOWN
                                          |                           |
                                          +------- owner: PeerGone ---+--> gone

A follower admits, expels and introduces no member. A member that it does not hear, though the owner does, gets none
of its requests until it is heard again. What the last owner said holds while there is none.
"""

from __future__ import annotations

from memserve.base.errors import check
from memserve.base.types import Role
from memserve.protocol.admission import AdmissionGrants
from memserve.protocol.messages import AnyMessage, Join, JoinAccepted, Leave, PeerGone, PeerJoined
from memserve.protocol.peers import ROUTER, Peer, PeerInfo
from memserve.router.admission.follower import RemoteAdmission
from memserve.router.members.membership import Membership
from memserve.router.members.registry import Member, MemberState
from memserve.router.parts import RouterParts
from memserve.router.requests.lifecycle import Lifecycle

ANY_ROUTER = Peer(ROUTER, 0)


class Following(Membership):
    """Keeps registry, trees and loads in step with what the owner says."""

    __slots__ = ("_asking", "_known")

    announces = False

    def __init__(self, parts: RouterParts, lifecycle: Lifecycle, asking: RemoteAdmission | None) -> None:
        """``asking`` None: there is no admission."""
        super().__init__(parts, lifecycle)
        self._asking = asking
        self._known: dict[str, PeerInfo] = {}  # instances and stores that are members, as the owner has said

    # -- what the owner says

    def hear_owner(self, owner: Peer, message: AnyMessage, now_ns: int) -> None:
        """The owner tells of members, or which requests are admitted."""
        match message:
            case AdmissionGrants() if self._asking is not None:
                for rejection in self._asking.hear(owner, message, now_ns):
                    self._lifecycle.arrivals.turn_away(rejection, now_ns)
                self._lifecycle.place_waiting(now_ns)
            case JoinAccepted(peers):
                if self._asking is not None:
                    self._asking.owner_accepts(owner)
                infos = {info.peer.name: info for info in peers if info.role is not Role.ROUTER}
                for name in [name for name, info in self._known.items() if infos.get(name) != info]:
                    self._forget(name, "the owner does not name it any more", now_ns)
                for info in infos.values():
                    self._know(info)
            case PeerJoined(info):
                if info.role is not Role.ROUTER and self._known.get(info.peer.name) != info:
                    self._forget(info.peer.name, "it was started anew", now_ns)
                    self._know(info)
            case PeerGone(peer, reason):
                known = self._known.get(peer.name)
                if known is not None and known.peer == peer:
                    self._forget(peer.name, reason, now_ns)
            case _:
                pass

    def _know(self, info: PeerInfo) -> None:
        self._known[info.peer.name] = info
        if info.role.has_model and self._registry.named(info.peer.name) is None:
            self._registry.awaited[info.peer.name] = None

    def _forget(self, name: str, reason: str, now_ns: int) -> None:
        self._known.pop(name, None)
        self._registry.awaited.pop(name, None)
        member = self._registry.named(name)
        if member is not None:
            self.gone(member, reason, now_ns, died=True)

    # -- what instances and stores say

    def join(self, sender: Peer, message: Join, now_ns: int) -> None:
        """They ask the owner."""

    def stranger(self, sender: Peer, message: AnyMessage, now_ns: int) -> Member | None:
        """The first message of a member, or the first after a silence."""
        info = self._known.get(sender.name)
        if info is None or info.peer != sender or isinstance(message, Leave):
            return None
        if self._registry.why_not(info) is not None:
            return None  # of another model than those heard so far: the owner has let all of those go meanwhile
        member = self._register(info, now_ns)
        self._registry.awaited.pop(member.name, None)
        self._counters.members_joined += 1
        self._lifecycle.place_waiting(now_ns)
        return member

    def drain(self, member: Member) -> None:
        """``member`` takes nothing new: it has said so."""
        if member.state is MemberState.LIVE:
            member.state = MemberState.DRAINING
            self._loads.close(member.number)
            self._lifecycle.admission.memory.reconsider()

    def expel(self, sender: Peer, reason: str, newest: int = 0, *, address: str = "") -> None:
        """A member that makes no sense to this follower is none to it until the owner names it again."""
        self._counters.expelled += 1
        self._known.pop(sender.name, None)
        self._registry.awaited.pop(sender.name, None)

    def all_gone(self, reason: str, now_ns: int) -> None:
        """The owner has taken this follower to be dead: instances have let its attempts go."""
        if self._asking is not None:
            self._asking.expelled()
        for name in list(self._known):
            self._forget(name, reason, now_ns)

    def speak(self, now_ns: int, *, beats: bool = False) -> None:
        """The owner hears of the requests that it admits. ``beats``: a heartbeat goes to it."""
        news = self._asking.news(now_ns, beats=beats) if self._asking is not None else None
        if news is not None:
            self._outbox.send(ANY_ROUTER, news)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a member is not known."""
        for member in self._registry:
            info = self._known.get(member.name)
            known = info is not None and info.peer == member.peer
            check(known, "{} is a member, and the owner has not said so", member)
        awaited = self._known.keys() - {member.name for member in self._registry}
        check(self._registry.awaited.keys() <= awaited, "{} are awaited, not {}", self._registry.awaited, awaited)

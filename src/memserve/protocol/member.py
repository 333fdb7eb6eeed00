"""A member of a cluster, an instance or a store: joining, heartbeats, routers that change, draining, leaving.

::

    OUTSIDE --Join ... JoinAccepted--> MEMBER --Drain--> MEMBER that drains --Leave--> LEFT
      ^  ^                          |
      |  +--------- RejoinRequest ---------+      another router took over: join it, with all that runs here
      +-- new generation <-- Expelled +      taken to be dead: drop all work, join as a new incarnation

    ALONE --JoinRequest--> OUTSIDE ... MEMBER --silence--> ALONE      a store that was told of no router waits for a
                                                                      router to call it

``host/member.py`` hosts this machine with threads and sockets, ``sim/nodes.py`` in virtual time. What the router
says of requests passes through (``ForwardMessage``); what it says of membership is followed here first, so that the
instance machine never speaks to a peer that the mailbox does not know.

Where a member looks for its router.
"""

from __future__ import annotations

from collections.abc import Sequence

from memserve.base.config import MemberConfig
from memserve.base.errors import check
from memserve.base.types import Role
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    DrainRequested,
    ForwardMessage,
    GenerationChanged,
    Joined,
    Left,
    LoadRead,
    LogWarning,
    MemberAction,
    MemberEvent,
    ReadLoad,
    RemovePeer,
)
from memserve.protocol.messages import (
    AnyMessage,
    Drain,
    Expelled,
    Heartbeat,
    HeartbeatAck,
    Join,
    JoinAccepted,
    Leave,
    PeerGone,
    PeerJoined,
    Refused,
    RejoinRequest,
)
from memserve.protocol.peers import ROUTER, Load, Peer, PeerInfo, members_digest
from memserve.protocol.store import JoinRequest


class RouterAddresses:
    """Where an instance looks for its router: all addresses, the one in use, and when a router was last heard.

    With one address the instance stays with it, and with the address that a ``RejoinRequest`` names. With several, an
    instance that has heard no router for a while asks for a ``HeartbeatAck``, and then tries the next address, with
    heartbeats as before: a router there remembers the instance (``RejoinRequest``) or says that it is no member
    (``Expelled``), and either way the instance joins. A router that was only cut off for a while is found again when
    the turn comes to its address.
    """

    __slots__ = ("_addresses", "_config", "_heard_ns", "address", "home", "is_called")

    def __init__(self, addresses: Sequence[str], config: MemberConfig) -> None:
        self._addresses, self._config = list(addresses), config
        #: whether an address is known only while a router has called
        self.is_called = not addresses
        self._heard_ns = 0
        #: the address that is tried, or where the router is. Empty: none is known
        self.address = self._addresses[0] if addresses else ""
        #: the address of the router whose member this instance is. None: it is no member
        self.home: str | None = None

    def __str__(self) -> str:
        return ", ".join(self._addresses)

    def __contains__(self, address: str) -> bool:
        return address in self._addresses

    def wants_ack(self, now_ns: int) -> bool:
        """Whether the router should be asked for a sign of life."""
        return (len(self._addresses) > 1 or self.is_called) and now_ns - self._heard_ns >= self._config.asks_after_ns

    def heard(self, now_ns: int) -> None:
        """A router has spoken, or the instance begins to listen."""
        self._heard_ns = now_ns

    def turn(self, now_ns: int) -> bool:
        """Go on to the next address if it is time. True: it was."""
        patience_ns = self._config.silent_after_ns if self.address == self.home else self._config.turn_ns
        if len(self._addresses) <= 1 or now_ns - self._heard_ns < patience_ns:
            return False
        self._heard_ns = now_ns
        self.address = self._addresses[(self._addresses.index(self.address) + 1) % len(self._addresses)]
        return True

    def lead_to(self, address: str, now_ns: int) -> None:
        """A router calls from ``address``; one that was not known takes the place of the one that is tried."""
        if self.is_called:
            self._addresses = [address]
        elif address not in self._addresses:
            self._addresses[self._addresses.index(self.address)] = address
        self.address, self.home = address, None
        self.heard(now_ns)

    def settle(self, joined_at: str) -> None:
        """The router at ``joined_at`` has accepted this instance, perhaps after the next address was tried."""
        if joined_at in self._addresses:  # a router of an older version does not say where
            self.address = joined_at
        self.home = self.address

    def return_home(self) -> bool:
        """Go back to the router's address. True: another one was tried meanwhile, the router was only cut off."""
        if self.home in (None, self.address):
            return False
        self.address = self.home or ""
        return True

    def is_lost(self, now_ns: int) -> bool:
        """Whether a router that has called is silent for too long."""
        return self.is_called and bool(self.address) and now_ns - self._heard_ns >= self._config.silent_after_ns

    def forget(self) -> None:
        """The router that has called is gone."""
        self._addresses, self.address, self.home = [], "", None


ANY_ROUTER = Peer(ROUTER, 0)
"""Any router that is at the address that is dialled."""


class MemberMachine:
    """The instance's part in joining, heartbeats, changes of router and leaving. One mutator, :meth:`handle`."""

    def __init__(self, info: PeerInfo, routers: Sequence[str], config: MemberConfig) -> None:
        """``info`` is what ``Join`` tells of the instance; ``routers``: the addresses where one may be. None: it is
        alone until a router calls it, and again when that router is silent."""
        self.info = info
        self.router: Peer | None = None
        """The router that has accepted the instance. None: it is no member."""
        self.addresses = RouterAddresses(routers, config)
        self._config = config
        self._dialled = ANY_ROUTER  # messages to another generation of the router do not leave
        self._rejoins_at: Peer | None = None  # the newest router that took over: it is asked until it answers
        self._peers: dict[str, PeerInfo] = {}  # the other members
        #: those of them that are routers, by name
        self.followers: dict[str, Peer] = {}
        self._members_digest: int | None = None  # of all members; counted when it is asked for
        self._is_reborn = True  # False between ChangeGeneration and GenerationChanged
        self.drains = False
        """True: it accepts no new request, and leaves when it is idle."""
        self._has_left = False
        self._leaves_at_ns: int | None = None  # while it drains: the end of the patience; None: it has no end
        self._why = ""  # of a drain that is not logged yet
        self._next_beat_ns: int | None = None
        self._beats = 0
        self._actions: list[MemberAction] = []

    @property
    def me(self) -> Peer:
        """The present incarnation."""
        return self.info.peer

    @property
    def next_deadline_ns(self) -> int | None:
        """When to look again. None: it has left, is alone, or waits for ``GenerationChanged``."""
        return None if self._has_left or not self._is_reborn else self._next_beat_ns

    @property
    def is_alone(self) -> bool:
        """Whether it knows of no router to join."""
        return not self.addresses.address

    def knows(self, peer: Peer) -> bool:
        """Whether this incarnation of ``peer`` is another member."""
        info = self._peers.get(peer.name)
        return info is not None and info.peer == peer

    def start(self, now_ns: int) -> list[MemberAction]:
        """Dial the first address and ask to join. Without an address: wait to be called."""
        if self.is_alone:
            return []
        self.addresses.heard(now_ns)
        self._dial(ANY_ROUTER)
        self._beat(now_ns)
        return self._take_actions()

    def handle(self, event: MemberEvent, now_ns: int) -> list[MemberAction]:
        """Take ``event`` into account at time ``now_ns`` (ns); the actions are to be done in order."""
        match event:
            case MessageArrived(sender, message):
                self._hear(sender, message, now_ns)
            case LoadRead():
                self._send_heartbeat(event, now_ns)
            case DrainRequested():
                self._drain(event, now_ns)
            case GenerationChanged(info):
                self._begin_anew(info, now_ns)
        due_ns = self.next_deadline_ns
        if due_ns is not None and now_ns >= due_ns:
            self._beat(now_ns)
        return self._take_actions()

    def _do(self, action: MemberAction) -> None:
        self._actions.append(action)

    def _dial(self, router: Peer) -> None:
        self._dialled = router
        self._do(ConnectRouter(router, self.addresses.address))

    def _take_actions(self) -> list[MemberAction]:
        actions, self._actions = self._actions, []
        return actions

    # -- messages

    def _hear(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        if sender.name != ROUTER:
            self._do(ForwardMessage(sender, message))
            return
        if isinstance(message, JoinRequest | RejoinRequest) and not self._may_join(sender, message):
            self._do(Send(sender, Refused(f"{self.me.name} belongs to the router at {self.addresses}")))
            return
        if self.is_alone and not isinstance(message, JoinRequest | RejoinRequest):
            return  # late: of a router that was taken to be gone
        self.addresses.heard(now_ns)
        # The turn may have come back to its address: the line there is to any router, and takes no answers to this one.
        if sender == self.router and (self.addresses.return_home() or self._dialled != sender):
            self._dial(sender)
        if self._is_reborn:  # else the message was for the incarnation that ends now
            self._hear_router(sender, message, now_ns)

    def _hear_router(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        match message:
            case JoinAccepted():
                self._welcome(sender, message, now_ns)
            case RejoinRequest(address):
                self._rejoin(sender, address, now_ns)
            case JoinRequest(address):
                if self.addresses.is_called and not self.drains:
                    self._rejoin(sender, address, now_ns)
            case Expelled():
                self._leave_incarnation(sender, message)
            case Refused(reason):
                if self.router is None and self.addresses.is_called:
                    self._be_alone(f"the router at {self.addresses} refuses this store: {reason}")
                elif self.router is None:
                    self._leave(refused=reason)
            case HeartbeatAck():
                pass
            case Leave():
                if self.addresses.is_called and sender in (self.router, self._rejoins_at):
                    self._be_alone(f"the router at {self.addresses} ends")
            case PeerJoined(info):
                self._meet(info)
                self._do(ForwardMessage(sender, message))
            case PeerGone(peer):
                self._do(ForwardMessage(sender, message))
                self._part(peer)
            case Drain():  # repeated with each heartbeat
                self.drains = True
                self._do(ForwardMessage(sender, message))
            case _:
                self._do(ForwardMessage(sender, message))

    def _may_join(self, sender: Peer, message: JoinRequest | RejoinRequest) -> bool:
        """Whether this member may follow what ``sender`` asks, or does so already.

        Where it looks for its router itself, one that remembers it has taken the place of its router: only one of them
        has the records. A store that is called may be remembered by several, so it asks whose place ``sender`` takes.
        """
        known = self.router or self._rejoins_at
        if self.is_alone or sender == known:
            return True
        if isinstance(message, JoinRequest):
            return message.address in self.addresses
        return not self.addresses.is_called or (known is not None and message.after == known.generation)

    def _is_outdated(self, router: Peer) -> bool:
        """Whether another router has taken the place of ``router``, as far as is known here."""
        known = (self.router, self._rejoins_at)
        return any(peer is not None and router.generation < peer.generation for peer in known)

    def _welcome(self, sender: Peer, message: JoinAccepted, now_ns: int) -> None:
        if self._is_outdated(sender):
            return  # late: that router is gone
        if sender != self.router:  # a further JoinAccepted of the same router does not move it
            self.addresses.settle(message.joined_at)
        self._dial(sender)
        names = {info.peer.name for info in message.peers}
        for peer in [info.peer for name, info in self._peers.items() if name not in names]:
            self._part(peer)
        for info in message.peers:
            self._meet(info)
        if sender != self.router:
            self.router, self._next_beat_ns = sender, now_ns  # its first heartbeat shows what there is, at once
            self._do(Joined())
        self._do(ForwardMessage(sender, message))

    def _rejoin(self, sender: Peer, address: str, now_ns: int) -> None:
        """Join the new router. Requests running here are orphaned; those that no client can ask for again are dropped
        when its ``JoinAccepted`` arrives."""
        if not address or sender == (self.router or self._rejoins_at) or self._is_outdated(sender):
            return
        what = "calls" if self.is_alone else "takes over"
        self._do(LogWarning(f"the router at {address} {what}: joining it"))
        self.router, self._rejoins_at = None, sender
        self.addresses.lead_to(address, now_ns)
        self._dial(ANY_ROUTER)
        self._next_beat_ns = now_ns

    def _leave_incarnation(self, sender: Peer, message: Expelled) -> None:
        """Also where this incarnation never heard that it was a member: its ``JoinAccepted`` was lost."""
        if self._is_outdated(sender):
            return
        self.router, self.addresses.home = None, None
        self._is_reborn = False
        self._do(LogWarning(f"expelled ({message.reason}): joining again"))
        self._do(ChangeGeneration(sender, message.reason, max(self.me.generation, message.newest) + 1))

    def _begin_anew(self, info: PeerInfo, now_ns: int) -> None:
        check(info.peer.generation > self.me.generation, f"{info.peer} is not newer than {self.me}")
        self.info, self._is_reborn, self._members_digest = info, True, None
        self._dial(ANY_ROUTER)
        self._next_beat_ns = now_ns

    def _meet(self, info: PeerInfo) -> None:
        if info.peer.name != self.me.name and self._peers.get(info.peer.name) != info:
            self._peers[info.peer.name], self._members_digest = info, None
            if info.role is Role.ROUTER:
                self.followers[info.peer.name] = info.peer
            self._do(AddPeer(info))

    def _part(self, peer: Peer) -> None:
        if self.knows(peer):
            del self._peers[peer.name]
            self.followers.pop(peer.name, None)
            self._members_digest = None
            self._do(RemovePeer(peer))

    def _be_alone(self, why: str) -> None:
        """Wait to be called again; the other members are those of a router that is gone."""
        self._do(LogWarning(f"{why}; {self.me.name} waits to be called by another"))
        self.router = self._rejoins_at = self._next_beat_ns = None
        self._dialled = ANY_ROUTER
        self.addresses.forget()
        for info in list(self._peers.values()):
            self._part(info.peer)

    # -- time

    def _beat(self, now_ns: int) -> None:
        """Ask to join, or read the load for a heartbeat."""
        if self.addresses.is_lost(now_ns):
            self._be_alone(f"the router at {self.addresses} is not heard any more")
            return
        self._next_beat_ns = now_ns + self._config.beat_ns
        if self.addresses.turn(now_ns):
            self._do(LogWarning(f"no router is heard: trying {self.addresses.address}"))
            self._dial(ANY_ROUTER)
        if self.router is None:
            self._do(Send(ANY_ROUTER, Join(self.info, self.addresses.address)))
            return
        self._beats += 1
        self._do(ReadLoad(with_stats=self._beats % self._config.stats_every == 1))

    def _send_heartbeat(self, read: LoadRead, now_ns: int) -> None:
        if self.router is None or self._has_left:
            return  # expelled or asked to rejoin meanwhile
        if self._members_digest is None:
            self._members_digest = members_digest([self.me, *(info.peer for info in self._peers.values())])
        heartbeat = Heartbeat(
            read.load, read.next_event, read.stats, self._members_digest, self.addresses.wants_ack(now_ns), read.costs
        )
        self._do(Send(ANY_ROUTER, heartbeat))  # a restarted router shall hear it too
        for follower, load, next_event in read.followers:
            if self.knows(follower):
                self._do(Send(follower, Heartbeat(load, next_event, read.stats, costs=read.costs)))
                if self.drains:
                    self._do(Send(follower, Drain()))
        if self._why:
            self._do(LogWarning(self._drain_notice(read.load, now_ns)))
        if self.drains:
            is_idle = not (read.load.requests_waiting or read.load.sequences_running or read.load.transfers_open)
            if is_idle or (self._leaves_at_ns is not None and now_ns >= self._leaves_at_ns):
                self._leave()

    # -- leaving

    def _drain(self, asked: DrainRequested, now_ns: int) -> None:
        self.drains, self._leaves_at_ns, self._why = True, now_ns + asked.patience_ns, asked.why
        if self._has_left:
            return
        if self.router is not None:
            self._do(Send(self.router, Drain()))
        if not asked.patience_ns or self.router is None:
            self._leave()
        else:
            self._next_beat_ns = now_ns

    def _drain_notice(self, load: Load, now_ns: int) -> str:
        why, self._why = self._why, ""
        left_s = max(0, (self._leaves_at_ns or now_ns) - now_ns) / 1e9
        return (
            f"{why}: instance {self.me.name} leaves; {load.sequences_running} sequences run and"
            f" {load.requests_waiting} requests wait here, and have {left_s:.0f} s to finish"
        )

    def _leave(self, refused: str = "") -> None:
        if self.info.role.has_model:  # a store outlives its router, which may be gone and tell it nothing
            for info in self._peers.values():
                if not info.role.has_model:
                    self._do(Send(info.peer, Leave()))
        if self.router is not None:
            self._do(Send(self.router, Leave()))
        self._has_left = True
        self._do(Left(refused))

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree."""
        lone = self.router is None and self._rejoins_at is None and not self._peers and self._next_beat_ns is None
        check(lone or not self.is_alone, "a member is alone, and knows others")
        check(self.router is None or self._is_reborn, "a member waits for its next incarnation")
        check(self.me.name not in self._peers, f"{self.me.name} is its own peer")
        routers = {name: info.peer for name, info in self._peers.items() if info.role is Role.ROUTER}
        check(self.followers == routers, "{} are followers, not {}", self.followers, routers)
        if self._members_digest is not None:
            known = members_digest([self.me, *(info.peer for info in self._peers.values())])
            check(self._members_digest == known, "the digest is not that of the members")

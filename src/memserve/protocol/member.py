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

    def __init__(self, addresses: Sequence[str], config: MemberConfig) -> None:
        self._addresses, self._config = list(addresses), config
        #: whether an address is known only while a router has called
        self.is_called = not addresses
        self._last_contact_ns = 0
        #: the address that is tried, or where the router is. Empty: none is known
        self.address = self._addresses[0] if addresses else ""
        #: the address of the router whose member this instance is. None: it is no member
        self.joined_address: str | None = None

    def __str__(self) -> str:
        return ", ".join(self._addresses)

    def __contains__(self, address: str) -> bool:
        return address in self._addresses

    def wants_ack(self, now_ns: int) -> bool:
        """Whether the router should be asked for a sign of life."""
        return (
            len(self._addresses) > 1 or self.is_called
        ) and now_ns - self._last_contact_ns >= self._config.asks_after_ns

    def mark_contact(self, now_ns: int) -> None:
        """A router has spoken, or the instance begins to listen."""
        self._last_contact_ns = now_ns

    def try_next(self, now_ns: int) -> bool:
        """Go on to the next address if it is time. True: it was."""
        timeout_ns = self._config.silent_after_ns if self.address == self.joined_address else self._config.turn_ns
        if len(self._addresses) <= 1 or now_ns - self._last_contact_ns < timeout_ns:
            return False
        self._last_contact_ns = now_ns
        self.address = self._addresses[(self._addresses.index(self.address) + 1) % len(self._addresses)]
        return True

    def switch_to(self, address: str, now_ns: int) -> None:
        """A router calls from ``address``; one that was not known takes the place of the one that is tried."""
        if self.is_called:
            self._addresses = [address]
        elif address not in self._addresses:
            self._addresses[self._addresses.index(self.address)] = address
        self.address, self.joined_address = address, None
        self.mark_contact(now_ns)

    def set_joined(self, joined_at: str) -> None:
        """The router at ``joined_at`` has accepted this instance, perhaps after the next address was tried."""
        if joined_at in self._addresses:  # a router of an older version does not say where
            self.address = joined_at
        self.joined_address = self.address

    def return_to_joined(self) -> bool:
        """Go back to the router's address. True: another one was tried meanwhile, the router was only cut off."""
        if self.joined_address in (None, self.address):
            return False
        self.address = self.joined_address or ""
        return True

    def is_lost(self, now_ns: int) -> bool:
        """Whether a router that has called is silent for too long."""
        return self.is_called and bool(self.address) and now_ns - self._last_contact_ns >= self._config.silent_after_ns

    def forget_router(self) -> None:
        """The router that has called is gone."""
        self._addresses, self.address, self.joined_address = [], "", None


ANY_ROUTER = Peer(ROUTER, 0)
"""Any router that is at the address that is connected to."""


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
        self._connected_router = ANY_ROUTER  # messages to another generation of the router do not leave
        self._rejoins_at: Peer | None = None  # the newest router that took over: it is asked until it answers
        self._peers: dict[str, PeerInfo] = {}  # the other members
        #: those of them that are routers, by name
        self.followers: dict[str, Peer] = {}
        self._members_digest: int | None = None  # of all members; counted when it is asked for
        self._is_generation_ready = True  # False between ChangeGeneration and GenerationChanged
        self.drains = False
        """True: it accepts no new request, and leaves when it is idle."""
        self._has_left = False
        self._leaves_at_ns: int | None = None  # while it drains: the end of the patience; None: it has no end
        self._drain_reason = ""  # of a drain that is not logged yet
        self._next_heartbeat_ns: int | None = None
        self._heartbeats = 0
        self._actions: list[MemberAction] = []

    @property
    def self_peer(self) -> Peer:
        """The present incarnation."""
        return self.info.peer

    @property
    def next_deadline_ns(self) -> int | None:
        """When to look again. None: it has left, is alone, or waits for ``GenerationChanged``."""
        return None if self._has_left or not self._is_generation_ready else self._next_heartbeat_ns

    @property
    def is_detached(self) -> bool:
        """Whether it knows of no router to join."""
        return not self.addresses.address

    def knows_peer(self, peer: Peer) -> bool:
        """Whether this incarnation of ``peer`` is another member."""
        info = self._peers.get(peer.name)
        return info is not None and info.peer == peer

    def start(self, now_ns: int) -> list[MemberAction]:
        """Connect to the first address and ask to join. Without an address: wait to be called."""
        if self.is_detached:
            return []
        self.addresses.mark_contact(now_ns)
        self._connect_router(ANY_ROUTER)
        self._on_heartbeat_due(now_ns)
        return self._take_actions()

    def handle(self, event: MemberEvent, now_ns: int) -> list[MemberAction]:
        """Take ``event`` into account at time ``now_ns`` (ns); the actions are to be done in order."""
        match event:
            case MessageArrived(sender, message):
                self._on_message(sender, message, now_ns)
            case LoadRead():
                self._send_heartbeat(event, now_ns)
            case DrainRequested():
                self._start_drain(event, now_ns)
            case GenerationChanged(info):
                self._start_generation(info, now_ns)
        due_ns = self.next_deadline_ns
        if due_ns is not None and now_ns >= due_ns:
            self._on_heartbeat_due(now_ns)
        return self._take_actions()

    def _add_action(self, action: MemberAction) -> None:
        self._actions.append(action)

    def _connect_router(self, router: Peer) -> None:
        self._connected_router = router
        self._add_action(ConnectRouter(router, self.addresses.address))

    def _take_actions(self) -> list[MemberAction]:
        actions, self._actions = self._actions, []
        return actions

    # -- messages

    def _on_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        if sender.name != ROUTER:
            self._add_action(ForwardMessage(sender, message))
            return
        if isinstance(message, JoinRequest | RejoinRequest) and not self._may_join(sender, message):
            self._add_action(Send(sender, Refused(f"{self.self_peer.name} belongs to the router at {self.addresses}")))
            return
        if self.is_detached and not isinstance(message, JoinRequest | RejoinRequest):
            return  # late: of a router that was taken to be gone
        self.addresses.mark_contact(now_ns)
        # The turn may have come back to its address: the line there is to any router, and takes no answers to this one.
        if sender == self.router and (self.addresses.return_to_joined() or self._connected_router != sender):
            self._connect_router(sender)
        if self._is_generation_ready:  # else the message was for the incarnation that ends now
            self._on_router_message(sender, message, now_ns)

    def _on_router_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        match message:
            case JoinAccepted():
                self._on_join_accepted(sender, message, now_ns)
            case RejoinRequest(address):
                self._rejoin_router(sender, address, now_ns)
            case JoinRequest(address):
                if self.addresses.is_called and not self.drains:
                    self._rejoin_router(sender, address, now_ns)
            case Expelled():
                self._leave_incarnation(sender, message)
            case Refused(reason):
                if self.router is None and self.addresses.is_called:
                    self._become_detached(f"the router at {self.addresses} refuses this store: {reason}")
                elif self.router is None:
                    self._leave_cluster(refused=reason)
            case HeartbeatAck():
                pass
            case Leave():
                if self.addresses.is_called and sender in (self.router, self._rejoins_at):
                    self._become_detached(f"the router at {self.addresses} ends")
            case PeerJoined(info):
                self._add_peer(info)
                self._add_action(ForwardMessage(sender, message))
            case PeerGone(peer):
                self._add_action(ForwardMessage(sender, message))
                self._remove_peer(peer)
            case Drain():  # repeated with each heartbeat
                self.drains = True
                self._add_action(ForwardMessage(sender, message))
            case _:
                self._add_action(ForwardMessage(sender, message))

    def _may_join(self, sender: Peer, message: JoinRequest | RejoinRequest) -> bool:
        """Whether this member may follow what ``sender`` asks, or does so already.

        Where it looks for its router itself, one that remembers it has taken the place of its router: only one of them
        has the records. A store that is called may be remembered by several, so it asks whose place ``sender`` takes.
        """
        current_router = self.router or self._rejoins_at
        if self.is_detached or sender == current_router:
            return True
        if isinstance(message, JoinRequest):
            return message.address in self.addresses
        return not self.addresses.is_called or (
            current_router is not None and message.after == current_router.generation
        )

    def _is_outdated(self, router: Peer) -> bool:
        """Whether another router has taken the place of ``router``, as far as is known here."""
        known_routers = (self.router, self._rejoins_at)
        return any(peer is not None and router.generation < peer.generation for peer in known_routers)

    def _on_join_accepted(self, sender: Peer, message: JoinAccepted, now_ns: int) -> None:
        if self._is_outdated(sender):
            return  # late: that router is gone
        if sender != self.router:  # a further JoinAccepted of the same router does not move it
            self.addresses.set_joined(message.joined_at)
        self._connect_router(sender)
        names = {info.peer.name for info in message.peers}
        for peer in [info.peer for name, info in self._peers.items() if name not in names]:
            self._remove_peer(peer)
        for info in message.peers:
            self._add_peer(info)
        if sender != self.router:
            self.router, self._next_heartbeat_ns = sender, now_ns  # its first heartbeat shows what there is, at once
            self._add_action(Joined())
        self._add_action(ForwardMessage(sender, message))

    def _rejoin_router(self, sender: Peer, address: str, now_ns: int) -> None:
        """Join the new router. Requests running here are orphaned; those that no client can ask for again are dropped
        when its ``JoinAccepted`` arrives."""
        if not address or sender == (self.router or self._rejoins_at) or self._is_outdated(sender):
            return
        verb = "calls" if self.is_detached else "takes over"
        self._add_action(LogWarning(f"the router at {address} {verb}: joining it"))
        self.router, self._rejoins_at = None, sender
        self.addresses.switch_to(address, now_ns)
        self._connect_router(ANY_ROUTER)
        self._next_heartbeat_ns = now_ns

    def _leave_incarnation(self, sender: Peer, message: Expelled) -> None:
        """Also where this incarnation never heard that it was a member: its ``JoinAccepted`` was lost."""
        if self._is_outdated(sender):
            return
        self.router, self.addresses.joined_address = None, None
        self._is_generation_ready = False
        self._add_action(LogWarning(f"expelled ({message.reason}): joining again"))
        self._add_action(ChangeGeneration(sender, message.reason, max(self.self_peer.generation, message.newest) + 1))

    def _start_generation(self, info: PeerInfo, now_ns: int) -> None:
        check(info.peer.generation > self.self_peer.generation, f"{info.peer} is not newer than {self.self_peer}")
        self.info, self._is_generation_ready, self._members_digest = info, True, None
        self._connect_router(ANY_ROUTER)
        self._next_heartbeat_ns = now_ns

    def _add_peer(self, info: PeerInfo) -> None:
        if info.peer.name != self.self_peer.name and self._peers.get(info.peer.name) != info:
            self._peers[info.peer.name], self._members_digest = info, None
            if info.role is Role.ROUTER:
                self.followers[info.peer.name] = info.peer
            self._add_action(AddPeer(info))

    def _remove_peer(self, peer: Peer) -> None:
        if self.knows_peer(peer):
            del self._peers[peer.name]
            self.followers.pop(peer.name, None)
            self._members_digest = None
            self._add_action(RemovePeer(peer))

    def _become_detached(self, why: str) -> None:
        """Wait to be called again; the other members are those of a router that is gone."""
        self._add_action(LogWarning(f"{why}; {self.self_peer.name} waits to be called by another"))
        self.router = self._rejoins_at = self._next_heartbeat_ns = None
        self._connected_router = ANY_ROUTER
        self.addresses.forget_router()
        for info in list(self._peers.values()):
            self._remove_peer(info.peer)

    # -- time

    def _on_heartbeat_due(self, now_ns: int) -> None:
        """Ask to join, or read the load for a heartbeat."""
        if self.addresses.is_lost(now_ns):
            self._become_detached(f"the router at {self.addresses} is not heard any more")
            return
        self._next_heartbeat_ns = now_ns + self._config.beat_ns
        if self.addresses.try_next(now_ns):
            self._add_action(LogWarning(f"no router is heard: trying {self.addresses.address}"))
            self._connect_router(ANY_ROUTER)
        if self.router is None:
            self._add_action(Send(ANY_ROUTER, Join(self.info, self.addresses.address)))
            return
        self._heartbeats += 1
        self._add_action(ReadLoad(with_stats=self._heartbeats % self._config.stats_every == 1))

    def _send_heartbeat(self, read: LoadRead, now_ns: int) -> None:
        if self.router is None or self._has_left:
            return  # expelled or asked to rejoin meanwhile
        if self._members_digest is None:
            self._members_digest = members_digest([self.self_peer, *(info.peer for info in self._peers.values())])
        heartbeat = Heartbeat(
            read.load, read.next_event, read.stats, self._members_digest, self.addresses.wants_ack(now_ns), read.costs
        )
        self._add_action(Send(ANY_ROUTER, heartbeat))  # a restarted router shall hear it too
        for follower, load, next_event in read.followers:
            if self.knows_peer(follower):
                self._add_action(Send(follower, Heartbeat(load, next_event, read.stats, costs=read.costs)))
                if self.drains:
                    self._add_action(Send(follower, Drain()))
        if self._drain_reason:
            self._add_action(LogWarning(self._drain_notice(read.load, now_ns)))
        if self.drains:
            load = read.load
            is_busy = load.requests_waiting or load.sequences_running or load.transfers_open or read.offers_wait
            if not is_busy or (self._leaves_at_ns is not None and now_ns >= self._leaves_at_ns):
                self._leave_cluster()

    # -- leaving

    def _start_drain(self, request: DrainRequested, now_ns: int) -> None:
        self.drains, self._leaves_at_ns, self._drain_reason = True, now_ns + request.patience_ns, request.why
        if self._has_left:
            return
        if self.router is not None:
            self._add_action(Send(self.router, Drain()))
        if not request.patience_ns or self.router is None:
            self._leave_cluster()
        else:
            self._next_heartbeat_ns = now_ns

    def _drain_notice(self, load: Load, now_ns: int) -> str:
        why, self._drain_reason = self._drain_reason, ""
        left_s = max(0, (self._leaves_at_ns or now_ns) - now_ns) / 1e9
        return (
            f"{why}: instance {self.self_peer.name} leaves; {load.sequences_running} sequences run and"
            f" {load.requests_waiting} requests wait here, and have {left_s:.0f} s to finish"
        )

    def _leave_cluster(self, refused: str = "") -> None:
        if self.info.role.has_model:  # a store outlives its router, which may be gone and tell it nothing
            for info in self._peers.values():
                if not info.role.has_model:
                    self._add_action(Send(info.peer, Leave()))
        if self.router is not None:
            self._add_action(Send(self.router, Leave()))
        self._has_left = True
        self._add_action(Left(refused))

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree."""
        is_bare = (
            self.router is None and self._rejoins_at is None and not self._peers and self._next_heartbeat_ns is None
        )
        check(is_bare or not self.is_detached, "a member is alone, and knows others")
        check(self.router is None or self._is_generation_ready, "a member waits for its next incarnation")
        check(self.self_peer.name not in self._peers, f"{self.self_peer.name} is its own peer")
        routers = {name: info.peer for name, info in self._peers.items() if info.role is Role.ROUTER}
        check(self.followers == routers, "{} are followers, not {}", self.followers, routers)
        if self._members_digest is not None:
            digest = members_digest([self.self_peer, *(info.peer for info in self._peers.values())])
            check(self._members_digest == digest, "the digest is not that of the members")

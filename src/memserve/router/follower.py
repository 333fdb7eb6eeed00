"""A router that is not the owner: it places requests as the owner does, and is a member of the owner's cluster.

::

    owner -- JoinAccepted, PeerJoined, PeerGone --> MemberMachine --> Cluster <-- heartbeats, KV events, tokens
    owner <------------ Join, Heartbeat ---------------+                +------> Dispatch, Cancel, QueryAnswers

What must be exclusive is the owner's alone: which members there are, documents, pinned prefixes. While no owner is
heard, a follower goes on with the members that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from memserve.base.config import ClusterConfig, MemberConfig
from memserve.base.errors import check
from memserve.base.types import ClockTicked, KVGeometry, Role
from memserve.kv.identity import DEFAULT_KEY
from memserve.protocol.events import MessageArrived
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import (
    ChangeGeneration,
    DrainRequested,
    ForwardMessage,
    GenerationChanged,
    LoadRead,
    MemberAction,
    ReadLoad,
)
from memserve.protocol.peers import ROUTER, Load, PeerInfo
from memserve.router.events import ClusterAction, ClusterEvent, RouterEnds
from memserve.router.machine import Cluster


@dataclass(frozen=True, slots=True)
class FollowerStarts:
    """The first event: the host's mailbox listens at ``address``."""

    address: str


FollowerEvent = ClusterEvent | DrainRequested | GenerationChanged | FollowerStarts
FollowerAction = ClusterAction | MemberAction

NO_KV = KVGeometry(1, 1, 1, 1, "float32", 1)
"""The geometry that a router names: it has no KV."""


def follower_info(info: PeerInfo) -> PeerInfo:
    """Raise :class:`InvariantError` unless ``info`` is that of a router."""
    check(info.role is Role.ROUTER and info.peer.name != ROUTER, "{} is no follower", info)
    return info


class Follower:
    """Both machines as one: :meth:`handle` is its one mutator."""

    def __init__(
        self,
        info: PeerInfo,
        owners: Sequence[str],
        config: ClusterConfig,
        member: MemberConfig,
        *,
        identity_key: bytes = DEFAULT_KEY,
    ) -> None:
        """``info``: what the owner and all members are told of it; ``owners``: the addresses where the owner may be."""
        info = structs.replace(info, admission=config.admission.shared_mode)
        self.member = MemberMachine(follower_info(info), owners, member)
        self.cluster = Cluster(config, identity_key=identity_key, follows=info.peer)
        self._actions: list[FollowerAction] = []

    def handle(self, event: FollowerEvent, now_ns: int) -> list[FollowerAction]:
        """Take ``event`` into account at time ``now_ns`` (ns); the actions are to be done in order."""
        match event:
            case FollowerStarts(address):
                self.member.info = structs.replace(self.member.info, address=address)
                self._perform_actions(self.member.start(now_ns), now_ns)
            case DrainRequested() | GenerationChanged():
                self._perform_actions(self.member.handle(event, now_ns), now_ns)
            case MessageArrived(sender, _) if sender.name == ROUTER:
                self._perform_actions(self.member.handle(event, now_ns), now_ns)
            case RouterEnds():
                self._perform_actions(self.member.handle(DrainRequested(0, ""), now_ns), now_ns)
            case _:
                self._actions += self.cluster.handle(event, now_ns)
                due_ns = self.member.next_deadline_ns
                if due_ns is not None and due_ns <= now_ns:
                    self._perform_actions(self.member.handle(ClockTicked(), now_ns), now_ns)
        actions, self._actions = self._actions, []
        return actions

    def _perform_actions(self, actions: Sequence[MemberAction], now_ns: int) -> None:
        """What the host need not do is done at once."""
        for action in actions:
            match action:
                case ForwardMessage(sender, message):
                    self._actions += self.cluster.handle(MessageArrived(sender, message), now_ns)
                case ReadLoad():
                    live = self.cluster.stats().requests_live
                    self._perform_actions(self.member.handle(LoadRead(Load(requests_waiting=live), 0), now_ns), now_ns)
                    if self.cluster.follower_membership is not None:
                        self.cluster.follower_membership.send_pending(now_ns, beats=True)
                        self._actions += self.cluster.handle(ClockTicked(), now_ns)
                case ChangeGeneration():
                    if self.cluster.follower_membership is not None:
                        self.cluster.follower_membership.remove_all(
                            f"this router was expelled: {action.reason}", now_ns
                        )
                    self._actions += self.cluster.handle(ClockTicked(), now_ns)
                    self._actions.append(action)
                case _:
                    self._actions.append(action)

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending at the latest. None: nothing is waited for."""
        ends = self.member.next_deadline_ns, self.cluster.next_deadline_ns
        return min([end for end in ends if end is not None], default=None)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        self.member.check_invariants()
        self.cluster.check_invariants()

"""Where the sessions of clients ran last (level 2)."""

from __future__ import annotations

from memserve.cluster.outbox import Outbox
from memserve.cluster.registry import Member, Registry
from memserve.messages import Peer
from memserve.metadata import SessionRouted
from memserve.policy.quotas import TenantStore

SESSIONS_MAX = 100_000
"""Of more, the tenant with most loses the one that was silent longest."""


class Sessions:
    """The instances of each session's last request, by tenant and name."""

    __slots__ = ("_outbox", "_places", "_registry")

    def __init__(self, registry: Registry, outbox: Outbox) -> None:
        self._registry, self._outbox = registry, outbox
        self._places: TenantStore[tuple[Peer, ...]] = TenantStore(SESSIONS_MAX)

    def remember(self, tenant: str, session: str, members: list[Member]) -> None:
        """It runs at these now. A request without a session is not remembered."""
        if not session:
            return
        peers = tuple(member.peer for member in members)
        self._outbox.note(SessionRouted(tenant, session, peers))
        self.recall(tenant, session, peers)

    def recall(self, tenant: str, session: str, peers: tuple[Peer, ...]) -> None:
        """It ran at these, which need not be members (any more)."""
        self._places.put(tenant, session, peers)

    def numbers(self, tenant: str, session: str) -> tuple[int, ...]:
        """Members that know it."""
        if not session:
            return ()
        found = (self._registry.get(peer) for peer in self._places.get(tenant, session) or ())
        return tuple(member.number for member in found if member is not None)

    def __len__(self) -> int:
        return len(self._places)

"""The cluster machine (level 2): requests and messages in, messages and tokens out."""

from __future__ import annotations

from memserve.cluster.events import ClusterAction, ClusterEvent
from memserve.cluster.report import ClusterStats, Counters, HandleView, InstanceView, RouteStory
from memserve.config import ClusterConfig
from memserve.mempool.identity import DEFAULT_KEY
from memserve.policy.routing import RoutingCosts


class Cluster:
    """Members, their caches, and the requests that they run. Deterministic: no clock, no random source.

    Every request ends with exactly one output that has a ``finish_reason`` for each of its ``n`` sequences, or with one
    ``RejectRequest``, whatever its instances do.
    """

    def __init__(
        self, config: ClusterConfig, costs: RoutingCosts | None = None, *, identity_key: bytes = DEFAULT_KEY
    ) -> None:
        """``costs``: a ``policy.costs.CostModel``; default: the conservative one. ``identity_key``: 16 bytes, that of
        the instances' pools."""
        self.config = config
        self._counters = Counters()

    def handle(self, event: ClusterEvent, now: int) -> list[ClusterAction]:
        """Take ``event`` into account at time ``now`` (ns) and say what is to be done, in order."""
        return []

    # -- views

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending at the latest; ``None`` = nothing is waited for."""
        return None

    def stats(self) -> ClusterStats:
        """State now, and totals since the start."""
        return ClusterStats(0, 0, 0, 0, 0, 0, 0, self._counters)

    def instances(self) -> tuple[InstanceView, ...]:
        """All members in the order in which they joined."""
        return ()

    def story(self, request_id: str) -> RouteStory | None:
        """What was decided for a live request."""
        return None

    def handles(self) -> tuple[HandleView, ...]:
        """All named prefixes, in the order in which they were pinned first."""
        return ()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""

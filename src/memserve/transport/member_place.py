"""A member's place in a cluster: where it listens and which router it joins, and how its process comes to its end.

What instances, stores, engines as members and routers beside the owner are given alike; each adds its own.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memserve.base.types import Role
from memserve.journal.survivors import end_when_orphaned
from memserve.kv.identity import identity_key
from memserve.protocol.member import MemberMachine
from memserve.protocol.member_events import ChangeGeneration
from memserve.protocol.peers import Peer
from memserve.system.process import HealthFile, HealthState, SignalCounter, new_generation, on_ending_signals
from memserve.system.secrets import as_followed
from memserve.transport.network_devices import ListenAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPlace(ListenAddress):
    """Where a member listens, what it joins, and what ends it."""

    name: str
    join: tuple[str, ...] = ()
    """Where the router's mailbox may be, ``tcp://host:port`` each. Empty: a store that waits for a router to call."""
    role: Role
    link: str = "auto"
    """How KV moves: one of :data:`memserve.base.types.LINKS`."""
    drain_s: float = 0.0
    """How long it may finish what it has, or write what is in memory alone, when it is told to end."""
    is_supervised: bool = False
    """A ``memserve serve`` on this host has started it, and ends it."""
    outlive: Path | None = None
    """The state folder of a router that it waits for when that is killed. None: it waits for none."""
    health_file: Path | None = None
    """Where it says once a second what it is to its cluster."""
    model: str = ""
    """The name of its model, where the cluster has several; empty: the first."""

    @property
    def identity_key(self) -> bytes:
        """By which the cluster's blocks are named: 16 bytes, from its secret."""
        return identity_key(as_followed(self.secret).initial_value)

    def open_health(self) -> HealthFile | None:
        """None: it has none. Raises :class:`memserve.base.errors.UserError` where it cannot be written."""
        return None if self.health_file is None else HealthFile(self.health_file)

    def follow_signals(self, request_end: Callable[[float, str], None]) -> SignalCounter:
        """From now on signals call ``request_end`` with the seconds that are left, and their name: ``drain_s`` the
        first time, none the second time, which is meant. Main thread only."""
        counter = SignalCounter()

        def end(sig: int, _frame: object) -> None:
            if counter.count_signal(sig):
                request_end(counter.patience_s(self.drain_s), counter.names[-1])

        if self.is_supervised:  # its supervisor ends it: a closed terminal, or Ctrl-C, lets streams drain first
            signal.signal(signal.SIGTERM, end)
        else:
            on_ending_signals(end)
        return counter

    def end_when_orphaned(self, router: Callable[[], Peer | None]) -> None:
        """End this process once nothing holds the state folder that it outlives; ``router``: whose member it is."""
        if self.outlive is not None:
            end_when_orphaned(self.outlive, router)


def next_incarnation(self_peer: Peer, order: ChangeGeneration) -> Peer:
    """``self_peer`` begun anew, as its router asks: newer than all that were heard of."""
    return Peer(self_peer.name, max(order.generation_min, new_generation()))


def health_of(member: MemberMachine) -> HealthState:
    """What a member is to its cluster."""
    if member.drains:
        return HealthState.DRAINS
    return HealthState.MEMBER if member.router is not None else HealthState.OUTSIDE

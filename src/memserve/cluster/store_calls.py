"""Asking a store to join that its operator has started without a word about this router."""

from __future__ import annotations

from memserve.cluster.events import MemberChange
from memserve.cluster.outbox import Outbox, Timers
from memserve.config import ClusterConfig
from memserve.messages import Leave, Peer
from memserve.store_messages import STORE, JoinRequest
from memserve.types import Role


class StoreCalls:
    """Calls the store at intervals, whether it is a member or not: one that has started anew is found again, and one
    that is a member hears that its router lives."""

    __slots__ = ("_address", "_config", "_outbox", "_timers")

    def __init__(self, config: ClusterConfig, timers: Timers, outbox: Outbox) -> None:
        self._config, self._timers, self._outbox = config, timers, outbox
        self._address = ""

    def begin(self, address: str, now: int) -> None:
        """From now on. ``address``: where the store reaches this router."""
        is_first = not self._address
        self._address = address
        if is_first:
            self._call(STORE, now)

    def end(self) -> None:
        """The router ends: the store need not wait until it is taken to be silent, and may join another at once."""
        if self._address:
            self._outbox.send(STORE, Leave())

    def _call(self, store: Peer, now: int) -> None:
        self._outbox.send(store, JoinRequest(self._address))
        self._timers.arm(now + self._config.call_every_ns, self._call, store)

    def declined(self, store: Peer, reason: str) -> None:
        """The store belongs to another router."""
        self._outbox.report(MemberChange.DECLINED, store, "", reason, role=Role.STORE)

"""Members that are silent: noticed, looked at once more, and then taken to be dead.

::

    heard ........ 4.5 s: noticed ........ 5 s: still silent --> dead
      ^                                       |
      +------------- heard meanwhile ---------+

Two looks, because the router may have been stopped before the first: what came meanwhile is read only after it.
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.cluster.outbox import Timers
from memserve.cluster.registry import Member, Registry
from memserve.messages import Peer

_LATE = 10
"""A message is on its way for less than this part of the time after which a silent member is dead."""


class SilenceWatch:
    """Looks after all members that it was told to :meth:`watch`, until they are gone."""

    __slots__ = ("_dead_after_ns", "_on_dead", "_registry", "_timers", "late_ns")

    def __init__(
        self, registry: Registry, timers: Timers, dead_after_ns: int, on_dead: Callable[[Member, str, int], None]
    ) -> None:
        """``on_dead(member, reason, now)``: for each that is silent for ``dead_after_ns``."""
        self._registry, self._timers, self._dead_after_ns, self._on_dead = registry, timers, dead_after_ns, on_dead
        #: how long what was sent is on its way, at most
        self.late_ns = dead_after_ns // _LATE

    def watch(self, member: Member) -> None:
        """From now on."""
        self._timers.arm(self._noticed_ns(member), self._look, member.peer)

    def _noticed_ns(self, member: Member) -> int:
        return member.heard_ns + self._dead_after_ns - self.late_ns

    def _look(self, peer: Peer, now: int) -> None:
        member = self._registry.get(peer)
        if member is None:
            return
        if self._noticed_ns(member) > now:
            self.watch(member)
        else:
            due_ns = max(member.heard_ns + self._dead_after_ns, now + self.late_ns)
            self._timers.arm(due_ns, self._look_again, (peer, member.heard_ns))

    def _look_again(self, seen: tuple[Peer, int], now: int) -> None:
        peer, heard_ns = seen
        member = self._registry.get(peer)
        if member is None:
            return
        if member.heard_ns > heard_ns:
            self._look(peer, now)
        else:
            self._on_dead(member, f"nothing was heard of it for {(now - heard_ns) / 1e9:.1f} s", now)

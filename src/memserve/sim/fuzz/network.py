"""A network that loses, repeats, delays and cuts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from memserve.messages import AnyMessage, Peer
from memserve.sim.clock import Clock
from memserve.sim.network import Network

Way = tuple[str, str]
"""From whom, to whom."""


def _silent(line: str, what: object = "") -> None:
    """Nobody listens."""


class FaultyNetwork(Network):
    """What the real mailbox promises is kept unless a fault says otherwise: order, and the receiver's generation.

    Messages held by a partition come late, in order, or are lost: each partition is of one kind.
    """

    def __init__(self, clock: Clock, random: Random, delay_ns: tuple[int, int]) -> None:
        super().__init__(clock)
        self.random, self.bounds_ns = random, delay_ns
        self.loss = 0.0
        self.repeats = 0.0
        self.extra_ns = 0
        self.lost = 0
        self.cut: dict[Way, list[str]] = {}
        """The modes of the partitions on each way, ``hold`` or ``lose``."""
        self.log: Callable[..., None] = _silent
        self._held: dict[Way, deque[tuple[Peer, Peer, AnyMessage]]] = {}

    def send(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        self.sent += 1
        way = (sender.name, to.name)
        modes = self.cut.get(way)
        if (modes and modes[-1] == "lose") or self.random.random() < self.loss:
            self.lost += 1
            self.log(f"      lost: {sender.name} -> {to.name} {type(message).__name__}")
        elif modes or self._held.get(way):
            self._held.setdefault(way, deque()).append((sender, to, message))
        else:
            self.travel(sender, to, message)
            if self.random.random() < self.repeats:
                self.travel(sender, to, message)

    def span_ns(self, sender: Peer, to: Peer, message: AnyMessage) -> int:
        extra_ns = self.random.randint(0, self.extra_ns) if self.extra_ns else 0
        return self.random.randint(*self.bounds_ns) + extra_ns

    def part(self, one: str, other: str, mode: str, both_ways: bool) -> list[Way]:
        """Cut the way from ``one`` to ``other`` (and back); returns what :meth:`heal` wants."""
        ways = [(one, other), (other, one)] if both_ways else [(one, other)]
        for way in ways:
            self.cut.setdefault(way, []).append(mode)
        return ways

    def heal(self, ways: list[Way], mode: str) -> None:
        """Undo one :meth:`part`; what was held starts to travel."""
        for way in ways:
            self.cut[way].remove(mode)
            if not self.cut[way]:
                for sender, to, message in self._held.pop(way, ()):
                    self.travel(sender, to, message)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether data cannot flow from ``one`` to ``other``."""
        return bool(self.cut.get((one, other)))

"""A network that loses, repeats, delays, reorders, garbles and cuts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from memserve.protocol.messages import AnyMessage, Dispatch
from memserve.protocol.peers import Peer
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.process import Network

Way = tuple[str, str]
"""Sender and receiver."""


def _silent(line: str, detail: object = "") -> None:
    """A log that drops every line."""


class FaultyNetwork(Network):
    """Worse than the real one, whose mailbox drops repeated and overtaken messages: here they are delivered, and the
    machines must tolerate them.

    Messages held by a partition come late, in order, or are lost: each partition is of one kind.
    """

    def __init__(self, clock: Clock, random: Random, delay_ns: tuple[int, int]) -> None:
        super().__init__(clock)
        self.random, self.bounds_ns = random, delay_ns
        self.loss = 0.0
        self.repeats = 0.0
        self.overtakes = 0.0
        self.garbles = 0.0
        self.extra_ns = 0
        self.lost = 0
        self.cut: dict[Way, list[str]] = {}
        """The modes of the partitions in each direction, ``hold`` or ``lose``."""
        self.dispatched_twice: set[str] = set()
        """Requests of which a dispatch was repeated: what the first has left in the cache may be read by the second."""
        self.log: Callable[..., None] = _silent
        self._held: dict[Way, deque[tuple[Peer, Peer, AnyMessage]]] = {}
        self._connection: dict[Way, int] = {}
        """Counts the connections of each direction: messages under way in an earlier one never arrive."""

    @property
    def is_well(self) -> bool:
        """No fault is active."""
        shares = max(self.loss, self.repeats, self.overtakes, self.garbles)
        return shares < 1e-9 and not self.extra_ns and not any(self.cut.values())

    def send_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        self.sent += 1
        way = (sender.name, to.name)
        modes = self.cut.get(way)
        if (modes and modes[-1] == "lose") or self.random.random() < self.loss:
            self._lose_message(sender, to, message)
        elif self.garbles and self.random.random() < self.garbles:
            self._garble_message(sender, to, message)
        elif modes or self._held.get(way):
            self._held.setdefault(way, deque()).append((sender, to, message))
        else:
            self.carry_message(sender, to, message)
            if self.random.random() < self.repeats:
                self.carry_message(sender, to, message)
                if isinstance(message, Dispatch):
                    self.dispatched_twice.add(message.request.request_id.partition("#")[0])

    def _lose_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        self.lost += 1
        self.log(f"      lost: {sender.name} -> {to.name} {type(message).__name__}")

    def _garble_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """It is dropped; half of the time the connection breaks, and messages under way are lost."""
        self._lose_message(sender, to, message)
        if self.random.random() < 0.5:
            way = (sender.name, to.name)
            self._connection[way] = self._connection.get(way, 0) + 1

    def span_ns(self, sender: Peer, to: Peer, message: AnyMessage) -> int:
        extra_ns = self.random.randint(0, self.extra_ns) if self.extra_ns else 0
        return self.random.randint(*self.bounds_ns) + extra_ns

    def carry_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        ends = (sender, to)
        arrival_ns = self.clock.now + self.span_ns(sender, to, message)
        if not self.overtakes or self.random.random() >= self.overtakes:
            arrival_ns = max(arrival_ns, self._last_arrival.get(ends, 0))
        self._last_arrival[ends] = max(arrival_ns, self._last_arrival.get(ends, 0))
        connection = self._connection.get((sender.name, to.name), 0)
        self.clock.call_at(arrival_ns, self._reach_receiver, sender, to, message, connection)

    def _reach_receiver(self, sender: Peer, to: Peer, message: AnyMessage, connection: int) -> None:
        """At the receiver."""
        if connection == self._connection.get((sender.name, to.name), 0):
            self.deliver_message(sender, to, message)
        else:
            self._lose_message(sender, to, message)

    def cut_ways(self, first: str, second: str, mode: str, both_ways: bool) -> list[Way]:
        """Cut the way from ``first`` to ``second`` (and back); returns the ways for :meth:`heal_ways`."""
        ways = [(first, second), (second, first)] if both_ways else [(first, second)]
        for way in ways:
            self.cut.setdefault(way, []).append(mode)
        return ways

    def heal_ways(self, ways: list[Way], mode: str) -> None:
        """Undo one :meth:`cut_ways`; what was held starts to travel."""
        for way in ways:
            self.cut[way].remove(mode)
            if not self.cut[way]:
                for sender, to, message in self._held.pop(way, ()):
                    self.carry_message(sender, to, message)

    def is_cut(self, first: str, second: str) -> bool:
        """Whether data cannot flow from ``one`` to ``other``."""
        return bool(self.cut.get((first, second)))

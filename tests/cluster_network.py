"""Virtual time, and the network between the nodes of a cluster world: delays, loss, repetition, partitions."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from random import Random

from memserve.messages import AnyMessage, Peer


class Clock:
    """Events in order of time; equal times in order of posting."""

    def __init__(self) -> None:
        self.now = 0
        self.steps = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._posted = 0

    def at(self, when_ns: int, do: Callable[[], None]) -> None:
        """Do ``do`` at ``when_ns`` (not before now)."""
        self._posted += 1
        heapq.heappush(self._queue, (max(when_ns, self.now), self._posted, do))

    def after(self, delay_ns: int, do: Callable[[], None]) -> None:
        """Do ``do`` in ``delay_ns``."""
        self.at(self.now + delay_ns, do)

    def run_one(self) -> bool:
        """The next event; ``False`` = there is none."""
        if not self._queue:
            return False
        self.now, _, do = heapq.heappop(self._queue)
        self.steps += 1
        do()
        return True


class Network:
    """Connections between named nodes. One sender's messages to one receiver keep their order, unless lost.

    What the real mailbox promises is kept: nothing is heard twice, a message for an old generation arrives nowhere.
    Messages held by a partition come late, in order, or are lost: each partition is of one kind.
    """

    def __init__(self, clock: Clock, random: Random, delay_ns: tuple[int, int]) -> None:
        self.clock, self.random, self.delay_ns = clock, random, delay_ns
        self.loss = 0.0
        self.repeats = 0.0
        self.extra_ns = 0
        self.nodes: dict[str, Node] = {}
        self.cut: dict[tuple[str, str], list[str]] = {}  # (from, to) -> modes of the partitions between them
        self.held: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        self.last_arrival: dict[tuple[Peer, Peer], int] = {}
        self.log: Callable[[str], None] = lambda line: None
        self.sent, self.lost = 0, 0

    def send(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """Carry ``message``, or lose it."""
        self.sent += 1
        way = (sender.name, to.name)
        modes = self.cut.get(way)
        if (modes and modes[-1] == "lose") or self.random.random() < self.loss:
            self.lost += 1
            self.log(f"      lost: {sender.name} -> {to.name} {type(message).__name__}")
            return
        if modes or self.held.get(way):
            self.held.setdefault(way, deque()).append(lambda: self._travel(sender, to, message))
            return
        self._travel(sender, to, message)
        if self.random.random() < self.repeats:
            self._travel(sender, to, message)

    def _travel(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        delay = self.random.randint(*self.delay_ns) + (self.random.randint(0, self.extra_ns) if self.extra_ns else 0)
        key = (sender, to)
        when = max(self.clock.now + delay, self.last_arrival.get(key, 0))
        self.last_arrival[key] = when
        self.clock.at(when, lambda: self._arrive(sender, to, message))

    def _arrive(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        node = self.nodes.get(to.name)
        if node is not None and (to.generation == 0 or node.peer.generation == to.generation):
            node.receive(sender, message)

    def part(self, one: str, other: str, mode: str, both_ways: bool) -> list[tuple[str, str]]:
        """Cut the way from ``one`` to ``other`` (and back); returns what :meth:`heal` wants."""
        ways = [(one, other), (other, one)] if both_ways else [(one, other)]
        for way in ways:
            self.cut.setdefault(way, []).append(mode)
        return ways

    def heal(self, ways: list[tuple[str, str]], mode: str) -> None:
        """Undo one :meth:`part`; what was held starts to travel."""
        for way in ways:
            self.cut[way].remove(mode)
            if not self.cut[way]:
                for go in self.held.pop(way, ()):
                    go()

    def is_cut(self, one: str, other: str) -> bool:
        """Whether data cannot flow from ``one`` to ``other``."""
        return bool(self.cut.get((one, other)))


class Node(ABC):
    """Somebody with a name, an incarnation and a mailbox."""

    peer: Peer

    @abstractmethod
    def receive(self, sender: Peer, message: AnyMessage) -> None:
        """A message has arrived at the mailbox."""

"""Messages between named nodes in virtual time."""

from __future__ import annotations

from abc import ABC, abstractmethod

from memserve.messages import AnyMessage, Peer
from memserve.sim.clock import Clock


class Node(ABC):
    """A process with a name, an incarnation and a mailbox."""

    peer: Peer

    @abstractmethod
    def receive(self, sender: Peer, message: AnyMessage) -> None:
        """A message has arrived at the mailbox."""


class Network:
    """Carries messages. One sender's messages to one receiver keep their order, as the mailbox promises; a message to
    another generation than the receiver's is lost.

    Here every message takes ``delay_ns`` and arrives; subclasses decide otherwise.
    """

    def __init__(self, clock: Clock, delay_ns: int = 100_000) -> None:
        self.clock = clock
        self.delay_ns = delay_ns
        self.nodes: dict[str, Node] = {}
        self.sent = 0
        self._last_arrival: dict[tuple[Peer, Peer], int] = {}

    def send(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """Carry ``message``; ``to.generation`` 0: whichever process has the name now."""
        self.sent += 1
        self.travel(sender, to, message)

    def span_ns(self, sender: Peer, to: Peer, message: AnyMessage) -> int:
        """How long ``message`` is under way, if no earlier one delays it."""
        return self.delay_ns

    def travel(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """Send ``message`` off; it arrives after all that were sent before it."""
        way = (sender, to)
        when = max(self.clock.now + self.span_ns(sender, to, message), self._last_arrival.get(way, 0))
        self._last_arrival[way] = when
        self.clock.at(when, self.arrive, sender, to, message)

    def arrive(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """``message`` arrives."""
        node = self.nodes.get(to.name)
        if node is not None and (to.generation == 0 or node.peer.generation == to.generation):
            node.receive(sender, message)

"""Messages between named nodes in virtual time.

A process in virtual time: it can be killed and paused, and has a clock of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from memserve.base.types import ClockTicked
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer
from memserve_lab.sim.clock import Clock


class Node(ABC):
    """A process with a name, an incarnation and a mailbox."""

    peer: Peer

    @abstractmethod
    def receive_message(self, sender: Peer, message: AnyMessage) -> None:
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

    def send_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """Carry ``message``; ``to.generation`` 0: whichever process has the name now."""
        self.sent += 1
        self.carry_message(sender, to, message)

    def span_ns(self, sender: Peer, to: Peer, message: AnyMessage) -> int:
        """How long ``message`` is under way, if no earlier one delays it."""
        return self.delay_ns

    def carry_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """Send ``message`` off; it arrives after all that were sent before it."""
        way = (sender, to)
        arrival_ns = max(self.clock.now + self.span_ns(sender, to, message), self._last_arrival.get(way, 0))
        self._last_arrival[way] = arrival_ns
        self.clock.call_at(arrival_ns, self.deliver_message, sender, to, message)

    def deliver_message(self, sender: Peer, to: Peer, message: AnyMessage) -> None:
        """``message`` arrives."""
        node = self.nodes.get(to.name)
        if node is not None and (to.generation == 0 or node.peer.generation == to.generation):
            node.receive_message(sender, message)


TICK_MIN_NS = 1_000_000
"""Time between two checks of a machine's deadlines, as in ``system/loop``."""


class Ticking:
    """Calls ``tick`` when a machine's deadline comes, as the hosts' loop does."""

    __slots__ = ("_planned_ns", "_process", "_tells")

    def __init__(self, process: Process, tick: Callable[[], None]) -> None:
        self._process, self._tells = process, tick
        self._planned_ns: int | None = None

    def plan_tick(self, deadline_ns: int | None) -> None:
        """Take the machine's next deadline after an event, by the process's own clock."""
        planned_ns = self._planned_ns
        if deadline_ns is None or (planned_ns is not None and planned_ns <= deadline_ns):
            return
        now = self._process.now
        self._planned_ns = when_ns = max(deadline_ns, now + TICK_MIN_NS)
        self._process.call_later(when_ns - now, self._tick_at, when_ns)

    def _tick_at(self, when_ns: int) -> None:
        if self._planned_ns == when_ns:
            self._planned_ns = None
            self._tells()


class Clocked(Protocol):
    """What a process needs of a world."""

    @property
    def clock(self) -> Clock:
        """Virtual time."""


class Process(Node):
    """A node that can be killed and paused: its events then never happen, or wait."""

    def __init__(self, host: Clocked, peer: Peer) -> None:
        self.host = host
        self.peer = peer
        self.alive = True
        self.paused = 0
        self.life = 0
        """Counts its starts: calls planned in one life do not happen in the next."""
        self.skew_ns = 0
        self.ticking = Ticking(self, self._post_tick)
        self._frozen: deque[tuple[int, Callable[..., None], tuple[Any, ...]]] = deque()

    @property
    def now(self) -> int:
        """The time of its own clock: clocks of different hosts are unrelated."""
        return self.host.clock.now + self.skew_ns

    def _post_tick(self) -> None:
        self.post_event(ClockTicked())

    # -- life

    def begin_life(self) -> None:
        """The process starts, with nothing in memory."""
        self.life += 1
        self.alive, self.paused = True, 0
        self._frozen.clear()
        self.ticking = Ticking(self, self._post_tick)

    def kill_process(self) -> None:
        """SIGKILL."""
        self.life += 1
        self.alive, self.paused = False, 0
        self._frozen.clear()

    def pause_process(self) -> None:
        """SIGSTOP. Pauses add up."""
        self.paused += 1

    def resume_process(self) -> None:
        """SIGCONT: events that have queued up are handled now, late."""
        self.paused -= 1
        while self._frozen and not self.paused:
            self._call_now(*self._frozen.popleft())

    # -- events

    def call_later(self, delay_ns: int, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do(*arguments)`` in ``delay_ns``, if this life lasts that long; if it is paused then, after the
        pause."""
        clock = self.host.clock
        clock.call_at(clock.now + delay_ns, self._call_now, self.life, do, arguments)

    def receive_message(self, sender: Peer, message: AnyMessage) -> None:
        if self.alive and not self.paused:
            self.on_message(sender, message)
        else:
            self._call_soon(self._hear_as, self.peer, sender, message)

    def submit_event(self, event: object) -> None:
        """Another part of this host posts an event."""
        self._call_soon(self.post_event, event)

    def _call_soon(self, do: Callable[..., None], *arguments: Any) -> None:
        if self.alive:
            self._call_now(self.life, do, arguments)

    def _call_now(self, life: int, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self.life != life:
            return
        if self.paused:
            self._frozen.append((life, do, arguments))
        else:
            do(*arguments)

    def _hear_as(self, meant: Peer, sender: Peer, message: AnyMessage) -> None:
        if self.peer == meant:  # else the process got a new generation while the message was in its mailbox
            self.on_message(sender, message)

    @abstractmethod
    def on_message(self, sender: Peer, message: AnyMessage) -> None:
        """Handle a message; the process is running."""

    @abstractmethod
    def post_event(self, event: object) -> None:
        """Hand ``event`` to the machine and perform its actions."""

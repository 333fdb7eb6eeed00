"""Links that share their bandwidth, and the data port on top of them.

A flow from one place to another gets the smaller of its shares of the source's outgoing and the destination's incoming
bandwidth, each shared evenly among the flows there (max-min fairness, but shares that others cannot use are lost).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memserve.base.types import KVGeometry
from memserve.kv.costs import CopyCurve
from memserve.kv.transfer.events import CancelPulls, PagesPulled, PagesSealed, PullPages, SealPages
from memserve.protocol.peers import Peer
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.hardware import SEAL_BYTE_NS
from memserve_lab.sim.nodes import MemberNode


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way. ``left_ns``: how long the rest would take alone."""

    source: str
    target: str
    left_ns: float
    done: Callable[[], None]
    speed: float = 0.0
    """1 = alone."""
    since_ns: int = 0
    turn: int = 0
    """Counts changes of speed: an end that was scheduled before the last change is void."""


class Fabric:
    """All flows of a world."""

    __slots__ = ("_clock", "_entering", "_leaving")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._leaving: dict[str, dict[Flow, None]] = {}
        self._entering: dict[str, dict[Flow, None]] = {}

    def start_flow(self, source: str, target: str, alone_ns: int, on_done: Callable[[], None]) -> None:
        """Start a flow that would take ``alone_ns`` on idle links; call ``done`` at its end."""
        flow = Flow(source, target, float(alone_ns), on_done, since_ns=self._clock.now)
        self._leaving.setdefault(source, {})[flow] = None
        self._entering.setdefault(target, {})[flow] = None
        self._shares_changed(flow)

    def _shares_changed(self, cause: Flow) -> None:
        """Update the speed of all flows that share an end with ``cause``."""
        for flow in {**self._leaving[cause.source], **self._entering[cause.target]}:
            self._change_speed(flow)

    def _change_speed(self, flow: Flow) -> None:
        now = self._clock.now
        flow.left_ns -= (now - flow.since_ns) * flow.speed
        flow.since_ns = now
        flow.speed = 1 / max(len(self._leaving[flow.source]), len(self._entering[flow.target]))
        flow.turn += 1
        self._clock.call_after(max(0, round(flow.left_ns / flow.speed)), self._end_flow, flow, flow.turn)

    def _end_flow(self, flow: Flow, turn: int) -> None:
        if turn != flow.turn:
            return
        flow.turn = -1
        del self._leaving[flow.source][flow], self._entering[flow.target][flow]
        self._shares_changed(flow)
        flow.done()


@dataclass(slots=True)
class LinkTotals:
    """Totals of what went over the links."""

    pulls: int = 0
    pulled_bytes: int = 0
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """How pages come from one peer: the time that they take alone, and what production calls the way."""

    curve: CopyCurve
    name: str


@dataclass(slots=True)
class TimedPort:
    """Sealing and pulling together take the time of the transfer's curve, or longer while others use the link. Pages
    have no contents, so all are right."""

    node: MemberNode
    fabric: Fabric
    link_to: Callable[[Peer], Link]
    geometry: KVGeometry
    totals: LinkTotals = field(default_factory=LinkTotals)

    def seal_pages(self, job: SealPages) -> None:
        """Answer when the checksums are computed; their values do not matter."""
        sealed_bytes = len(job.blocks) * (job.end_layer - job.first_layer) * self.geometry.page_bytes
        spent_ns = _sealing_ns(sealed_bytes)
        sealed = PagesSealed(job.job_id, (0,) * len(job.blocks), sealed_bytes, spent_ns)
        self.node.call_later(spent_ns, self.node.post_event, sealed)

    def pull_pages(self, job: PullPages) -> None:
        """Answer when all pages are here; with an error when there is no peer to pull from."""
        if self.node.owner_of(job) is None:
            self.node.call_later(1, self.node.post_event, PagesPulled(job.job_id, "no such peer"))
            return
        layers = job.end_layer - job.first_layer
        pieces = len(job.src_blocks) * (layers if job.by_page else 1)
        pulled_bytes = len(job.src_blocks) * layers * self.geometry.page_bytes
        link = self.link_to(job.peer)
        alone_ns = max(0, link.curve.ns(pulled_bytes, pieces) - _sealing_ns(pulled_bytes))  # the owner's part
        begun_ns, life = self.node.host.clock.now, self.node.life
        self.totals.pulls += 1
        self.totals.pulled_bytes += pulled_bytes

        def arrived() -> None:
            spent_ns = self.node.host.clock.now - begun_ns
            self.totals.waited_ns += spent_ns - alone_ns
            error = "" if self.node.owner_of(job) is not None else "the peer is gone"
            pulled = PagesPulled(job.job_id, error, pulled_bytes, link.name, spent_ns)
            if self.node.life == life:
                self.node.call_later(0, self.node.post_event, pulled)

        self.fabric.start_flow(job.peer.name, self.node.peer.name, alone_ns, arrived)

    def cancel_pulls(self, job: CancelPulls) -> None:
        """Pulls that have begun go on, and are answered."""


def _sealing_ns(sealed_bytes: int) -> int:
    return round(SEAL_BYTE_NS * sealed_bytes)

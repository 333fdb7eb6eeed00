"""What every member of a cluster has in virtual time, whatever its machine: a mailbox, and a port for pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from memserve.instance.events import DialRouter, MeetPeer, PartFromPeer
from memserve.instance.member import ANY_ROUTER
from memserve.kv_transfer.events import CancelPulls, PullPages, SealPages
from memserve.messages import ROUTER, AnyMessage, Peer
from memserve.sim.clock import Clock
from memserve.sim.network import Network
from memserve.sim.process import Process


class DataPort(Protocol):
    """Moves pages beside the device. Each job but a cancellation is answered through ``node.post``, at its time."""

    def seal(self, job: SealPages) -> None:
        """Answer with ``PagesSealed``."""

    def pull(self, job: PullPages) -> None:
        """Answer with ``PagesPulled``."""

    def cancel(self, job: CancelPulls) -> None:
        """Pulls from a peer need not begin; each is answered all the same."""


class Addressed(Protocol):
    """A router."""

    @property
    def address(self) -> str:
        """Where it is reached."""


class MemberHost(Protocol):
    """A world with members."""

    @property
    def clock(self) -> Clock:
        """Virtual time."""

    @property
    def network(self) -> Network:
        """The wires between the nodes."""

    @property
    def router(self) -> Addressed:
        """The one router there is."""

    @property
    def tells(self) -> bool:
        """Whether :meth:`say` is wanted: else no lines are built."""

    def handled(self, node: Process, event: object, actions: Sequence[object]) -> None:
        """A machine has handled ``event``; none of ``actions`` is done yet."""

    def say(self, line: str, what: object = "") -> None:
        """Something worth telling happened; ``what`` is written out only when it is read."""


class MemberNode(Process):
    """Hosts a machine that is a member of a cluster, or has one in it."""

    host: MemberHost
    port: DataPort

    def forget_lines(self) -> None:
        """A process that starts knows no other member, and no router."""
        #: what the mailbox knows: other members by name, and where it looks for a router
        self._lines: dict[str, Peer] = {}
        self._dialled: DialRouter | None = None

    def line(self, action: DialRouter | MeetPeer | PartFromPeer) -> None:
        """The mailbox gets to know a member, or forgets it, or looks for a router elsewhere."""
        match action:
            case DialRouter():
                self._dialled = action
            case MeetPeer(info):
                self._lines[info.peer.name] = info.peer
            case PartFromPeer(peer):
                del self._lines[peer.name]

    def port_job(self, job: SealPages | PullPages | CancelPulls) -> None:
        """Have pages sealed or moved."""
        match job:
            case SealPages():
                self.port.seal(job)
            case PullPages():
                self.port.pull(job)
            case CancelPulls():
                self.port.cancel(job)

    def send(self, to: Peer, message: AnyMessage) -> None:
        """Messages to peers that the mailbox does not know, and to an address without a router, are lost."""
        if self._reaches_router(to) if to.name == ROUTER else self._lines.get(to.name) == to:
            self.host.network.send(self.peer, to, message)
        elif self.host.tells:
            self.host.say(f"      lost: {self.peer.name} does not reach {to}: ", message)

    def _reaches_router(self, to: Peer) -> bool:
        """Only the router that was dialled, or whichever is there if any was meant."""
        line = self._dialled
        return line is not None and line.address == self.host.router.address and to in (line.router, ANY_ROUTER)

    def owner_of(self, job: PullPages) -> MemberNode | None:
        """The living process whose pages ``job`` is to read. None: it is unknown here, or of another generation."""
        node = self.host.network.nodes.get(job.peer.name)
        if isinstance(node, MemberNode) and node.peer == job.peer and self._lines.get(job.peer.name) == job.peer:
            return node
        return None

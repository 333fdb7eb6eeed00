"""The process of a store in virtual time: what ``runtime/store_host`` does around its machine, without threads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from memserve.errors import check
from memserve.instance.events import BecomeNew, DialRouter, DrainAsked, MeetPeer, Notice, PartFromPeer, Reborn
from memserve.kv_transfer.events import CancelPulls, PullPages, SealPages
from memserve.messages import AnyMessage, Peer
from memserve.serving import MessageArrived, Send
from memserve.sim.member_node import DataPort, MemberHost, MemberNode
from memserve.store import disk_events as disk
from memserve.store.events import Ended, SealExtents, StoreAction
from memserve.store.machine import StoreMachine


class StoreDevices(Protocol):
    """The disks of a store, and what computes checksums. Each job is answered through ``node.post``, at its time."""

    def perform(self, action: disk.DiskAction) -> None:
        """Answer with ``DiskDone`` where the action has an answer."""

    def seal(self, job: SealExtents) -> None:
        """Answer with ``ExtentsSealed``."""


class StoreNode(MemberNode):
    """Hosts a ``StoreMachine``, its disks and its data port. It has no clients but the cluster's instances."""

    machine: StoreMachine
    devices: StoreDevices

    def __init__(self, host: MemberHost, name: str, generation: int = 0) -> None:
        """Boots at once. ``generation``: of the process before it."""
        super().__init__(host, Peer(name, generation))
        self.boot()

    # -- life

    def boot(self) -> None:
        """A new process under the same name, which finds what the world has kept of its memory and its disks."""
        self.begin_life()
        self.forget_lines()
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.machine = self.new_machine()
        self.devices = self.new_devices()
        self.port = self.new_port()
        self._conclude(None, self.machine.start(self.now))

    @abstractmethod
    def new_machine(self) -> StoreMachine:
        """The machine of the process that starts now as ``peer``."""

    @abstractmethod
    def new_devices(self) -> StoreDevices:
        """Its disks."""

    @abstractmethod
    def new_port(self) -> DataPort:
        """Its way to the pages of others."""

    def drain(self, patience_ns: int) -> None:
        """Its operator ends it: what is to be written is written before, for ``patience_ns`` at most."""
        self.submit(DrainAsked(patience_ns, "asked"))

    def ended(self, refused: str) -> None:
        """The process has ended, because it was asked to, or was ``refused`` by the router."""

    # -- in

    def hear(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.say(f"{self.peer.name} <- {sender.name}: ", message)
        self.post(MessageArrived(sender, message))

    def post(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self._conclude(event, actions)

    def _conclude(self, event: object, actions: Sequence[StoreAction]) -> None:
        self.host.handled(self, event, actions)
        life = self.life
        for action in actions:
            self._perform(action)
            if self.life != life:
                return  # it has ended
        self.ticking.look(self.machine.next_deadline_ns)

    # -- out

    def _perform(self, action: StoreAction) -> None:
        match action:
            case Send(to, message):
                self.send(to, message)
            case SealPages() | PullPages() | CancelPulls():
                self.port_job(action)
            case SealExtents():
                self.devices.seal(action)
            case DialRouter() | MeetPeer() | PartFromPeer():
                self.line(action)
            case BecomeNew():
                self.peer = Peer(self.peer.name, action.generation_min)
                self.post(Reborn(replace(self.machine.info, peer=self.peer)))
            case Notice(text):
                self.host.say(f"{self.peer.name}: {text}")
            case Ended(refused):
                self.kill()
                self.ended(refused)
            case (
                disk.WritePages() | disk.WriteExtent() | disk.ReadExtent() | disk.ReadRecord()
                | disk.WriteRecord() | disk.DropRecord() | disk.SyncDisk() | disk.ForgetDisk()
            ):  # fmt: skip
                self.devices.perform(action)
            case _:
                check(False, f"no part of this world does {action!r}")

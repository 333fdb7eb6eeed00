"""Disks that only know how long their jobs take, and the jobs of a store's host on them.

A disk works on ``depth`` jobs at once; others wait in order. A job first takes the latency of its kind, beside all
others; then its bytes share the disk's bandwidth evenly with those of all other jobs, reads and writes alike::

    wait for one of depth places --> latency --> bytes, shared --> read: checksum, one after the other --> DiskDone

KV has no contents in virtual time. A record is its head, as production writes it: so what is read is still compared
with the key, length and checksum that were meant.

The process of a store in virtual time: what ``store/host/process`` does around its machine, without threads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from msgspec.structs import replace

from memserve._core import SegmentLog
from memserve.base.errors import UserError, check
from memserve.base.units import NS_PER_MS, NS_PER_S, NS_PER_US, ceil_div
from memserve.kv.costs import CopyCurve
from memserve.kv.transfer.events import CancelPulls, PullPages, SealPages
from memserve.protocol.events import MessageArrived, Send
from memserve.protocol.member_events import (
    AddPeer,
    ChangeGeneration,
    ConnectRouter,
    DrainRequested,
    GenerationChanged,
    LogWarning,
    RemovePeer,
)
from memserve.protocol.messages import AnyMessage
from memserve.protocol.peers import Peer
from memserve.store.disks import events as disk
from memserve.store.disks import events as ev
from memserve.store.disks.events import PAGE_BYTES
from memserve.store.machine.events import Ended, ExtentsSealed, SealExtents, StoreAction
from memserve.store.machine.machine import StoreMachine
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.hardware import SEAL_BYTE_NS, find
from memserve_lab.sim.nodes import DataPort, MemberHost, MemberNode
from memserve_lab.sim.process import Process

DEPTH = 32
"""Records that a disk works on at once: ``store/host/disks`` gives it 64 operations, and a record is two."""
SEALERS = 2
"""Threads of a store that compute checksums of its memory, as in ``store/host/memory_jobs``."""
TABLE_SECRET = b"simulated tables"
"""By which a store's tables hash: how much memory they take is the same in every process."""
NS_PER_MINUTE = 60 * NS_PER_S
_DONE_NS = 0.5  # work of less than this is over


@dataclass(frozen=True, slots=True)
class DiskModel:
    """One kind of disk."""

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    read_latency_ns: int
    write_latency_ns: int
    sync_ns: int
    source: str
    depth: int = DEPTH

    @property
    def curve(self) -> CopyCurve:
        """Reading, checksums included, as a store finds it at its start: what decisions use. The store's own work for
        each block, which a real store adds, takes no virtual time."""
        return CopyCurve(float(self.read_latency_ns), 0.0, NS_PER_S / self.read_bytes_per_s + SEAL_BYTE_NS)


DISKS = {
    disk.name: disk
    for disk in (
        DiskModel(
            "nvme", 6.5e9, 3.5e9, 90 * NS_PER_US, 25 * NS_PER_US, 100 * NS_PER_US,
            "Samsung PM9A3 U.2 (PCIe 4 x4), announced figures; latencies assumed",
        ),
        DiskModel(
            "sata", 0.55e9, 0.52e9, 150 * NS_PER_US, 60 * NS_PER_US, 1 * NS_PER_MS,
            "the interface's 6 Gbit/s; latencies assumed",
        ),
        DiskModel(
            "virtual", 1.9e9, 2.1e9, 240 * NS_PER_US, 60 * NS_PER_US, 2 * NS_PER_MS,
            "fitted to O_DIRECT on a cloud's virtual disk: reads of 64 KB, 256 KB and 1 MB at 0.7, 1.1 and 1.3 GB/s "
            "one at a time, writes of 1 MB at 2.1 GB/s; time of a sync assumed",
        ),
    )
}  # fmt: skip


def disk_model(text: str) -> DiskModel:
    """A disk by its name, or of a speed ``READ/WRITE`` in GB/s with the latencies of ``nvme``. Raises
    :class:`UserError`."""
    read, slash, write = text.partition("/")
    if not slash:
        return find(DISKS, text, "disk")
    try:
        speeds = float(read) * 1e9, float(write) * 1e9
    except ValueError:
        speeds = 0.0, 0.0
    if not all(0 < speed < 1e15 for speed in speeds):
        hint = f"one of {', '.join(DISKS)}, or READ/WRITE in GB/s: 6.5/3.5"
        raise UserError(f"cannot read {text!r} as a disk", hint=hint)
    usual = DISKS["nvme"]
    source = "bandwidth as given, latencies as nvme"
    return DiskModel(text, *speeds, usual.read_latency_ns, usual.write_latency_ns, usual.sync_ns, source)


class Shares:
    """Jobs that share one resource evenly: each of ``n`` progresses at ``1 / n`` of its speed alone."""

    __slots__ = ("_clock", "_jobs", "_number", "_progress_ns", "_since_ns", "_turn")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._progress_ns = 0.0  # work that each job has got which has been here all the time
        self._since_ns = 0
        self._jobs: list[tuple[float, int, Callable[[], None]]] = []  # by the progress at which they end
        self._number = self._turn = 0

    def start_job(self, alone_ns: float, on_done: Callable[[], None]) -> None:
        """Begin with what takes ``alone_ns`` alone; call ``done`` at its end."""
        self._go_on()
        self._number += 1
        heappush(self._jobs, (self._progress_ns + alone_ns, self._number, on_done))
        self._plan_end()

    def _go_on(self) -> None:
        now = self._clock.now
        if self._jobs:
            self._progress_ns += (now - self._since_ns) / len(self._jobs)
        self._since_ns = now

    def _plan_end(self) -> None:
        self._turn += 1
        if self._jobs:
            left_ns = (self._jobs[0][0] - self._progress_ns) * len(self._jobs)
            self._clock.call_after(max(0, round(left_ns)), self._end_jobs, self._turn)

    def _end_jobs(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._go_on()
        jobs_ended = []
        while self._jobs and self._jobs[0][0] - self._progress_ns < _DONE_NS:
            jobs_ended.append(heappop(self._jobs)[2])
        self._plan_end()
        for on_done in jobs_ended:
            on_done()


class TimedDisk:
    """One disk, whatever processes use it. Bytes are counted when the disk has moved them."""

    def __init__(self, clock: Clock, model: DiskModel) -> None:
        self.model = model
        self.read_bytes = self.written_bytes = 0
        self.busy_ns = 0
        """Time in which the disk had a job."""
        self.written_by_minute: Counter[int] = Counter()
        self._clock = clock
        self._shares = Shares(clock)
        self._waiting: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._running = 0
        self._busy_since_ns = 0

    def begin_read(self, nbytes: int, on_done: Callable[[], None]) -> None:
        """Read; call ``done`` at the end."""
        self._submit_job(nbytes, 0, on_done)

    def begin_write(self, nbytes: int, on_done: Callable[[], None]) -> None:
        """Write; call ``done`` at the end."""
        self._submit_job(0, nbytes, on_done)

    def sync_writes(self, on_done: Callable[[], None]) -> None:
        """Make safe what was written. It takes its time beside the others, and no place among them."""
        self._clock.call_after(self.model.sync_ns, on_done)

    def _submit_job(self, read: int, written: int, on_done: Callable[[], None]) -> None:
        if self._running == self.model.depth:
            self._waiting.append((read, written, on_done))
            return
        if not self._running:
            self._busy_since_ns = self._clock.now
        self._running += 1
        self._begin_job(read, written, on_done)

    def _begin_job(self, read: int, written: int, on_done: Callable[[], None]) -> None:
        model = self.model
        work_ns = NS_PER_S * (read / model.read_bytes_per_s + written / model.write_bytes_per_s)
        latency_ns = model.read_latency_ns if read else model.write_latency_ns
        self._clock.call_after(
            latency_ns, self._shares.start_job, work_ns, lambda: self._end_job(read, written, on_done)
        )

    def _end_job(self, read: int, written: int, on_done: Callable[[], None]) -> None:
        self.read_bytes += read
        if written:
            self.written_bytes += written
            self.written_by_minute[self._clock.now // NS_PER_MINUTE] += written
        if self._waiting:
            self._begin_job(*self._waiting.popleft())
        else:
            self._running -= 1
            if not self._running:
                self.busy_ns += self._clock.now - self._busy_since_ns
        on_done()


class OneAfterTheOther:
    """Threads that take jobs in order, each a job at a time."""

    def __init__(self, clock: Clock, threads: int = 1) -> None:
        self._clock = clock
        self._free_ns = [0] * threads

    def run_after(self, spent_ns: int, do: Callable[[], None]) -> None:
        """Call ``do`` when the first thread that is free has spent ``spent_ns`` on the job."""
        thread = min(range(len(self._free_ns)), key=self._free_ns.__getitem__)
        self._free_ns[thread] = max(self._clock.now, self._free_ns[thread]) + spent_ns
        self._clock.call_at(self._free_ns[thread], do)


class TimedDisks:
    """Performs the jobs of one store's life on its disks, and computes its checksums."""

    def __init__(self, node: Process, disks: Sequence[TimedDisk]) -> None:
        clock = node.host.clock
        self._node, self._disks = node, disks
        self._heads: list[dict[int, bytes]] = [{} for _ in disks]  # by offset; KV has no name behind it
        self._checkers = [OneAfterTheOther(clock) for _ in disks]
        self._sealers = OneAfterTheOther(clock, SEALERS)

    def seal_extents(self, job: SealExtents) -> None:
        """Answer when the checksums are computed; their values do not matter."""
        nbytes = sum(length for _, length in job.extents)
        sealed = ExtentsSealed(job.job, (0,) * len(job.extents))
        self._sealers.run_after(round(SEAL_BYTE_NS * nbytes), self._answer_with(sealed))

    def perform_action(self, action: ev.DiskAction) -> None:
        """Begin with a job."""
        match action:
            case ev.DropRecord():
                return
            case ev.WritePages(job, number, _, data):
                self._disks[number].begin_write(len(data), self._answer_with(ev.DiskDone(job, True)))
            case ev.SyncDisk(job, number):
                self._disks[number].sync_writes(self._answer_with(ev.DiskDone(job, True)))
            case ev.WriteExtent(job, number, offset, head, _, length, inside):
                check(not inside, "a block of KV is larger than a page")
                self._write_record(job, number, offset, head, length)
            case ev.WriteRecord(job, number, offset, head, _, length):
                self._write_record(job, number, offset, head, length)
            case ev.ReadExtent(job, number, offset, _, length) | ev.ReadRecord(job, number, offset, length):
                self._read_record(job, number, offset, length)
            case _:
                check(False, f"no disk here does {action!r}")

    def _write_record(self, job: int, number: int, offset: int, head: bytes, length: int) -> None:
        def written() -> None:
            self._heads[number][offset] = head[: SegmentLog.HEAD_BYTES]
            self._answer_with(ev.DiskDone(job, True))()

        self._disks[number].begin_write(_record_bytes(length), written)

    def _read_record(self, job: int, number: int, offset: int, length: int) -> None:
        def arrived() -> None:
            head = self._heads[number][offset].ljust(PAGE_BYTES, b"\0")
            job_done = ev.DiskDone(job, True, 0, head)
            self._checkers[number].run_after(round(SEAL_BYTE_NS * length), self._answer_with(job_done))

        self._disks[number].begin_read(_record_bytes(length), arrived)

    def _answer_with(self, event: object) -> Callable[[], None]:
        """Posts ``event`` when it is called, unless the process has ended by then."""
        node, life = self._node, self._node.life

        def post() -> None:
            if node.life == life:
                node.submit_event(event)

        return post


def _record_bytes(length: int) -> int:
    """Head and payload, in whole pages."""
    return PAGE_BYTES * (1 + ceil_div(length, PAGE_BYTES))


class StoreDevices(Protocol):
    """The disks of a store, and what computes checksums. Each job is answered through ``node.post``, at its time."""

    def perform_action(self, action: disk.DiskAction) -> None:
        """Answer with ``DiskDone`` where the action has an answer."""

    def seal_extents(self, job: SealExtents) -> None:
        """Answer with ``ExtentsSealed``."""


class StoreNode(MemberNode):
    """Hosts a ``StoreMachine``, its disks and its data port. It has no clients but the cluster's instances."""

    machine: StoreMachine
    devices: StoreDevices

    def __init__(self, host: MemberHost, name: str, generation: int = 0) -> None:
        """Boots at once. ``generation``: of the process before it."""
        super().__init__(host, Peer(name, generation))
        self.boot_process()

    # -- life

    def boot_process(self) -> None:
        """A new process under the same name, which finds what the world has kept of its memory and its disks."""
        self.begin_life()
        self.forget_lines()
        self.peer = Peer(self.peer.name, self.peer.generation + 1)
        self.machine = self.new_machine()
        self.devices = self.new_devices()
        self.port = self.new_port()
        self._conclude_event(None, self.machine.start(self.now))

    @abstractmethod
    def new_machine(self) -> StoreMachine:
        """The machine of the process that starts now as ``peer``."""

    @abstractmethod
    def new_devices(self) -> StoreDevices:
        """Its disks."""

    @abstractmethod
    def new_port(self) -> DataPort:
        """Its way to the pages of others."""

    def drain_store(self, patience_ns: int) -> None:
        """Its operator ends it: what is to be written is written before, for ``patience_ns`` at most."""
        self.submit_event(DrainRequested(patience_ns, "asked"))

    def on_ended(self, refused: str) -> None:
        """The process has ended, because it was asked to, or was ``refused`` by the router."""

    # -- in

    def on_message(self, sender: Peer, message: AnyMessage) -> None:
        if self.host.tells:
            self.host.log_line(f"{self.peer.name} <- {sender.name}: ", message)
        self.post_event(MessageArrived(sender, message))

    def post_event(self, event: object) -> None:
        actions = self.machine.handle(event, self.now)  # type: ignore[arg-type]  # callers post events of this machine only
        self._conclude_event(event, actions)

    def _conclude_event(self, event: object, actions: Sequence[StoreAction]) -> None:
        self.host.on_handled(self, event, actions)
        life = self.life
        for action in actions:
            self._perform_action(action)
            if self.life != life:
                return  # it has ended
        self.ticking.plan_tick(self.machine.next_deadline_ns)

    # -- out

    def _perform_action(self, action: StoreAction) -> None:
        match action:
            case Send(to, message):
                self.send_message(to, message)
            case SealPages() | PullPages() | CancelPulls():
                self.port_job(action)
            case SealExtents():
                self.devices.seal_extents(action)
            case ConnectRouter() | AddPeer() | RemovePeer():
                self.change_connections(action)
            case ChangeGeneration():
                self.peer = Peer(self.peer.name, action.generation_min)
                self.post_event(GenerationChanged(replace(self.machine.info, peer=self.peer)))
            case LogWarning(text):
                self.host.log_line(f"{self.peer.name}: {text}")
            case Ended(refused):
                self.kill_process()
                self.on_ended(refused)
            case (
                disk.WritePages() | disk.WriteExtent() | disk.ReadExtent() | disk.ReadRecord()
                | disk.WriteRecord() | disk.DropRecord() | disk.SyncDisk() | disk.ForgetDisk()
            ):  # fmt: skip
                self.devices.perform_action(action)
            case _:
                check(False, f"no part of this world does {action!r}")

"""Reading peers over NIXL: between hosts, and wherever memory cannot be mapped.

Without progress on the owner's side a READ does not end: over TCP because the owner sends, on one host because the
connection takes both. NIXL's own thread costs 60 % of a core while nothing happens (1.5, UCX). Ours looks now and
then, and often for a while after pages were sealed, for then a peer is about to read them, and after a peer said that
it reads.

UCX listens where the process does: on the network device of the host that it was given, and the RDMA adapters behind
that (``UCX_NET_DEVICES`` in the environment says otherwise). It asks no peer for the cluster's secret, and encrypts
nothing: this link is for networks that are said to be trusted. Instances on one host need no NIXL.

Over TCP a READ is a request that the owner's UCX answers. UCX 1.23 takes an answer that cannot be sent for a bug of its
own, and aborts: a reader that is killed, or whose connection breaks, takes with it the processes that it reads at that
moment. RDMA adapters read without the owner. So ``trusted`` has NIXL only with them (``data_port.py``).

A thread that looks after something: often for a while, then now and then.

Reads go through slots: memory of ours that READs may write, whatever became of them. A READ that was given up can
still write. Over TCP (NIXL 1.5, UCX), most of 64 MB landed after the handle had been released and the agent removed,
when a stopped peer went on. So nothing is read into an arena: ranges land in a slot, and are copied from there while
they are checksummed, which has to be done anyway. The slot of a READ that was given up is used again when NIXL says
that it is over, and not before.

A read goes through two slots at a time: one fills while the other is copied.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from memserve import _core
from memserve.base.types import Tier
from memserve.base.units import MIB, NS_PER_S, ns_from_s
from memserve.protocol.peers import ArenaPlace, Peer, PeerInfo
from memserve.transport.links.gpu_memory import GpuMemory, land_ranges, shards_of
from memserve.transport.links.nixl_agent import Agent, Transfer
from memserve.transport.ports import ArenaMemory, Arenas, LinkError, Seals, Travelled, check_ranges, place_of
from memserve.transport.ranges import Ranges, Shards, cut_pieces

SLOTS_MAX = 64
_SPINS = 64
_POLL_S = 50e-6
"""Between looks at a READ that did not end at once."""

Slot = _core.Arena | GpuMemory

_never_freed: list[object] = []
"""What READs may still write, of readers that were closed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Filling:
    """A slot that READs write."""

    slot: Slot
    landing: Ranges
    """From the slot into the arena."""
    transfers: list[tuple[str, Transfer]]
    """With the agents that are read: one, or more where the source is in shards."""
    stalled_at_ns: int

    def is_over(self) -> bool:
        """Whether nothing writes the slot any more; lets NIXL work on it."""
        return all(transfer.is_over() for _, transfer in self.transfers)

    @property
    def has_succeeded(self) -> bool:
        """Of what is over."""
        return all(transfer.has_succeeded for _, transfer in self.transfers)


@dataclass(frozen=True, slots=True)
class SlotSource:
    """Where a peer's arena is read: one memory, or the shards of all its workers."""

    agent_names: tuple[str, ...]
    """Of the process that has each memory."""
    addresses: tuple[int, ...]
    on_gpu: bool
    shards: Shards = ()


class SlotReader:
    """Reads ranges of any length up to ``slot_bytes`` from peers' agents. Thread-safe."""

    def __init__(
        self,
        agent: Agent,
        slot_bytes: int,
        stall_ns: int,
        make: Callable[[int], Slot] = _core.Arena,
    ) -> None:
        """``make``: memory for a slot; on the GPU where what is read goes there."""
        self._agent = agent
        self._make = make
        self._slot_bytes = slot_bytes
        self._stall_ns = stall_ns
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._made = 0
        self._abandoned: list[_Filling] = []
        """READs that were given up but were not over when last looked at."""

    def read(self, source: SlotSource, target: ArenaMemory, ranges: Ranges, is_wanted: Callable[[], bool]) -> Seals:
        """Copy ``ranges`` from a peer's arena into one of ours; one checksum each of what was written.

        Raises :class:`LinkError` when a slot does not fill in time, or is not wanted any more.
        """
        if ranges.range_bytes > self._slot_bytes:
            raise LinkError(f"ranges of {ranges.range_bytes} bytes are longer than a slot")
        for agent_name in dict.fromkeys(source.agent_names):
            self._agent.announce_read(agent_name)
        step = self._slot_bytes // ranges.range_bytes
        seals: list[Seals] = []
        filling: deque[_Filling] = deque()
        try:
            for begin in range(0, len(ranges), step):
                filling.append(self._fill_slot(source, ranges.slice_ranges(begin, begin + step)))
                if len(filling) == 2:
                    seals.append(self._land_slot(filling, target, is_wanted))
            while filling:
                seals.append(self._land_slot(filling, target, is_wanted))
        finally:
            for abandoned in filling:
                self._abandon_slot(abandoned)
        return np.concatenate(seals) if seals else np.zeros(0, np.uint64)

    def sweep_abandoned(self) -> set[str]:
        """Take back what is over; the names of agents from which something is still under way."""
        with self._lock:
            states = [(filling, filling.is_over()) for filling in self._abandoned]
            self._abandoned = [filling for filling, is_over in states if not is_over]
            busy = {name for filling in self._abandoned for name, _ in filling.transfers}
        for filling, is_over in states:
            if is_over:
                self._recycle_slot(filling)
        return busy

    def close(self, *, keeps_agent: bool = False) -> None:
        """Give the slots back, and the agent; what may still be written stays for as long as the process lives.

        ``keeps_agent``: another reader's slots may still be written."""
        if self.sweep_abandoned() or keeps_agent:
            _never_freed.append((self._agent, self._abandoned))
        else:
            self._agent.close()
        self._free.clear()

    def _fill_slot(self, source: SlotSource, part: Ranges) -> _Filling:
        """Post the READs of a slot: each memory's pieces go to where the whole ranges have them."""
        slot = self._take_slot()
        offsets = np.arange(len(part), dtype=np.int64) * part.range_bytes
        on_gpu = source.on_gpu, isinstance(slot, GpuMemory)
        landing = Ranges(offsets, part.dst_offsets, part.range_bytes)
        filling = _Filling(slot, landing, [], time.monotonic_ns() + self._stall_ns)
        try:
            for piece in cut_pieces(Ranges(part.src_offsets, part.src_offsets, part.range_bytes), source.shards):
                name, address = source.agent_names[piece.source], source.addresses[piece.source]
                places = offsets[piece.owners] + piece.begins
                into_slot = Ranges(piece.ranges.src_offsets, places, piece.ranges.range_bytes)
                transfer = self._agent.post_read(name, address, slot.address, into_slot, on_gpu)
                filling.transfers.append((name, transfer))
        except BaseException:
            self._abandon_slot(filling)  # what was posted may still write the slot
            raise
        return filling

    def _land_slot(self, filling: deque[_Filling], target: ArenaMemory, is_wanted: Callable[[], bool]) -> Seals:
        """Wait until the first slot is full, then copy it out."""
        full = filling[0]
        self._wait_for_slot(full, is_wanted)
        if not full.has_succeeded:
            raise LinkError("reading over NIXL failed")
        landing = full.landing
        seals = land_ranges(target, landing.dst_offsets, full.slot, landing.src_offsets, landing.range_bytes)
        self._recycle_slot(filling.popleft())
        return seals

    def _wait_for_slot(self, filling: _Filling, is_wanted: Callable[[], bool]) -> None:
        polls = 0
        while not filling.is_over():
            polls += 1
            if not is_wanted():
                raise LinkError("the peer is gone")
            if time.monotonic_ns() > filling.stalled_at_ns:
                raise LinkError(f"the peer sent nothing for {self._stall_ns / NS_PER_S:.1f} s")
            if polls > _SPINS:
                time.sleep(_POLL_S)

    def _abandon_slot(self, filling: _Filling) -> None:
        if filling.is_over():
            self._recycle_slot(filling)
        else:
            with self._lock:
                self._abandoned.append(filling)

    def _recycle_slot(self, filling: _Filling) -> None:
        for _, transfer in filling.transfers:
            transfer.release_handle()
        self._return_slot(filling.slot)

    def _take_slot(self) -> Slot:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made == SLOTS_MAX:
                raise LinkError(f"all {SLOTS_MAX} slots are held by reads that did not end")
            self._made += 1
        try:
            slot = self._make(self._slot_bytes)
            self._agent.register_memory(slot.address, self._slot_bytes, on_gpu=isinstance(slot, GpuMemory))
        except BaseException:
            with self._lock:
                self._made -= 1
            raise
        return slot

    def _return_slot(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot)


_PACE = ((0.01, 0.0001), (0.1, 0.0005), (2.0, 0.002))
"""``(age_s, pause_s)``: how long to sleep between looks, until so long after the last call of ``look_often``."""
_SLOW_S = 0.05


class PollThread:
    """Calls ``attend`` again and again, until it returns False; then not before the next ``look_often``."""

    def __init__(self, poll: Callable[[], bool]) -> None:
        self._poll = poll
        self._changed = threading.Condition()
        self._poll_requested = False
        self._closed = False
        self._busy_since_s = 0.0
        self._thread = threading.Thread(target=self._run_polls, name="nixl poll", daemon=True)
        self._thread.start()

    def poll_soon(self) -> None:
        """Something is about to happen."""
        with self._changed:
            self._busy_since_s = time.monotonic()
            self._poll_requested = True
            self._changed.notify()

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run_polls(self) -> None:
        while True:
            pause_s = self._pause_s() if self._poll() else None
            with self._changed:
                self._changed.wait_for(lambda: self._poll_requested or self._closed, pause_s)
                self._poll_requested = False
                if self._closed:
                    return

    def _pause_s(self) -> float:
        age_s = time.monotonic() - self._busy_since_s
        return next((pause_s for until_s, pause_s in _PACE if age_s < until_s), _SLOW_S)


log = logging.getLogger(__name__)

SLOT_BYTES_MIN = 4 * MIB
"""A slot holds this much, or one block when that is larger."""
STALL_S = 4.0
"""A slot that does not fill within this time is given up, and the read with it."""


class ServingAgent:
    """The agent of a worker that is not the leader: peers read its GPU's memory, and it reads nothing.

    Raises :class:`UserError` when NIXL is not installed, or does not start.
    """

    def __init__(self, memory: GpuMemory, host: str | None) -> None:
        self._agent = Agent(_agent_name(), host)
        self._agent.register_memory(memory.address, len(memory.tensor), on_gpu=True)
        #: what peers need to read it
        self.metadata = self._agent.export_metadata()
        self._poll_thread = PollThread(self._poll_agent)

    def expect_reads(self) -> None:
        """Peers will read in a moment."""
        self._poll_thread.poll_soon()

    def close(self) -> None:
        """No peer reads any more."""
        self._poll_thread.close()
        self._agent.close()

    def _poll_agent(self) -> bool:
        try:
            if self._agent.poll_notifications():
                self._poll_thread.poll_soon()
        except LinkError as error:
            log.warning("%s", error)
        return True


def _agent_name() -> str:
    return f"memserve {os.getpid()} {time.time_ns():x}"


class NixlLink:
    """A :class:`PageLink` over NIXL with UCX: RDMA, TCP, or one copy by the kernel on the same host.

    Raises :class:`UserError` when NIXL is not installed, or does not start.
    """

    name = "nixl"
    workers = 4

    def __init__(self, arenas: Arenas, block_bytes: int, *, stall_s: float = STALL_S, host: str | None = None) -> None:
        self._arenas = arenas
        self._agent = Agent(_agent_name(), host)
        for arena in arenas.values():
            on_gpu = isinstance(arena, GpuMemory)  # of several GPUs: the others are read by their workers' agents
            nbytes = len(arena.tensor) if isinstance(arena, GpuMemory) else arena.nbytes
            self._agent.register_memory(arena.address, nbytes, on_gpu=on_gpu)
        self._metadata = self._agent.export_metadata()  # without slots: no peer may read those
        sizes = max(SLOT_BYTES_MIN, block_bytes), ns_from_s(stall_s)
        self._reader = SlotReader(self._agent, *sizes)
        gpus = [arena for arena in arenas.values() if isinstance(arena, GpuMemory)]
        #: reads into GPU memory, which pass through slots there
        self._gpu_reader = SlotReader(self._agent, *sizes, make=gpus[0].allocate_like) if gpus else None
        self._lock = threading.Lock()
        self._peers: dict[Peer, PeerInfo] = {}
        self._names: dict[Peer, dict[bytes, str]] = {}
        """Agents of peers that were read from, by their metadata; generations of one process share theirs."""
        self._reading: Counter[str] = Counter()
        """Reads under way, by agent."""
        self._leaving: list[str] = []
        """Agents without a peer, to be removed once nothing is under way from them."""
        self._broken: set[str] = set()
        """Agents from which a read failed: to be connected to anew."""
        self._poll_thread = PollThread(self._poll_agent)

    def describe(self, info: PeerInfo) -> PeerInfo:
        """Add the agent, where those of all workers are there."""
        shards = [shard for place in info.arenas for shard in place.shards[1:]]
        all_there = all(shard.nixl_agent for shard in shards)
        return msgspec.structs.replace(info, nixl_agent=self._metadata if all_there else b"")

    def reaches(self, info: PeerInfo) -> bool:
        """It has an agent as well."""
        return bool(info.nixl_agent)

    def add_peer(self, info: PeerInfo) -> None:
        """Remember its agent, and be there when it reads."""
        with self._lock:
            self._peers[info.peer] = info
        self._poll_thread.poll_soon()

    def remove_peer(self, peer: Peer) -> None:
        """A read under way notices, and its slots are abandoned."""
        with self._lock:
            self._peers.pop(peer, None)
            names = self._names.pop(peer, {}).values()
            still = {name for agent_names in self._names.values() for name in agent_names.values()}
            self._leaving += [name for name in names if name not in still]

    def expect_reads(self) -> None:
        """Look more often for a while, if there are peers."""
        if self._peers:
            self._poll_thread.poll_soon()
            for arena in self._arenas.values():
                if isinstance(arena, GpuMemory):
                    arena.on_expected()

    def read(
        self, peer: Peer, src_tier: Tier, dst_tier: Tier, ranges: Ranges, travelled: Travelled | None = None
    ) -> Seals:
        """Read slot by slot, then copy and checksum each. Raises :class:`LinkError`."""
        target = self._arenas.get(dst_tier)
        if target is None:
            raise LinkError(f"no {dst_tier.name} here")
        place, source = self._start_read(peer, src_tier)
        try:
            check_ranges(ranges, place.arena_bytes, target.nbytes)
            return self._read_slots(peer, source, target, ranges)
        finally:
            with self._lock:
                self._reading.subtract(source.agent_names)

    def close(self) -> None:
        """Stop attending, give agent and slots back."""
        self._poll_thread.close()
        keeps_agent = bool(self._sweep_slots())
        for reader in filter(None, (self._gpu_reader, self._reader)):
            reader.close(keeps_agent=keeps_agent)

    def _sweep_slots(self) -> set[str]:
        """Agents from which something is still under way."""
        return self._reader.sweep_abandoned() | (
            self._gpu_reader.sweep_abandoned() if self._gpu_reader is not None else set()
        )

    def _start_read(self, peer: Peer, tier: Tier) -> tuple[ArenaPlace, SlotSource]:
        """Where the peer's tier lies, and how it is read; from now on a read is under way from its agents."""
        with self._lock:
            info = self._peers.get(peer)
            if info is None:
                raise LinkError(f"{peer.name} is gone")
            place = place_of(info, tier)
            try:
                shards = shards_of(place, info.geometry)
            except ValueError as error:
                raise LinkError(str(error)) from error
            agents = [shard.nixl_agent or info.nixl_agent for shard in place.shards] or [info.nixl_agent]
            addresses = tuple(shard.address for shard in place.shards) or (place.address,)
            agent_names = self._names.setdefault(peer, {})
            for metadata in agents:
                name = agent_names.get(metadata)
                if name is None or name in self._broken:
                    agent_names[metadata] = self._connect_agent(metadata, name)
            names = tuple(agent_names[metadata] for metadata in agents)
            self._leaving = [leaving for leaving in self._leaving if leaving not in names]
            self._reading.update(names)
            return place, SlotSource(names, addresses, place.on_gpu, shards)

    def _read_slots(self, peer: Peer, source: SlotSource, target: ArenaMemory, ranges: Ranges) -> Seals:
        reader = self._gpu_reader if isinstance(target, GpuMemory) and self._gpu_reader else self._reader
        try:
            return reader.read(source, target, ranges, lambda: peer in self._peers)
        except LinkError:
            with self._lock:
                self._broken.update(source.agent_names)
            raise

    def _connect_agent(self, metadata: bytes, broken: str | None) -> str:
        """The name of the peer's agent. A connection that broke stays broken until its agent is removed, which has to
        wait for what is under way."""
        if broken is not None and not self._reading[broken] and broken not in self._sweep_slots():
            self._remove_agent(broken)
        return self._agent.add_peer(metadata)

    def _poll_agent(self) -> bool:
        """Serve readers, take back what is over; whether there is anybody to serve."""
        try:
            if self._agent.poll_notifications():
                self._poll_thread.poll_soon()
        except LinkError as error:
            log.warning("%s", error)
        with self._lock:
            busy = self._sweep_slots()
            for name in [name for name in self._leaving if name not in busy and not self._reading[name]]:
                self._leaving.remove(name)
                self._remove_agent(name)
            return bool(self._peers or self._leaving or busy)

    def _remove_agent(self, agent_name: str) -> None:
        del self._reading[agent_name]
        self._broken.discard(agent_name)
        try:
            self._agent.remove_peer(agent_name)
        except LinkError as error:
            log.info("%s", error)

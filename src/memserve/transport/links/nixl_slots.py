"""Reading through slots: memory of ours that READs may write, whatever became of them.

A READ that was given up can still write. Over TCP (NIXL 1.5, UCX), most of 64 MB landed after the handle had been
released and the agent removed, when a stopped peer went on. So nothing is read into an arena: ranges land in a slot,
and are copied from there while they are checksummed, which has to be done anyway. The slot of a READ that was given up
is used again when NIXL says that it is over, and not before.

A read goes through two slots at a time: one fills while the other is copied.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memserve import _core
from memserve.base.units import NS_PER_S
from memserve.transport.links.gpu_memory import GpuMemory, land_ranges
from memserve.transport.links.nixl_agent import Agent, Transfer
from memserve.transport.ports import ArenaMemory, LinkError, Seals
from memserve.transport.ranges import Ranges, Shards, pieces

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
    def succeeded(self) -> bool:
        """Of what is over."""
        return all(transfer.succeeded for _, transfer in self.transfers)


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
            self._agent.announce(agent_name)
        step = self._slot_bytes // ranges.range_bytes
        seals: list[Seals] = []
        filling: deque[_Filling] = deque()
        try:
            for begin in range(0, len(ranges), step):
                filling.append(self._fill(source, ranges.part(begin, begin + step)))
                if len(filling) == 2:
                    seals.append(self._land(filling, target, is_wanted))
            while filling:
                seals.append(self._land(filling, target, is_wanted))
        finally:
            for abandoned in filling:
                self._abandon(abandoned)
        return np.concatenate(seals) if seals else np.zeros(0, np.uint64)

    def sweep(self) -> set[str]:
        """Take back what is over; the names of agents from which something is still under way."""
        with self._lock:
            states = [(filling, filling.is_over()) for filling in self._abandoned]
            self._abandoned = [filling for filling, is_over in states if not is_over]
            busy = {name for filling in self._abandoned for name, _ in filling.transfers}
        for filling, is_over in states:
            if is_over:
                self._recycle(filling)
        return busy

    def close(self, *, keeps_agent: bool = False) -> None:
        """Give the slots back, and the agent; what may still be written stays for as long as the process lives.

        ``keeps_agent``: another reader's slots may still be written."""
        if self.sweep() or keeps_agent:
            _never_freed.append((self._agent, self._abandoned))
        else:
            self._agent.close()
        self._free.clear()

    def _fill(self, source: SlotSource, part: Ranges) -> _Filling:
        """Post the READs of a slot: each memory's pieces go to where the whole ranges have them."""
        slot = self._take()
        offsets = np.arange(len(part), dtype=np.int64) * part.range_bytes
        on_gpu = source.on_gpu, isinstance(slot, GpuMemory)
        landing = Ranges(offsets, part.dst_offsets, part.range_bytes)
        filling = _Filling(slot, landing, [], time.monotonic_ns() + self._stall_ns)
        try:
            for piece in pieces(Ranges(part.src_offsets, part.src_offsets, part.range_bytes), source.shards):
                name, address = source.agent_names[piece.source], source.addresses[piece.source]
                places = offsets[piece.owners] + piece.begins
                into_slot = Ranges(piece.ranges.src_offsets, places, piece.ranges.range_bytes)
                transfer = self._agent.read(name, address, slot.address, into_slot, on_gpu)
                filling.transfers.append((name, transfer))
        except BaseException:
            self._abandon(filling)  # what was posted may still write the slot
            raise
        return filling

    def _land(self, filling: deque[_Filling], target: ArenaMemory, is_wanted: Callable[[], bool]) -> Seals:
        """Wait until the first slot is full, then copy it out."""
        full = filling[0]
        self._wait(full, is_wanted)
        if not full.succeeded:
            raise LinkError("reading over NIXL failed")
        landing = full.landing
        seals = land_ranges(target, landing.dst_offsets, full.slot, landing.src_offsets, landing.range_bytes)
        self._recycle(filling.popleft())
        return seals

    def _wait(self, filling: _Filling, is_wanted: Callable[[], bool]) -> None:
        looks = 0
        while not filling.is_over():
            looks += 1
            if not is_wanted():
                raise LinkError("the peer is gone")
            if time.monotonic_ns() > filling.stalled_at_ns:
                raise LinkError(f"the peer sent nothing for {self._stall_ns / NS_PER_S:.1f} s")
            if looks > _SPINS:
                time.sleep(_POLL_S)

    def _abandon(self, filling: _Filling) -> None:
        if filling.is_over():
            self._recycle(filling)
        else:
            with self._lock:
                self._abandoned.append(filling)

    def _recycle(self, filling: _Filling) -> None:
        for _, transfer in filling.transfers:
            transfer.release()
        self._give_back(filling.slot)

    def _take(self) -> Slot:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made == SLOTS_MAX:
                raise LinkError(f"all {SLOTS_MAX} slots are held by reads that did not end")
            self._made += 1
        try:
            slot = self._make(self._slot_bytes)
            self._agent.register(slot.address, self._slot_bytes, on_gpu=isinstance(slot, GpuMemory))
        except BaseException:
            with self._lock:
                self._made -= 1
            raise
        return slot

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot)

"""A disk of bytes that forgets as real ones do: what was not synced may be lost, torn at sectors, or out of order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from memserve_lab.sim.reference.oracle import require

SECTOR_BYTES = 512
PAGE_BYTES = 4096


@dataclass
class Write:
    """Bytes on their way."""

    offset: int
    data: bytes
    completed: bool = False


@dataclass
class SymbolicDisk:
    """``synced`` is what a loss of power leaves for certain; ``writes`` came since, in order."""

    nbytes: int
    rng: random.Random
    synced: bytearray = field(default_factory=bytearray)
    writes: list[Write] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.synced = bytearray(self.nbytes)

    def begin_write(self, offset: int, data: bytes) -> Write:
        """Start a write: whole pages inside of the disk."""
        whole = offset % PAGE_BYTES == 0 and len(data) % PAGE_BYTES == 0
        require(whole and offset + len(data) <= self.nbytes, "a disk writes whole pages, and none behind its end")
        write = Write(offset, data)
        self.writes.append(write)
        return write

    def end_write(self, write: Write, works: bool) -> None:
        """The write is over. One that failed has written some sectors."""
        write.completed = works
        if works:
            return
        self.writes = [pending for pending in self.writes if pending is not write]
        for offset in range(0, len(write.data), SECTOR_BYTES):
            if self.rng.random() < 0.5:
                self.writes.append(
                    Write(write.offset + offset, write.data[offset : offset + SECTOR_BYTES], completed=True)
                )

    def sync_writes(self) -> None:
        """What has completed stays; what is on its way may still be lost."""
        for write in self.writes:
            if write.completed:
                self.synced[write.offset : write.offset + len(write.data)] = write.data
        self.writes = [write for write in self.writes if not write.completed]

    def read_bytes(self, offset: int, count: int) -> bytes:
        """What is read now: every completed write shows."""
        if not self.writes:
            return bytes(self.synced[offset : offset + count])
        view = bytearray(self.synced[offset : offset + count])
        for write in self.writes:
            if write.completed:
                self._apply_write(view, offset, write, None)
        return bytes(view)

    def kill_writer(self) -> None:
        """The process dies: completed writes stay, sectors of the others may have been written."""
        for write in self.writes:
            self._apply_write(self.synced, 0, write, None if write.completed else self.rng)
        self.writes = []

    def lose_power(self) -> None:
        """Of everything since the last sync any sectors may be there, whatever the order was."""
        writes = list(self.writes)
        self.rng.shuffle(writes)
        for write in writes:
            fate = self.rng.random()
            if fate < 0.3:
                continue
            self._apply_write(self.synced, 0, write, None if fate < 0.6 else self.rng)
        self.writes = []

    def erase_start(self, nbytes: int) -> None:
        """The first ``nbytes`` are zero from now on, whatever was on its way there."""
        self.synced[:nbytes] = bytes(nbytes)
        self.writes = [write for write in self.writes if write.offset >= nbytes]

    def flip_bit(self, bit: int) -> None:
        """One bit is another one, also of what is on its way there."""
        byte_index, mask = bit // 8, 1 << bit % 8
        self.synced[byte_index] ^= mask
        for write in self.writes:
            place = byte_index - write.offset
            if 0 <= place < len(write.data):
                write.data = write.data[:place] + bytes([write.data[place] ^ mask]) + write.data[place + 1 :]

    @staticmethod
    def _apply_write(view: bytearray, start: int, write: Write, torn: random.Random | None) -> None:
        for offset in range(0, len(write.data), SECTOR_BYTES):
            place = write.offset + offset - start
            if 0 <= place < len(view) and (torn is None or torn.random() < 0.5):
                view[place : place + SECTOR_BYTES] = write.data[offset : offset + SECTOR_BYTES]

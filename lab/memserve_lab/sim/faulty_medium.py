"""A journal's medium in memory, which fails as disks do.

Each router of a world has one, which outlives its process; the host of the
``Cluster`` opens a :class:`~memserve.journal.store.Store` on it, writes the records of each ``Remember`` and ``Note``,
and calls ``sync`` before it performs the actions after a ``Remember``. Draws from the seed decide what to call:

* the process is killed (``kill -9``): nothing to call. What was appended is in the system's cache; open it again;
* the machine loses power: :meth:`FaultyMedium.lose_power` with how much of the unsafe tail arrived, and which pieces
  of that did not (disks write out of order);
* the disk is full: :attr:`FaultyMedium.room_bytes`; None = there is room again;
* bytes rot: :meth:`FaultyMedium.damage`: opening must raise ``UserError``, or lose nothing that was promised;
* *planted fault*, the disk's cache lies: ``FaultyMedium(fsync_lies=True)``. ``sync`` returns and nothing is safe. A
  checker "durable is durable" keeps the records for which ``sync`` returned, and finds them missing in
  ``Store(medium).state`` after :meth:`~FaultyMedium.lose_power`. A killed process alone does not show this fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from memserve.journal.store import MediumFailed


class FaultyMedium:
    """A :class:`memserve.journal.store.Medium` in memory that can lose parts of its data."""

    def __init__(self, *, fsync_lies: bool = False, room_bytes: int | None = None) -> None:
        self.fsync_lies = fsync_lies
        self.room_bytes = room_bytes
        """None: the disk has room. N: the journal may grow to N bytes."""
        self.syncs = 0
        self._safe = b""
        self._unsafe = bytearray()

    @property
    def unsafe_bytes(self) -> int:
        """Appended, and not yet safe."""
        return len(self._unsafe)

    @property
    def name(self) -> str:
        """As :class:`Medium`."""
        return "memory"

    def load(self) -> bytes | None:
        """Everything, safe or not: the operating system's cache outlives processes."""
        return self._everything() or None

    def append(self, data: bytes) -> None:
        """As :class:`Medium`. On a full disk a part of ``data`` arrives."""
        room_bytes = self._room_for(len(data))
        self._unsafe += data[:room_bytes]
        if room_bytes < len(data):
            raise MediumFailed("no space left on device")

    def sync(self) -> None:
        """As :class:`Medium`, unless ``fsync_lies``."""
        self.syncs += 1
        if not self.fsync_lies:
            self._safe, self._unsafe = self._everything(), bytearray()

    def replace(self, data: bytes) -> None:
        """As :class:`Medium`."""
        if self.room_bytes is not None and len(data) > self.room_bytes:
            raise MediumFailed("no space left on device")
        self._safe, self._unsafe = data, bytearray()

    def close(self) -> None:
        """Nothing to release."""

    def lose_power(self, arrived_bytes: int, holes: Sequence[tuple[int, int]] = ()) -> None:
        """Keep only ``arrived_bytes`` of the unsafe tail, with zeros in its ``holes`` ``[start, end)``."""
        tail = self._unsafe[:arrived_bytes]
        for start, end in holes:
            tail[start:end] = bytes(len(tail[start:end]))
        self._safe, self._unsafe = self._safe + bytes(tail), bytearray()

    def damage(self, offset: int, data: bytes) -> None:
        """Overwrite the bytes from ``at`` on with ``data``."""
        everything = bytearray(self._everything())
        everything[offset : offset + len(data)] = data
        self._safe, self._unsafe = bytes(everything), bytearray()

    def _everything(self) -> bytes:
        return self._safe + bytes(self._unsafe)

    def _room_for(self, wanted_bytes: int) -> int:
        if self.room_bytes is None:
            return wanted_bytes
        return max(0, min(wanted_bytes, self.room_bytes - len(self._safe) - len(self._unsafe)))

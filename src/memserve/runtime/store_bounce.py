"""Memory of a disk's thread: pages for heads of records, and whole payloads that can't be read or written in place."""

from __future__ import annotations

from dataclasses import dataclass

from memserve import _core
from memserve.store.disk_events import PAGE_BYTES

_PAGES = 512
_IDLE_MAX = 8
"""Larger pieces of one size that are kept for the next job."""


@dataclass(slots=True)
class Bounce:
    """Bytes on a page boundary."""

    address: int
    view: memoryview
    arena: _core.Arena
    """Of a whole arena or of a page in one that is shared."""


class BounceMemory:
    """Pieces of whole pages, reused. As many are out as there are jobs under way: the machine bounds those."""

    def __init__(self) -> None:
        self._arena = _core.Arena(_PAGES * PAGE_BYTES)
        self.pages = (self._arena.address, self._arena.nbytes)
        """Where most single pages lie: worth making known to the kernel."""
        whole = memoryview(self._arena).cast("B")
        self._idle: dict[int, list[Bounce]] = {PAGE_BYTES: []}
        for at in range(0, _PAGES * PAGE_BYTES, PAGE_BYTES):
            page = Bounce(self._arena.address + at, whole[at : at + PAGE_BYTES], self._arena)
            self._idle[PAGE_BYTES].append(page)

    def take(self, nbytes: int) -> Bounce:
        """At least ``nbytes``, what they hold is left over from before."""
        size = PAGE_BYTES
        while size < nbytes:
            size *= 2
        idle = self._idle.setdefault(size, [])
        if idle:
            return idle.pop()
        arena = _core.Arena(size)
        return Bounce(arena.address, memoryview(arena).cast("B"), arena)

    def give(self, bounce: Bounce | None) -> None:
        """It is used no more. None: nothing was."""
        if bounce is None:
            return
        idle = self._idle[len(bounce.view)]
        if len(idle) < (_PAGES if len(bounce.view) == PAGE_BYTES else _IDLE_MAX):
            idle.append(bounce)

"""Copies of pages between tiers beside a running step: a thread with an urgent line and one that gives way to it.

    urgent:      the pages that the next layers read        DRAM -> HBM, a layer of a batch at a time
    background:  whole blocks that leave, pages that stay   HBM -> DRAM and HBM -> HBM, a block at a time

A step waits for an urgent copy where its layer needs the pages, and for the rest at its end. On a machine without a
device both tiers are the same memory; a ``rate_bytes_s`` then *emulates* a link of that rate.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.base.units import NS_PER_S
from memserve.instance.events import LinkUse
from memserve.model.arena import copy_pages
from memserve.model.tier_file import TierFile

Pages = NDArray[np.int32]
"""Numbers of pages in the arena of a tier: ``block * num_layers + layer``."""

_WAIT_S = 60.0
"""No copy takes so long: the thread has died."""


@dataclass(slots=True)
class Copy:
    """A copy of pages that was asked for."""

    source: int  # address of the arena
    target: int
    src: Pages
    dst: Pages
    page_bytes: int
    direction: Tier | None = None
    """The tier that it leads to. None: it stays within one."""
    completed: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    lower: _core.LowerPages | None = None
    """Converts what changes the tier. None: pages lie alike in both."""
    file: TierFile | None = None
    """Of the last pages of the lower tier. None: all of it is memory."""

    @property
    def nbytes(self) -> int:
        """Bytes to copy; between tiers, those that cross the link: as they lie in the lower one."""
        lower = self.lower if self.direction is not None else None
        return len(self.src) * (self.page_bytes if lower is None else lower.lower_page_bytes)

    def execute(self) -> None:
        """Copy now, in this thread."""
        if self.file is not None and self.direction is not None:
            down = self.direction is Tier.DRAM
            copy_pages(self.target, self.source, self.page_bytes, self.src, self.dst, self.file, down=down)
        elif self.lower is None or self.direction is None:
            _core.copy_blocks(self.target, self.source, self.page_bytes, self.src, self.dst, 1)
        elif self.direction is Tier.DRAM:
            self.lower.down(self.target, self.source, self.src, self.dst)
        else:
            self.lower.up(self.target, self.source, self.src, self.dst)


class PageCopier:
    """One thread that copies. Calls come from the device's thread alone."""

    def __init__(self, rate_bytes_s: float | None = None) -> None:
        """``rate_bytes_s``: emulate a link of this rate. None: as fast as the memory is."""
        self._link_use = LinkUse()
        self._rate_bytes_s = rate_bytes_s
        self._urgent: deque[Copy] = deque()
        self._background: deque[Copy] = deque()
        self._changed = threading.Condition()
        self._copying = False
        self._ends = False
        self._thread: threading.Thread | None = None

    def start_copy(self, copy: Copy, *, urgent: bool) -> None:
        """Ask for a copy."""
        with self._changed:
            check(not self._ends, "a copier that has ended is asked for a copy")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_copies, name="memserve-copier", daemon=True)
                self._thread.start()
            (self._urgent if urgent else self._background).append(copy)
            self._changed.notify_all()

    def wait_for(self, copy: Copy) -> None:
        """Until ``copy`` is done. Raises the error that it ended with."""
        if not copy.completed.is_set():
            began_ns = time.perf_counter_ns()
            check(copy.completed.wait(_WAIT_S), f"a copy of {copy.nbytes} bytes takes more than {_WAIT_S} s")
            self._link_use.waited_ns += time.perf_counter_ns() - began_ns
        if copy.error is not None:
            raise copy.error

    def take_link_use(self) -> LinkUse | None:
        """What was copied since the last call, and what was waited for it; no copy is under way. None: nothing."""
        if not self._link_use.busy_ns:
            return None
        used, self._link_use = self._link_use, LinkUse()
        return used

    def cancel_copies(self) -> None:
        """A step has failed: drop what is not begun, and wait for the rest."""
        with self._changed:
            self._urgent.clear()
            self._background.clear()
            is_idle = self._changed.wait_for(lambda: not self._copying, _WAIT_S)
        check(is_idle, f"a copy takes more than {_WAIT_S} s")

    def close(self) -> None:
        """Drop what is not begun, and end the thread."""
        with self._changed:
            self._ends = True
            self._urgent.clear()
            self._background.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_WAIT_S)

    def _run_copies(self) -> None:
        while (copy := self._next_copy()) is not None:
            began_ns = time.perf_counter_ns()
            try:
                copy.execute()
                self._keep_to_rate(copy.nbytes, began_ns)
            except BaseException as error:
                copy.error = error  # raised where it is waited for
            self._count_copy(copy, time.perf_counter_ns() - began_ns)
            copy.completed.set()
            with self._changed:
                self._copying = False
                self._changed.notify_all()

    def _count_copy(self, copy: Copy, spent_ns: int) -> None:
        self._link_use.busy_ns += spent_ns
        if copy.direction is Tier.HBM:
            self._link_use.up_bytes += copy.nbytes
        elif copy.direction is Tier.DRAM:
            self._link_use.down_bytes += copy.nbytes

    def _next_copy(self) -> Copy | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ends or self._urgent or self._background)
            if self._ends:
                return None
            self._copying = True
            return (self._urgent or self._background).popleft()

    def _keep_to_rate(self, nbytes: int, began_ns: int) -> None:
        if self._rate_bytes_s is not None:
            left_ns = began_ns + int(nbytes / self._rate_bytes_s * NS_PER_S) - time.perf_counter_ns()
            if left_ns > 0:
                time.sleep(left_ns / NS_PER_S)

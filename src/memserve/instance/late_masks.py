"""Sequences whose mask is late: what may come next by their grammar was not known when they were to draw.

Such a sequence skips steps. It stays where it is, with its slot, its blocks, and the logits that the device keeps for
it, until the mask is there, or has taken too long: then its request alone ends.
"""

from __future__ import annotations

from memserve.instance.grammar_events import AwaitMask
from memserve.instance.sequence import LateMask, Sequence
from memserve.units import NS_PER_S

MASK_NS = NS_PER_S
"""The longest that a sequence waits for one mask."""
MASKS_NS = 5 * NS_PER_S
"""The longest that the sequences of one request wait for masks in all of their answers, on average."""


class LateMasks:
    """All sequences that wait for a mask."""

    __slots__ = ("_jobs", "_numbers", "orders")

    def __init__(self) -> None:
        self._jobs: dict[int, Sequence] = {}
        self._numbers = 0
        #: for the host; the machine takes them
        self.orders: list[AwaitMask] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def add(self, sequence: Sequence, now_ns: int) -> None:
        """``sequence``, which has a slot, waits from now on."""
        self._numbers += 1
        left_ns = max(0, MASKS_NS * sequence.group.request.n - sequence.group.masks_ns)
        sequence.late = LateMask(self._numbers, now_ns, now_ns + min(MASK_NS, left_ns))
        self._jobs[self._numbers] = sequence
        self.orders.append(AwaitMask(self._numbers, sequence.slot))  # type: ignore[arg-type]  # it has a slot

    def computed(self, job_id: int, now_ns: int) -> None:
        """A mask is there; unknown ones are not wanted any more."""
        sequence = self._jobs.get(job_id)
        if sequence is not None and sequence.late is not None and not sequence.late.is_there:
            sequence.late.is_there = True
            sequence.group.masks_ns += now_ns - sequence.late.since_ns

    def due(self) -> list[Sequence]:
        """Those that may draw in the next plan: no earlier plan has a row of theirs any more."""
        return [one for one in self._jobs.values() if one.late is not None and one.late.is_there and not one.inflight]

    def drop(self, sequence: Sequence, now_ns: int) -> None:
        """``sequence`` does not wait any more, if it has waited."""
        if sequence.late is not None:
            self.computed(sequence.late.job_id, now_ns)
            del self._jobs[sequence.late.job_id]
            sequence.late = None

    def overdue(self, now_ns: int) -> list[Sequence]:
        """Those that have waited for as long as they may."""
        waiting = [one for one in self._jobs.values() if one.late is not None and not one.late.is_there]
        return [one for one in waiting if one.late is not None and one.late.until_ns <= now_ns]

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`overdue` is worth calling. None: nothing waits."""
        waiting = [one.late.until_ns for one in self._jobs.values() if one.late is not None and not one.late.is_there]
        return min(waiting, default=None)

    def take_orders(self) -> list[AwaitMask]:
        """What the host has to do since the last call."""
        taken, self.orders = self.orders, []
        return taken

    def sequences(self) -> list[Sequence]:
        """All of them, for checks."""
        return list(self._jobs.values())

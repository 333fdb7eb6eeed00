"""When a session comes back for its next turn, learnt from measured gaps: by tenant, and by the tool that was called.

A gap is the time from the end of an answer to the arrival of the request that goes on from it. Gaps are counted in
bins whose edges grow by the root of two, from 50 ms to more than half an hour; old counts fade. What a tool has not
shown yet is taken from the tenant's other tools, and without those from a broad guess. Answers that call no tool are a
class of their own: a person reads them, or the session is over.

The *worth* of waiting on is Gittins' index: over all lengths of the wait, the most that is to be had of

::

    chance that the session returns within the wait / expected time until it returns or the wait is over

It rises towards the time at which most calls end, and falls for one that is overdue. Times what computing the KV again
would take, it is what keeping it saves a second.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memserve.base.units import NS_PER_MS

BINS = 32
FIRST_NS = 50 * NS_PER_MS
"""Upper edge of the first bin; each further one is larger by the root of two."""
SAMPLES_MAX = 256.0
"""From so many gaps on counts are halved: what was measured long ago fades."""
PRIOR_SAMPLES = 8.0
"""What the tenant's other tools say weighs as much as so many gaps of the tool itself."""
CLASSES_MAX = 4096
"""Tools of tenants with a history; beyond, the one that was silent longest is forgotten."""
ANY_TOOL = "\x00"
"""The class of all tools of a tenant together."""
_GUESSED_BINS = slice(2, 24)
_GUESSED_ABSENT = (8.0, 0.1)  # without a tool, and with one: of a session more that comes back

Column = NDArray[np.float64]

_EDGES_NS: Column = FIRST_NS * np.sqrt(2.0) ** np.arange(BINS)
_MIDDLES_NS: Column = _EDGES_NS / 2**0.25


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of a session whose answer ended some time ago."""

    chance: float
    """That it comes back at all, 0 to 1."""
    worth: float
    """Chance of its return in each nanosecond for which its KV is kept, at best (Gittins' index)."""
    wait_ns: int
    """The median of the rest of its gap, if it comes back."""


@dataclass(slots=True)
class _History:
    """Gaps of one class."""

    counts: Column
    absent: float = 0.0
    """Sessions that did not come back."""


class ReturnForecasts:
    """The histories of an instance. Their memory is bounded: ``CLASSES_MAX`` times a kilobyte."""

    def __init__(self) -> None:
        self._histories: OrderedDict[tuple[str, str], _History] = OrderedDict()
        #: tables by class, made when they are asked for
        self._tables: dict[tuple[str, str], tuple[Column, Column, Column]] = {}

    def learn_gap(self, tenant: str, tool: str, gap_ns: int | None) -> None:
        """A session came back ``gap_ns`` after an answer that called ``tool`` (empty: none). None: it did not."""
        for name in {tool, ANY_TOOL} if tool else {tool}:
            self._count_gap(self._history_of(tenant, name), gap_ns)
        self._tables.pop((tenant, tool), None)

    def _history_of(self, tenant: str, name: str) -> _History:
        history = self._histories.get((tenant, name))
        if history is None:
            history = self._histories[tenant, name] = _History(np.zeros(BINS))
            if len(self._histories) > CLASSES_MAX:
                forgotten, _ = self._histories.popitem(last=False)
                self._tables.pop(forgotten, None)
        self._histories.move_to_end((tenant, name))
        return history

    @staticmethod
    def _count_gap(history: _History, gap_ns: int | None) -> None:
        if gap_ns is None:
            history.absent += 1
        else:
            history.counts[bin_of(gap_ns)] += 1
        if history.counts.sum() + history.absent > SAMPLES_MAX:
            history.counts /= 2
            history.absent /= 2

    def forecast_return(self, tenant: str, tool: str, waited_ns: int) -> Forecast:
        """Of a session whose answer called ``tool`` and ended ``waited_ns`` ago."""
        table = self._tables.get((tenant, tool))
        if table is None:
            if len(self._tables) >= CLASSES_MAX:
                self._tables.clear()
            table = self._tables[tenant, tool] = _make_table(*self._counts_of(tenant, tool))
        chances, worths, waits_ns = table
        place = bin_of(waited_ns)
        return Forecast(float(chances[place]), float(worths[place]), int(waits_ns[place]))

    def _counts_of(self, tenant: str, tool: str) -> tuple[Column, float]:
        """Counts of a class, with what stands in for those that it does not have yet."""
        counts: Column = np.zeros(BINS)
        counts[_GUESSED_BINS] = 1.0 / (_GUESSED_BINS.stop - _GUESSED_BINS.start)
        absent = _GUESSED_ABSENT[bool(tool)]
        for name in (ANY_TOOL, tool) if tool else (tool,):
            history = self._histories.get((tenant, name))
            if history is not None:
                weight = PRIOR_SAMPLES / (float(counts.sum()) + absent)
                counts, absent = history.counts + weight * counts, history.absent + weight * absent
        return counts, absent

    def __len__(self) -> int:
        return len(self._histories)


def bin_of(gap_ns: int) -> int:
    """The bin that a gap is counted in."""
    return min(BINS - 1, max(0, math.ceil(2 * math.log2(max(gap_ns, 1) / FIRST_NS))))


def _make_table(counts: Column, absent: float) -> tuple[Column, Column, Column]:
    """Chance, worth and median of the rest in ns, ``[BINS]`` each, by the bin of the time waited so far."""
    chances, worths, waits_ns = np.zeros(BINS), np.zeros(BINS), np.zeros(BINS)
    for place in range(BINS):
        waited_ns = float(_EDGES_NS[place - 1]) if place else 0.0
        returned = np.cumsum(counts[place:])
        total = float(returned[-1]) + absent
        if returned[-1] <= 0:
            continue
        until_ns = _EDGES_NS[place:] - waited_ns
        own_ns = np.maximum(_MIDDLES_NS[place:] - waited_ns, until_ns[0] / 2)
        # of a wait up to each edge: those that return within it take their own time, all others the whole of it
        expected_ns = np.cumsum(counts[place:] * own_ns) + (total - returned) * until_ns
        chances[place] = returned[-1] / total
        worths[place] = np.max(returned / expected_ns)
        waits_ns[place] = until_ns[int(np.searchsorted(returned, returned[-1] / 2))]
    return chances, worths, waits_ns

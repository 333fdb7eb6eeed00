"""CacheTTL's rule (Continuum, arXiv 2511.02230), as a baseline for what an instance does by itself.

An answer that ends in a tool call is pinned for the time ``t`` that maximises::

    P(the tool ends within t) * (queueing delay * eta + time to compute the prefix again) - t

``P`` is the distribution of the tool's measured durations (of all tools up to ``HISTORY`` of the tool's own; a fixed
time up to so many of all), ``eta`` the memoryfulness: minus the correlation of a program's turns so far with those that
are left. Waiting turns run in the order of their programs, first those whose prefix is pinned. The first that does not
fit stops the line. Pins last until their time is over or their turn is admitted; where nothing runs and the head does
not fit, or where a running sequence cannot grow, the pin of the program that came last is given up.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np

from memserve.base.types import TokenArray
from memserve.base.units import NS_PER_S, ceil_div
from memserve.instance.returns.policy import HORIZON_NS, Absence, ReturnPolicy
from memserve.instance.scheduler.capacity import headroom_blocks
from memserve.instance.scheduler.sequence import Group, Sequence
from memserve.instance.scheduler.state import SchedulerState

HISTORY = 100
COLD_NS = 2 * NS_PER_S
QUEUED = 100
"""Requests whose waits make the queueing delay."""
_UNPINNED = 1 << 40
"""Added to a program's place in the order where its prefix is not pinned."""


class CacheTtl(ReturnPolicy):
    """Pins of one instance. Which request goes on from which is found as by the policy that it replaces."""

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        self._gaps_ns: dict[str, list[int]] = {}
        self._all_gaps_ns: list[int] = []
        self._waits_ns: deque[int] = deque(maxlen=QUEUED)
        #: of each program whose end is not known: its turns
        self._turns: dict[int, int] = {}
        self._turn_pairs: list[tuple[int, int]] = []
        #: the step at which the head of the line did not fit
        self._stopped_step = -1

    def on_request_opened(self, group: Group) -> None:
        match = self._find_absence(group)
        absence = match[0] if match is not None else None
        if absence is not None and absence.tool:
            gap_ns = self._state.now - absence.since_ns
            insort(self._gaps_ns.setdefault(absence.tool, []), gap_ns)
            insort(self._all_gaps_ns, gap_ns)
        super().on_request_opened(group)
        if absence is None or not self._pool.retained.retained_tokens(absence.handle):
            group.ranked_arrival = group.begun + _UNPINNED
        else:  # pinned until it is admitted, however long that takes
            group.ranked_arrival = group.begun
            prefix, until_ns = group.request.prompt[: absence.tokens], self._state.now + HORIZON_NS
            self._pool.retained.retain_prefix(absence.handle, group.isolation, prefix, until_ns, 1.0)

    def on_admitted(self, group: Group) -> None:
        self._waits_ns.append(self._state.now - group.arrived_ns)
        super().on_admitted(group)

    def on_answer_left(self, group: Group, tokens: TokenArray, drawn: int) -> None:
        turns = self._turns[group.begun] = self._turns.get(group.begun, 0) + 1
        if not group.tool:
            self._turn_pairs += [(turn, turns - turn) for turn in range(1, turns + 1)]
            del self._turns[group.begun]
        super().on_answer_left(group, tokens, drawn)

    def retain_answer(self, absence: Absence, tokens: TokenArray) -> int:
        """Pinned: nothing but :meth:`should_wait`, or a running sequence, takes its room."""
        ttl_ns = self._time_to_live_ns(absence) if absence.tool else 0
        if not ttl_ns:
            return 0
        priority, until_ns = 1 / (2 + absence.begun), self._state.now + ttl_ns
        return self._pool.retained.retain_prefix(absence.handle, absence.places[0][0], tokens, until_ns, priority)

    def _time_to_live_ns(self, absence: Absence) -> int:
        if len(self._all_gaps_ns) <= HISTORY:
            return COLD_NS
        own_gaps_ns = self._gaps_ns.get(absence.tool, [])
        gaps_ns = np.array(own_gaps_ns if len(own_gaps_ns) > HISTORY else self._all_gaps_ns, dtype=np.float64)
        delay_ns = sum(self._waits_ns) / max(1, len(self._waits_ns))
        benefit_ns = delay_ns * self._memoryfulness() + self._reload_ns(absence)
        gains_ns = np.arange(1, len(gaps_ns) + 1) / len(gaps_ns) * benefit_ns - gaps_ns
        best = int(np.argmax(gains_ns))
        return int(gaps_ns[best]) if gains_ns[best] > 0 else 0

    def _memoryfulness(self) -> float:
        so_far, left = np.array(self._turn_pairs or [(0, 0)], dtype=np.float64).T
        if not (so_far.std() and left.std()):
            return 1.0
        return float(-np.corrcoef(so_far, left)[0, 1])

    def rank_absences(self) -> None:
        """Programs that came last lose their pins first: that does not change."""

    def should_wait(self, sequence: Sequence) -> bool:
        state = self._state
        if sequence.out or sequence.dram_blocks:
            return False
        runs = bool(state.decoding.items or state.prefilling.items or state.idle.items)
        if runs and self._stopped_step == state.counters.steps:
            return True
        tokens, group = sequence.known_tokens(), sequence.group
        matched = self._pool.match(group.isolation, tokens)
        wanted = ceil_div(len(tokens) - matched, self._block_tokens) + headroom_blocks(len(state.decoding)) + 1
        own = self._returned.get(group.request.request_id)
        while wanted > self._pool.retained.room_beside(wanted):
            if runs:
                self._stopped_step = state.counters.steps
                return True
            others = [absence for absence in self._kept.values() if absence is not own]
            if not others:
                return False
            self._end_retention(max(others, key=lambda absence: absence.begun))
        return False

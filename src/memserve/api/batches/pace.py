"""How many requests of batches may run at once: as many as fit beside the others, found by trying.

The number grows with each answer. It shrinks where a request was refused, where requests wait in front of instances,
and where an interactive request (one of no batch) had to wait before its first step: then batches make room at once,
and take it back slowly. One request runs in any case, so that batches go on under any load.
"""

from __future__ import annotations

from memserve.base.units import NS_PER_S

START = 4
MOST = 512
WAIT_SHARE = 0.1
"""An interactive request that waits for more than this share of its time to the first token waits for batches."""
HOLD_NS = 2 * NS_PER_S
"""After an interactive request had to wait, the number does not grow for this long, and shrinks once."""


class BatchPace:
    """Counts requests of batches. Pure: it is told the time."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._limit = float(min(START, most))
        self.in_flight = 0
        self._hold_until_ns = 0
        self._interactive_at_ns: int | None = None
        self._queue_is_empty = True

    @property
    def limit(self) -> int:
        """How many may run at once."""
        return int(self._limit)

    @property
    def has_room(self) -> bool:
        """Whether another one may begin."""
        return self.in_flight < self.limit

    def begin_request(self) -> None:
        """One more runs."""
        self.in_flight += 1

    def end_request(self, *, is_refused: bool, now_ns: int) -> None:
        """One has its answer, or was refused for lack of room."""
        if is_refused:
            self._limit = max(1.0, min(self._limit, self.in_flight) / 2)
            self._hold_until_ns = now_ns + HOLD_NS
        elif now_ns >= self._hold_until_ns and self._queue_is_empty and self.in_flight >= self.limit:
            is_alone = self._interactive_at_ns is None or now_ns - self._interactive_at_ns > HOLD_NS
            self._limit = min(self._most, self._limit + (1.0 if is_alone else 1.0 / self._limit))
        self.in_flight -= 1

    def note_waiting(self, requests: int) -> None:
        """So many requests wait in front of instances, those of batches among them."""
        self._queue_is_empty = requests == 0
        if requests:
            self._limit = max(1.0, min(self._limit, self.in_flight - requests))

    def note_interactive(self, queue_ns: int | None, to_first_token_ns: int, now_ns: int) -> None:
        """An interactive request has its first token, after ``queue_ns`` in queues (None: not known)."""
        self._interactive_at_ns = now_ns
        waited = queue_ns is not None and queue_ns > WAIT_SHARE * to_first_token_ns
        if waited and self.in_flight and now_ns >= self._hold_until_ns:
            self._limit = max(1.0, min(self._limit, self.in_flight) / 2)
        if waited and self.in_flight:
            self._hold_until_ns = now_ns + HOLD_NS

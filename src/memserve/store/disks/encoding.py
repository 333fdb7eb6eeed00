"""Values that are encoded before they are written to a disk: their length there is known only then.

::

    write --> due --EncodeExtent--> encoding --DiskDone--> encoded --place--> a write as any other
               |  at most 64 MiB under way                    |  waits for a segment, and for the superblock
               +---------------- removed: ends without a write +

The host keeps an encoded value until it is written or dropped. A value that has not become shorter by a page is written
as it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from memserve.base.errors import check
from memserve.base.units import KIB, MIB

ENCODED_BYTES_MAX = 64 * MIB
"""Of values that are encoded or wait for their place, on one disk; a longer value goes alone."""


ENCODED_BYTES_MIN = 16 * KIB
"""Shorter values are left as they are."""


@dataclass(slots=True)
class EncodeStep:
    """A caller's write whose value is encoded first."""

    key: bytes
    extent: int
    length: int
    scope: int
    seal: int
    name: bytes
    is_removed: bool = False
    source: int = 0
    """The job that has encoded it; the host keeps the result by this number."""
    encoded_bytes: int = 0
    """0: as it is."""


class EncodedWrites:
    """Those of one disk."""

    def __init__(self) -> None:
        self._due: deque[EncodeStep] = deque()
        self._encoding: dict[int, EncodeStep] = {}
        """By job."""
        self._encoded: deque[EncodeStep] = deque()
        self._bytes = 0
        """Of values that the host encodes or keeps."""

    def __len__(self) -> int:
        return len(self._due) + len(self._encoding) + len(self._encoded)

    def add_write(self, step: EncodeStep) -> None:
        """A write begins."""
        self._due.append(step)

    def take_due(self) -> EncodeStep | None:
        """The next to be encoded; None: none is due, or too much is under way."""
        if not self._due or (self._bytes > 0 and self._bytes + self._due[0].length > ENCODED_BYTES_MAX):
            return None
        return self._due.popleft()

    def on_begin(self, step: EncodeStep, job: int) -> None:
        """The host encodes it."""
        self._encoding[job] = step
        self._bytes += step.length

    def on_encoded(self, job: int, encoded_bytes: int) -> None:
        """The host has; 0: it does not become shorter."""
        step = self._encoding.pop(job)
        step.source, step.encoded_bytes = job, encoded_bytes
        self._encoded.append(step)

    @property
    def next_encoded(self) -> EncodeStep | None:
        """The next that needs a place on the disk."""
        return self._encoded[0] if self._encoded else None

    def pop_encoded(self) -> EncodeStep:
        """It has one, or needs none any more."""
        step = self._encoded.popleft()
        self._bytes -= step.length
        return step

    def remove_value(self, key: bytes) -> bool:
        """It is not to be written any more. False: there is no such value."""
        steps = [step for step in self._all_steps() if step.key == key and not step.is_removed]
        for step in steps:
            step.is_removed = True
        return bool(steps)

    def remove_all(self) -> None:
        """None is to be written any more."""
        for step in self._all_steps():
            step.is_removed = True

    def take_idle(self) -> list[EncodeStep]:
        """The disk is lost: all that the host does not encode just now."""
        steps = [*self._due, *self._encoded]
        self._bytes -= sum(step.length for step in self._encoded)
        self._due.clear()
        self._encoded.clear()
        return steps

    def _all_steps(self) -> list[EncodeStep]:
        return [*self._due, *self._encoding.values(), *self._encoded]

    def check_invariants(self, jobs: set[int]) -> None:
        """``jobs``: of the steps that the host encodes."""
        check(jobs == set(self._encoding), "values and the jobs that encode them differ")
        held = sum(step.length for step in (*self._encoding.values(), *self._encoded))
        check(held == self._bytes, "bytes that the host keeps are miscounted")
        check(len(self._encoding) + len(self._encoded) <= 1 or self._bytes <= ENCODED_BYTES_MAX, "too much is encoded")

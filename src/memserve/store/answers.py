"""Answers to calls that have forgotten something: given once a restart knows of it.

A value that was deleted or replaced lies on a disk until its space is written again. What says that it is gone is
written as well, a moment later; a process that is killed in between would bring the value back.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from memserve.kv_transfer.context import Deadlines
from memserve.store.client import Client
from memserve.store.jobs import Jobs
from memserve.store.values import Values
from memserve.store_messages import StoreCode, StoreDone


@dataclass(slots=True, eq=False)
class _Held:
    client: Client
    answer: StoreDone
    deadline_ns: int
    over: bool = False


class Answers:
    """All that are held back."""

    def __init__(self, values: Values, jobs: Jobs) -> None:
        self._values = values
        self._jobs = jobs
        self._held: list[_Held] = []
        self._deadlines = Deadlines()

    def give(self, client: Client, answer: StoreDone, deadline_ns: int) -> None:
        """Answer as soon as everything that was forgotten so far stays so; ``LATE`` when that takes too long."""
        if self._values.disks.removals_written:
            self._send(client, answer)
            return
        held = _Held(client, answer, deadline_ns)
        client.calls.add(answer.call)
        self._held.append(held)
        self._deadlines.add(held)

    def _send(self, client: Client, answer: StoreDone) -> None:
        client.calls.discard(answer.call)
        if not client.is_gone:
            self._jobs.send(client.peer, answer)

    def advance(self, now: int) -> None:
        """Give what may be given now."""
        if self._held and self._values.disks.removals_written:
            held, self._held = self._held, []
            for one in held:
                one.over = True
                self._send(one.client, one.answer)
        while (late := self._deadlines.pop_due(now)) is not None:
            assert isinstance(late, _Held)
            late.over = True
            self._held.remove(late)
            done, too_late = bytes([StoreCode.DONE]), bytes([StoreCode.LATE])
            self._send(late.client, replace(late.answer, codes=late.answer.codes.replace(done, too_late)))

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance` is worth calling."""
        return self._deadlines.next_ns()

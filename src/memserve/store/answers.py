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
        """Answer as soon as everything that was forgotten so far stays so; ``LATE`` when that takes too long, or a disk
        has no room for it."""
        disks = self._values.disks
        if disks.removals_written or disks.removals_wait_for_room:
            self._send(client, answer if disks.removals_written else _too_late(answer))
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
        disks = self._values.disks
        if self._held and (disks.removals_written or disks.removals_wait_for_room):
            held, self._held = self._held, []
            for one in held:
                one.over = True
                self._send(one.client, one.answer if disks.removals_written else _too_late(one.answer))
        while (late := self._deadlines.pop_due(now)) is not None:
            assert isinstance(late, _Held)
            late.over = True
            self._held.remove(late)
            self._send(late.client, _too_late(late.answer))

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`advance` is worth calling."""
        return self._deadlines.next_ns()


def _too_late(answer: StoreDone) -> StoreDone:
    """What was forgotten may be back after a restart."""
    return replace(answer, codes=answer.codes.replace(bytes([StoreCode.DONE]), bytes([StoreCode.LATE])))

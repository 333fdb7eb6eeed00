"""Attempts that their instance does not have (level 2): noticed within two heartbeats, not when patience ends.

A ``Dispatch`` can be lost on a link that stays up (a full queue, a broken connection that comes back at once), and so
can the last word about a request. Both ends count, and each heartbeat carries the instance's totals::

    dispatches    sent - heard    may be under way; not, if it was sent before the last heartbeat but one
    answers       told - heard    all told before the heartbeat are before it on the link: the rest is lost

Where totals differ the router asks by name, and only the answer counts: messages of one link come in order, so what was
dispatched before the question is there when it is heard, and what was said before the answer is heard before it. A late
heartbeat, or one that repeats an old reading because its engine is busy, costs a question and nothing else; a lost
question is repeated at the next heartbeat, where totals still differ.

Of a pair, who prefills is asked first. When that one has it no more, who decodes is asked: it has it, or has told its
end, or never will.
"""

from __future__ import annotations

from memserve.cluster.lifecycle import Lifecycle
from memserve.cluster.outbox import Outbox
from memserve.cluster.registry import Member, Reckoning
from memserve.messages import AskAttempts, AttemptsUnknown, Load


class Reckoner:
    """Compares totals, asks, and has lost attempts placed again."""

    __slots__ = ("_lifecycle", "_outbox")

    def __init__(self, lifecycle: Lifecycle, outbox: Outbox) -> None:
        self._lifecycle, self._outbox = lifecycle, outbox

    def heartbeat(self, member: Member, load: Load) -> None:
        """``load`` came with a heartbeat of ``member``."""
        if load.dispatches_heard is None:
            return
        reckoning = member.reckoning
        differs = _differs(reckoning, load.dispatches_heard, load.answers_told)
        reckoning.dispatches_before = reckoning.dispatches
        if differs:
            self._ask(member, [name for name in member.attempts if self._is_with(member, name)])

    def _is_with(self, member: Member, attempt_id: str) -> bool:
        """Whether it is ``member`` who must have the attempt now: who decodes has it from the handover on."""
        attempt = self._lifecycle.jobs.by_attempt[attempt_id].attempt
        return attempt is not None and (attempt.first is member or attempt.first not in attempt.involved)

    def _ask(self, member: Member, attempts: list[str]) -> None:
        self._outbox.send(member.peer, AskAttempts(tuple(attempts), member.reckoning.dispatches))

    def answer(self, member: Member, message: AttemptsUnknown, now: int) -> None:
        """``member`` has said what it does not have. The difference of the totals is explained."""
        reckoning = member.reckoning
        reckoning.dispatches_lost = message.dispatches - message.dispatches_heard
        reckoning.answers_lost = max(0, message.answers_told - reckoning.answers)
        decoding: dict[Member, list[str]] = {}
        for attempt_id in message.attempts:
            job = self._lifecycle.jobs.by_attempt.get(attempt_id)
            attempt = job.attempt if job is not None else None
            if attempt is None or member not in attempt.involved:
                continue  # it has ended meanwhile, or was handed over
            if attempt.first is member and attempt.decode_at is not None:
                decoding.setdefault(attempt.decode_at, []).append(attempt_id)
            else:
                self._lifecycle.lost(attempt_id, member, now)
        for other, attempts in decoding.items():
            self._ask(other, attempts)


def _differs(reckoning: Reckoning, dispatches_heard: int, answers_told: int) -> bool:
    """Whether something was lost for sure, or is under way for longer than from one heartbeat to the next."""
    known = dispatches_heard + reckoning.dispatches_lost
    on_time = reckoning.dispatches_before <= known <= reckoning.dispatches
    return not on_time or answers_told > reckoning.answers + reckoning.answers_lost

"""What must hold between any two events (level 2)."""

from __future__ import annotations

from collections import Counter

from memserve.cluster.jobs import Attempt, Job, Jobs
from memserve.cluster.loads import ROLE_CODE, LoadTable, Work
from memserve.cluster.registry import MemberState, Registry
from memserve.errors import check


def check_jobs(jobs: Jobs, registry: Registry) -> None:
    """Requests, attempts and members agree on who does what."""
    for request_id, job in jobs.by_id.items():
        check(job.request_id == request_id, f"{job.request_id} is listed as {request_id}")
        check(not all(job.finished), f"{request_id} has ended and is still here")
        check((job.attempt is None) == (request_id in jobs.unplaced), f"{request_id}: placed and unplaced, or neither")
        if job.attempt is not None:
            check(jobs.by_attempt.get(job.attempt.attempt_id) is job, f"{request_id}: its attempt is not listed")
            _check_attempt(job, job.attempt, registry)
    check(all(jobs.by_id.get(request_id) is job for request_id, job in jobs.unplaced.items()), "unplaced, but unknown")
    check(len(jobs.by_attempt) == len(jobs.by_id) - len(jobs.unplaced), "attempts of nobody are listed")
    for member in registry:
        for attempt_id in member.attempts:
            attempt = jobs.by_attempt[attempt_id].attempt
            check(attempt is not None and member in attempt.involved, f"{member} is not involved in {attempt_id}")


def _check_attempt(job: Job, attempt: Attempt, registry: Registry) -> None:
    for member in attempt.involved:
        check(registry.get(member.peer) is member, f"{attempt.attempt_id} depends on {member}, which is gone")
        check(attempt.attempt_id in member.attempts, f"{member} does not know that {attempt.attempt_id} depends on it")
    check(attempt.involved, f"{attempt.attempt_id} depends on nobody")
    check(len(attempt.charges) == 1 + attempt.is_computing, f"{attempt.attempt_id} is charged {attempt.charges}")
    check(bool(attempt.aside) == (attempt.gap_ns is not None), f"{attempt.attempt_id}: a gap without end")
    for output in attempt.aside:
        check(output.offset > len(job.emitted[output.index]), f"{attempt.attempt_id}: {output} could be delivered")


def check_loads(jobs: Jobs, registry: Registry, loads: LoadTable) -> None:
    """Every instance is charged with exactly what its attempts put on it."""
    sums: dict[int, Counter[str]] = {}
    for job in jobs.by_id.values():
        for charge in job.attempt.charges if job.attempt is not None else ():
            sums.setdefault(charge.number, Counter()).update(charge.work._asdict())
    for member in registry:
        expected = Work(**sums.pop(member.number, Counter()))
        own = loads.own_of(member.number)
        check(own == expected, f"{member} is charged {own}, its attempts make {expected}")
        check(loads.role[member.number] == ROLE_CODE[member.info.role], f"{member} has another role in the arrays")
        is_open = bool(loads.is_open[member.number])
        check(is_open == (member.state is MemberState.LIVE), f"{member} is open: {is_open}")
    check(not sums, f"instances that are gone are charged: {sums}")
    for number in range(len(loads)):
        check(registry.has_number(number) or not loads.is_open[number], f"{number} is open, and nobody's")

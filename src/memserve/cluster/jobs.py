"""A client's request as the cluster sees it (level 2): what the client has, and the attempt that goes on.

::

    UNPLACED --dispatch--> RUNNING --every sequence ended--> gone
        ^                     |
        +---attempt failed----+        the next attempt gets the tokens that the client has

An attempt has an id of its own, unique in the life of the router, so that whatever is still said about an old one is
known by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import structs

from memserve.cluster.loads import Charge
from memserve.cluster.registry import Member
from memserve.cluster.report import AttemptStory, RouteStory
from memserve.errors import check
from memserve.messages import Dispatch, Holder, Peer
from memserve.policy.candidates import Route
from memserve.types import FinishReason, Request, TokenOutput, TransferMode

ASIDE_OUTPUTS_MAX = 4096
"""Outputs of an attempt that wait for earlier ones; more of them are a failure."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One try: who was asked, and what came of it so far."""

    attempt_id: str
    first: Member
    """Computes the prompt."""
    decode_at: Member | None
    """Decodes, when that is another one."""
    holders: tuple[Holder, ...]
    route: Route
    dispatched_ns: int
    news_ns: int
    involved: list[Member]
    """All and only the members whose death fails it."""
    charges: list[Charge]
    """Work not yet discharged; the prompt's is the first one while :attr:`is_computing`."""
    is_computing: bool = True
    """No output has come: the prompt is work to be done."""
    aside: list[TokenOutput] = field(default_factory=list)
    """Outputs behind tokens that have not come, in order of arrival: two members may speak, on two ways."""
    gap_ns: int | None = None
    """Since when there are any."""

    def is_from(self, peer: Peer) -> bool:
        """Whether ``peer`` may speak for it: a prefill instance's last words may come after its part has ended."""
        return peer == self.first.peer or (self.decode_at is not None and peer == self.decode_at.peer)


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    request: Request
    arrived_ns: int
    request_id: str = field(init=False)
    """The client's name for it."""
    emitted: list[list[int]] = field(init=False)
    """For each sequence the tokens that the client has."""
    finished: list[FinishReason | None] = field(init=False)
    """For each sequence why it ended; ``None`` = it goes on."""
    introduced: list[bool] = field(init=False)
    """For each sequence whether the client has had its first output, with all that only comes once."""
    identities: bytes | None = None
    """Of the prompt's whole blocks; ``None`` = not known yet, or nothing of it may be cached."""
    attempt: Attempt | None = None
    tries: int = 0
    """Attempts that count against ``attempts_max``."""
    stalls: int = 0
    avoid: dict[Peer, float | None] = field(default_factory=dict)
    """Who refused it, with the time to retry after: ``None`` = it never could, 0 = it only came to nothing there."""
    refusal: str = ""
    """Why, the last time."""
    unplaced_ns: int | None = None
    """Since when nobody could take it; until news come."""
    is_stopped: bool = False
    """The client ended a sequence: instances may not have heard of it."""
    past: list[AttemptStory] = field(default_factory=list)
    """Attempts that have failed."""

    def __post_init__(self) -> None:
        self.request_id, n = self.request.request_id, self.request.n
        self.emitted, self.finished, self.introduced = [[] for _ in range(n)], [None] * n, [False] * n

    @property
    def has_begun(self) -> bool:
        """Whether the client has got anything: then it cannot be rejected any more."""
        return any(self.introduced) or any(reason is not None for reason in self.finished)

    @property
    def unfinished(self) -> Iterator[int]:
        """Sequences that go on."""
        return (index for index, reason in enumerate(self.finished) if reason is None)

    def message(self, attempt: Attempt, transfer: TransferMode, return_kv: bool, now: int) -> Dispatch:
        """What the first instance is told."""
        request = self.request
        generated: tuple[tuple[int, ...], ...] = ()
        ended: tuple[int, ...] = ()
        if request.beam_width == 0 and self.has_begun:
            generated = tuple(tuple(tokens) for tokens in self.emitted)
            ended = tuple(index for index, reason in enumerate(self.finished) if reason is not None)
        deadline_ns = request.deadline_ns
        return Dispatch(
            structs.replace(request, request_id=attempt.attempt_id, deadline_ns=None),
            deadline_in_ns=None if deadline_ns is None else max(0, deadline_ns - now),
            generated=generated,
            ended=ended,
            decode_at=attempt.decode_at.peer if attempt.decode_at is not None else None,
            transfer=transfer,
            holders=attempt.holders,
            return_kv=return_kv,
        )

    def told(self) -> tuple[tuple[str, str | int | float], ...]:
        """What the cluster decided, and what went wrong, for the client (``TokenOutput.story``)."""
        attempt = self.attempt
        if attempt is None:
            return (("attempts", len(self.past)), ("last_failure", self.past[-1].ended)) if self.past else ()
        where = attempt.first.name + (f" to {attempt.decode_at.name}" if attempt.decode_at is not None else "")
        return ("route", where), ("route_why", attempt.route.reason), ("attempts", len(self.past) + 1)

    def story(self) -> RouteStory:
        """All of it, for people."""
        now = (attempt_story(self.attempt, ""),) if self.attempt is not None else ()
        ended = tuple(index for index, reason in enumerate(self.finished) if reason is not None)
        counts = tuple(len(tokens) for tokens in self.emitted)
        return RouteStory(self.request_id, self.arrived_ns, counts, ended, (*self.past, *now))


def attempt_story(attempt: Attempt, ended: str) -> AttemptStory:
    """What is remembered of an attempt."""
    return AttemptStory(
        attempt.attempt_id,
        attempt.first.peer,
        attempt.decode_at.peer if attempt.decode_at is not None else None,
        tuple(holder.peer for holder in attempt.holders),
        attempt.dispatched_ns,
        attempt.route.reason,
        ended,
    )


class Jobs:
    """All and only the requests that have not ended, in order of arrival, and their attempts by id."""

    __slots__ = ("by_attempt", "by_id", "unplaced")

    def __init__(self) -> None:
        self.by_id: dict[str, Job] = {}
        self.by_attempt: dict[str, Job] = {}
        #: jobs without an attempt, in the order in which they lost it
        self.unplaced: dict[str, Job] = {}

    def enter(self, job: Job) -> None:
        """A new one, unplaced."""
        check(job.request_id not in self.by_id, f"{job.request_id} is known")
        self.by_id[job.request_id] = self.unplaced[job.request_id] = job

    def begin(self, job: Job, attempt: Attempt) -> None:
        """``attempt`` is the job's now."""
        check(job.attempt is None, f"{job.request_id} has an attempt")
        del self.unplaced[job.request_id]
        job.attempt = attempt
        self.by_attempt[attempt.attempt_id] = job
        for member in attempt.involved:
            member.attempts[attempt.attempt_id] = None

    def end_attempt(self, job: Job) -> Attempt:
        """The job is unplaced again; nobody waits for the attempt."""
        attempt = job.attempt
        if attempt is None:
            raise ValueError(f"{job.request_id} has no attempt")
        for member in attempt.involved:
            del member.attempts[attempt.attempt_id]
        del self.by_attempt[attempt.attempt_id]
        job.attempt = None
        self.unplaced[job.request_id] = job
        return attempt

    def leave(self, job: Job) -> None:
        """It has ended; it must be unplaced."""
        del self.by_id[job.request_id]
        del self.unplaced[job.request_id]

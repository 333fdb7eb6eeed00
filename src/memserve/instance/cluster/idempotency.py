"""What an instance keeps of answers that clients may ask for again, when there is another router.

::

    dispatched, or arrived from another instance --> RUNNING --ended, or left--> OVER --time, room--> GONE

The router has all of this itself while it lives. One that has just accepted the instance gets it in ``AnswersHeld``,
before any further token of those answers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Sequence

from memserve.base.errors import check
from memserve.base.state_table import Transitions
from memserve.base.types import Request, TokenOutput
from memserve.protocol.idempotency import AnswerHeld, AnswerLog, AnswersHeld
from memserve.protocol.peers import Peer

_MESSAGE_BYTES = 4 << 20
"""A message takes further answers until it has about as many bytes."""


class ReplayPhase(enum.Enum):
    """What becomes of a kept answer."""

    RUNNING = enum.auto()  # its request is here
    OVER = enum.auto()  # it has ended, or was handed over
    GONE = enum.auto()


class ReplayCause(enum.Enum):
    """Why its phase changes."""

    ENDED = enum.auto()
    FORGOTTEN = enum.auto()  # its time is over, others need the memory, or the attempt came to nothing


KEPT_ANSWER = Transitions(
    "An answer kept by an instance",
    ReplayPhase.RUNNING,
    {
        (ReplayPhase.RUNNING, ReplayCause.ENDED): ReplayPhase.OVER,
        (ReplayPhase.RUNNING, ReplayCause.FORGOTTEN): ReplayPhase.GONE,
        (ReplayPhase.OVER, ReplayCause.FORGOTTEN): ReplayPhase.GONE,
    },
)


class _Kept:
    """One answer."""

    __slots__ = ("log", "phase", "request", "until_ns")

    def __init__(self, request: Request, log: AnswerLog) -> None:
        self.request = request
        self.log = log
        self.phase = KEPT_ANSWER.initial
        self.until_ns = 0  # when it is forgotten, once it is over

    def held(self) -> AnswerHeld:
        request, runs = self.request, self.phase is ReplayPhase.RUNNING
        told = tuple(self.log.outputs(request.request_id))
        return AnswerHeld(request.key, request.asked, request.request_id, runs, request.created_s, told)


class ReplayBuffer:
    """Answers by their attempts, within a bounded time and memory."""

    __slots__ = ("_answers", "_bytes_max", "_keep_ns", "_over", "_told_to", "is_asked", "nbytes")

    def __init__(self, keep_ns: int, bytes_max: int) -> None:
        self._keep_ns, self._bytes_max = keep_ns, bytes_max
        self._answers: dict[str, _Kept] = {}  # by attempt, in order of arrival
        self._over: dict[str, _Kept] = {}  # of them: not running, in order of their end
        self._told_to: Peer | None = None
        #: approximate memory of all
        self.nbytes = 0
        #: a router has to be told what there is
        self.is_asked = False

    def __len__(self) -> int:
        return len(self._answers)

    # -- the life of an answer

    def open(self, request: Request, told: Sequence[TokenOutput], known: Iterable[Sequence[int]]) -> None:
        """An attempt begins here; its client was ``told`` this before, the ``known`` tokens of each sequence. Without
        what was told nothing is kept. Nor are beam searches: they tell nothing before their end."""
        if not request.key or request.beam_width or (any(known) and not told):
            return
        self.forget(request.request_id)
        kept = self._answers[request.request_id] = _Kept(request, AnswerLog(told))
        self.nbytes += kept.log.nbytes
        self._make_room()

    def record(self, outputs: Iterable[TokenOutput]) -> None:
        """What attempts tell."""
        if not self._answers:
            return
        for output in outputs:
            kept = self._answers.get(output.request_id)
            if kept is not None and (added := kept.log.take(output)) >= 0:
                self.nbytes += added
            elif kept is not None:  # another process has left something out
                self.forget(output.request_id)
        self._make_room()

    def _make_room(self) -> None:
        while self.nbytes > self._bytes_max and self._answers:
            self.forget(next(iter(self._over or self._answers)))

    def told_of(self, attempt_id: str, latest: Iterable[TokenOutput]) -> tuple[TokenOutput, ...]:
        """All that was told of an attempt, and of ``latest``, which is not recorded yet."""
        kept = self._answers.get(attempt_id)
        if kept is None:
            return ()
        self.record([output for output in latest if output.request_id == attempt_id])
        # it may have been forgotten by that: what was told is right all the same
        return tuple(kept.log.outputs(attempt_id))

    def ended(self, attempt_id: str, now_ns: int) -> None:
        """The attempt is not here any more. Its last outputs may still be recorded."""
        kept = self._answers.get(attempt_id)
        if kept is not None and kept.phase is ReplayPhase.RUNNING:
            kept.phase = KEPT_ANSWER.step(kept.phase, ReplayCause.ENDED)
            kept.until_ns = now_ns + self._keep_ns
            self._over[attempt_id] = kept

    def forget(self, attempt_id: str) -> None:
        """Keep nothing of an attempt, if anything was kept."""
        kept = self._answers.pop(attempt_id, None)
        if kept is not None:
            kept.phase = KEPT_ANSWER.step(kept.phase, ReplayCause.FORGOTTEN)
            self._over.pop(attempt_id, None)
            self.nbytes -= kept.log.nbytes

    def runs(self, attempt_id: str) -> bool:
        """Whether the attempt is here and its answer is kept."""
        kept = self._answers.get(attempt_id)
        return kept is not None and kept.phase is ReplayPhase.RUNNING

    # -- time

    def expire(self, now_ns: int) -> None:
        """Forget what was kept for long enough."""
        while self._over:
            attempt_id, kept = next(iter(self._over.items()))
            if kept.until_ns > now_ns:
                return
            self.forget(attempt_id)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` is worth calling. None: nothing is kept of attempts that are over."""
        return next(iter(self._over.values())).until_ns if self._over else None

    # -- telling a router

    def ask(self, router: Peer | None) -> None:
        """``router`` has accepted the instance."""
        self.is_asked = self.is_asked or router != self._told_to
        self._told_to = router

    def with_key(self, key: str, asked: str) -> list[AnswerHeld]:
        """What is kept of the answer to one request, each attempt by itself."""
        with_key = (kept for kept in self._answers.values() if kept.request.key == key)
        return [kept.held() for kept in with_key if kept.request.asked == asked]

    def answers_another(self, key: str, asked: str) -> bool:
        """Whether the whole answer to another request with this key is kept."""
        others = (kept for kept in self._answers.values() if kept.request.key == key and kept.request.asked != asked)
        return any(kept.log.is_complete(kept.request.n) for kept in others)

    def take_held(self, follower_of: Callable[[str], Peer | None] = lambda _attempt: None) -> list[AnswersHeld]:
        """Everything that no follower is responsible for, for the router that has accepted the instance."""
        self.is_asked = False
        parts: list[list[AnswerHeld]] = [[]]
        nbytes = 0
        for attempt_id, kept in self._answers.items():
            if (kept.log or kept.phase is ReplayPhase.RUNNING) and follower_of(attempt_id) is None:
                nbytes += kept.log.nbytes
                parts[-1].append(kept.held())
            if nbytes > _MESSAGE_BYTES:
                parts.append([])
                nbytes = 0
        return [AnswersHeld(tuple(part), part is parts[-1]) for part in parts]

    def check_invariants(self, groups: Container[str]) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        for attempt_id, kept in self._answers.items():
            check(kept.phase is not ReplayPhase.GONE, "{} is gone, and kept", attempt_id)
            is_over = kept.phase is ReplayPhase.OVER
            check(is_over == (self._over.get(attempt_id) is kept), "{} is {}, listed wrongly", attempt_id, kept.phase)
            check(is_over or attempt_id in groups, "{} runs, and is not here", attempt_id)
        check(self._over.keys() <= self._answers.keys(), "answers are over, and unknown")
        ends = [kept.until_ns for kept in self._over.values()]
        check(ends == sorted(ends), "answers are kept out of order")
        nbytes = sum(kept.log.nbytes for kept in self._answers.values())
        check(nbytes == self.nbytes, "{} bytes were counted, there are {}", self.nbytes, nbytes)
        check(nbytes <= self._bytes_max or len(self._answers) <= 1, "{} bytes are kept", nbytes)

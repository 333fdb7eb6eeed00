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


class _RetainedAnswer:
    """One answer."""

    __slots__ = ("log", "phase", "request", "until_ns")

    def __init__(self, request: Request, log: AnswerLog) -> None:
        self.request = request
        self.log = log
        self.phase = KEPT_ANSWER.initial
        self.until_ns = 0  # when it is forgotten, once it is over

    def to_message(self) -> AnswerHeld:
        request, runs = self.request, self.phase is ReplayPhase.RUNNING
        outputs = tuple(self.log.outputs_for(request.request_id))
        return AnswerHeld(request.key, request.asked, request.request_id, runs, request.created_s, outputs)


class ReplayBuffer:
    """Answers by their attempts, within a bounded time and memory."""

    def __init__(self, keep_ns: int, bytes_max: int) -> None:
        self._keep_ns, self._bytes_max = keep_ns, bytes_max
        self._answers: dict[str, _RetainedAnswer] = {}  # by attempt, in order of arrival
        self._ended: dict[str, _RetainedAnswer] = {}  # of them: not running, in order of their end
        self._reported_to: Peer | None = None
        #: approximate memory of all
        self.nbytes = 0
        #: a router has to be told what there is
        self.report_due = False

    def __len__(self) -> int:
        return len(self._answers)

    # -- the life of an answer

    def open_answer(
        self, request: Request, emitted_outputs: Sequence[TokenOutput], known_tokens: Iterable[Sequence[int]]
    ) -> None:
        """An attempt begins here. ``emitted_outputs``: what its client has; ``known_tokens``: those tokens, of each
        sequence. Without the outputs nothing is retained, nor of beam searches: they emit nothing before their end."""
        if not request.key or request.beam_width or (any(known_tokens) and not emitted_outputs):
            return
        self.forget_attempt(request.request_id)
        answer = self._answers[request.request_id] = _RetainedAnswer(request, AnswerLog(emitted_outputs))
        self.nbytes += answer.log.nbytes
        self._drop_oldest()

    def record_outputs(self, outputs: Iterable[TokenOutput]) -> None:
        """What attempts tell."""
        if not self._answers:
            return
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is not None and (added := answer.log.append_output(output)) >= 0:
                self.nbytes += added
            elif answer is not None:  # another process has left something out
                self.forget_attempt(output.request_id)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self.nbytes > self._bytes_max and self._answers:
            self.forget_attempt(next(iter(self._ended or self._answers)))

    def outputs_of(self, attempt_id: str, latest: Iterable[TokenOutput]) -> tuple[TokenOutput, ...]:
        """All that was told of an attempt, and of ``latest``, which is not recorded yet."""
        answer = self._answers.get(attempt_id)
        if answer is None:
            return ()
        self.record_outputs([output for output in latest if output.request_id == attempt_id])
        # it may have been forgotten by that: what was told is right all the same
        return tuple(answer.log.outputs_for(attempt_id))

    def on_attempt_ended(self, attempt_id: str, now_ns: int) -> None:
        """The attempt is not here any more. Its last outputs may still be recorded."""
        answer = self._answers.get(attempt_id)
        if answer is not None and answer.phase is ReplayPhase.RUNNING:
            answer.phase = KEPT_ANSWER.next_phase(answer.phase, ReplayCause.ENDED)
            answer.until_ns = now_ns + self._keep_ns
            self._ended[attempt_id] = answer

    def forget_attempt(self, attempt_id: str) -> None:
        """Keep nothing of an attempt, if anything was kept."""
        answer = self._answers.pop(attempt_id, None)
        if answer is not None:
            answer.phase = KEPT_ANSWER.next_phase(answer.phase, ReplayCause.FORGOTTEN)
            self._ended.pop(attempt_id, None)
            self.nbytes -= answer.log.nbytes

    def is_running(self, attempt_id: str) -> bool:
        """Whether the attempt is here and its answer is kept."""
        answer = self._answers.get(attempt_id)
        return answer is not None and answer.phase is ReplayPhase.RUNNING

    # -- time

    def expire_answers(self, now_ns: int) -> None:
        """Forget what was kept for long enough."""
        while self._ended:
            attempt_id, answer = next(iter(self._ended.items()))
            if answer.until_ns > now_ns:
                return
            self.forget_attempt(attempt_id)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire_answers` is worth calling. None: nothing is kept of attempts that are over."""
        return next(iter(self._ended.values())).until_ns if self._ended else None

    # -- telling a router

    def on_router_accepted(self, router: Peer | None) -> None:
        """``router`` has accepted the instance."""
        self.report_due = self.report_due or router != self._reported_to
        self._reported_to = router

    def with_key(self, key: str, request_digest: str) -> list[AnswerHeld]:
        """What is kept of the answer to one request, each attempt by itself."""
        with_key = (answer for answer in self._answers.values() if answer.request.key == key)
        return [answer.to_message() for answer in with_key if answer.request.asked == request_digest]

    def answers_another(self, key: str, request_digest: str) -> bool:
        """Whether the whole answer to another request with this key is kept."""
        other_answers = (
            answer
            for answer in self._answers.values()
            if answer.request.key == key and answer.request.asked != request_digest
        )
        return any(answer.log.is_complete(answer.request.n) for answer in other_answers)

    def take_messages(self, follower_of: Callable[[str], Peer | None] = lambda _attempt: None) -> list[AnswersHeld]:
        """Everything that no follower is responsible for, for the router that has accepted the instance."""
        self.report_due = False
        parts: list[list[AnswerHeld]] = [[]]
        nbytes = 0
        for attempt_id, answer in self._answers.items():
            if (answer.log or answer.phase is ReplayPhase.RUNNING) and follower_of(attempt_id) is None:
                nbytes += answer.log.nbytes
                parts[-1].append(answer.to_message())
            if nbytes > _MESSAGE_BYTES:
                parts.append([])
                nbytes = 0
        return [AnswersHeld(tuple(part), part is parts[-1]) for part in parts]

    def check_invariants(self, groups: Container[str]) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        for attempt_id, answer in self._answers.items():
            check(answer.phase is not ReplayPhase.GONE, "{} is gone, and kept", attempt_id)
            is_over = answer.phase is ReplayPhase.OVER
            check(
                is_over == (self._ended.get(attempt_id) is answer), "{} is {}, listed wrongly", attempt_id, answer.phase
            )
            check(is_over or attempt_id in groups, "{} runs, and is not here", attempt_id)
        check(self._ended.keys() <= self._answers.keys(), "answers are over, and unknown")
        ends = [answer.until_ns for answer in self._ended.values()]
        check(ends == sorted(ends), "answers are kept out of order")
        nbytes = sum(answer.log.nbytes for answer in self._answers.values())
        check(nbytes == self.nbytes, "{} bytes were counted, there are {}", self.nbytes, nbytes)
        check(nbytes <= self._bytes_max or len(self._answers) <= 1, "{} bytes are kept", nbytes)

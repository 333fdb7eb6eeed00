"""The clients of a workload in virtual time: what ``bench/load`` does over HTTP, with equal records.

Open loop: a turn is sent when it is due, even if other turns are late; only its own session can delay it. Closed loop:
``users`` sessions at a time; when one ends, the next begins.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from memserve.base.types import FinishReason, Request, SamplingParams, StopParams, TokenArray, TokenOutput
from memserve.base.units import ns_from_s
from memserve.protocol.events import RequestArrived, ToolCalled
from memserve_lab.sim.clock import Clock
from memserve_lab.sim.replay.scripts import Script
from memserve_lab.sim.replay.setup import Surroundings
from memserve_lab.sim.timed_device import Moments
from memserve_lab.workloads.records import History, Session, Workload

MakeScript = Callable[[Session], Script]

_SAMPLING = SamplingParams()  # no token is drawn


@dataclass(slots=True)
class Served:
    """One request. Times are nanoseconds since the workload began; latency counts from ``scheduled_ns``."""

    session: str
    turn: int
    group: str
    scheduled_ns: int
    prompt_tokens: int
    first_ns: int | None = None
    token_ns: array[int] = field(default_factory=lambda: array("q"))
    """When each token reached the client."""
    end_ns: int | None = None
    cached_tokens: int = 0
    dram_tokens: int = 0
    """Of them: brought up from the instance's second tier."""
    fetched_tokens: int = 0
    """Of them: from elsewhere."""
    fetched_tier: str = ""
    """Where they lay there: ``hbm``, ``dram``, ``store`` or ``ssd``."""
    instance: str = ""
    """The instances that computed the answer, from the story: ``p1 to d1``."""
    finish: str = ""
    """The finish reason. Empty: under way, or rejected."""
    error: str = ""
    is_cut_off: bool = False
    """Its connection broke."""
    retry_after_s: float | None = None

    @property
    def answered(self) -> bool:
        """Whether it was answered to its full length, or to the end of the context."""
        return self.finish == "length"


class _Talk:
    """A session under way."""

    __slots__ = ("answer", "number", "prompt", "script", "served", "session")

    def __init__(self, session: Session, script: Script) -> None:
        self.session, self.script = session, script
        self.number = 0
        self.prompt: TokenArray | None = None  # of this turn, once it was sent
        self.served: Served | None = None
        self.answer: list[int] = []


class Clients:
    """All clients of a workload. ``served`` holds every request that was sent, in the order of sending."""

    def __init__(
        self,
        clock: Clock,
        around: Surroundings,
        moments: Moments,
        submit: Callable[[RequestArrived | ToolCalled], None],
        workload: Workload,
        make_script: MakeScript = Script,
    ) -> None:
        """``moments``: when tokens were drawn; ``submit``: the way to a router."""
        self._clock, self._around, self._moments, self._submit = clock, around, moments, submit
        self._workload, self._make_script = workload, make_script
        self.served: list[Served] = []
        self.tokens = 0
        self.answered = 0
        """Requests that have ended."""
        self._start_ns = 0
        self._waiting = iter(workload.sessions)
        self._talks: dict[str, _Talk] = {}
        self._left = len(workload.sessions)

    @property
    def done(self) -> bool:
        """Every session has ended."""
        return not self._left

    def begin_workload(self) -> None:
        """Start: now is second 0 of the workload."""
        self._start_ns = self._clock.now
        around = self._around
        self._moments.way_ns = around.message_ns + around.back_ns - self._start_ns
        if self._workload.users is None:
            self._clock.at_each(self._first_turns(), self._ask_turn)
        else:
            for _ in range(self._workload.users):
                self._take_next(0)

    def _first_turns(self) -> Iterator[tuple[int, tuple[_Talk, int]]]:
        for session in sorted(self._waiting, key=_due_ns):
            due_ns = _due_ns(session)
            yield self._start_ns + due_ns, (self._begin_session(session), due_ns)

    def _take_next(self, free_ns: int) -> None:
        session = next(self._waiting, None)
        if session is not None:
            self._ask_at(self._begin_session(session), max(_due_ns(session), free_ns))

    def _begin_session(self, session: Session) -> _Talk:
        return _Talk(session, self._make_script(session))

    def _ask_at(self, talk: _Talk, due_ns: int) -> None:
        self._clock.call_at(self._start_ns + due_ns, self._ask_turn, talk, due_ns)

    def _ask_turn(self, talk: _Talk, due_ns: int) -> None:
        session, number = talk.session, talk.number
        prompt = talk.prompt if talk.prompt is not None else talk.script.prompt_of(number)
        talk.prompt = prompt
        request_id = f"{len(self.served)}"
        talk.served = Served(session.session_id, number, session.group, due_ns, len(prompt))
        talk.answer = []
        self.served.append(talk.served)
        self._talks[request_id] = talk
        stop = StopParams(max_tokens=session.turns[number].output_tokens_max)
        request = Request(request_id, prompt, _SAMPLING, stop, session=session.session_id)
        self._clock.call_after(self._around.front_ns, self._submit, RequestArrived(request))

    # -- answers

    def on_output(self, output: TokenOutput) -> None:
        """The router gives tokens to a client; each arrives one message delay after it was drawn."""
        talk = self._talks[output.request_id]
        served = talk.served
        assert served is not None, "it has asked"
        tokens = output.tokens
        if tokens:
            self.tokens += len(tokens)
            served.token_ns.extend(self._moments.seen_ns(tokens))
            talk.answer.extend(tokens)
            if served.first_ns is None:
                served.first_ns = served.token_ns[0]
                if tool := talk.session.turns[talk.number].tool:
                    self._submit(ToolCalled(output.request_id, tool))
        if output.cached_tokens:
            served.cached_tokens = output.cached_tokens
        for fact, value in output.story:
            match fact, value:
                case "route", str():
                    served.instance = value
                case "cached_tokens_dram", int():
                    served.dram_tokens = value
                case "fetched_tokens", int():
                    served.fetched_tokens = value
                case "fetched_tier", str():
                    served.fetched_tier = value
        if output.finish_reason is not None:
            served.finish = output.finish_reason.value
            end_ns = self._clock.now + self._around.back_ns - self._start_ns
            self._end_turn(output.request_id, talk, max(end_ns, *served.token_ns[-1:], 0))

    def turned_away(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        """The router rejects a request."""
        talk = self._talks[request_id]
        assert talk.served is not None, "it has asked"
        talk.served.error, talk.served.retry_after_s = reason, retry_after_s
        end_ns = self._clock.now + self._around.back_ns - self._start_ns
        if self._around.retries and retry_after_s is not None:
            del self._talks[request_id]
            talk.served.end_ns = end_ns
            self._ask_at(talk, end_ns + ns_from_s(retry_after_s))
            return
        self._end_turn(request_id, talk, end_ns)

    def cut_off(self, request_ids: Iterable[str]) -> None:
        """The router of these requests is gone: their clients get an error from the network, if they still wait."""
        for request_id in request_ids:
            talk = self._talks.get(request_id)
            if talk is not None and talk.served is not None:
                talk.served.error, talk.served.is_cut_off = "its router is gone", True
                self._end_turn(request_id, talk, self._clock.now - self._start_ns)

    def _end_turn(self, request_id: str, talk: _Talk, end_ns: int) -> None:
        served, session = talk.served, talk.session
        assert served is not None, "it has asked"
        del self._talks[request_id]
        served.end_ns = end_ns
        self.answered += 1
        talk.number += 1
        talk.prompt = None
        ok = served.finish == FinishReason.LENGTH
        if talk.number == len(session.turns) or (not ok and session.history is History.CLOSED):
            self._left -= 1
            self._take_next(end_ns)
            return
        talk.script.add_answer(talk.answer)
        turn = session.turns[talk.number]
        self._ask_at(talk, max(ns_from_s(turn.due_s or 0.0), end_ns + ns_from_s(turn.think_s)))


def _due_ns(session: Session) -> int:
    return ns_from_s(session.turns[0].due_s or 0.0)

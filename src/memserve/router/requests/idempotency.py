"""Answers that clients may ask for again: with ``Request.key``, after a lost connection, or at a restarted router.

::

    NEW --client--> ATTENDED --client left--> UNATTENDED --client--> ATTENDED       one connection at a time gets it
     |                 |  ^                       |
     |             ended  client                ended          UNATTENDED, REPORTED and KEPT end by time, or for room
     |                 v  |                       v
     +--instance--> REPORTED, which runs on  ... KEPT          an instance that has accepted this router has it

A request with a key is a request like any other to the rest of the machine. What it emits is kept here and passed on
to the connection that reads the answer now, under that connection's own name. A client that comes again gets all that
is known at once. Where instances have told of the answer, their attempt goes on as the request's own.

One answer with a key as the router sees it: its phases, and what instances have told of it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from msgspec import structs

from memserve.base.errors import check
from memserve.base.state_table import Transitions
from memserve.base.types import Request, TokenOutput
from memserve.protocol.events import KeyConflict
from memserve.protocol.idempotency import AnswerHeld, AnswerLog, AnswersHeld, QueryAnswers
from memserve.protocol.messages import Cancel
from memserve.protocol.peers import Peer
from memserve.router.members.registry import Member, MemberState
from memserve.router.parts import RequestFlow, RouterParts
from memserve.router.requests.requests import RequestState


class AnswerPhase(enum.Enum):
    """Where an answer with a key stands."""

    NEW = enum.auto()
    REPORTED = enum.auto()  # an instance has (a part of) it, no client has asked this router for it
    ATTENDED = enum.auto()  # a connection gets it
    UNATTENDED = enum.auto()  # its request goes on, its client is gone
    KEPT = enum.auto()  # complete
    GONE = enum.auto()


class AnswerCause(enum.Enum):
    """Why an answer changes its phase."""

    INSTANCE_TOLD = enum.auto()
    CLIENT_CAME = enum.auto()
    CLIENT_LEFT = enum.auto()
    COMPLETED = enum.auto()
    REJECTED = enum.auto()  # its request ended before what an instance has was used
    DROPPED = enum.auto()  # there is no answer, its time is over, or others need the memory


ANSWER = Transitions(
    "An answer with a key at the router",
    AnswerPhase.NEW,
    {
        (AnswerPhase.NEW, AnswerCause.INSTANCE_TOLD): AnswerPhase.REPORTED,
        (AnswerPhase.NEW, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.REPORTED, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.REPORTED, AnswerCause.DROPPED): AnswerPhase.GONE,
        (AnswerPhase.ATTENDED, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.ATTENDED, AnswerCause.CLIENT_LEFT): AnswerPhase.UNATTENDED,
        (AnswerPhase.ATTENDED, AnswerCause.COMPLETED): AnswerPhase.KEPT,
        (AnswerPhase.ATTENDED, AnswerCause.REJECTED): AnswerPhase.REPORTED,
        (AnswerPhase.ATTENDED, AnswerCause.DROPPED): AnswerPhase.GONE,
        (AnswerPhase.UNATTENDED, AnswerCause.CLIENT_CAME): AnswerPhase.ATTENDED,
        (AnswerPhase.UNATTENDED, AnswerCause.COMPLETED): AnswerPhase.KEPT,
        (AnswerPhase.UNATTENDED, AnswerCause.REJECTED): AnswerPhase.REPORTED,
        (AnswerPhase.UNATTENDED, AnswerCause.DROPPED): AnswerPhase.GONE,
        (AnswerPhase.KEPT, AnswerCause.CLIENT_CAME): AnswerPhase.KEPT,
        (AnswerPhase.KEPT, AnswerCause.DROPPED): AnswerPhase.GONE,
    },
)
"""A further client with the key takes the answer over: mostly it is the same one, and the server has not noticed that
its first connection is dead. One reader also means one that stops sequences, and one that is waited for."""


@dataclass(slots=True, eq=False)
class HeldAnswer:
    """What one instance has of an answer."""

    answer: Answer
    peer: Peer
    attempt_id: str
    runs: bool
    created_s: int
    log: AnswerLog

    @property
    def name(self) -> tuple[Peer, str]:
        """Of what one instance has of one attempt."""
        return self.peer, self.attempt_id


@dataclass(slots=True, eq=False)
class Answer:
    """One answer."""

    key: str
    request_digest: str
    created_s: int
    phase: AnswerPhase = ANSWER.initial
    request_id: str = ""
    """Of the live request; empty: there is none."""
    sequences: int = 1
    reader: str = ""
    """The connection that gets it, by the name that it has given to the request; empty: none."""
    until_ns: int = 0
    """When it is dropped, while no client waits for it."""
    log: AnswerLog = field(default_factory=AnswerLog)
    held_answers: list[HeldAnswer] = field(default_factory=list)
    """What instances have told, as long as the request was not placed."""
    queried_peers: dict[Peer, None] = field(default_factory=dict)
    """Instances that were asked for it, and have not told yet."""

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        return self.log.nbytes + sum(entry.log.nbytes for entry in self.held_answers)


OTHER_REQUEST = "this Idempotency-Key was used for another request: take a new key, or send the same body again"
CLIENT_LEFT = "its client has left"
TAKEN_OVER = "another connection with the same Idempotency-Key reads this answer now"


class ReplayLog:
    """All answers with a key, within a bounded time and memory."""

    def __init__(self, parts: RouterParts, flow: RequestFlow) -> None:
        self._config, self._registry, self._counters = parts.config, parts.tables.registry, parts.counters
        self._timers, self._outbox, self._flow = parts.timers, parts.outbox, flow
        self._by_key: dict[str, Answer] = {}
        self._by_request: dict[str, Answer] = {}  # of live requests
        self._by_reader: dict[str, Answer] = {}
        self._by_attempt: dict[tuple[Peer, str], HeldAnswer] = {}  # of a handover both instances have some
        self._idle: dict[str, Answer] = {}  # those that no client reads, by key, in the order in which that began
        self._unreported_members: dict[Peer, None] = {}  # members of the last router that have not told what they have
        self._queried: dict[str, Answer] = {}  # those of which instances have not told yet what they have, by key
        #: whether there are other routers, at which a client may have begun
        self.queries_instances = parts.follower is not None
        #: approximate memory of all
        self.nbytes = 0
        parts.outbox.relay_keyed(self._by_request, self._relay_output)

    def __len__(self) -> int:
        return len(self._by_key)

    # -- clients

    def serve_known(self, request: Request, now_ns: int) -> bool:
        """A client has sent ``request``. Whether that is all: its answer is known here, or its key is another
        request's."""
        answer = self._by_key.get(request.key)
        if answer is None:
            return False
        if answer.request_digest != request.asked:
            self._outbox.reject_request(request.request_id, OTHER_REQUEST, None, conflict=KeyConflict.OTHER_REQUEST)
            return True
        if answer.phase is AnswerPhase.REPORTED:
            return False
        if answer.reader:
            self._outbox.reject_request(
                answer.reader, TAKEN_OVER, None, conflict=KeyConflict.TAKEN_OVER, is_reader=True
            )
        self._counters.answers_continued += 1
        self._change_phase(answer, AnswerCause.CLIENT_CAME, now_ns)
        if answer.phase is AnswerPhase.ATTENDED:
            self._set_reader(answer, request.request_id)
        for output in answer.log.outputs_for(request.request_id):
            self._outbox.emit_output(structs.replace(output, story=(*output.story, ("created", answer.created_s))))
        return True

    def begin_answer(self, request: Request, now_ns: int) -> Request:
        """A client has sent ``request``, which :meth:`serve_known` has not served: a new one, or one that instances
        know. Returns it as it is to be run."""
        answer = self._by_key.get(request.key)
        if answer is None:
            answer = self._by_key[request.key] = Answer(request.key, request.asked, request.created_s)
            self.nbytes += answer.nbytes
        answer.request_id, answer.sequences = request.request_id, request.n
        self._by_request[request.request_id] = answer
        self._change_phase(answer, AnswerCause.CLIENT_CAME, now_ns)
        self._set_reader(answer, request.request_id)
        if self.queries_instances:
            self._query_instances(answer, now_ns)
        return structs.replace(request, created_s=answer.created_s)

    def _query_instances(self, answer: Answer, now_ns: int) -> None:
        """Another router may have begun this answer: instances know."""
        peers = [
            member.peer for member in self._registry if member.has_model and member.state is not MemberState.REJOINING
        ]
        for peer in peers:
            self._outbox.send(peer, QueryAnswers(answer.key, answer.request_digest))
        if peers:
            answer.queried_peers, self._queried[answer.key] = dict.fromkeys(peers), answer
            self._timers.arm(
                now_ns + self._config.dead_after_ns, self._on_query_timeout, (answer, answer.queried_peers)
            )

    def _on_query_timeout(self, query: tuple[Answer, dict[Peer, None]], now_ns: int) -> None:
        """Those that have not told are silent, or a message was lost."""
        answer, queried_peers = query
        if answer.queried_peers is queried_peers:
            for peer in list(queried_peers):
                self._on_instance_answered(answer, peer, now_ns)

    def _on_instance_answered(self, answer: Answer, peer: Peer, now_ns: int) -> None:
        if peer in answer.queried_peers:
            del answer.queried_peers[peer]
            if not answer.queried_peers:
                del self._queried[answer.key]
                self._flow.place_waiting(now_ns)

    def _set_reader(self, answer: Answer, reader: str) -> None:
        self._by_reader.pop(answer.reader, None)
        answer.reader = reader
        self._by_reader[reader] = answer

    def request_of(self, reader: str) -> str:
        """The request whose answer a connection gets; ``reader`` itself for one without a key."""
        answer = self._by_reader.get(reader)
        return reader if answer is None else answer.request_id

    def is_read_by(self, reader: str) -> bool:
        """Whether a connection gets an answer with a key."""
        return reader in self._by_reader

    def on_reader_left(self, reader: str, now_ns: int) -> bool:
        """A connection is gone. Whether its request goes on without."""
        answer = self._by_reader.pop(reader, None)
        if answer is None:
            return reader in self._by_request  # another connection has taken it over
        answer.reader = ""
        self._outbox.reject_request(reader, CLIENT_LEFT, None, is_reader=True)  # the host waits for nothing more for it
        self._change_phase(answer, AnswerCause.CLIENT_LEFT, now_ns)
        return True

    def on_taken_over(self, request_id: str, now_ns: int) -> None:
        """A client asks another router for the answer of a live request, and an instance goes on for that one."""
        self._reject_live(request_id, TAKEN_OVER, KeyConflict.TAKEN_OVER, now_ns)

    def _reject_live(self, request_id: str, reason: str, conflict: KeyConflict, now_ns: int) -> None:
        """End a live request for what other routers do with its key."""
        answer = self._by_request[request_id]
        if answer.reader:
            self._outbox.reject_request(answer.reader, reason, None, conflict=conflict, is_reader=True)
            del self._by_reader[answer.reader]
            answer.reader = ""
            self._change_phase(answer, AnswerCause.CLIENT_LEFT, now_ns)
        self._flow.give_up_request(request_id, now_ns)

    def on_attempt_taken(self, sender: Peer, attempt_id: str, now_ns: int) -> None:
        """As :meth:`on_taken_over`, of what ``sender`` has told of and no request here goes on with yet: its request
        may still wait to be admitted, or for what other instances tell."""
        entry = self._by_attempt.get((sender, attempt_id))
        if entry is None:
            return
        answer = entry.answer
        answer.held_answers.remove(entry)
        self._forget_held(entry)
        if answer.request_id:
            self.on_taken_over(answer.request_id, now_ns)
        elif not answer.held_answers:
            self._drop_answer(answer, now_ns)

    # -- the request

    def _relay_output(self, output: TokenOutput) -> TokenOutput | None:
        """What a live request emits, as its reader gets it; ``None``: there is no reader."""
        answer = self._by_request[output.request_id]
        self.nbytes += max(0, answer.log.append_output(output))
        if not answer.reader:
            return None
        story = output.story if output.offset else (*output.story, ("created", answer.created_s))
        return structs.replace(output, request_id=answer.reader, story=story)

    def on_request_end(self, request_id: str, now_ns: int) -> None:
        """The request has ended in whatever way, and has emitted everything."""
        answer = self._by_request.pop(request_id)
        self._by_reader.pop(answer.reader, None)
        self._queried.pop(answer.key, None)
        answer.queried_peers = {}
        answer.reader = answer.request_id = ""
        if answer.log.is_complete(answer.sequences):
            self._drop_held(answer)
            self._change_phase(answer, AnswerCause.COMPLETED, now_ns)
        elif answer.held_answers:
            self.nbytes -= answer.log.nbytes
            answer.log = AnswerLog()
            self.nbytes += answer.log.nbytes
            self._change_phase(answer, AnswerCause.REJECTED, now_ns)
        else:
            self._drop_answer(answer, now_ns)
        self._evict_idle(now_ns)

    def emitted_outputs(self, request_id: str) -> tuple[TokenOutput, ...]:
        """All that was emitted of a live request."""
        answer = self._by_request.get(request_id)
        return tuple(answer.log.outputs_for(request_id)) if answer is not None else ()

    # -- what instances have

    def wait_for_member(self, member: Member, now_ns: int) -> None:
        """``member`` was one of the last router's: requests with keys are placed when it has told what it has."""
        self._unreported_members[member.peer] = None
        self._timers.arm(now_ns + self._config.dead_after_ns, self.on_member_reported, member.peer)

    def on_member_reported(self, peer: Peer, now_ns: int) -> None:
        """A member has told what it has, is gone, or has had its time for that."""
        for answer in list(self._queried.values()):
            self._on_instance_answered(answer, peer, now_ns)
        if peer in self._unreported_members:
            del self._unreported_members[peer]
            if not self._unreported_members:
                self._flow.place_waiting(now_ns)

    def awaits_reports(self, req: RequestState) -> bool:
        """Whether an instance that has not told yet may have the answer of ``req``."""
        answer = self._by_request.get(req.request_id)
        return answer is not None and not req.has_begun and self._is_awaited(answer)

    def _is_awaited(self, answer: Answer) -> bool:
        return bool(self._unreported_members) or bool(answer.queried_peers)

    def on_answers_held(self, member: Member, message: AnswersHeld, now_ns: int) -> None:
        """``member`` tells what it has."""
        for report in message.answers:
            self._add_held_answer(member, report, now_ns)
        if message.key and (answer := self._queried.get(message.key)) is not None:
            if message.refused == answer.request_digest:  # an earlier question may have been for another request
                self._reject_live(answer.request_id, OTHER_REQUEST, KeyConflict.OTHER_REQUEST, now_ns)
            else:
                self._on_instance_answered(answer, member.peer, now_ns)
        elif message.is_last and not message.key:
            self.on_member_reported(member.peer, now_ns)
        self._evict_idle(now_ns)

    def _add_held_answer(self, member: Member, report: AnswerHeld, now_ns: int) -> None:
        answer = self._by_key.get(report.key)
        if answer is None:
            answer = self._by_key[report.key] = Answer(report.key, report.asked, report.created_s)
            self.nbytes += answer.nbytes
            self._change_phase(answer, AnswerCause.INSTANCE_TOLD, now_ns)
        is_open = answer.phase is AnswerPhase.REPORTED or (self._is_awaited(answer) and not answer.log)
        is_known = (member.peer, report.attempt_id) in self._by_attempt
        if answer.request_digest != report.asked or not is_open or is_known:
            if report.runs and not is_known:
                self._outbox.send(member.peer, Cancel(report.attempt_id))
            return
        outputs = [structs.replace(output, request_id=report.attempt_id) for output in report.told]
        entry = HeldAnswer(answer, member.peer, report.attempt_id, report.runs, report.created_s, AnswerLog(outputs))
        answer.held_answers.append(entry)
        self._by_attempt[entry.name] = entry
        self.nbytes += entry.log.nbytes

    def on_output(self, sender: Peer, output: TokenOutput) -> bool:
        """Whether ``output`` is one of a reported attempt, which goes on at ``sender``."""
        entry = self._by_attempt.get((sender, output.request_id))
        if entry is None:
            return False
        added = entry.log.append_output(output)
        self.nbytes += max(0, added)
        if added < 0:  # a message was lost: what follows is of no use
            self._stop_attempt(entry)
        return True

    def on_refused(self, sender: Peer, attempt_id: str) -> None:
        """An instance does not run a reported attempt any more."""
        entry = self._by_attempt.get((sender, attempt_id))
        if entry is not None:
            entry.runs = False

    def take_best_held(self, req: RequestState) -> HeldAnswer | None:
        """The best that instances have for ``req``, which is about to be placed; others are given up."""
        answer = self._by_request.get(req.request_id)
        if answer is None or not answer.held_answers:
            return None
        usable = [entry for entry in answer.held_answers if not req.has_begun and _agrees(req, entry)]
        best = max(usable, key=lambda entry: self._rank_held(req, entry), default=None)
        for entry in answer.held_answers:
            self._forget_held(entry)
            if entry is not best:
                self._stop_attempt(entry)
        answer.held_answers.clear()
        if best is not None:
            answer.created_s = best.created_s
        return best

    def _rank_held(self, req: RequestState, entry: HeldAnswer) -> tuple[bool, bool, int]:
        alive = entry.runs and self._registry.get(entry.peer) is not None
        return entry.log.is_complete(req.request.n), alive, entry.log.token_count

    def release_held(self, entry: HeldAnswer) -> None:
        """What :meth:`take_best_held` has returned goes no further than it is."""
        self._stop_attempt(entry)

    def _stop_attempt(self, entry: HeldAnswer) -> None:
        if entry.runs and self._registry.get(entry.peer) is not None:
            self._outbox.send(entry.peer, Cancel(entry.attempt_id))
        entry.runs = False

    def _forget_held(self, entry: HeldAnswer) -> None:
        del self._by_attempt[entry.name]
        self.nbytes -= entry.log.nbytes

    def _drop_held(self, answer: Answer) -> None:
        for entry in answer.held_answers:
            self._forget_held(entry)
            self._stop_attempt(entry)
        answer.held_answers.clear()

    # -- time and room

    def _change_phase(self, answer: Answer, cause: AnswerCause, now_ns: int) -> None:
        answer.phase = ANSWER.next_phase(answer.phase, cause)
        if answer.phase in (AnswerPhase.GONE, AnswerPhase.ATTENDED):
            self._idle.pop(answer.key, None)
        elif cause is not AnswerCause.CLIENT_CAME:  # a client that reads what is kept changes nothing
            self._idle.pop(answer.key, None)
            self._idle[answer.key] = answer
            answer.until_ns = now_ns + self._config.answer_ns
            self._timers.arm(answer.until_ns, self._is_due, answer)

    def _is_due(self, answer: Answer, now_ns: int) -> None:
        if self._idle.get(answer.key) is answer and answer.until_ns <= now_ns:
            self._end_answer(answer, now_ns)

    def _end_answer(self, answer: Answer, now_ns: int) -> None:
        if answer.request_id:
            self._flow.give_up_request(answer.request_id, now_ns)  # which leads to over()
        if self._by_key.get(answer.key) is answer and not answer.request_id:
            self._drop_answer(answer, now_ns)

    def _drop_answer(self, answer: Answer, now_ns: int) -> None:
        self._drop_held(answer)
        self.nbytes -= answer.nbytes
        del self._by_key[answer.key]
        self._change_phase(answer, AnswerCause.DROPPED, now_ns)

    def _evict_idle(self, now_ns: int) -> None:
        """What clients read stays: its memory ends with their requests."""
        while self.nbytes > self._config.answer_bytes and self._idle:
            self._end_answer(next(iter(self._idle.values())), now_ns)

    def check_invariants(self, live: dict[str, RequestState]) -> None:
        """Raise :class:`InvariantError` if the books do not agree. For tests; slow."""
        for key, answer in self._by_key.items():
            reads = answer.phase is AnswerPhase.ATTENDED
            runs = reads or answer.phase is AnswerPhase.UNATTENDED
            check(answer.key == key and answer.phase is not AnswerPhase.GONE, "{} is listed as {}", answer, key)
            check(bool(answer.reader) == reads, "{} has a reader, and should not, or the reverse", answer)
            check(bool(answer.request_id) == runs, "{} has a request, and should not, or the reverse", answer)
            check(not reads or self._by_reader.get(answer.reader) is answer, "{} is not known by its reader", answer)
            check(not runs or self._by_request.get(answer.request_id) is answer, "{} is not known by name", answer)
            check(reads == (key not in self._idle), "{} is idle, and should not be, or the reverse", answer)
            check(
                all(self._by_attempt.get(entry.name) is entry for entry in answer.held_answers),
                "{} is mixed up",
                answer,
            )
        asking = {key: answer for key, answer in self._by_key.items() if answer.queried_peers}
        check(asking == self._queried, "instances are asked for {}, listed are {}", asking, self._queried)
        readers = sum(bool(answer.reader) for answer in self._by_key.values())
        check(len(self._by_reader) == readers, "connections read nothing")
        check(len(self._by_attempt) == sum(len(a.held_answers) for a in self._by_key.values()), "attempts of no answer")
        keyed = [name for name, req in live.items() if req.request.key]
        check(sorted(keyed) == sorted(self._by_request), "{} have keys, not {}", keyed, self._by_request)
        nbytes = sum(answer.nbytes for answer in self._by_key.values())
        check(nbytes == self.nbytes, "{} bytes were counted, there are {}", self.nbytes, nbytes)


def _agrees(req: RequestState, entry: HeldAnswer) -> bool:
    """Whether what an instance has told can be the beginning of the answer."""
    outputs, request = entry.log.outputs_for(req.request_id), req.request
    return all(0 <= o.index < request.n and o.offset + len(o.tokens) <= request.stop.max_tokens for o in outputs)

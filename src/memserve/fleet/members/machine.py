"""An engine as a member of a cluster: it runs requests of the routers as an instance does, by its own API.

What routers ask of an instance it does in the engine's words, and what the engine says becomes an instance's outputs,
heartbeats and KV events. So placement, admission, retries, kept answers and explanations are those of any instance.
What it cannot do is never asked of it: its KV cannot be moved or pinned (``Role.ENGINE``), and a request that its API
has no words for is refused, and placed elsewhere.

::

    router           this machine                        engine
    Dispatch     --> StartCall, one a sequence      -->  POST
    Tokens       <-- PieceArrived                   <--  events of the stream
    Cancel       --> EndCall                        -->  the connection is closed
    KvEvents     <-- KvReceived, as identities      <--  its own KV events
    Heartbeat    <-- ReportRead                     <--  /metrics

A request ends here with its last sequence. Where a call breaks, the router is told, and the request goes on from its
last token on another member.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memserve import _core
from memserve.base.errors import check
from memserve.base.types import FinishReason, Request, Tier, TokenOutput
from memserve.fleet.kv_events import EngineKvFeed, KvEntries, KvListener
from memserve.fleet.members.dialects import Dialect, SequenceCall
from memserve.fleet.members.events import (
    CallBroke,
    EndCall,
    EngineMemberAction,
    EngineMemberEvent,
    GenerationBegun,
    PieceArrived,
    RepeatEvents,
    ReportRead,
    StartCall,
)
from memserve.fleet.members.index import EngineIndex
from memserve.fleet.members.work import EngineAttempt, EngineSequence, EngineTerms, EngineWork
from memserve.fleet.messages import EngineReport, KvReceived, ReplayEnded
from memserve.instance.cluster.idempotency import ReplayBuffer
from memserve.instance.cluster.routers import Routers, RouterUpdates
from memserve.instance.stats import InstanceStats
from memserve.kv.costs import PreemptionModel
from memserve.kv.events import KvFeed
from memserve.kv.identity import namespace_id
from memserve.protocol.events import MessageArrived, RejectRequest, Send
from memserve.protocol.idempotency import AnswerHeld, AnswersHeld, AnswerTaken, QueryAnswers
from memserve.protocol.member_events import LoadRead
from memserve.protocol.messages import (
    AnyMessage,
    Cancel,
    Dispatch,
    Drain,
    JoinAccepted,
    Migrate,
    MigrationRefused,
    PeerGone,
    PeerJoined,
    QueryAttempts,
    QueryKvEvents,
    StopSequence,
)
from memserve.protocol.peers import Load, Peer, PeerInfo


class EngineMember:
    """One mutator, :meth:`handle`; :meth:`heartbeat_load` is read between two events."""

    def __init__(self, terms: EngineTerms, dialect: Dialect, self_peer: Peer) -> None:
        self._terms, self._dialect, self._self_peer = terms, dialect, self_peer
        exchange = terms.exchange
        self._routers = Routers(exchange.kept_answer_ns)
        self._replay_buffer = ReplayBuffer(exchange.kept_answer_ns, exchange.kept_answer_bytes)
        self._index = EngineIndex()
        feed = KvFeed(self._index, exchange.event_capacity) if terms.spec.events else None
        self._updates = RouterUpdates(self._routers, feed, self._load)
        self._listener: KvListener | None = None  # None: it publishes nothing, or the names of blocks are not known yet
        self._kv_names: tuple[str, int] | None = None  # namespace and tokens of a block, as the cluster's instances say
        self._report = EngineReport({})
        self._work = EngineWork()
        self._drains = False
        self._outputs: list[TokenOutput] = []
        self._actions: list[EngineMemberAction] = []
        self._owner_messages: dict[type, Callable[[Any, int], None]] = {
            JoinAccepted: self._on_join_accepted, PeerJoined: self._on_peer_joined, PeerGone: self._on_peer_gone,
            Drain: self._on_drain,
        }  # fmt: skip
        self._commands: dict[type, Callable[[Any, Peer, int], None]] = {
            Dispatch: self._on_dispatch, Cancel: self._on_cancel, StopSequence: self._on_stop,
            QueryKvEvents: self._on_query_events, QueryAttempts: self._on_query_attempts,
            QueryAnswers: self._on_query_answers, Migrate: self._on_migrate,
        }  # fmt: skip
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            MessageArrived: lambda event, now_ns: self._on_message(event.sender, event.message, now_ns),
            PieceArrived: self._on_piece, CallBroke: self._on_broke, ReportRead: self._on_report,
            KvReceived: self._on_kv_received, ReplayEnded: lambda event, now_ns: self._on_replay_ended(),
            GenerationBegun: lambda event, now_ns: self._restart_as(event.self_peer),
        }  # fmt: skip

    # -- the one mutator

    def handle(self, event: EngineMemberEvent, now_ns: int) -> list[EngineMemberAction]:
        """Take ``event`` into account at time ``now_ns`` (ns) and say what is to be done, in order."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, now_ns)
        self._end_overdue(now_ns)
        self._replay_buffer.expire_answers(now_ns)
        actions = self._take_actions(now_ns)
        self._routers.forget_ended(set)
        return actions

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending. None: nothing is waited for."""
        deadlines = [attempt.deadline_ns for attempt in self._work.attempts.values()]
        waits = (self._routers.next_deadline_ns, self._replay_buffer.next_deadline_ns, self._updates.next_deadline_ns)
        return min((due_ns for due_ns in (*deadlines, *waits) if due_ns is not None), default=None)

    @property
    def self_peer(self) -> Peer:
        """The present incarnation."""
        return self._self_peer

    @property
    def router(self) -> Peer | None:
        """The owner that has accepted it."""
        return self._routers.owner

    def _take_actions(self, now_ns: int) -> list[EngineMemberAction]:
        """What is kept of answers goes before further tokens of them."""
        messages: list[EngineMemberAction] = []
        if self._replay_buffer.report_due and self.router is not None:
            owner = self.router
            reports = self._replay_buffer.take_messages(self._routers.follower_of)
            messages += [Send(owner, report) for report in reports]
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._replay_buffer.record_outputs(outputs)
            messages += self._routers.route_outputs(outputs)
        actions, self._actions = self._actions, []
        return [*messages, *actions, *self._updates.take_messages(now_ns)]

    # -- messages

    def _on_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        follow, run = self._owner_messages.get(type(message)), self._commands.get(type(message))
        if follow is not None and self._comes_from_owner(sender, message):
            follow(message, now_ns)
        elif run is not None and (self._routers.is_follower(sender) or self._comes_from_owner(sender, message)):
            run(message, sender, now_ns)

    def _comes_from_owner(self, sender: Peer, message: AnyMessage) -> bool:
        return self._routers.comes_from_owner(sender, message, self._replace_owner)

    def _replace_owner(self) -> None:
        for attempt_id in [name for name in self._work.attempts if self._routers.follower_of(name) is None]:
            if not self._replay_buffer.is_running(attempt_id):
                self._drop_attempt(attempt_id, now_ns=0)
        self._routers.owner_changes(None)

    def _on_join_accepted(self, message: JoinAccepted, now_ns: int) -> None:
        for follower in self._routers.set_members(message.peers):
            self._on_follower_gone(follower, now_ns)
        self._replay_buffer.on_router_accepted(self.router)
        for info in message.peers:
            self._learn_names(info)

    def _on_peer_joined(self, message: PeerJoined, now_ns: int) -> None:
        older = self._routers.on_member_joined(message.info)
        if older is not None:
            self._on_follower_gone(older, now_ns)
        self._learn_names(message.info)

    def _on_peer_gone(self, message: PeerGone, now_ns: int) -> None:
        if self._routers.remove_member(message.peer):
            self._on_follower_gone(message.peer, now_ns)

    def _on_follower_gone(self, follower: Peer, now_ns: int) -> None:
        for attempt_id in [name for name in self._work.attempts if self._routers.follower_of(name) == follower]:
            if self._replay_buffer.is_running(attempt_id):
                self._routers.continue_detached(attempt_id, now_ns)
            else:
                self._drop_attempt(attempt_id, now_ns)

    def _on_drain(self, message: Drain, now_ns: int) -> None:
        self._drains = True

    # -- requests

    def _on_dispatch(self, order: Dispatch, sender: Peer, now_ns: int) -> None:
        self._routers.counts_of(sender).dispatches_heard += 1
        request = order.request
        self._work.count("requests_arrived")
        if request.request_id in self._work.attempts:
            return  # it was sent twice
        self._routers.assign_attempt(request.request_id, sender)
        # an engine refuses a call that its context has no room for, where an instance would stop there
        max_tokens = min(request.stop.max_tokens, self._terms.context_tokens - len(request.prompt))
        deadline_ns = None if order.deadline_in_ns is None else now_ns + order.deadline_in_ns
        attempt = EngineAttempt(request, max_tokens, deadline_ns, now_ns)
        generated = order.generated or ((),) * request.n
        attempt.sequences = [
            EngineSequence(index, list(tokens), resumed=len(tokens)) for index, tokens in enumerate(generated)
        ]
        calls = [self._make_call(attempt, sequence) for sequence in attempt.sequences]
        refusal = self._refusal_reason(order, calls)
        # before anything is counted as work: what is refused was never an attempt of this member, and runs elsewhere
        if refusal:
            self._reject_attempt(request.request_id, refusal, None)
            return
        self._work.attempts[request.request_id] = attempt
        self._work.count("prompt_tokens", len(request.prompt))
        self._replay_buffer.open_answer(request, order.told, order.generated)
        for sequence, call in zip(attempt.sequences, calls, strict=True):
            if sequence.index not in order.ended:
                self._start_sequence(attempt, sequence, call, now_ns)
        self._updates.on_attempt_placed(sender)
        self._remove_if_done(attempt, now_ns)

    def _make_call(self, attempt: EngineAttempt, sequence: EngineSequence) -> SequenceCall:
        tokens = tuple(sequence.tokens)
        return SequenceCall(attempt.request, sequence.index, tokens, attempt.max_tokens, self._terms.model)

    def _refusal_reason(self, order: Dispatch, calls: list[SequenceCall]) -> str:
        """Why the engine cannot run it; empty: it can."""
        request, name = order.request, self._terms.spec.name
        sampling = request.sampling
        if order.decode_at is not None or order.span is not None or request.needs_instance:
            return f"{name} is a server of another project, and cannot run such a request"
        if len(request.prompt) >= self._terms.context_tokens:
            return f"{name} runs sequences of up to {self._terms.context_tokens} tokens"
        if any(order.generated) and (sampling.presence_penalty or sampling.frequency_penalty):
            return f"{name} would not see in its penalties what was generated before"
        if self._drains:
            return f"{name} drains"
        refusal = next(filter(None, map(self._dialect.refusal, calls)), "")
        return f"{name}: {refusal}" if refusal else ""

    def _start_sequence(
        self, attempt: EngineAttempt, sequence: EngineSequence, call: SequenceCall, now_ns: int
    ) -> None:
        reason = self._ending_of(attempt, sequence)
        if reason is not None:  # where it ran before, it had ended, and nothing was said of that
            self._emit(attempt, sequence, (), reason)
            return
        # also of what other clients have sent there: the times of a busy engine would teach that prompts are dear
        sequence.is_alone = not self._work.calls and not (self._report.running or self._report.waiting)
        sequence.expected_tokens = self._expected_tokens(attempt.request)
        self._work.calls_made, self._work.changes = self._work.calls_made + 1, self._work.changes + 1
        sequence.call_id, sequence.asked_ns = self._work.calls_made, now_ns
        self._work.calls[sequence.call_id] = attempt, sequence
        self._actions.append(StartCall(sequence.call_id, call))
        if self._listener is not None:
            self._listener.on_prompt_sent(now_ns)

    @staticmethod
    def _ending_of(attempt: EngineAttempt, sequence: EngineSequence) -> FinishReason | None:
        """How a sequence has ended with its last token. None: it goes on."""
        stop, tokens = attempt.request.stop, sequence.tokens
        if tokens and tokens[-1] in stop.stop_token_ids and len(tokens) >= stop.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= attempt.max_tokens else None

    def _on_piece(self, event: PieceArrived, now_ns: int) -> None:
        attempt, sequence = self._work.calls.get(event.call_id, (None, None))
        if attempt is None or sequence is None:
            return  # it has ended
        piece = event.piece
        if piece.cached_tokens is not None:
            sequence.cached_tokens = min(piece.cached_tokens, len(attempt.request.prompt))
        if piece.tokens and not sequence.has_begun:
            sequence.first_ns, sequence.first_changes = now_ns, self._work.changes
            sequence.first_tokens = len(sequence.tokens) + len(piece.tokens)
        reason, count = None, 0
        # one by one: a piece may go on behind the token with which the sequence ends here
        for token in piece.tokens:
            sequence.tokens.append(token)
            count += 1
            reason = self._ending_of(attempt, sequence)
            if reason is not None:
                break
        # its own word where nothing here says why: its context is full, or its end token is not among the stop tokens
        if reason is None and piece.finish:
            reason = FinishReason.LENGTH if piece.finish == "length" else FinishReason.STOP
        if count or reason is not None:
            logprobs = tuple(piece.logprobs[:count])
            self._emit(attempt, sequence, tuple(piece.tokens[:count]), reason, logprobs)
        if reason is not None:
            self._work.learn_times(attempt, sequence, now_ns)
            self._count_ended(attempt, sequence)
            # an engine that has not said so itself still draws: only a closed connection ends that
            self._end_sequence(sequence, is_over=bool(piece.finish))
            self._remove_if_done(attempt, now_ns)

    def _count_ended(self, attempt: EngineAttempt, sequence: EngineSequence) -> None:
        """Once for a request, by its first sequence."""
        if sequence is attempt.sequences[0]:
            self._work.count("cached_tokens", sequence.cached_tokens or 0)
            self._work.count("requests_finished")

    def _emit(
        self,
        attempt: EngineAttempt,
        sequence: EngineSequence,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        logprobs: tuple[Any, ...] = (),
    ) -> None:
        request_id, first = attempt.request.request_id, len(sequence.tokens) - len(tokens)
        story = (("engine", f"{self._terms.spec.kind} at {self._terms.spec.name}"),) if not first else ()
        # once, and of a prompt that was computed elsewhere before that has been said
        cached_tokens = sequence.cached_tokens or 0 if reason is not None and not sequence.resumed else 0
        self._work.count("generated_tokens", len(tokens))
        self._outputs.append(
            TokenOutput(
                request_id,
                sequence.index,
                tokens,
                logprobs,
                reason,
                cached_tokens,
                offset=first,
                story=story,
            )
        )

    def _on_broke(self, event: CallBroke, now_ns: int) -> None:
        attempt, sequence = self._work.calls.get(event.call_id, (None, None))
        if attempt is None or sequence is None:
            return
        request_id = attempt.request.request_id
        self._end_sequence(sequence, is_over=True)
        reason = f"{self._terms.spec.name}: {event.reason}"
        # a kept answer that stops in the middle would be given out as a whole one
        self._replay_buffer.forget_attempt(request_id)
        self._drop_attempt(request_id, now_ns, keeps_owner=True)
        # what is wrong with the request is wrong everywhere; else another member may try at once
        self._reject_attempt(request_id, reason, None if event.is_final else 0.0)

    def _end_sequence(self, sequence: EngineSequence, *, is_over: bool = False) -> None:
        """``is_over``: the engine has said so."""
        if sequence.call_id is not None:
            del self._work.calls[sequence.call_id]
            self._work.changes += 1
            if not is_over:
                self._actions.append(EndCall(sequence.call_id))
            sequence.call_id = None

    def _remove_if_done(self, attempt: EngineAttempt, now_ns: int) -> None:
        if not attempt.open_sequences:
            self._drop_attempt(attempt.request.request_id, now_ns)

    def _drop_attempt(self, request_id: str, now_ns: int, *, keeps_owner: bool = False) -> None:
        """It is not here any more. ``keeps_owner``: its router is still to be told."""
        attempt = self._work.attempts.pop(request_id, None)
        if attempt is None:
            return
        for sequence in attempt.sequences:
            self._end_sequence(sequence)
        self._replay_buffer.on_attempt_ended(request_id, now_ns)
        if not keeps_owner:
            self._routers.on_attempt_ended(request_id)

    def _reject_attempt(self, request_id: str, reason: str, retry_after_s: float | None) -> None:
        self._work.count("requests_rejected")
        message = self._routers.route_refusal(RejectRequest(request_id, reason, retry_after_s))
        self._routers.on_attempt_ended(request_id)
        if message is not None:
            self._actions.append(message)

    def _on_cancel(self, message: Cancel, sender: Peer, now_ns: int) -> None:
        if self._routers.is_of(message.request_id, sender) and message.request_id in self._work.attempts:
            self._end_all(self._work.attempts[message.request_id], FinishReason.CANCELLED, now_ns)

    def _on_stop(self, message: StopSequence, sender: Peer, now_ns: int) -> None:
        attempt = self._work.attempts.get(message.request_id)
        if attempt is None or not self._routers.is_of(message.request_id, sender):
            return
        for sequence in attempt.open_sequences:
            # a stop string is found in text: without a token the word is of an older attempt
            if sequence.index == message.index and sequence.tokens:
                self._emit(attempt, sequence, (), FinishReason.STOP)
                self._end_sequence(sequence)
        self._remove_if_done(attempt, now_ns)

    def _end_all(self, attempt: EngineAttempt, reason: FinishReason, now_ns: int) -> None:
        for sequence in attempt.open_sequences:
            self._emit(attempt, sequence, (), reason)
        self._drop_attempt(attempt.request.request_id, now_ns)

    def _end_overdue(self, now_ns: int) -> None:
        for attempt in [attempt for attempt in self._work.attempts.values() if attempt.deadline_ns is not None]:
            if attempt.deadline_ns is not None and attempt.deadline_ns <= now_ns:
                self._end_all(attempt, FinishReason.DEADLINE, now_ns)
        for attempt_id in self._routers.overdue_attempts(now_ns):
            self._drop_attempt(attempt_id, now_ns)

    def _on_migrate(self, message: Migrate, sender: Peer, now_ns: int) -> None:
        if self._routers.is_of(message.request_id, sender):
            reason = f"{self._terms.spec.name} keeps its KV to itself"
            self._actions.append(Send(sender, MigrationRefused(message.request_id, reason)))

    # -- what routers ask

    def _on_query_events(self, message: QueryKvEvents, sender: Peer, now_ns: int) -> None:
        rest = self._updates.catch_up(sender, message.first)
        if rest is not None:
            self._actions.append(Send(sender, rest))

    def _on_query_attempts(self, message: QueryAttempts, sender: Peer, now_ns: int) -> None:
        self._actions.append(self._routers.answer_attempts(message, sender, self._work.attempts))

    def _on_query_answers(self, message: QueryAnswers, sender: Peer, now_ns: int) -> None:
        """A client asks ``sender`` for the answer with this key: what is here of it is told, and runs on for it."""
        # what this event itself has brought is not in the buffer yet
        self._replay_buffer.record_outputs(self._outputs)
        answers = [
            self._take_over(answer, sender) for answer in self._replay_buffer.with_key(message.key, message.asked)
        ]
        same_key = (attempt.request for attempt in self._work.attempts.values() if attempt.request.key == message.key)
        is_anothers = self._replay_buffer.answers_another(message.key, message.asked)
        is_anothers = is_anothers or any(request.asked != message.asked for request in same_key)
        refused = message.asked if is_anothers else ""
        self._actions.append(Send(sender, AnswersHeld(tuple(answers), True, message.key, refused)))

    def _take_over(self, answer: AnswerHeld, router: Peer) -> AnswerHeld:
        if answer.attempt_id not in self._work.attempts:
            return answer
        former = self._routers.router_of(answer.attempt_id)
        if former is not None and former != router:
            self._actions.append(Send(former, AnswerTaken(answer.attempt_id)))
        self._routers.assign_attempt(answer.attempt_id, router)
        return answer

    # -- the engine's load and speed

    def _on_report(self, event: ReportRead, now_ns: int) -> None:
        last_report, self._report = self._report, event.report
        is_new = last_report.started_s != event.report.started_s
        if self._listener is not None:
            # its cache is empty after a restart, and its events begin anew
            if is_new:
                self._listener.feed.on_engine_restarted()
            self._repeat(self._listener.on_answered(is_new=is_new, is_busy=bool(self._work.calls), now_ns=now_ns))

    def _expected_tokens(self, request: Request) -> int | None:
        """Of its prompt, what the engine has cached, as its KV events say; None where they do not."""
        if self._kv_names is None or request.isolation:
            return None
        (namespace, block_tokens), key = self._kv_names, self._terms.identity_key
        packed = _core.block_identities(key, namespace_id("", namespace, key), request.prompt, block_tokens)
        return self._index.matched_blocks(packed) * block_tokens

    def _load(self) -> Load:
        """As its routers are told it: while it drains without what the engine does for others, for which it need not
        await."""
        report = EngineReport({}) if self._drains else self._report
        return self._work.load(report, self._terms, self._routers.counts_of(None))

    @property
    def costs(self) -> PreemptionModel:
        """What is known of the engine's speed."""
        return self._work.costs

    def stats(self) -> InstanceStats:
        """Gauges and totals, as an instance has them."""
        return self._work.stats(self._report, self._terms, self._routers.counts_of(None))

    def cached_identities(self) -> bytes:
        """Of the blocks that the engine has, as far as it has said so: 16 bytes each."""
        return self._index.cached_identities(Tier.HBM)

    def heartbeat_load(self, now_ns: int) -> LoadRead:
        """What a heartbeat tells at time ``now_ns`` (ns), to the owner and to each follower."""
        load, updates = self._load(), self._updates
        followers = [
            (peer, peer_load, updates.for_heartbeat(peer, now_ns))
            for peer, peer_load in self._routers.loads_for_followers(load)
        ]
        next_event = updates.for_heartbeat(self.router, now_ns)
        costs = self._work.costs.encoded_costs() if self._work.costs.samples else b""
        return LoadRead(load, next_event, b"", tuple(followers), costs)

    # -- what it has cached

    def _learn_names(self, info: PeerInfo) -> None:
        """By an instance it is known what blocks are called in this cluster: the engine's events begin to count."""
        if not info.role.shares_kv or not self._terms.spec.events:
            return
        names = info.namespace, info.geometry.block_tokens
        if names == self._kv_names:
            return
        # what was known under other names is of no use to routers, and would never be taken back
        self._kv_names = names
        self._index.clear(0)
        namespace, key, spec = info.namespace, self._terms.identity_key, self._terms.spec
        entries = KvEntries(0, self._index, key, lambda _: namespace_id("", namespace, key), names[1])
        feed = EngineKvFeed(entries, bool(spec.replay), spec.events_format)
        self._listener = KvListener(feed, bool(spec.replay))
        if spec.replay:
            self._repeat(self._listener.request_replay(0))

    def _on_kv_received(self, event: KvReceived, now_ns: int) -> None:
        if self._listener is not None:
            self._repeat(self._listener.on_received(event, now_ns))

    def _on_replay_ended(self) -> None:
        if self._listener is not None:
            self._repeat(self._listener.on_replay_ended())

    def _repeat(self, first: int | None) -> None:
        if first is not None:
            self._actions.append(RepeatEvents(first))

    # -- incarnations

    def _restart_as(self, self_peer: Peer) -> None:
        for request_id in list(self._work.attempts):
            self._replay_buffer.forget_attempt(request_id)
            self._drop_attempt(request_id, 0)
        self._routers.reset_routers()
        self._self_peer, self._drains = self_peer, False
        self._outputs.clear()

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the books do not agree. Between two events."""
        self._routers.check_invariants(self._work.attempts)
        self._replay_buffer.check_invariants(self._work.attempts)
        self._updates.check_invariants()
        self._index.check_invariants()
        for name, attempt in self._work.attempts.items():
            check(attempt.request.request_id == name, "{} is listed as {}", attempt.request.request_id, name)
            check(attempt.open_sequences, "{} has ended, and is here", name)
        calls = {sequence.call_id for attempt in self._work.attempts.values() for sequence in attempt.open_sequences}
        check(calls == self._work.calls.keys(), "{} are under way, not {}", self._work.calls.keys(), calls)

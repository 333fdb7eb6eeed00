"""The cluster machine: requests and messages in, messages and tokens out.

Synchronous and deterministic, like the instance's: one mutator, ``handle(event, now_ns)``. It holds what a router must
know, and nothing of it is needed by instances to stay right: each message may be lost, come late or twice.

::

    Membership            which instances there are        Registry, LoadTable, LossDetector
    Trees                 which of them cache what         _core.PrefixDirectory, one feed of KV events an instance
    AdmissionController   admit, queue or reject           MemoryBudget, policy.admission, .fairness, .ledger
    Placer                which instance runs a request    policy.routing
    Lifecycle             phases and attempts              RequestTable
    OutputMerger          what the client gets
    Handles, Sessions     what clients give names to
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memserve.base.config import ClusterConfig
from memserve.base.errors import check, refuse_event
from memserve.base.types import FinishReason, NamedPrefix, Request, TokenOutput
from memserve.kv.identity import DEFAULT_KEY
from memserve.protocol.admission import AdmissionRequests
from memserve.protocol.idempotency import AnswersHeld, AnswerTaken
from memserve.protocol.kv_hints import KvHintDone, KvHinted
from memserve.protocol.messages import (
    AdapterFiles,
    AdaptersHeld,
    AdaptersNamed,
    AnyMessage,
    AttemptsUnknown,
    Drain,
    HandedOver,
    Heartbeat,
    Join,
    KvEvents,
    KvSnapshot,
    Leave,
    MigrationRefused,
    NoteTool,
    Pinned,
    Refused,
    RequestRefused,
    SegmentHeld,
    StopSequence,
    Tokens,
)
from memserve.protocol.peers import ROUTER, Peer
from memserve.protocol.records import RouterStarted
from memserve.router.admission.controller import AdmissionController
from memserve.router.admission.follower import remote_admission_for
from memserve.router.admission.needs import with_operator_settings
from memserve.router.events import (
    AdapterNamed,
    AdapterUnnamed,
    ClockTicked,
    ClusterAction,
    ClusterEvent,
    InstanceDied,
    InstanceDrained,
    MessageArrived,
    PrefixPinned,
    PrefixUnpinned,
    RequestArrived,
    RequestCancelled,
    RouterEnds,
    SequenceStopped,
    StateRecovered,
    StoreNamed,
    ToolCalled,
)
from memserve.router.members.loads import LoadTable
from memserve.router.members.membership import Following, Membership, StoreCalls
from memserve.router.members.registry import Member, MemberState, Registry, order_of
from memserve.router.outbox import Outbox, Timers
from memserve.router.parts import RouterParts
from memserve.router.placement.placer import Placer
from memserve.router.placement.prefix_directory import PrefixNode, Trees, is_sane
from memserve.router.report import ClusterStats, Counters, InstanceView
from memserve.router.requests.hints import HintRelay
from memserve.router.requests.lifecycle import Lifecycle
from memserve.router.requests.outputs import OutputMerger
from memserve.router.requests.requests import RequestPhase, RequestState, RouteStory
from memserve.router.requests.sessions import HandleView, MemberTables, NamedPrefixes, Sessions


class Cluster:
    """Members, their caches, and the requests that they run. Deterministic: no clock, no random source.

    Every request ends with exactly one output that has a ``finish_reason`` for each of its ``n`` sequences, or with one
    ``RejectRequest``, whatever its instances do.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        identity_key: bytes = DEFAULT_KEY,
        remembers: bool = False,
        follows: Peer | None = None,
    ) -> None:
        """``identity_key``: 16 bytes, that of the instances' pools. ``remembers``: it asks its host to ``Remember`` and
        to ``Note``, and its first event is a ``StateRecovered``. ``follows``: the follower that this is; None: it is
        the owner."""
        self.config = config
        counters, timers, outbox = Counters(), Timers(), Outbox(remembers)
        registry, loads = Registry(0 if follows is None else order_of(follows.name)), LoadTable()
        trees = Trees(config, timers, counters, identity_key)
        remote_admission = remote_admission_for(config, registry, loads) if follows is not None else None
        admission = remote_admission or AdmissionController(config.admission, config.policy, registry, loads)
        tables = MemberTables(registry, trees, loads, admission.memory)
        handles = NamedPrefixes(config, tables, timers, outbox)
        sessions = Sessions(registry, outbox)
        placer = Placer(config, tables, sessions, handles)
        self.hints = hints = HintRelay(
            tables, handles, placer, timers, outbox, moves_kv=not config.admission.counts_memory
        )
        parts = RouterParts(
            config, tables, admission, sessions, handles, placer, hints, timers, outbox, counters, follows
        )
        self._counters, self._timers, self._outbox = counters, timers, outbox
        self._registry, self._loads, self._trees = registry, loads, trees
        self._named_prefixes, self._sessions, self._placer = handles, sessions, placer
        self._lifecycle = lifecycle = Lifecycle(parts)
        self.answers = lifecycle.answers
        #: None: this is the owner
        self.follower_membership = Following(parts, lifecycle, remote_admission) if follows is not None else None
        self._membership = self.follower_membership or Membership(parts, lifecycle)
        self._store_calls = StoreCalls(config, timers, outbox)
        self._outputs = OutputMerger(lifecycle, timers, outbox, counters)
        self._event_handlers = self._event_handler_table()
        self._message_handlers = self._message_handler_table()

    def _event_handler_table(self) -> dict[type[ClusterEvent], Callable[[Any, int], None]]:
        """What each event leads to."""
        return {
            MessageArrived: lambda event, now_ns: self._on_message(event.sender, event.message, now_ns),
            RequestArrived: lambda event, now_ns: self._on_request(event.request, now_ns),
            RequestCancelled: lambda event, now_ns: self._cancel_request(event.request_id, now_ns),
            SequenceStopped: lambda event, now_ns: self._stop_sequence(event.request_id, event.index, now_ns),
            ToolCalled: lambda event, _: self._note_tool(event),
            InstanceDrained: lambda event, now_ns: self._drain_instance(event.name, now_ns),
            InstanceDied: self._on_instance_died,
            PrefixPinned: self._named_prefixes.pin_prefix,
            PrefixUnpinned: lambda event, _: self._named_prefixes.unpin_prefix(event),
            KvHinted: self.hints.start_hint,
            StateRecovered: self._recover_state,
            AdapterNamed: self._membership.adapters.name_adapter,
            AdapterUnnamed: self._membership.adapters.unname_adapter,
            StoreNamed: lambda event, now_ns: self._store_calls.start_calls(event, now_ns),
            RouterEnds: lambda _event, _now_ns: self._store_calls.stop_calls(),
            ClockTicked: lambda _event, _now_ns: None,
        }

    def _message_handler_table(self) -> dict[type[AnyMessage], Callable[[Member, Any, int], None]]:
        """What each message of a member leads to. Others are for other processes, and ignored."""
        membership, lifecycle = self._membership, self._lifecycle
        return {
            Tokens: self._on_tokens,
            Heartbeat: membership.on_heartbeat,
            KvEvents: self._apply_kv_update,
            KvSnapshot: self._apply_kv_update,
            HandedOver: lambda member, message, now_ns: lifecycle.on_handed_over(message.request_id, member, now_ns),
            MigrationRefused: lifecycle.migrations.on_refused,
            RequestRefused: self._on_refused,
            AnswersHeld: self.answers.on_answers_held,
            AnswerTaken: lambda member, message, now_ns: self._on_answer_taken(member, message.request_id, now_ns),
            AttemptsUnknown: membership.on_attempts_unknown,
            SegmentHeld: lambda member, message, now_ns: lifecycle.on_segment_held(message.request_id, member, now_ns),
            AdmissionRequests: lifecycle.remote_requests.on_requests,
            Pinned: self._named_prefixes.on_pinned,
            KvHintDone: self.hints.on_done,
            AdaptersHeld: membership.on_adapters_held,
            AdaptersNamed: membership.on_adapters_named,
            Drain: lambda member, _message, now_ns: membership.drain_member(member, now_ns),
            Leave: lambda member, _message, now_ns: membership.remove_member(member, "it left", now_ns, died=False),
        }

    # -- the one mutator

    def handle(self, event: ClusterEvent, now_ns: int) -> list[ClusterAction]:
        """Take ``event`` into account at time ``now_ns`` (ns) and say what is to be done, in order.

        What is due by ``now_ns`` happens after it: a heartbeat that waited behind other work is heard before its sender
        is taken to be dead.
        """
        self._forgive_own_pause(now_ns)
        self._event_handlers.get(type(event), refuse_event)(event, now_ns)
        self._timers.run_due(now_ns)
        self._lifecycle.admission_flow.admit_waiting(now_ns)
        self._membership.send_pending(now_ns)
        return self._outbox.take_actions()

    def _recover_state(self, event: StateRecovered, now_ns: int) -> None:
        """Go on from what the last router knew; its members are asked to join again."""
        check(not len(self._registry) and not self._lifecycle.requests.by_id, "the recovered state comes first")
        self._outbox.record_ahead(RouterStarted(event.router, event.address, event.clock_offset_ns))
        recovered = event.recovered
        files = (AdapterFiles(record.name, record.folder, record.digest) for record in recovered.adapters)
        self._membership.adapters.restore_adapters(files)
        last = recovered.router.generation if recovered.router is not None else 0
        self._membership.recover_members(recovered.members, recovered.dead_peers, event.address, last, now_ns)
        for session in recovered.sessions:
            self._sessions.restore_route(session.tenant, session.session, session.peers)
        for pin in recovered.handles:
            self._named_prefixes.recover_pin(pin, now_ns)

    def _forgive_own_pause(self, now_ns: int) -> None:
        """A router that did not look at the clock for so long heard nothing either: no silence counts."""
        due_ns = self._timers.next_ns
        if due_ns is not None and now_ns - due_ns > self.config.dead_after_ns // 2:
            self._registry.forgive_silence(now_ns)

    # -- processes of this host

    def _drain_instance(self, name: str, now_ns: int) -> None:
        if (member := self._registry.member_by_name(name)) is not None:
            self._membership.drain_member(member, now_ns)

    def _on_instance_died(self, event: InstanceDied, now_ns: int) -> None:
        if (member := self._registry.member_by_name(event.name)) is not None:
            self._membership.remove_member(member, f"its process {event.how}", now_ns, died=True)

    # -- clients

    def _on_request(self, request: Request, now_ns: int) -> None:
        self._counters.requests += 1
        request_id = request.request_id
        if request.key and self.answers.serve_known(request, now_ns):
            return
        reason = None
        if request_id in self._lifecycle.requests.by_id:
            reason = f"a request with the id {request_id!r} is still running"
        elif not len(request.prompt) or request.n < 1:
            reason = "the prompt is empty" if not len(request.prompt) else f"n must be at least 1, got {request.n}"
        if reason is not None:
            self._counters.requests_rejected += 1
            self._outbox.reject_request(request_id, reason, None)
            return
        if request.key:
            request = self.answers.begin_answer(request, now_ns)
        req = RequestState(with_operator_settings(request, self.config.admission), now_ns)
        if request.deadline_ns is not None:
            self._timers.arm(request.deadline_ns, self._expire_request, request_id)
        self._lifecycle.admission_flow.add_request(req, now_ns)

    def _cancel_request(self, request_id: str, now_ns: int) -> None:
        req = self._lifecycle.requests.by_id.get(self.answers.request_of(request_id))
        if req is not None and req.phase is RequestPhase.QUEUED and self.answers.is_read_by(request_id):
            pass  # nothing was done for it
        elif self.answers.on_reader_left(request_id, now_ns):
            return
        if req is not None:  # else it ended while the cancellation was on its way
            self._counters.requests_cancelled += 1
            self._lifecycle.end_request(req, FinishReason.CANCELLED, now_ns)

    def _expire_request(self, request_id: str, now_ns: int) -> None:
        req = self._lifecycle.requests.by_id.get(request_id)
        if req is not None and req.request.deadline_ns is not None and req.request.deadline_ns <= now_ns:
            self._counters.requests_expired += 1
            self._lifecycle.end_request(req, FinishReason.DEADLINE, now_ns)

    def _stop_sequence(self, request_id: str, index: int, now_ns: int) -> None:
        """The client has read enough of one sequence. The instances are told; no answer is waited for."""
        req = self._lifecycle.requests.by_id.get(self.answers.request_of(request_id))
        if req is None or not 0 <= index < req.request.n or req.request.beam_width:
            return
        emitted = req.emitted[index]
        if req.finished[index] is not None or not emitted:
            return
        reason = FinishReason.STOP
        req.finished[index], req.is_stopped = reason, True
        self._counters.finished[reason.value] += 1
        end = TokenOutput(
            req.request_id, index, (), finish_reason=reason, story=req.routing_story(), offset=len(emitted)
        )
        self._outbox.emit_output(end)
        if all(req.finished):
            self._lifecycle.finish_request(req, now_ns)
        elif req.attempt is not None:
            for member in req.attempt.involved:
                self._outbox.send(member.peer, StopSequence(req.attempt.attempt_id, index))

    def _note_tool(self, event: ToolCalled) -> None:
        """Instances keep what a session comes back to."""
        req = self._lifecycle.requests.by_id.get(self.answers.request_of(event.request_id))
        if req is not None and req.attempt is not None:
            for member in req.attempt.involved:
                self._outbox.send(member.peer, NoteTool(req.attempt.attempt_id, event.tool))

    # -- messages

    def _on_message(self, sender: Peer, message: AnyMessage, now_ns: int) -> None:
        if isinstance(message, Join):
            self._membership.on_join(sender, message, now_ns)
            return
        if self.follower_membership is not None and sender.name == ROUTER:
            self.follower_membership.on_owner_message(sender, message, now_ns)
            return
        member = self._registry.get(sender)
        if isinstance(message, Refused):
            self._store_calls.on_declined(sender, message.reason)
            if member is not None:
                self._membership.remove_member(member, message.reason, now_ns, died=False)
            return
        member = member or self._membership.on_unknown_sender(sender, message, now_ns)
        if member is None:
            return
        if member.state is MemberState.REJOINING and not isinstance(message, Leave):
            self._membership.request_rejoin(member)
            return
        member.last_seen_ns = now_ns
        handle = self._message_handlers.get(type(message))
        if handle is not None:
            handle(member, message, now_ns)

    def _on_tokens(self, member: Member, message: Tokens, now_ns: int) -> None:
        member.totals.answers += 1
        self._outputs.merge_outputs(member, message, now_ns)

    def _on_refused(self, member: Member, message: RequestRefused, now_ns: int) -> None:
        member.totals.answers += 1
        self.answers.on_refused(member.peer, message.request_id)
        self._lifecycle.on_refused(member, message, now_ns)

    def _on_answer_taken(self, member: Member, attempt_id: str, now_ns: int) -> None:
        """The client of an attempt asks another router for the answer, which goes on there."""
        self.answers.on_attempt_taken(member.peer, attempt_id, now_ns)
        req = self._lifecycle.requests.by_attempt.get(attempt_id)
        if req is not None and req.request.key and req.attempt is not None and req.attempt.is_from(member.peer):
            self.answers.on_taken_over(req.request_id, now_ns)

    def _apply_kv_update(self, member: Member, message: KvEvents | KvSnapshot, now_ns: int) -> None:
        """News of a member's index. A member whose news make no sense is a danger to all."""
        trees, number = self._trees, member.number
        next_event = trees.feed_of(number).next_event
        if is_sane(message, member.info.role):
            if isinstance(message, KvEvents):
                self._membership.query_kv_events(member, trees.apply_events(number, message, now_ns))
                self._membership.update_load(member, message.load)
            else:
                self._membership.query_kv_events(member, trees.apply_snapshot(number, message, now_ns))
            if self._outbox.remembers and trees.feed_of(number).next_event != next_event:
                self._outbox.record_later(trees.make_record(member.peer, number, message, next_event, now_ns))
            return
        self._membership.expel_peer(member.peer, "its KV events make no sense")
        self._membership.remove_member(member, "its KV events make no sense", now_ns, died=True)

    # -- views

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending at the latest; ``None``: nothing is waited for."""
        return self._timers.next_ns

    def stats(self) -> ClusterStats:
        """State now, and totals since the start."""
        requests, trees, counters = self._lifecycle.requests, self._trees, self._counters
        admission = self._lifecycle.admission.snapshot()
        return ClusterStats(
            requests_live=len(requests.by_id),
            requests_unplaced=sum(req.phase is RequestPhase.UNPLACED for req in requests.unplaced.values()),
            instances=sum(member.has_model for member in self._registry),
            instances_draining=sum(member.state is MemberState.DRAINING for member in self._registry),
            stores=sum(member.is_store for member in self._registry),
            tree_blocks=sum(trees.block_count(member.number) for member in self._registry),
            tree_bytes=trees.directory.nbytes,
            handles=len(self._named_prefixes),
            counters=replace(
                counters,
                decisions=dict(counters.decisions),
                attempts_failed=dict(counters.attempts_failed),
                finished=dict(counters.finished),
            ),
            admission=admission,
            prompt_tokens=self._lifecycle.request_counters.ceiling.total_counts(),
            tenant_prompt_tokens=self._lifecycle.request_counters.ceiling.counts_by_tenant(),
            tenant_retained_tokens=self._named_prefixes.retained_tokens(),
        )

    def instances(self) -> tuple[InstanceView, ...]:
        """All members in the order in which they joined."""
        return self._membership.member_views()

    def story(self, request_id: str) -> RouteStory | None:
        """What was decided for a live request."""
        req = self._lifecycle.requests.by_id.get(request_id)
        return req.make_story() if req is not None else None

    def prefix_trees(self, tenant: str | None) -> dict[str, tuple[PrefixNode, ...]]:
        """The last prompts' prefixes by tenant, with their holders; ``None``: of all tenants."""
        names = {member.number: member.name for member in self._registry}

        def match(identities: bytes) -> list[tuple[str, int, int]]:
            matches = self._trees.directory.match(identities)
            return [(names[number], blocks, lower) for number, blocks, lower in matches]

        return self._lifecycle.request_counters.recent_prompts.build_trees(tenant, match)

    def handles(self) -> tuple[HandleView, ...]:
        """All named prefixes, in the order in which they were pinned first."""
        return self._named_prefixes.handle_views()

    def pinned_tokens(self, tenant: str, handles: Sequence[str]) -> list[int | None]:
        """How much of each of a tenant's named prefixes is pinned; ``None``: unknown, or not answered yet."""
        return self._named_prefixes.pinned_tokens(tenant, handles)

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        """A tenant's named prefixes, least recently renewed first."""
        return self._named_prefixes.prefixes_of(tenant)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        self._registry.check_invariants()
        self._membership.check_invariants()
        self._trees.check_invariants()
        self._named_prefixes.check_invariants()
        self.hints.check_invariants()
        requests = self._lifecycle.requests
        requests.check_invariants(self._registry)
        self._lifecycle.remote_requests.check_invariants()
        self._lifecycle.migrations.check_invariants()
        self._lifecycle.admission.check_invariants(requests.by_id | self._lifecycle.remote_requests.by_id)
        self.answers.check_invariants(requests.by_id)
        self._lifecycle.request_counters.ceiling.check_invariants()
        charges = [c for req in requests.by_id.values() if req.attempt is not None for c in req.attempt.charges]
        members = {m.number: (m.info.role, m.is_open) for m in self._registry}
        self._loads.check_invariants(charges, members)

    def __repr__(self) -> str:
        requests = self._lifecycle.requests
        return (
            f"<Cluster members={len(self._registry)} requests={len(requests.by_id)} unplaced={len(requests.unplaced)}>"
        )

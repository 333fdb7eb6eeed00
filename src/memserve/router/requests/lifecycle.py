"""Dispatch, failure, another attempt, the end: no request is lost.

Whatever goes wrong with an attempt, it is ended as a whole: the involved instances are told, its work is discharged,
and the request is placed again with the tokens that the client has. Drawing depends on seed, sequence and position
alone, so the next attempt goes on exactly where the client's stream is.

The way of a request from arrival to its place in the ledger, or to its rejection: this router's own, and remote ones.

What dispatches and answers leave behind in counters, in the reuse that would be possible, and in the metadata.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from msgspec import structs

from memserve.base.config import ClusterConfig
from memserve.base.types import Caching, FinishReason, TokenOutput
from memserve.base.units import NS_PER_S, ns_from_s
from memserve.protocol.messages import RETRY_S, Cancel, RequestRefused
from memserve.protocol.records import EntryUsed
from memserve.router.admission.admission_queue import AdmissionQueue
from memserve.router.admission.controller import Rejection
from memserve.router.admission.remote_requests import AdmissionTables, RemoteAttempts, RemoteRequests
from memserve.router.members.loads import Charge
from memserve.router.members.registry import Member
from memserve.router.outbox import Outbox
from memserve.router.parts import RequestFlow, RouterParts
from memserve.router.placement.candidates import Candidate, Route
from memserve.router.placement.placer import Placement, Placer
from memserve.router.placement.prefix_directory import IDENTITY_BYTES, RecentPrompts
from memserve.router.placement.reuse_ceiling import ReuseCeiling
from memserve.router.placement.shards import PATIENCE, SpanPlacer
from memserve.router.placement.stripes import StripePlacer
from memserve.router.report import Counters
from memserve.router.requests.idempotency import ReplayLog
from memserve.router.requests.migration import Migrations
from memserve.router.requests.requests import Attempt, RequestCause, RequestPhase, RequestState, RequestTable


class AdmissionFlow:
    """Requests of a router that has instances, up to their place there or their rejection."""

    def __init__(
        self,
        parts: RouterParts,
        requests: RequestTable,
        remote_requests: RemoteRequests,
        answers: ReplayLog,
        flow: RequestFlow,
    ) -> None:
        self._requests, self._answers, self._flow = requests, answers, flow
        self._admission, self._placer = parts.admission, parts.placer
        self._outbox, self._counters = parts.outbox, parts.counters
        self._queue = AdmissionQueue(
            parts.admission, parts.timers, remote_requests, flow.place_request, self._handle_own_rejection
        )

    def add_request(self, req: RequestState, now_ns: int) -> None:
        """A new request: placed now, queued, or rejected."""
        self._requests.add_request(req)
        self.enqueue_request(req, now_ns)

    def enqueue_request(self, req: RequestState, now_ns: int) -> None:
        """Ask for admission: placed now, queued, or rejected."""
        if self._admission.memory.wants_identities:
            # blocks that requests share, or that pins hold, count once: the ledger must know them before it decides
            self._placer.prompt_identities(req)
        self._queue.enqueue_request(req, now_ns)

    def admit_waiting(self, now_ns: int) -> None:
        """Admit and place queued requests as long as there is room."""
        self._queue.admit_waiting(now_ns)

    def handle_rejection(self, rejection: Rejection, now_ns: int) -> None:
        """Admission has decided."""
        self._queue.handle_rejection(rejection, now_ns)

    def _handle_own_rejection(self, rejection: Rejection, now_ns: int) -> None:
        if rejection.req.has_begun:  # an expelled follower has asked for it again
            self._counters.requests_failed += 1
            self._flow.end_request(rejection.req, FinishReason.ERROR, now_ns)
        else:
            self.reject_request(
                rejection.req, rejection.reason, rejection.retry_after_s, now_ns, overloaded=rejection.is_overload
            )

    def reject_request(
        self, req: RequestState, reason: str, retry_after_s: float | None, now_ns: int, *, overloaded: bool = False
    ) -> None:
        """``req``, of which its client has nothing, will not be run. ``retry_after_s`` None: it can never run."""
        self._counters.requests_rejected += 1
        self._outbox.reject_request(req.request_id, reason, retry_after_s, overloaded)
        self._requests.remove_request(req, RequestCause.REJECTED)
        self._admission.release_request(req, now_ns)
        if req.request.key:
            self._answers.on_request_end(req.request_id, now_ns)


class RequestCounters:
    """Counts; decides nothing."""

    def __init__(self, config: ClusterConfig, placer: Placer, outbox: Outbox, counters: Counters) -> None:
        self._config, self._placer, self._outbox, self._counters = config, placer, outbox, counters
        self.ceiling, self.recent_prompts = ReuseCeiling(), RecentPrompts()

    def on_dispatched(self, req: RequestState, placement: Placement, now_ns: int) -> None:
        """An attempt of ``req`` is dispatched."""
        self._count_dispatch(req, placement)
        self._count_prompt(req, placement, now_ns)
        self._note_use(req, placement, now_ns)

    def _count_dispatch(self, req: RequestState, placement: Placement) -> None:
        counters = self._counters
        counters.dispatches += 1
        counters.resumptions += bool(req.past)
        if req.has_begun:
            counters.recomputed_tokens += placement.prompt_tokens - placement.route.first.matched_tokens
        counters.prompt_tokens += placement.prompt_tokens
        counters.matched_tokens += placement.route.first.matched_tokens
        way = "fetch" if placement.holders else "reuse" if placement.route.first.matched_tokens else "compute"
        decision = (self._config.policy, way)
        counters.decisions[decision] = counters.decisions.get(decision, 0) + 1
        if placement.transfer.reason:
            mode = placement.transfer.mode.value
            counters.transfers_chosen[mode] = counters.transfers_chosen.get(mode, 0) + 1

    def _count_prompt(self, req: RequestState, placement: Placement, now_ns: int) -> None:
        """Each prompt counts once, whatever becomes of its attempts."""
        if req.identities and not req.past:
            tenant, block_tokens = req.request.tenant, placement.first.info.geometry.block_tokens
            self.ceiling.count_prompt(tenant, req.identities, len(req.request.prompt), block_tokens)
            self.recent_prompts.add_prompt(tenant, req.identities, now_ns)

    def _note_use(self, req: RequestState, placement: Placement, now_ns: int) -> None:
        """The deepest block of the prefix that is reused stands for all of them."""
        blocks = placement.route.first.matched_tokens // placement.first.info.geometry.block_tokens
        if blocks and req.identities and self._outbox.remembers:
            # its hash is chained over all before it, so the next router finds them by it
            end = blocks * IDENTITY_BYTES
            self._outbox.record_later(
                EntryUsed(placement.first.peer, req.identities[end - IDENTITY_BYTES : end], now_ns)
            )

    def on_answered(self, req: RequestState) -> None:
        """The next prompt of a conversation begins with this one and its answer."""
        for tokens in req.emitted if req.identities is not None else ():
            blocks = self._placer.answer_identities(req, tokens)
            if blocks:
                self.ceiling.count_answer(req.request.tenant, blocks)


RETRY_AFTER_S = 5.0
"""What clients are told when no instance was there in time."""

STALE_RETRIES_MAX = 3
"""A request is placed anew so often because other routers were quicker; then it runs where it is placed."""


GRAMMAR_DEATHS_MAX = 2
"""A request with a grammar is not tried again once so many instances have died while they had it: one is chance."""
DEADLY = "the instances that worked on it have died, and it is not tried on another one"


class Lifecycle:
    """The way of each request from arrival to its end. All of its methods leave the books balanced."""

    def __init__(self, parts: RouterParts) -> None:
        self._config, self._counters = parts.config, parts.counters
        tables = parts.tables
        self._registry, self._trees, self._loads = tables.registry, tables.trees, tables.loads
        self._placer, self._sessions, self._named_prefixes = parts.placer, parts.sessions, parts.named_prefixes
        self._timers, self._outbox = parts.timers, parts.outbox
        self._stall_check_ns = sys.maxsize  # when the next look is; the greatest: there is none
        self.admission = parts.admission
        follower = parts.follower
        self.requests = RequestTable(f"{follower.name}.{follower.generation}-" if follower is not None else "")
        self._shard_placer = SpanPlacer(parts.config, tables.registry, tables.loads, self.requests)
        self._stripe_placer = StripePlacer(parts.config, tables.registry, tables.loads, self.requests)
        self.answers = ReplayLog(parts, self)
        self.request_counters = RequestCounters(parts.config, parts.placer, parts.outbox, parts.counters)
        admitted_by = AdmissionTables(parts.config, tables.registry, parts.admission, parts.timers, parts.outbox)
        self.remote_requests = RemoteRequests(admitted_by, self, RemoteAttempts(parts, self.requests))
        self.migrations = Migrations(parts, self.requests)
        self.admission_flow = AdmissionFlow(parts, self.requests, self.remote_requests, self.answers, self)

    # -- the way of requests, as its parts see it (RequestFlow)

    def enqueue_request(self, req: RequestState, now_ns: int) -> None:
        """Ask for the admission of a request that has entered."""
        self.admission_flow.enqueue_request(req, now_ns)

    def admit_waiting(self, now_ns: int) -> None:
        """Admit and place queued requests as long as there is room."""
        self.admission_flow.admit_waiting(now_ns)

    def give_up_request(self, request_id: str, now_ns: int) -> None:
        """End a request for which no client has come."""
        self.end_request(self.requests.by_id[request_id], FinishReason.CANCELLED, now_ns)

    # -- placing

    def place_request(self, req: RequestState, now_ns: int) -> None:
        """Dispatch an unplaced request; else it waits, or ends when waiting cannot help."""
        if not self.admission.may_place(req, now_ns):
            self._wait_for_instance(req, None, now_ns)
            return
        if req.request.key and (self.answers.awaits_reports(req) or self._continues_answer(req, now_ns)):
            return
        is_suspect = bool(req.request.sampling.grammar) and req.deaths >= GRAMMAR_DEATHS_MAX
        if req.tries >= self._config.attempts_max or is_suspect:
            self._counters.requests_failed += 1
            self.end_request(req, FinishReason.ERROR, now_ns, DEADLY if is_suspect else "")
            return
        placement = self._placer.choose_placement(req)
        if placement is None and self._gives_second_chance(req):
            placement = self._placer.choose_placement(req)
        if placement is not None:
            placement = self._stripe_placer.divide_prompt(req, placement)
        placement = placement or self._shard_placer.choose_placement(req)
        if placement is None:
            self._on_no_instance(req, now_ns)
        else:
            self._dispatch_attempt(req, placement, now_ns)

    def place_waiting(self, now_ns: int) -> None:
        """Something has changed: try all unplaced requests, in order."""
        # a copy: placing one may reject or end others of them
        for req in list(self.requests.unplaced.values()):
            if req.phase is RequestPhase.UNPLACED:
                self.place_request(req, now_ns)

    def _gives_second_chance(self, req: RequestState) -> bool:
        """Avoid instances no longer where an attempt merely failed: all others have refused."""
        failed = [peer for peer, retry_after_s in req.avoid.items() if retry_after_s == 0.0]
        # a failure may have been chance; a refusal (with a time, or for ever) was a decision
        for peer in failed:
            del req.avoid[peer]
        return bool(failed)

    def _on_no_instance(self, req: RequestState, now_ns: int) -> None:
        """No instance takes the request: reject it at once when waiting will not change that."""
        refusals = [req.avoid[m.peer] for m in self._registry if m.peer in req.avoid]
        busy = [retry_after_s for retry_after_s in refusals if retry_after_s is not None]
        longest = (
            0
            if self._registry.unheard_members
            else max(self._loads.longest_context(req.request), self._shard_placer.longest_sequence())
        )
        if self._shard_placer.may_place_later(req):
            self._wait_for_instance(req, RETRY_S, now_ns)
        elif not req.has_begun and busy:
            self.admission_flow.reject_request(req, req.refusal, min(busy), now_ns)
        elif not req.has_begun and longest:
            tokens = len(req.request.prompt)
            too_long = f"the prompt has {tokens} tokens; with one more to generate the most that fits is {longest}"
            self.admission_flow.reject_request(req, req.refusal if refusals else too_long, None, now_ns)
        else:
            self._wait_for_instance(req, min(busy, default=None), now_ns)

    def _wait_for_instance(self, req: RequestState, retry_after_s: float | None, now_ns: int) -> None:
        if req.unplaced_ns is None:
            req.unplaced_ns = now_ns
            # by id and not by request: it may have ended, and its state been freed, when the timer fires
            self._timers.arm(now_ns + self._config.unplaced_ns, self._on_unplaced_timer, req.request_id)
        if retry_after_s is not None:
            self._timers.arm(
                now_ns + max(ns_from_s(retry_after_s), NS_PER_S // 10), self._retry_placing, req.request_id
            )

    def _on_unplaced_timer(self, request_id: str, now_ns: int) -> None:
        req = self.requests.unplaced.get(request_id)
        if req is None or req.unplaced_ns is None or now_ns < req.unplaced_ns + self._config.unplaced_ns:
            return
        if req.parts and now_ns < req.unplaced_ns + PATIENCE * self._config.unplaced_ns:
            self._timers.arm(now_ns + self._config.unplaced_ns, self._on_unplaced_timer, request_id)
        elif req.has_begun:
            self._counters.requests_failed += 1
            self.end_request(req, FinishReason.ERROR, now_ns)
        else:
            self.admission_flow.reject_request(
                req, req.refusal or "no instance is ready to take requests", RETRY_AFTER_S, now_ns
            )

    def _retry_placing(self, request_id: str, now_ns: int) -> None:
        """All instances were busy."""
        req = self.requests.unplaced.get(request_id)
        if req is not None:
            req.avoid = {peer: None for peer, retry_after_s in req.avoid.items() if retry_after_s is None}
            self.place_request(req, now_ns)

    # -- dispatching

    def _dispatch_attempt(self, req: RequestState, placement: Placement, now_ns: int) -> None:
        number = self.requests.next_number()
        attempt_id = self.requests.attempt_name(req, number)
        first, decode_at, involved = placement.first, placement.decode_at, placement.members
        self._counters.sequences_split += bool(placement.parts) and not placement.striped
        self._counters.prompts_striped += placement.striped
        may_be_stale = not placement.parts and req.stale_retries < STALE_RETRIES_MAX
        known_tokens = self._loads.prefill_tokens_of(first.number) if may_be_stale else None
        attempt = Attempt(
            attempt_id, number, first, decode_at, placement.holders, placement.route, now_ns, now_ns, involved,
            self._charge_work(req, placement), parts=placement.parts, known_tokens=known_tokens,
            part=len(placement.parts) - 1 if placement.striped else 0, striped=placement.striped,
            is_shared=bool(placement.parts), transfer=placement.transfer,
        )  # fmt: skip
        self._start_attempt(req, attempt, now_ns)
        self.request_counters.on_dispatched(req, placement, now_ns)
        if not placement.parts or placement.striped:
            self._expect_blocks(req, [first] if placement.striped else involved, now_ns)
        for member in involved if placement.striped else [first]:
            self._send_dispatch(req, attempt, member, now_ns)

    def _send_dispatch(self, req: RequestState, attempt: Attempt, to: Member, now_ns: int) -> None:
        to.totals.dispatches += 1
        outputs = self.answers.emitted_outputs(req.request_id) if req.request.key else ()
        self._outbox.send(to.peer, req.make_dispatch(attempt, to, self._config, outputs, now_ns))

    def _start_attempt(self, req: RequestState, attempt: Attempt, now_ns: int) -> None:
        self.requests.start_attempt(req, attempt)
        for name in self.admission.memory.reserve_for_attempt(req, attempt):
            self._named_prefixes.evict_pin(name)
        req.tries += 1
        self._sessions.record_route(req.request.tenant, req.request.session, attempt.involved)
        self._arm_stall_check(self._stalled_at_ns(req, attempt))

    # -- what instances have from an earlier router's time

    def _continues_answer(self, req: RequestState, now_ns: int) -> bool:
        """Whether ``req`` needs no dispatch: an instance has its answer, or an attempt that goes on as its own. In any
        case the client gets what is known."""
        held_answer = self.answers.take_best_held(req)
        if held_answer is None:
            return False
        req.request = structs.replace(req.request, created_s=held_answer.created_s)
        for output in held_answer.log.outputs_for(req.request_id):
            self._outbox.emit_output(output)
            req.emitted[output.index] += output.tokens
            req.introduced[output.index], req.finished[output.index] = True, output.finish_reason
            if output.finish_reason is not None:
                self._counters.finished[output.finish_reason.value] += 1
        if all(req.finished):
            self.finish_request(req, now_ns)
            return True
        member = self._registry.get(held_answer.peer)
        if member is None or not held_answer.runs or not self.admission.memory.has_room_at(req, member):
            self.answers.release_held(held_answer)
            return False
        self._adopt_attempt(req, member, held_answer.attempt_id, now_ns)
        return True

    def _adopt_attempt(self, req: RequestState, member: Member, attempt_id: str, now_ns: int) -> None:
        number = self.requests.next_number()
        self._counters.attempts_adopted += 1
        candidate = Candidate(member.number, member.name, member.info.role, member.info.host_id)
        route = Route(candidate, None, "it ran there when this router came")
        placement = Placement(route, member, None, (), len(req.request.prompt) + max(map(len, req.emitted)))
        attempt = Attempt(
            attempt_id, number, member, None, (), route, now_ns, now_ns, [member], self._charge_work(req, placement)
        )
        self._start_attempt(req, attempt, now_ns)
        if req.has_begun:
            self.on_prefilled(req, attempt)

    # -- sequences that several instances share

    def on_segment_held(self, attempt_id: str, sender: Member, now_ns: int) -> None:
        """``sender`` has computed its part of a sequence, or repeats that: the turn of the next part."""
        req = self.requests.by_attempt.get(attempt_id)
        attempt = req.attempt if req is not None else None
        if req is None or attempt is None or sender not in attempt.involved:
            self._outbox.send(sender.peer, Cancel(attempt_id))  # it has not heard that this is over
        elif sender is attempt.holder:
            attempt.part, attempt.news_ns = attempt.part + 1, now_ns
            self._send_dispatch(req, attempt, attempt.parts[attempt.part].member, now_ns)

    def _charge_work(self, req: RequestState, placement: Placement) -> list[Charge]:
        width = max(req.request.n, req.request.beam_width)
        return [self._loads.charge_work(member.number, work) for member, work in placement.work_by_member(width)]

    def _expect_blocks(self, req: RequestState, involved: Sequence[Member], now_ns: int) -> None:
        """The prompt will be cached where it is computed, and where it is decoded when those instances cache too."""
        identities = req.identities or b""
        for index, member in enumerate(involved if identities else ()):
            if member.info.caching and (index == 0 or self._config.caching is not Caching.PD_CACHING_1):
                self._trees.expect_blocks(member.number, identities, now_ns)

    # -- going on

    def on_prefilled(self, req: RequestState, attempt: Attempt) -> None:
        """An instance speaks of the attempt: if it was prefilling, the prompt's work is done."""
        if req.phase is RequestPhase.PREFILLING:
            req.change_phase(RequestCause.PREFILLED)
            self.admission.memory.on_prefilled(attempt)
            while len(attempt.charges) > 1:
                self._loads.discharge_work(attempt.charges.pop(0))
            if attempt.striped:
                for member in self.requests.end_sharing(attempt):
                    self._outbox.send(member.peer, Cancel(attempt.attempt_id))

    def on_handed_over(self, attempt_id: str, sender: Member, now_ns: int) -> None:
        """The decode instance has all that it needs: the prefill instance no longer matters."""
        req = self.requests.by_attempt.get(attempt_id)
        attempt = req.attempt if req is not None else None
        if req is None or attempt is None or attempt.decode_at is not sender or req.phase is RequestPhase.HANDED_OVER:
            return
        attempt.news_ns = attempt.handed_over_ns = now_ns
        self.on_prefilled(req, attempt)
        self.admission.memory.on_handed_over(attempt)
        self.requests.hand_over(req, attempt)
        self.migrations.on_handed_over(req, attempt, now_ns)

    # -- failing

    def attempt_failed(self, req: RequestState, cause: str, now_ns: int, blamed: Sequence[Member] = ()) -> None:
        """Try elsewhere; with ``blamed`` members only when all others have refused."""
        for member in blamed:
            req.avoid.setdefault(member.peer, 0.0)
        self._abandon_attempt(req, cause)
        self.place_request(req, now_ns)

    def on_refused(self, sender: Member, message: RequestRefused, now_ns: int) -> None:
        """An instance will not run its attempt. That costs no try, unless it had taken the attempt before."""
        req = self.requests.by_attempt.get(message.request_id)
        if req is None or req.attempt is None or sender not in req.attempt.involved:
            return  # an old attempt's, or the sender has handed it over: another instance has it
        if message.load is not None and req.attempt.known_tokens is not None:
            req.stale_retries += 1
            req.tries -= 1
            self._abandon_attempt(req, "outrun", but=sender)
            self._loads.apply_heartbeat(sender.number, message.load)  # behind the end of the work that it does not have
            self.place_request(req, now_ns)
            return
        req.refusal = message.reason
        req.avoid[sender.peer] = message.retry_after_s
        if message.retry_after_s is None or message.retry_after_s > 0:
            req.tries -= 1
        self._abandon_attempt(req, "refused", but=sender)
        self.place_request(req, now_ns)

    def _stalled_at_ns(self, req: RequestState, attempt: Attempt) -> int:
        """When ``attempt`` has stalled, if nothing is heard of it until then."""
        return attempt.news_ns + req.stalled_after_ns(self._config)

    def _arm_stall_check(self, due_ns: int) -> None:
        """One timer for all attempts: nearly all of them end long before they could stall."""
        if due_ns < self._stall_check_ns:
            self._stall_check_ns = due_ns
            self._timers.arm(due_ns, self._check_stalled, None)

    def _check_stalled(self, _: None, now_ns: int) -> None:
        if now_ns < self._stall_check_ns:
            return  # an earlier entry was armed behind this one
        attempts = self.requests.by_attempt
        for attempt_id, req in list(attempts.items()):
            attempt = req.attempt
            if attempts.get(attempt_id) is req and attempt is not None and self._stalled_at_ns(req, attempt) <= now_ns:
                req.stalls += 1
                self.attempt_failed(req, "stalled", now_ns, blamed=list(attempt.involved))
        self._stall_check_ns = sys.maxsize
        dues = [self._stalled_at_ns(req, req.attempt) for req in attempts.values() if req.attempt is not None]
        self._arm_stall_check(min(dues, default=sys.maxsize))

    def on_attempt_lost(self, attempt_id: str, by: Member, now_ns: int) -> None:
        """``by`` has no attempt of this name, though it should: a message was lost."""
        req = self.requests.by_attempt[attempt_id]
        # Once is chance; a member that loses an attempt of a request that has failed before is avoided.
        self.attempt_failed(req, "lost", now_ns, blamed=[by] if req.past else [])

    def _abandon_attempt(self, req: RequestState, cause: str, but: Member | None = None) -> None:
        """End the attempt, and tell the involved instances, ``but`` one that knows or is gone."""
        attempt = req.attempt
        if attempt is None:
            raise ValueError(f"{req.request_id} has no attempt")
        self.requests.fail_attempt(req, attempt)
        req.past.append(attempt.make_story(cause))
        causes = self._counters.attempts_failed
        causes[cause] = causes.get(cause, 0) + 1
        self._release_attempt(attempt, completed=False)
        self._cancel_attempt(attempt, but)

    def _release_attempt(self, attempt: Attempt, *, completed: bool) -> int:
        """Returns for how long KV of the attempt is held for its client; 0: it is not."""
        self.migrations.on_attempt_over(attempt)
        held_ns = self.admission.memory.release_attempt(attempt, completed=completed)
        for charge in attempt.charges:
            self._loads.discharge_work(charge)
        return held_ns

    def _on_hold_ended(self, _: None, now_ns: int) -> None:
        self.admission_flow.admit_waiting(now_ns)

    def _cancel_attempt(self, attempt: Attempt, but: Member | None = None) -> None:
        for member in attempt.involved:
            if member is not but:
                self._outbox.send(member.peer, Cancel(attempt.attempt_id))

    def abandon_member(self, member: Member, now_ns: int, *, died: bool) -> list[RequestState]:
        """``member`` is gone: attempts that depend on it have failed. Returns the requests to be placed again."""
        self.remote_requests.on_member_removed(member, now_ns)
        self.migrations.on_member_gone(member)
        failed = [self.requests.by_attempt[attempt_id] for attempt_id in member.attempts]
        for req in failed:
            req.deaths += died
            self._abandon_attempt(req, "gone", but=member)
        return failed

    # -- ending

    def end_request(self, req: RequestState, reason: FinishReason, now_ns: int, error: str = "") -> None:
        """End every unfinished sequence with ``reason``, now."""
        for index in req.unfinished:
            offset = len(req.emitted[index])
            req.finished[index] = reason
            self._counters.finished[reason.value] += 1
            story = req.routing_story()
            ending = TokenOutput(
                req.request_id, index, (), finish_reason=reason, error=error, story=story, offset=offset
            )  # fmt: skip
            self._outbox.emit_output(ending)
        req.is_stopped = True
        self.finish_request(req, now_ns)

    def finish_request(self, req: RequestState, now_ns: int) -> None:
        """All sequences of ``req`` have ended."""
        attempt = req.attempt
        self.requests.remove_request(req, RequestCause.FINISHED)
        if attempt is not None:
            held_ns = self._release_attempt(attempt, completed=req.request.use_cache)
            if held_ns:
                self._timers.arm(now_ns + held_ns, self._on_hold_ended, None)
            if req.is_stopped or attempt.is_shared:  # instances may go on, and keep parts
                self._cancel_attempt(attempt)
        self.admission.release_request(req, now_ns)
        if req.request.key:
            self.answers.on_request_end(req.request_id, now_ns)
        self.request_counters.on_answered(req)
        self._counters.requests_finished += 1
        self._named_prefixes.extend_pin(req.request.tenant, req.request.session, now_ns)

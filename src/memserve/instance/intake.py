"""Requests come in, from clients or the router, are called off, or run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many

import numpy as np
from msgspec import structs

from memserve.base.config import InstanceConfig
from memserve.base.errors import UserError
from memserve.base.types import FinishReason, Request
from memserve.base.units import NS_PER_MS, NS_PER_S
from memserve.base.validation import check_request
from memserve.instance.adapters import AdapterShelf
from memserve.instance.events import GRAMMAR_FAILED, GrammarBuilt
from memserve.instance.scheduler.capacity import impossible_reason, lies_whole
from memserve.instance.scheduler.grammar_waits import BUILD_NS, MASK_NS, MASKS_NS, Wanted
from memserve.instance.scheduler.sequence import Cause, Group, Phase, RemoteState, Sequence
from memserve.instance.scheduler.state import SchedulerState
from memserve.protocol.events import RejectRequest
from memserve.protocol.messages import RETRY_S, Dispatch, Span
from memserve.protocol.peers import Peer

TOOL_CHARS_MAX = 128  # of the names of all tools that an answer calls
_TOO_SLOW = (
    f"what may come next was not known within {MASK_NS // NS_PER_S} s, or {MASKS_NS // NS_PER_S} s in all of the answer"
)


class RequestIntake:
    """Makes groups out of requests and puts them into the scheduler's state, or rejects them."""

    def __init__(
        self, state: SchedulerState, config: InstanceConfig, context: int, whole: int, adapters: AdapterShelf
    ) -> None:
        """``context``: tokens of the longest sequence; ``whole``: of the longest that never lies by layer."""
        self._state = state
        self._config = config
        self._context, self._whole, self._adapters = context, whole, adapters
        self._arrivals = 0
        self._deadlines: list[tuple[int, int, str]] = []  # heap of (deadline_ns, arrival, request id)
        self.draining = False
        """True: dispatches are rejected, the instance is about to leave."""

    # -- coming

    def rejection_of(self, request: Request, now_ns: int) -> RejectRequest | None:
        """Why ``request`` is rejected. None: it is accepted. Counts it either way."""
        state = self._state
        # counted before it is judged: arrived = accepted + rejected
        state.counters.requests += 1
        reason = self._invalid_reason(request) or impossible_reason(request, self.context_of(request), state.slots)
        retry_after_s: float | None = None
        if request.request_id in state.groups:
            reason = f"a request with the id {request.request_id!r} is still running"
        elif reason is None and self._is_full_for(request.tenant):
            reason = f"the queue is full: {len(state.waiting)} sequences wait"
            retry_after_s = self._retry_after_s(now_ns)
        elif reason is None and (late_ns := self._late_ns(request)) > 0:
            asked_ns = request.slo_ttft_ns or 0
            expected_s = (asked_ns + late_ns) / NS_PER_S
            reason = (
                f"the first token is expected in {expected_s:.2f} s, and slo_ttft_ms asks for {asked_ns / NS_PER_S:g} s"
            )
            retry_after_s = min(60.0, max(1.0, late_ns / NS_PER_S))
        if reason is None:
            return None
        state.counters.requests_rejected += 1
        return RejectRequest(request.request_id, reason, retry_after_s)

    def _late_ns(self, request: Request) -> int:
        """By how much the first token is expected behind the time that ``request`` asks for; 0: it asks for none, or
        nothing is known of this machine's speed yet."""
        state = self._state
        if request.slo_ttft_ns is None or not state.costs.samples:
            return 0
        pool = state.memory.pool
        cached = pool.match(request.isolation, request.prompt) if request.use_cache else 0
        own_ns = state.costs.model.prefill_ns(max(1, len(request.prompt) - cached), cached)
        return max(0, state.costs.queue_ns(state.prefill_tokens_queued()) + own_ns - request.slo_ttft_ns)

    def _invalid_reason(self, request: Request) -> str | None:
        """What of ``request`` the model cannot do. The HTTP edge checks this, too; another process may not have."""
        try:
            check_request(request, self._config.vocab_size)
        except UserError as error:
            return error.message
        if request.adapter and request.adapter not in self._adapters:
            return "this instance does not have the adapter of that name: start all of them with the same --lora"
        return None

    def unknown_token(self, generated: Many[Many[int]]) -> bool:
        """Whether tokens that another process has drawn are none of the model's."""
        vocab_size = self._config.vocab_size
        return any(not 0 <= token < vocab_size for tokens in generated for token in tokens)

    def _is_full_for(self, tenant: str) -> bool:
        """Whether the queue is full and ``tenant`` has its share of it: the lines of others do not keep it out.

        With ``k`` tenants at most ``max_waiting * (1 + 1/2 + ... + 1/k)`` wait, weights apart.
        """
        waiting, limit = self._state.waiting, self._config.scheduler.max_waiting
        if len(waiting) < limit:
            return False
        return len(waiting.line_of(tenant)) >= self._state.turns.share_of(tenant, limit)

    def tokens_to_generate(self, request: Request) -> int:
        """The most that one sequence of ``request`` gets: what it asks for, or what the context has room for."""
        return min(request.stop.max_tokens, self.context_of(request) - len(request.prompt))

    def context_of(self, request: Request) -> int:
        """Tokens of the longest sequence that ``request`` may have."""
        return self._whole if lies_whole(request) else self._context

    def open_group(self, request: Request, now_ns: int, deadline_ns: int | None) -> Group:
        """A group without sequences yet; ``deadline_ns`` is absolute."""
        group = Group(request, self._arrivals, self.tokens_to_generate(request), now_ns)
        self._arrivals += 1
        if self._state.returns is not None:
            self._state.returns.on_request_opened(group)
        self._state.open_group(group)
        if deadline_ns is not None:
            # with the arrival: an id may come again after its request has ended, and the old deadline is not its own
            heapq.heappush(self._deadlines, (deadline_ns, group.arrival, request.request_id))
        return group

    def enqueue_group(
        self, group: Group, cause: Cause, generated: Many[Many[int]] = (), ended_indices: Many[int] = ()
    ) -> None:
        """Give ``group`` its sequences. Where tokens were ``generated`` before, each goes on behind its own, except
        those that have ``ended_indices``; beams start over, they have emitted nothing."""
        if group.beam is not None or not (any(generated) or ended_indices):
            self._state.move(group.new_sequence(), cause)
            return
        # its sequences have tokens of their own by now: nothing is left to fork from the prompt
        group.forks_pending = 0
        if all(generated[index] for index in range(group.request.n) if index not in ended_indices):
            group.prompt_logprobs = None  # the client has them
        for index in range(group.request.n):
            sequence = group.new_sequence()
            sequence.out = list(generated[index])
            sequence.resumed = len(sequence.out)
            self._state.move(sequence, cause)
        for sequence in list(group.sequences.values()):
            if sequence.index in ended_indices:
                self._state.finish_silently(sequence)
            # the instance that died may have sampled the last token without reporting the end
            elif sequence.known_ending is not None:
                self.finish_known(sequence, sequence.known_ending)

    def finish_known(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence whose known tokens are all that it gets."""
        self._state.outputs.append(sequence.final_output(reason))
        self._state.finish_sequence(sequence, reason)

    def _retry_after_s(self, now_ns: int) -> float:
        """The time that the head of a line has waited: an estimate of the time until a new request gets there."""
        since_ns = min(line[0].group.arrived_ns for line in self._state.waiting.lines)
        return min(60.0, max(1.0, (now_ns - since_ns) / NS_PER_S))

    # -- grammars

    def on_grammar_built(self, event: GrammarBuilt) -> None:
        """The host has built a grammar, or cannot."""
        if grammar := self._state.grammars.on_grammar_built(event.job_id, self._state.now):
            self._release_waiting(grammar, event.error)

    def _release_waiting(self, grammar: Wanted, error: str) -> None:
        state = self._state
        for group in [group for group in state.groups.values() if group.wanted_grammar == grammar]:
            if error:
                state.finish_group(group, FinishReason.ERROR, f"{GRAMMAR_FAILED}: {error}")
                continue
            waiting = [
                candidate for candidate in group.sequences.values() if candidate.phase is Phase.WAITING_FOR_GRAMMAR
            ]
            if waiting:
                group.facts.append(("grammar_ms", round((state.now - group.arrived_ns) / NS_PER_MS, 3)))
            for sequence in waiting:
                state.move(sequence, Cause.GRAMMAR_BUILT)

    # -- coming from the router

    def runs_dispatch(self, order: Dispatch) -> bool:
        """Whether ``order`` has come before, and runs: messages may be repeated."""
        group = self._state.groups.get(order.request.request_id)
        if group is None:
            return False
        runs = group.remote.original if group.remote is not None and group.remote.original else group.request
        # an array has no truth value of equality: prompts are compared apart
        same = structs.replace(runs, prompt=order.request.prompt) == order.request
        return same and np.array_equal(runs.prompt, order.request.prompt)

    def open_dispatch(self, order: Dispatch, self_peer: Peer, now_ns: int) -> Group | RejectRequest:
        """A group for ``order``, without sequences yet. What runs here may be a substitute of its request."""
        request = order.request
        if self.draining:
            return RejectRequest(request.request_id, "the instance is about to leave", 0.0)
        refusal = self.rejection_of(request, now_ns) or self._reject_contradiction(order)
        if refusal is not None:
            return refusal
        if order.span is not None and self._has_part(order.span):
            return RejectRequest(request.request_id, "it has a part of another long sequence", RETRY_S)
        remote = self._remote_state(order, self_peer, now_ns)
        group = self.open_group(
            request if remote.original is None else _substitute(request), now_ns, remote.deadline_ns
        )
        group.remote, group.span = remote, order.span
        return group

    def _has_part(self, span: Span) -> bool:
        """Whether a part of a sequence that instances share is here: another one would wait for its memory, and be
        waited for elsewhere. Of prompts in stripes, each of which fits, several may be here."""
        here = (group.span for group in self._state.groups.values() if group.span is not None)
        return any(not (span.stripes and other.stripes) for other in here)

    def _remote_state(self, order: Dispatch, self_peer: Peer, now_ns: int) -> RemoteState:
        """A beam search leaves by a substitute, if it leaves at all."""
        request = order.request
        decode_at = None if order.decode_at is None or order.decode_at.name == self_peer.name else order.decode_at
        # beams begin before the prompt's end: no state stands there, and no window is complete
        needs_more = self._state.memory.needs_more_than_blocks
        is_short = request.sampling.prompt_logprobs or self.tokens_to_generate(request) <= 1
        if request.beam_width and (is_short or needs_more):
            decode_at = None
        return RemoteState(
            decode_at,
            order.transfer,
            order.return_kv,
            None if order.deadline_in_ns is None else now_ns + order.deadline_in_ns,
            request if request.beam_width and decode_at is not None else None,
            list(order.holders),
        )

    def _reject_contradiction(self, order: Dispatch) -> RejectRequest | None:
        """Dispatches that the router never sends."""
        n = order.request.n
        fits = not order.generated or len(order.generated) == n
        fits = fits and bool(order.generated or not order.ended) and all(index < n for index in order.ended)
        if fits and not self.unknown_token(order.generated):
            return None
        return RejectRequest(order.request.request_id, "generated tokens do not fit the request")

    # -- going

    def cancel_request(self, request_id: str) -> None:
        """The client went away."""
        group = self._state.groups.get(request_id)
        if group is not None:  # else the request ended while the cancellation was on its way
            self._state.counters.requests_cancelled += 1
            self._state.finish_group(group, FinishReason.CANCELLED)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """The edge found a stop string in the text of one sequence."""
        group = self._state.groups.get(request_id)
        if group is None or group.beam is not None or group.muted:
            return
        if group.remote is not None and group.remote.import_id is not None:
            group.remote.stopped.append(index)  # its tokens are on their way here
            return
        sequence = group.sequences.get(index)
        if sequence is not None and sequence.out:
            self.finish_known(sequence, FinishReason.STOP)

    def note_tool(self, request_id: str, tool: str) -> None:
        """The edge has read in an answer that it calls ``tool``, perhaps beside others."""
        group = self._state.groups.get(request_id)
        if group is not None and tool not in group.tool.split("+"):
            group.tool = f"{group.tool}+{tool}"[:TOOL_CHARS_MAX] if group.tool else tool[:TOOL_CHARS_MAX]

    def expire_requests(self, now_ns: int) -> None:
        """End all requests that have outlived their deadlines, or wait too long for their grammars or masks."""
        for grammar in self._state.grammars.expire_builds(now_ns):
            self._release_waiting(grammar, f"it was not built within {BUILD_NS // NS_PER_S} s")
        for sequence in self._state.late_masks.overdue_sequences(now_ns):
            if sequence.phase is not Phase.FINISHED:  # with another one of its request
                self._state.finish_group(sequence.group, FinishReason.ERROR, f"{GRAMMAR_FAILED}: {_TOO_SLOW}")
        deadlines, groups = self._deadlines, self._state.groups
        while deadlines and deadlines[0][0] <= now_ns:
            _, arrival, request_id = heapq.heappop(deadlines)
            group = groups.get(request_id)
            if group is not None and group.arrival == arrival:  # else it ended before
                self._state.finish_group(group, FinishReason.DEADLINE)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire_requests` is worth calling. None: no request has a deadline, or waits for a grammar."""
        grammars, masks = self._state.grammars.next_deadline_ns, self._state.late_masks.next_deadline_ns
        ends = self._deadlines[0][0] if self._deadlines else None, grammars, masks
        return min([end for end in ends if end is not None], default=None)


def _substitute(request: Request) -> Request:
    """The request that runs here for a beam search that leaves: the prompt, and a draw that is discarded."""
    # two: with one it would end here, and be handed over no more
    stop = structs.replace(request.stop, max_tokens=2, min_tokens=0, stop_token_ids=())
    return structs.replace(request, beam_width=0, stop=stop, sampling=structs.replace(request.sampling, logprobs=None))

"""Requests come in, are called off, or run out of time (level 2)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many

from memserve.config import InstanceConfig
from memserve.errors import UserError
from memserve.instance.roster import Roster
from memserve.instance.sequence import Group, Phase, Sequence
from memserve.policy.capacity import impossible_reason
from memserve.serving import RejectRequest
from memserve.types import FinishReason, Request
from memserve.units import NS_PER_S
from memserve.validation import check_request


class FrontDesk:
    """Makes groups out of requests and puts them into the roster, or says why not."""

    __slots__ = ("_arrivals", "_config", "_context", "_deadlines", "_roster")

    def __init__(self, roster: Roster, config: InstanceConfig, context: int) -> None:
        self._roster = roster
        self._config = config
        self._context = context
        self._arrivals = 0
        self._deadlines: list[tuple[int, int, str]] = []  # heap of (deadline_ns, arrival, request id)

    # -- coming

    def refusal(self, request: Request, now: int) -> RejectRequest | None:
        """Why ``request`` is not taken, or ``None``; counts it either way."""
        roster = self._roster
        roster.counters.requests += 1
        reason = self._fault(request) or impossible_reason(request, self._context, roster.slots)
        retry_after_s: float | None = None
        if request.request_id in roster.groups:
            reason = f"a request with the id {request.request_id!r} is still running"
        elif reason is None and self._is_full_for(request.tenant):
            reason = f"the queue is full: {len(roster.waiting)} sequences wait"
            retry_after_s = self._retry_after_s(now)
        if reason is None:
            return None
        roster.counters.requests_rejected += 1
        return RejectRequest(request.request_id, reason, retry_after_s)

    def _fault(self, request: Request) -> str | None:
        """What of ``request`` the model cannot do. Edges look at it too; another process may not have."""
        try:
            check_request(request, self._config.vocab_size)
        except UserError as error:
            return error.message
        return None

    def unknown_token(self, generated: Many[Many[int]]) -> bool:
        """Whether tokens that another process has drawn are none of the model's."""
        vocab_size = self._config.vocab_size
        return any(not 0 <= token < vocab_size for tokens in generated for token in tokens)

    def _is_full_for(self, tenant: str) -> bool:
        """Whether as many wait as may, and ``tenant`` has its share of them: others' lines do not keep it out.

        With ``k`` tenants at most ``max_waiting * (1 + 1/2 + ... + 1/k)`` wait, weights apart.
        """
        waiting, limit = self._roster.waiting, self._config.scheduler.max_waiting
        if len(waiting) < limit:
            return False
        return len(waiting.line(tenant)) >= self._roster.turns.share(tenant, limit)

    def tokens_to_generate(self, request: Request) -> int:
        """The most that one sequence of it gets: what is asked for, or what the context has room for."""
        return min(request.stop.max_tokens, self._context - len(request.prompt))

    def open(self, request: Request, now: int, deadline_ns: int | None) -> Group:
        """A group without sequences yet; ``deadline_ns`` is absolute."""
        group = Group(request, self._arrivals, self.tokens_to_generate(request), now)
        self._arrivals += 1
        self._roster.open(group)
        if deadline_ns is not None:
            heapq.heappush(self._deadlines, (deadline_ns, group.arrival, request.request_id))
        return group

    def line_up(self, group: Group, phase: Phase, generated: Many[Many[int]] = (), ended: Many[int] = ()) -> None:
        """Give ``group`` its sequences. Where tokens were ``generated`` before, each goes on behind its own, except
        those that have ``ended``; beams start over, they have emitted nothing."""
        if group.beam is not None or not (any(generated) or ended):
            self._roster.enter(group.new_sequence(), phase)
            return
        group.forks_pending = 0
        if all(generated[index] for index in range(group.request.n) if index not in ended):
            group.prompt_logprobs = None  # the client has them
        for index in range(group.request.n):
            sequence = group.new_sequence()
            sequence.out = list(generated[index])
            self._roster.enter(sequence, phase)
        for sequence in list(group.sequences.values()):
            self._end_if_known(sequence, sequence.index in ended)

    def _end_if_known(self, sequence: Sequence, told: bool) -> None:
        """End a sequence that the client knows the end of (``told``), or whose known tokens are all that it gets."""
        reason = sequence.known_ending
        if told:
            self._roster.leave(sequence)
        elif reason is not None:
            self._roster.outputs.append(sequence.ending(reason))
            self._roster.finish(sequence, reason)

    def _retry_after_s(self, now: int) -> float:
        """As long as the first of a line has waited: a fair guess of how long it takes to get there."""
        since_ns = min(line[0].group.arrived_ns for line in self._roster.waiting.lines)
        return min(60.0, max(1.0, (now - since_ns) / NS_PER_S))

    # -- going

    def cancel(self, request_id: str) -> None:
        """The client went away."""
        group = self._roster.groups.get(request_id)
        if group is not None:  # else it ended while the cancellation was on its way
            self._roster.counters.requests_cancelled += 1
            self._roster.finish_group(group, FinishReason.CANCELLED)

    def stop(self, request_id: str, index: int) -> None:
        """The edge found a stop string in the text of one sequence."""
        group = self._roster.groups.get(request_id)
        if group is None or group.beam is not None or group.muted:
            return
        if group.orders is not None and group.orders.import_id is not None:
            group.orders.stopped.append(index)  # its tokens are on their way here
            return
        sequence = group.sequences.get(index)
        if sequence is not None and sequence.out:
            self._roster.outputs.append(sequence.ending(FinishReason.STOP))
            self._roster.finish(sequence, FinishReason.STOP)

    def expire(self, now: int) -> None:
        """End whatever has outlived its deadline."""
        deadlines, groups = self._deadlines, self._roster.groups
        while deadlines and deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(deadlines)
            group = groups.get(request_id)
            if group is not None and group.arrival == arrival:  # else it ended before
                self._roster.finish_group(group, FinishReason.DEADLINE)

    @property
    def next_deadline_ns(self) -> int | None:
        """When :meth:`expire` is worth calling; ``None`` = no deadlines."""
        return self._deadlines[0][0] if self._deadlines else None

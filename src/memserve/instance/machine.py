"""The instance machine (level 2): requests and finished steps in, plans and tokens out.

Synchronous and deterministic: one mutator, ``handle(event, now)``; no clock, no random source, no torch. The device
works on up to ``steps_in_flight`` plans at once, strictly in order. That order is what makes everything else simple: a
block freed after plan ``k`` was made may be used in plan ``k + 1``, a cache entry filled by plan ``k`` may be read in
``k + 1``, and a token sampled by plan ``k`` may be computed in ``k + 1`` before the machine has seen it.
"""

from __future__ import annotations

import heapq
from collections import deque

from memserve.config import InstanceConfig
from memserve.errors import check
from memserve.instance.actions import Action, EmitTokens, RejectRequest, RunStep
from memserve.instance.events import (
    ClockTicked,
    Event,
    RequestArrived,
    RequestCancelled,
    SequenceStopped,
    StepFailed,
    StepFinished,
)
from memserve.instance.invariants import check_instance
from memserve.instance.memory import SequenceMemory
from memserve.instance.outstanding import Outstanding
from memserve.instance.planner import Planner
from memserve.instance.report import MemoryReport, RequestStory
from memserve.instance.results import Results
from memserve.instance.roster import Roster
from memserve.instance.sequence import Group, Phase
from memserve.instance.stats import InstanceStats
from memserve.instance.views import instance_stats, memory_report, request_story
from memserve.mempool.pool import BlockPool
from memserve.policy.batching import context_tokens, impossible_reason, running_max
from memserve.policy.preemption import PreemptionCosts
from memserve.types import FinishReason, Request
from memserve.units import NS_PER_S


class Instance:
    """One inference instance: queue, batching, blocks, endings.

    Every request ends with exactly one output that has a ``finish_reason`` for each of its ``n`` sequences, or with one
    ``RejectRequest``. Every plan must be answered by one ``StepFinished`` or ``StepFailed``, in order.
    """

    def __init__(
        self,
        config: InstanceConfig,
        block_tokens: int,
        costs: PreemptionCosts | None = None,
        pool: BlockPool | None = None,
    ) -> None:
        if pool is None:
            pool = BlockPool(config.pool, block_tokens, config.namespace)
        self.config = config
        scheduler = config.scheduler
        self._context = context_tokens(config.max_model_tokens, config.pool.hbm_blocks, block_tokens)
        memory = SequenceMemory(pool, block_tokens)
        slots = running_max(scheduler)
        self._roster = Roster(memory, slots, scheduler.preemption, costs or PreemptionCosts())
        self._planner = Planner(self._roster, scheduler)
        self._results = Results(self._roster)
        self._outstanding: deque[Outstanding] = deque()
        self._arrivals = 0
        self._deadlines: list[tuple[int, int, str]] = []  # heap of (deadline_ns, arrival, request id)

    # -- the one mutator

    def handle(self, event: Event, now: int) -> list[Action]:
        """Take ``event`` into account at time ``now`` (ns) and say what is to be done, in order.

        Raises :class:`InvariantError` when the device's report does not fit the oldest plan under way.
        """
        actions: list[Action] = []
        if isinstance(event, StepFinished):
            self._results.apply(self._take_outstanding(event.step_id), event)
        elif isinstance(event, RequestArrived):
            self._arrive(event.request, now, actions)
        elif isinstance(event, StepFailed):
            failed = self._take_outstanding(event.step_id)
            self._results.fail(failed, list(self._outstanding), event)
        elif isinstance(event, RequestCancelled):
            self._cancel(event.request_id)
        elif isinstance(event, SequenceStopped):
            self._stop(event.request_id, event.index)
        else:
            check(isinstance(event, ClockTicked), f"unknown event {event!r}")
        if self._deadlines and self._deadlines[0][0] <= now:
            self._expire(now)
        self._plan(now, actions)
        if self._roster.outputs:
            actions.append(EmitTokens(self._roster.outputs))
            self._roster.outputs = []
        return actions

    def _plan(self, now: int, actions: list[Action]) -> None:
        """Keep the device busy: as many plans as it may have. They come before outputs, which can wait for it."""
        outstanding = self._outstanding
        while len(outstanding) < self.config.scheduler.steps_in_flight:
            made = self._planner.make(now, nothing_under_way=not outstanding)
            if made is None:
                return
            plan, memo = made
            outstanding.append(memo)
            actions.append(RunStep(plan))

    def _take_outstanding(self, step_id: int) -> Outstanding:
        check(self._outstanding, f"step {step_id} reported, but no plan is under way")
        oldest = self._outstanding.popleft()
        check(oldest.step_id == step_id, f"step {step_id} reported, but {oldest.step_id} is the oldest under way")
        return oldest

    # -- requests

    def _arrive(self, request: Request, now: int, actions: list[Action]) -> None:
        roster = self._roster
        roster.counters.requests += 1
        reason = impossible_reason(request, self._context, roster.slots)
        retry_after_s: float | None = None
        if request.request_id in roster.groups:
            reason = f"a request with the id {request.request_id!r} is still running"
        elif reason is None and len(roster.waiting) >= self.config.scheduler.max_waiting:
            reason = f"the queue is full: {len(roster.waiting)} sequences wait"
            retry_after_s = self._retry_after_s(now)
        if reason is not None:
            roster.counters.requests_rejected += 1
            actions.append(RejectRequest(request.request_id, reason, retry_after_s))
            return
        max_tokens = min(request.stop.max_tokens, self._context - len(request.prompt))
        group = Group(request, self._arrivals, max_tokens, now)
        self._arrivals += 1
        roster.groups[request.request_id] = group
        roster.enter(group.new_sequence(), Phase.WAITING)
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, group.arrival, request.request_id))

    def _retry_after_s(self, now: int) -> float:
        """As long as the head of the line has waited: a fair guess of how long it takes to get there."""
        head = self._roster.waiting.items[0].group
        return min(60.0, max(1.0, (now - head.arrived_ns) / NS_PER_S))

    def _cancel(self, request_id: str) -> None:
        group = self._roster.groups.get(request_id)
        if group is not None:  # else it ended while the cancellation was on its way
            self._roster.counters.requests_cancelled += 1
            self._roster.finish_group(group, FinishReason.CANCELLED)

    def _stop(self, request_id: str, index: int) -> None:
        group = self._roster.groups.get(request_id)
        if group is None or group.beam is not None:
            return
        sequence = group.sequences.get(index)
        if sequence is not None and sequence.out:
            self._roster.outputs.append(sequence.ending(FinishReason.STOP))
            self._roster.finish(sequence, FinishReason.STOP)

    def _expire(self, now: int) -> None:
        deadlines, groups = self._deadlines, self._roster.groups
        while deadlines and deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(deadlines)
            group = groups.get(request_id)
            if group is not None and group.arrival == arrival:  # else it ended before
                self._roster.finish_group(group, FinishReason.DEADLINE)

    # -- views

    @property
    def pool(self) -> BlockPool:
        """The memory, to look at (reports, KV events)."""
        return self._roster.memory.pool

    @property
    def context_tokens(self) -> int:
        """The longest sequence that can run here: the model's context or, if smaller, what the pool holds."""
        return self._context

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending; ``None`` = no deadlines."""
        return self._deadlines[0][0] if self._deadlines else None

    def stats(self) -> InstanceStats:
        """State now, and totals since the start."""
        return instance_stats(self._roster, len(self._outstanding))

    def report(self) -> MemoryReport:
        """How the memory is used."""
        return memory_report(self._roster)

    def story(self, request_id: str) -> RequestStory | None:
        """What has happened to a live request so far."""
        group = self._roster.groups.get(request_id)
        return request_story(group) if group is not None else None

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        check_instance(self._roster, self._outstanding)

    def __repr__(self) -> str:
        return f"<Instance {self._roster} in_flight={len(self._outstanding)}>"

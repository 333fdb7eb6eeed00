"""The instance machine: requests and finished steps in, plans and tokens out.

Synchronous and deterministic: one mutator, ``handle(event, now)``; no clock, no random source, no torch. The device
works on up to ``steps_in_flight`` plans at once, strictly in order. That order is what makes everything else simple: a
block freed after plan ``k`` was made may be used in plan ``k + 1``, a cache entry filled by plan ``k`` may be read in
``k + 1``, and a token sampled by plan ``k`` may be computed in ``k + 1`` before the machine has seen it.

With ``me`` it is a member of a cluster: then it also hears messages, and gives KV to other instances and takes theirs
(``cluster_link``). Without, none of that exists.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from memserve.config import InstanceConfig
from memserve.errors import check
from memserve.instance.actions import Action, EmitTokens, RunStep
from memserve.instance.cluster_link import ClusterLink
from memserve.instance.events import (
    ClockTicked,
    Event,
    LayerFinished,
    MessageArrived,
    PrefixPinned,
    PrefixUnpinned,
    RequestArrived,
    RequestCancelled,
    SequenceStopped,
    StepFailed,
    StepFinished,
)
from memserve.instance.frontdesk import FrontDesk
from memserve.instance.gliding import glide, steps_ahead
from memserve.instance.invariants import check_instance
from memserve.instance.memory import SequenceMemory
from memserve.instance.outstanding import Outstanding
from memserve.instance.pins import Pins
from memserve.instance.planner import Planner
from memserve.instance.report import MemoryReport, RequestStory
from memserve.instance.results import Results
from memserve.instance.roster import Roster
from memserve.instance.sequence import Phase
from memserve.instance.stats import InstanceStats
from memserve.instance.views import instance_stats, memory_report, request_story
from memserve.kv_transfer.jobs import PagesPulled, PagesSealed
from memserve.mempool.pool import BlockPool
from memserve.messages import Load, Peer
from memserve.policy.capacity import context_tokens, running_max
from memserve.policy.reuse import PreemptionCosts, PreemptionModel
from memserve.types import KVGeometry, NamedPrefix, Request, TokenOutput
from memserve.units import NS_PER_MS

AHEAD_MAX_NS = 10 * NS_PER_MS
"""The next step is planned when the work that the device has is expected to end within this time: early enough to keep
it busy, and so late that a request which arrives meanwhile waits for one step and not for two."""


class Instance:
    """One inference instance: queue, batching, blocks, endings.

    Every request ends with exactly one output that has a ``finish_reason`` for each of its ``n`` sequences, or with one
    ``RejectRequest``; in a cluster also without a word, where it was handed over, or nobody waits for it. Every plan
    must be answered by one ``StepFinished`` or ``StepFailed``, in order.
    """

    def __init__(
        self,
        config: InstanceConfig,
        block_tokens: int,
        costs: PreemptionCosts | None = None,
        pool: BlockPool | None = None,
        *,
        me: Peer | None = None,
        geometry: KVGeometry | None = None,
        holds_tokens: bool = False,
    ) -> None:
        """``me``: its name and generation in a cluster; needs ``geometry``, which peers compare. ``pool`` must then
        have been built with ``event_capacity=config.exchange.event_capacity``, as the default one is.

        ``holds_tokens``: further tokens of a sequence are not told one by one, but with whatever else there is to say
        of it, or when the host asks (:meth:`tell`). For hosts that know otherwise when each was drawn.
        """
        if pool is None:
            capacity = config.exchange.event_capacity if me is not None else 0
            pool = BlockPool(config.pool, block_tokens, config.namespace, event_capacity=capacity)
        self.config = config
        scheduler = config.scheduler
        self._context = context_tokens(config.max_model_tokens, config.pool.hbm_blocks, block_tokens)
        memory = SequenceMemory(pool, block_tokens, PreemptionModel(costs or PreemptionCosts()))
        self._roster = Roster(memory, running_max(scheduler), scheduler.preemption)
        self._desk = FrontDesk(self._roster, config, self._context)
        self._pins = Pins(pool)
        self._planner = Planner(self._roster, scheduler, self._pins)
        self._results = Results(self._roster, holds_tokens)
        self._holds_tokens = holds_tokens
        self._outstanding: deque[Outstanding] = deque()
        self._ends_ns = 0  # when the last of them is expected to be done, as far as that is known
        self._plan_at_ns: int | None = None
        self._link: ClusterLink | None = None
        if me is not None:
            check(geometry is not None, "a member of a cluster must know the geometry of its KV")
            self._link = ClusterLink(self._roster, self._desk, self._pins, config, geometry, me)  # type: ignore[arg-type]  # as was just checked

    # -- the one mutator

    def handle(self, event: Event, now: int) -> list[Action]:
        """Take ``event`` into account at time ``now`` (ns) and say what is to be done, in order.

        Raises :class:`InvariantError` when the device's report does not fit the oldest plan under way.
        """
        actions: list[Action] = []
        link = self._link
        if isinstance(event, StepFinished):
            self._results.apply(self._take_outstanding(event.step_id, now), event)
            if link is not None:
                link.step_ended(event.step_id, now)
        elif isinstance(event, RequestArrived):
            self._arrive(event.request, now, actions)
        elif isinstance(event, RequestCancelled):
            self._desk.cancel(event.request_id)
        elif isinstance(event, SequenceStopped):
            self._desk.stop(event.request_id, event.index)
        elif isinstance(event, StepFailed):
            self._fail(event, now)
        elif isinstance(event, PrefixPinned):
            name, until_ns = _pin_name(event.handle, event.tenant), now + event.ttl_ns
            self._pins.pin(name, event.isolation, event.tokens, until_ns, tenant=event.tenant)
        elif isinstance(event, PrefixUnpinned):
            self._pins.unpin(_pin_name(event.handle, event.tenant))
        elif link is not None:
            self._hear(link, event, now)
        else:
            check(isinstance(event, ClockTicked), f"unknown event {event!r}")
        self._desk.expire(now)
        self._pins.expire(now)
        if link is not None:
            link.settle(now)
        self._plan(now, actions)
        if self._roster.outputs:
            actions.append(EmitTokens(self._roster.outputs))
            self._roster.outputs = []
            if link is not None:
                link.answers_told += 1
        if link is not None:
            link.conclude(actions, now)
        else:
            self._pins.lost.clear()
        return actions

    @staticmethod
    def _hear(link: ClusterLink, event: Event, now: int) -> None:
        if isinstance(event, MessageArrived):
            link.hear(event.sender, event.message, now)
        elif isinstance(event, LayerFinished):
            link.handoffs.layer_finished(event.step_id, event.layer)
        elif isinstance(event, PagesSealed | PagesPulled):
            link.pages_done(event, now)
        else:
            check(isinstance(event, ClockTicked), f"unknown event {event!r}")

    def _plan(self, now: int, actions: list[Action]) -> None:
        """Keep the device busy: as many plans as it may have, but none long before it is needed. Plans come before
        outputs, which can wait for the device."""
        outstanding, link = self._outstanding, self._link
        self._plan_at_ns = None
        while len(outstanding) < self.config.scheduler.steps_in_flight:
            if outstanding and self._ends_ns - now > AHEAD_MAX_NS:
                self._plan_at_ns = self._ends_ns - AHEAD_MAX_NS
                return
            copies_only = link is not None and link.exchange.wants_plan
            made = self._planner.make(now, nothing_under_way=not outstanding, copies_only=copies_only)
            if made is None:
                return
            plan, memo = made
            if link is not None:
                link.planned(plan, now)
            self._ends_ns = (max(now, self._ends_ns) if outstanding else now) + self._expected_ns(memo)
            outstanding.append(memo)
            actions.append(RunStep(plan))

    def _expected_ns(self, memo: Outstanding) -> int:
        return self._roster.costs.step_ns(memo.prefill_tokens, memo.decode_rows, memo.prefill_pairs)

    def _take_outstanding(self, step_id: int, now: int) -> Outstanding:
        check(self._outstanding, f"step {step_id} reported, but no plan is under way")
        oldest = self._outstanding.popleft()
        check(oldest.step_id == step_id, f"step {step_id} reported, but {oldest.step_id} is the oldest under way")
        self._ends_ns = now + sum(map(self._expected_ns, self._outstanding))
        return oldest

    def _fail(self, event: StepFailed, now: int) -> None:
        failed = self._take_outstanding(event.step_id, now)
        if not failed.void:
            self._pins.release_all()
            if self._link is not None:
                self._link.kv_lost(now)
        self._results.fail(failed, list(self._outstanding), event)
        if self._link is not None:
            self._link.step_ended(event.step_id, now)

    def _arrive(self, request: Request, now: int, actions: list[Action]) -> None:
        refusal = self._desk.refusal(request, now)
        if refusal is not None:
            actions.append(refusal)
        else:
            self._desk.line_up(self._desk.open(request, now, request.deadline_ns), Phase.WAITING)

    def reborn(self, me: Peer) -> None:
        """The host joins again as ``me``, a new generation, after ``Expelled``: nothing of the old one is left but the
        cache. Raises :class:`InvariantError` outside a cluster."""
        check(self._link is not None, "only a member of a cluster is born anew")
        if self._link is not None:
            self._link.reborn(me)

    # -- many steps at once, for a host that knows what will happen (``gliding``)

    def steps_ahead(self) -> int:
        """How many of the next steps can be told by :meth:`glide`, if no other event comes before their end."""
        return steps_ahead(self._planner, self._outstanding, self.config.scheduler.steps_in_flight, self._link)

    def glide(self, tokens: list[int], device_ns: int) -> None:
        """As ``len(tokens)`` times ``StepFinished``, all alike: step ``i`` drew ``tokens[i]`` for every sequence.

        The plans under way are then those of so many steps later. ``device_ns``: of all steps together. Needs
        ``holds_tokens``: the tokens are held.
        """
        check(self._holds_tokens, "who glides tells of tokens late")
        glide(self._planner, self._outstanding, self._link, tokens, device_ns)

    def tell(self) -> list[TokenOutput]:
        """All tokens that have been held, one output a sequence, for one message; nothing is held any more."""
        sequences = [s for group in self._roster.groups.values() for s in group.sequences.values()]
        outputs = [sequence.news() for sequence in sequences if sequence.holds_tokens]
        if outputs and self._link is not None:
            self._link.answers_told += 1
        return outputs

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
    def me(self) -> Peer | None:
        """Its name and generation in a cluster."""
        return self._link.members.me if self._link is not None else None

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending; ``None`` = no deadlines."""
        soonest, link = self._desk.next_deadline_ns, self._link
        others = self._pins.next_deadline_ns, self._plan_at_ns, link.next_deadline_ns if link is not None else None
        for deadline in others:
            if deadline is not None and (soonest is None or deadline < soonest):
                soonest = deadline
        return soonest

    @property
    def next_event(self) -> int:
        """Number that the next KV event will have, for heartbeats."""
        return self._link.feed.next_event if self._link is not None else 0

    def pinned_tokens(self, handle: str, tenant: str) -> int:
        """How much is kept under a name that ``PrefixPinned`` gave; 0 = nothing, or no more."""
        return self._pins.tokens(_pin_name(handle, tenant))

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        """What a tenant's ``PrefixPinned`` keep, least recently renewed first."""
        skipped = len(_pin_name("", tenant))
        return [dataclasses.replace(kept, handle=kept.handle[skipped:]) for kept in self._pins.of(tenant)]

    @property
    def is_idle(self) -> bool:
        """No requests, no plans under way, nothing lent or borrowed: a draining instance may leave."""
        transfers = self._link.exchange.transfers_open if self._link is not None else 0
        return not (self._roster.groups or self._outstanding or transfers)

    def crowd(self) -> tuple[int, int]:
        """Sequences that wait, and sequences that run: of :meth:`load`, what costs little."""
        return self._roster.crowd()

    def load(self) -> Load:
        """How busy it is, for heartbeats; all zero outside a cluster."""
        return self._link.load() if self._link is not None else Load()

    def stats(self) -> InstanceStats:
        """State now, and totals since the start."""
        return instance_stats(self._roster, len(self._outstanding), self._link)

    def report(self) -> MemoryReport:
        """How the memory is used."""
        return memory_report(self._roster)

    def story(self, request_id: str) -> RequestStory | None:
        """What has happened to a live request so far."""
        group = self._roster.groups.get(request_id)
        return request_story(group) if group is not None else None

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        check_instance(self._roster, self._outstanding, self._link)

    def __repr__(self) -> str:
        return f"<Instance {self._roster} in_flight={len(self._outstanding)}>"


def _pin_name(handle: str, tenant: str) -> str:
    """Names of different tenants are different names: the length comes first, so that no two are alike."""
    return f"{len(tenant)}:{tenant}:{handle}"

"""The instance machine: requests and finished steps in, plans and tokens out.

Synchronous and deterministic: one mutator, ``handle(event, now_ns)``; no clock, no random source, no torch. The device
works on up to ``steps_in_flight`` plans at once, strictly in order. That order is what makes everything else simple: a
block freed after plan ``k`` was made may be used in plan ``k + 1``, a cache entry filled by plan ``k`` may be read in
``k + 1``, and a token sampled by plan ``k`` may be computed in ``k + 1`` before the machine has seen it.

With ``me`` the instance is a member of a cluster: it also hears messages, gives KV to other instances and takes theirs
(``cluster_link``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from msgspec import structs

from memserve.base.config import InstanceConfig
from memserve.base.errors import InvariantError, check, refuse_event
from memserve.base.kv_layout import lower_page_bytes
from memserve.base.types import ClockTicked, KVGeometry, NamedPrefix, Request, Role, TokenOutput
from memserve.base.units import NS_PER_MS
from memserve.instance.adapters import AdapterShelf
from memserve.instance.cluster.commands import InstanceParts
from memserve.instance.cluster.link import ClusterLink
from memserve.instance.events import (
    Action,
    AdapterLoaded,
    Event,
    GrammarBuilt,
    LayerFinished,
    MaskComputed,
    RunStep,
    StepFailed,
    StepFinished,
)
from memserve.instance.hints import HintRunner
from memserve.instance.intake import RequestIntake
from memserve.instance.invariants import check_instance
from memserve.instance.layerwise.budget import TPOT_NS, LayerBudget, LinkRate
from memserve.instance.layerwise.placer import LayerPlacer
from memserve.instance.returns.policy import ReturnPolicy
from memserve.instance.scheduler.batch import InflightPlan
from memserve.instance.scheduler.capacity import context_tokens, running_max, streamed_tokens
from memserve.instance.scheduler.memory import SequenceMemory
from memserve.instance.scheduler.planner import Planner
from memserve.instance.scheduler.results import StepResults
from memserve.instance.scheduler.sequence import Cause
from memserve.instance.scheduler.slo import Objectives
from memserve.instance.scheduler.state import SchedulerState
from memserve.instance.speculation.speculation import Speculation
from memserve.instance.stats import (
    InstanceStats,
    MemoryReport,
    instance_stats,
    memory_report,
)
from memserve.kv.contents import ContentReuse
from memserve.kv.costs import PreemptionCosts, PreemptionModel
from memserve.kv.identity import DEFAULT_KEY
from memserve.kv.pool import BlockPool
from memserve.kv.retention import Pins
from memserve.kv.transfer.events import PagesPulled, PagesSealed
from memserve.protocol.events import (
    EmitTokens,
    MessageArrived,
    PrefixPinned,
    PrefixUnpinned,
    RequestArrived,
    RequestCancelled,
    SequenceStopped,
    ToolCalled,
)
from memserve.protocol.kv_hints import KvHinted
from memserve.protocol.member_events import LoadRead
from memserve.protocol.messages import HoldAdapters
from memserve.protocol.peers import Load, Peer

AHEAD_MAX_NS = 10 * NS_PER_MS
"""The next step is planned when the device is expected to finish its work within this time: early enough to keep it
busy, and so late that a request which arrives meanwhile waits for one step and not for two."""


class Instance:
    """One inference instance: queue, batching, blocks, endings.

    Every request ends with exactly one output that has a ``finish_reason`` for each of its ``n`` sequences, or with one
    ``RejectRequest``. In a cluster it may end silently: it was handed over, or its router is gone. Every plan must be
    answered by one ``StepFinished`` or ``StepFailed``, in order.
    """

    def __init__(
        self,
        config: InstanceConfig,
        block_tokens: int,
        costs: PreemptionCosts | None = None,
        pool: BlockPool | None = None,
        *,
        self_peer: Peer | None = None,
        geometry: KVGeometry | None = None,
    ) -> None:
        """``self_peer``: name and generation in a cluster; needs ``geometry``, which peers compare. ``pool`` must then
        have been built with ``event_capacity=config.exchange.event_capacity``, as the default one is."""
        if pool is None:
            capacity = config.exchange.event_capacity if self_peer is not None else 0
            pool = BlockPool(config.pool, block_tokens, config.namespace, event_capacity=capacity)
        self.config = config
        scheduler = config.scheduler
        check(geometry is not None or scheduler.layerwise == "off", "KV by layer needs the geometry of the KV")
        whole = self._context = context_tokens(config.max_model_tokens, config.pool, block_tokens)
        memory = SequenceMemory(pool, block_tokens, PreemptionModel(costs or PreemptionCosts()))
        if scheduler.layerwise != "off" and geometry is not None:
            memory.layers = _layer_placer(config, memory, geometry)
            # what no other can read lies whole where it leaves
            if config.pool.shares_dram or config.role is Role.COLOCATED:
                layers = geometry.num_layers
                self._context = streamed_tokens(config.max_model_tokens, config.pool, block_tokens, layers)
        if scheduler.nonprefix_reuse:
            _let_reuse_contents(config, memory)
        self.state = SchedulerState(memory, running_max(scheduler), scheduler.preemption)
        if scheduler.scheduling == "slo":
            self.state.objectives = Objectives(scheduler, self.state.costs)
            if isinstance(memory.layers, LayerPlacer):
                memory.layers.tokens_left = self.state.objectives.tokens_left
        if scheduler.keep_tool_prefixes == "auto" and _sees_whole_sessions(config):
            self.state.returns = ReturnPolicy(self.state)
        self.adapters = AdapterShelf(config.adapters)
        self.intake = RequestIntake(self.state, config, self._context, whole, self.adapters)
        self.pins = Pins(pool)
        self.hints = HintRunner(self.state, self.pins)
        drafts = 0 if memory.layers.is_by_layer else scheduler.draft_tokens
        speculation = Speculation(self.state, drafts) if drafts else None
        self.planner = Planner(self.state, scheduler, self.pins, speculation)
        self.results = StepResults(self.state, speculation)
        #: plans that the device has not answered, oldest first
        self.inflight: deque[InflightPlan] = deque()
        self._ends_ns = 0  # when the last of them is expected to be done, as far as that is known
        self._plan_at_ns: int | None = None
        #: None: outside a cluster
        self.link: ClusterLink | None = None
        if self_peer is not None:
            if geometry is None:
                raise InvariantError("a member of a cluster must know the geometry of its KV")
            parts = InstanceParts(self.state, self.intake, self.pins, self.hints, self.load, self.adapters)
            self.link = ClusterLink(parts, config, geometry, self_peer)
        self._refusals: list[Action] = []  # of requests of this event
        self._handlers = self._handlers_of_events()

    # -- the one mutator

    def _handlers_of_events(self) -> dict[type[Event], Callable[[Any, int], None]]:
        """Of an instance with and without a cluster; what others bring goes to the link."""
        intake = self.intake
        return {
            StepFinished: self._finish_step,
            StepFailed: self._fail_step,
            RequestArrived: lambda event, now_ns: self._on_request_arrived(event.request, now_ns),
            RequestCancelled: lambda event, _: intake.cancel_request(event.request_id),
            SequenceStopped: lambda event, _: intake.stop_sequence(event.request_id, event.index),
            ToolCalled: lambda event, _: intake.note_tool(event.request_id, event.tool),
            GrammarBuilt: lambda event, _: intake.on_grammar_built(event),
            MaskComputed: lambda event, now_ns: self.state.late_masks.on_mask_computed(event.job_id, now_ns),
            PrefixPinned: self._pin_prefix,
            PrefixUnpinned: lambda event, _: self.pins.unpin_prefix(_pin_name(event.handle, event.tenant)),
            KvHinted: self._on_hint,
            HoldAdapters: lambda event, _: self.adapters.update_wanted(event.adapters),
            AdapterLoaded: lambda event, _: self.adapters.on_loaded(event),
            ClockTicked: lambda _event, _now_ns: None,
        }

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """Take ``event`` into account at time ``now_ns`` (ns) and say what is to be done, in order.

        Raises :class:`InvariantError` when the device's report does not fit the oldest plan under way.
        """
        link = self.link
        self.state.now = now_ns
        self._handlers.get(type(event), self._handle_cluster_event)(event, now_ns)
        actions, self._refusals = self._refusals, []
        self.intake.expire_requests(now_ns)
        self.pins.expire_pins(now_ns)
        self.pool.retained.expire_retained(now_ns)
        if link is not None:
            link.settle_transfers(now_ns)
            actions += link.segments.take_dropped()
        self._make_plans(now_ns, actions)
        actions += [*self.state.grammars.take_commands(), *self.state.late_masks.take_commands()]
        actions += self.adapters.take_orders(group.request.adapter for group in self.state.groups.values())
        if outputs := self._take_outputs():
            actions += link.send_outputs(outputs) if link is not None else [EmitTokens(outputs)]
        if link is not None:
            link.append_messages(actions, now_ns)
        else:
            self.pins.lost.clear()
            if (report := self.adapters.take_report()) is not None:
                actions.append(report)
        return actions

    def _take_outputs(self) -> list[TokenOutput]:
        outputs, self.state.outputs = self.state.outputs, []
        return outputs

    def _handle_cluster_event(self, event: Event, now_ns: int) -> None:
        """What a cluster brings."""
        link = self.link
        if link is None:
            refuse_event(event, now_ns)
        elif isinstance(event, MessageArrived):
            link.on_message(event.sender, event.message, now_ns)
        elif isinstance(event, LayerFinished):
            if self.inflight and self.inflight[0].step_id == event.step_id:
                self.inflight[0].reported_layers += 1
            link.layer_finished(event.step_id, event.layer)
        elif isinstance(event, PagesSealed | PagesPulled):
            link.pages_done(event, now_ns)
        else:
            refuse_event(event, now_ns)

    def _make_plans(self, now_ns: int, actions: list[Action]) -> None:
        """Keep the device busy: as many plans as it may have, but none long before the device needs it. Plans come
        before outputs, which can wait."""
        inflight, link = self.inflight, self.link
        self._plan_at_ns = None
        while len(inflight) < self.config.scheduler.steps_in_flight:
            if inflight and self._ends_ns - now_ns > AHEAD_MAX_NS:
                self._plan_at_ns = self._ends_ns - AHEAD_MAX_NS
                return
            copies_only = self.hints.take_moved() or (link is not None and link.exchange.wants_plan)
            begins_ns = max(now_ns, self._ends_ns) if inflight else now_ns
            result = self.planner.make_plan(now_ns, begins_ns, nothing_under_way=not inflight, copies_only=copies_only)
            if result is None:
                return
            plan, memo = result
            if link is not None:
                link.on_plan_made(plan, now_ns)
            self._ends_ns = begins_ns + self._expected_ns(memo)
            inflight.append(memo)
            actions.append(RunStep(plan))

    def _expected_ns(self, memo: InflightPlan) -> int:
        return self.state.costs.step_ns(memo.prefill_tokens, memo.decode_rows + len(memo.drafts), memo.prefill_pairs)

    def _take_inflight(self, step_id: int, now_ns: int) -> InflightPlan:
        check(self.inflight, f"step {step_id} reported, but no plan is under way")
        oldest = self.inflight.popleft()
        check(oldest.step_id == step_id, f"step {step_id} reported, but {oldest.step_id} is the oldest under way")
        self._ends_ns = now_ns + sum(map(self._expected_ns, self.inflight))
        return oldest

    def _fail_step(self, event: StepFailed, now_ns: int) -> None:
        failed, link = self._take_inflight(event.step_id, now_ns), self.link
        if failed.void:
            self.results.fail_step(failed, [], event)
        else:
            self.pins.release_all()
            lost = link.kv_lost(now_ns) if link is not None else []
            self.results.fail_step(failed, list(self.inflight), event)
            if link is not None:
                link.start_over(lost, now_ns)
        if link is not None:
            link.step_ended(event.step_id, now_ns)

    def _finish_step(self, event: StepFinished, now_ns: int) -> None:
        self.results.apply_step(self._take_inflight(event.step_id, now_ns), event)
        if self.link is not None:
            self.link.step_ended(event.step_id, now_ns)

    def _pin_prefix(self, event: PrefixPinned, now_ns: int) -> None:
        name, until_ns = _pin_name(event.handle, event.tenant), now_ns + event.ttl_ns
        tenant, priority = event.tenant, event.priority
        self.pins.pin_prefix(name, event.isolation, event.tokens, until_ns, tenant=tenant, priority=priority)

    def _on_hint(self, event: KvHinted, now_ns: int) -> None:
        self.hints.run_named(event, _pin_name(event.handle, event.tenant), now_ns)

    def _on_request_arrived(self, request: Request, now_ns: int) -> None:
        refusal = self.intake.rejection_of(request, now_ns)
        if refusal is not None:
            self._refusals.append(refusal)
        else:
            self.intake.enqueue_group(self.intake.open_group(request, now_ns, request.deadline_ns), Cause.ENQUEUED)

    def restart_as(self, self_peer: Peer) -> None:
        """The host joins again as ``self_peer``, a new generation, after ``Expelled``: only the cache is left. Raises
        :class:`InvariantError` outside a cluster."""
        check(self.link is not None, "only a member of a cluster is born anew")
        if self.link is not None:
            self.link.restart_as(self_peer)

    # -- views

    @property
    def pool(self) -> BlockPool:
        """The memory, to look at (reports, KV events)."""
        return self.state.memory.pool

    @property
    def context_tokens(self) -> int:
        """The longest sequence that can run here: the model's context or, if smaller, what the pool holds; in both
        tiers, where KV may lie by layer."""
        return self._context

    @property
    def self_peer(self) -> Peer | None:
        """Name and generation in a cluster. None: outside one."""
        return self.link.self_peer if self.link is not None else None

    @property
    def next_deadline_ns(self) -> int | None:
        """When a ``ClockTicked`` is worth sending. None: nothing has a deadline."""
        soonest, link = self.intake.next_deadline_ns, self.link
        lapses = self.pins.next_deadline_ns, self.pool.retained.next_deadline_ns
        turns_ns = self.state.returns.next_check_ns if self.state.returns is not None else None
        deadlines = *lapses, self._plan_at_ns, turns_ns, link.next_deadline_ns if link is not None else None
        for deadline in deadlines:
            if deadline is not None and (soonest is None or deadline < soonest):
                soonest = deadline
        return soonest

    @property
    def next_event(self) -> int:
        """Number that the next KV event will have."""
        return self.link.router_updates.next_event if self.link is not None else 0

    def pinned_tokens(self, handle: str, tenant: str) -> int:
        """Tokens kept under a name that ``PrefixPinned`` gave. 0: none, or no more."""
        return self.pins.pinned_tokens(_pin_name(handle, tenant))

    def named_prefixes(self, tenant: str) -> list[NamedPrefix]:
        """The prefixes that a tenant has pinned, least recently renewed first."""
        skipped = len(_pin_name("", tenant))
        return [replace(prefix, handle=prefix.handle[skipped:]) for prefix in self.pins.prefixes_of(tenant)]

    @property
    def is_idle(self) -> bool:
        """No requests, no plans under way, no open transfers: a draining instance may leave."""
        transfers = self.link.exchange.transfers_open if self.link is not None else 0
        return not (self.state.groups or self.inflight or transfers)

    def load(self) -> Load:
        """How busy the instance is, for heartbeats. All zero: outside a cluster."""
        link = self.link
        if link is None:
            return Load()
        counts = link.routers.counts_of(None)
        load = self.state.current_load(link.exchange.transfers_open, counts.dispatches_heard, counts.answers_told)
        if not any(link.routers.followers):
            return load
        # the router of a prompt counts it until its first token: the others shall, too
        under_way = sum([plan.prefill_tokens for plan in self.inflight]) + link.fetches.tokens_to_compute()
        return structs.replace(load, prefill_tokens_queued=load.prefill_tokens_queued + under_way)

    def heartbeat_load(self, now_ns: int) -> LoadRead:
        """What a heartbeat tells at time ``now_ns`` (ns), to the owner and to each follower."""
        load, link = self.load(), self.link
        if link is None:
            return LoadRead(load, 0)
        followers = [
            (peer, peer_load, link.router_updates.for_heartbeat(peer, now_ns))
            for peer, peer_load in link.routers.loads_for_followers(load)
        ]
        costs = self.state.costs.encoded_costs(self.config.role)
        next_event = link.router_updates.for_heartbeat(link.router, now_ns)
        return LoadRead(load, next_event, b"", tuple(followers), costs, link.writer.has_waiting)

    def stats(self) -> InstanceStats:
        """State now, and totals since the start."""
        return instance_stats(self.state, len(self.inflight), self.link)

    def report(self) -> MemoryReport:
        """How the memory is used."""
        return memory_report(self.state)

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if the state contradicts itself. For tests; slow."""
        check_instance(self.state, self.inflight, self.link)

    def __repr__(self) -> str:
        return f"<Instance {self.state} in_flight={len(self.inflight)}>"


def _sees_whole_sessions(config: InstanceConfig) -> bool:
    """Whether answers end where the next prompts of their sessions come to, and KV lies in whole blocks."""
    return config.pool.caching and config.role is Role.COLOCATED and config.scheduler.layerwise == "off"


def _layer_placer(config: InstanceConfig, memory: SequenceMemory, geometry: KVGeometry) -> LayerPlacer:
    scheduler = config.scheduler
    link_bytes_s, costs = scheduler.link_bytes_s, memory.costs
    is_known = link_bytes_s is not None or costs.is_measured
    link = LinkRate(link_bytes_s or costs.model.swap_in.bytes_s(geometry.block_bytes), is_measured=is_known)
    # what crosses the link; where there is none, to convert a page takes as long as to copy it whole
    page_bytes = lower_page_bytes(geometry, config.pool.lower_dtype) if scheduler.link_bytes_s else geometry.page_bytes
    budget = LayerBudget(geometry.num_layers, page_bytes, link, scheduler.slo_tpot_ns or TPOT_NS)
    return LayerPlacer(memory.pool, budget, scheduler, memory.costs)


def _let_reuse_contents(config: InstanceConfig, memory: SequenceMemory) -> None:
    """Let sequences take KV from elsewhere, unless that cannot be right here."""
    scheduler, pool = config.scheduler, config.pool
    cases = (
        (bool(config.why_keys_stay), config.why_keys_stay),
        (not pool.caching, "no KV is cached here (--no-cache)"),
        (scheduler.layerwise != "off", "KV lies by layer here (--layerwise)"),
        (pool.states is not None, "the model keeps a recurrent state"),
        (pool.windows is not None, "KV of windows lies apart here (--window-kv)"),
    )
    memory.why_no_contents = next((reason for applies, reason in cases if applies), "")
    if not memory.why_no_contents:
        key = pool.identity_key or DEFAULT_KEY
        memory.contents = ContentReuse(memory.pool, key, scheduler.nonprefix_recompute)


def _pin_name(handle: str, tenant: str) -> str:
    """A name of its own for each tenant: the length comes first, so that no two are alike."""
    return f"{len(tenant)}:{tenant}:{handle}"

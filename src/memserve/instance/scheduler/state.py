"""All sequences by phase, the device slots, and the moves between phases.

``sequence.SEQUENCE`` is the table of all moves, ``docs/reference/REFERENCE.md`` shows it::

    WAITING_FOR_REMOTE_KV --fetched--> WAITING                          (KV from another instance)
             +----handed over--> REMOTE_KV_READY --admit--> PREFILLING
             +----handed over, to DRAM--> PARKED

    WAITING <--> WAITING_FOR_GRAMMAR                                    (it is built beside the steps)

    WAITING --admit--> PREFILLING --prompt scheduled--> DECODING --all tokens scheduled--> IDLE
       ^                ^ |                               |                                  |
       |                | +---------- preempt ------------+--------> PREEMPTED <-------------+
       |              admit                                              | |
       |                +----- PARKED <----- with its KV in DRAM --------+ |
       +<---------------------------- resume, when all its tokens are known
    any --finish--> FINISHED

Sequences in rank order, and the waiting queue: one such list for each tenant.

Running totals of an instance's scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from memserve import _core
from memserve.base.errors import InvariantError, check
from memserve.base.fairness import Turns
from memserve.base.types import FinishReason, TokenArray, TokenOutput
from memserve.base.units import NS_PER_S
from memserve.instance.scheduler.grammar_waits import GrammarWaits, LateMasks
from memserve.instance.scheduler.memory import SequenceMemory
from memserve.instance.scheduler.sequence import SEQUENCE, Cause, Group, Phase, Rank, Sequence, is_held_segment
from memserve.instance.scheduler.slo import Objectives
from memserve.protocol.peers import Load

INTERACTIVE_NS = 10 * NS_PER_S
"""How long after a request that is not deferrable the next one is expected."""


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank


class RankedList:
    """Sequences sorted by rank. Ranks are unique, so a place is found by bisection."""

    __slots__ = ("items", "tenants")

    def __init__(self) -> None:
        self.items: list[Sequence] = []
        #: sequences by tenant, of those that have any
        self.tenants: dict[str, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Insert in order."""
        items, tenant = self.items, sequence.group.tenant
        self.tenants[tenant] = self.tenants.get(tenant, 0) + 1
        if not items or items[-1].rank < sequence.rank:
            items.append(sequence)
        else:
            insort(items, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Raises :class:`InvariantError` where ``sequence`` is not listed."""
        place = bisect_left(self.items, sequence.rank, key=_rank)
        if place >= len(self.items) or self.items[place] is not sequence:
            raise InvariantError(f"{sequence} is not in this list")
        del self.items[place]
        tenant = sequence.group.tenant
        count_left = self.tenants[tenant] - 1
        if count_left:
            self.tenants[tenant] = count_left
        else:
            del self.tenants[tenant]

    def of_tenant(self, tenant: str) -> list[Sequence]:
        """The sequences of one tenant, in order."""
        if self.tenants.get(tenant, 0) == len(self.items):
            return self.items.copy()
        return [sequence for sequence in self.items if sequence.group.tenant == tenant]

    def __contains__(self, sequence: Sequence) -> bool:
        place = bisect_left(self.items, sequence.rank, key=_rank)
        return place < len(self.items) and self.items[place] is sequence

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return f"<RankedList {self.items}>"


class WaitingQueue:
    """Sequences that wait: a line for each tenant, in rank order. A long line slows no other tenant's down."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[str, RankedList] = {}

    def add(self, sequence: Sequence) -> None:
        """Insert into the line of its tenant, in order."""
        tenant = sequence.group.tenant
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = RankedList()
        line.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises :class:`InvariantError` where ``sequence`` is not listed."""
        tenant = sequence.group.tenant
        line = self._lines.get(tenant)
        if line is None:
            raise InvariantError(f"{sequence} is not in this list")
        line.remove(sequence)
        if not line.items:
            del self._lines[tenant]

    def line_of(self, tenant: str) -> list[Sequence]:
        """The line of one tenant itself, not a copy: callers neither change nor keep it."""
        line = self._lines.get(tenant)
        return line.items if line is not None else []

    def first_urgency(self) -> int | None:
        """The lowest urgency of the heads of all lines. None: nothing waits."""
        return min([line.items[0].rank[0] for line in self._lines.values()], default=None)

    @property
    def lines(self) -> list[list[Sequence]]:
        """The lines of all tenants that have any."""
        return [line.items for line in self._lines.values()]

    @property
    def tenants(self) -> Iterable[str]:
        """Tenants with a line."""
        return self._lines.keys()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __contains__(self, sequence: Sequence) -> bool:
        line = self._lines.get(sequence.group.tenant)
        return line is not None and sequence in line

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((sequence for line in self.lines for sequence in line), key=_rank))

    def __len__(self) -> int:
        return sum([len(line.items) for line in self._lines.values()])

    def __repr__(self) -> str:
        return f"<WaitingQueue {self._lines}>"


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals since the instance was made."""

    steps: int = 0
    steps_failed: int = 0
    rows_failed: int = 0
    late_draws: int = 0  # put off because a grammar's mask was not there
    requests: int = 0
    requests_rejected: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0  # of those
    generated_tokens: int = 0
    prefill_tokens: int = 0  # computed
    decode_tokens: int = 0  # computed
    drafted_tokens: int = 0  # computed as drafts
    kept_tokens: int = 0  # of those, drawn as well
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of those, not computed
    inexact_tokens: int = 0  # of those, with KV that was computed behind other tokens; not among the cached ones
    dropped_tokens: int = 0  # sampled after the sequence had ended (stop tokens are seen one step late)
    preempted_by_swap: int = 0
    preempted_by_recompute: int = 0
    preempted_for_slots: int = 0  # of both: for a slot that another tenant was due
    standstills: int = 0  # times that everything was preempted because nothing could move
    returned_turns: int = 0  # requests that went on from an answer of this instance
    kept_turns: int = 0  # of those, with all of its KV still here
    delayed_turns: int = 0  # admissions put off because the room was kept for earlier sessions
    retention_off: int = 0  # times that the order of last use had been better
    prefix_holds: int = 0  # admissions put off because the prefix was being computed for another sequence
    device_ns: int = 0
    queued_ns: int = 0  # sum over admitted requests of the time until they were first scheduled
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})

    def count_finish(self, reason: FinishReason) -> None:
        """One more sequence ended for ``reason``."""
        self.finished[reason.value] += 1


class Transfers(Protocol):
    """The transfers of requests, which follow their scheduling at once: a transfer never outlives its request."""

    def request_ended(self, group: Group) -> None:
        """``group`` has ended, or continues on another instance."""

    def request_preempted(self, group: Group) -> None:
        """The KV of ``group``, which other instances have to do with, has gone."""

    def sequence_completed(self, sequence: Sequence) -> None:
        """Another instance wants the KV that ``sequence`` has generated; its blocks are released after this call."""

    def free_blocks(self) -> bool:
        """Take back blocks that are lent without need. False: there are none."""


class TurnRetention(Protocol):
    """What is kept of sessions between their turns (:class:`~memserve.instance.returns.policy.ReturnPolicy`)."""

    @property
    def kept_prefixes(self) -> int:
        """Sessions whose KV waits for them."""

    @property
    def next_check_ns(self) -> int | None:
        """When a turn that waits while nothing runs is looked at again. None: there is none."""

    def on_request_opened(self, group: Group) -> None:
        """A request has come; before it has sequences."""

    def on_admitted(self, group: Group) -> None:
        """The request has its blocks."""

    def on_request_ended(self, request_id: str) -> None:
        """The request waits no more."""

    def on_answer_left(self, group: Group, tokens: TokenArray, drawn: int) -> None:
        """An answer of ``drawn`` tokens has ended, and left KV of ``tokens`` to the cache."""

    def average_running(self) -> None:
        """A plan is made."""

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether ``sequence``, which waits for admission, leaves room to kept sessions."""

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if its books contradict each other."""


class SchedulerState:
    """Sequences by phase, slots, outputs to emit. Every move keeps slots and blocks accounted exactly once."""

    def __init__(self, memory: SequenceMemory, slots: int, preemption: str) -> None:
        self.memory = memory
        self.slots = slots
        self.preemption = preemption
        self.costs = memory.costs
        self.counters = SchedulerCounters()
        #: time of the event that is being handled
        self.now = 0
        #: open requests that are not deferrable, and when the last of those ended that have. None: none has
        self._interactive_requests = 0
        self._interactive_ended_ns: int | None = None
        self.grammars = GrammarWaits(slots)
        self.late_masks = LateMasks()
        #: None: requests have no objectives
        self.objectives: Objectives | None = None
        #: None: what sessions leave between two turns is not told apart
        self.returns: TurnRetention | None = None
        #: None: outside a cluster, where no request has transfers
        self.transfers: Transfers | None = None
        #: all and only unfinished requests, in order of arrival
        self.groups: dict[str, Group] = {}
        #: unfinished requests of each tenant that has any
        self.tenants: dict[str, int] = {}
        #: the order in which those tenants are served
        self.turns = Turns()
        #: unfinished sequences
        self.sequences = 0
        self.remote_kv_ready = WaitingQueue()
        self.waiting = WaitingQueue()
        self.parked = WaitingQueue()
        self.prefilling = RankedList()
        self.decoding = RankedList()
        self.idle = RankedList()
        self._containers: dict[Phase, RankedList | WaitingQueue] = {
            Phase.REMOTE_KV_READY: self.remote_kv_ready,
            Phase.WAITING: self.waiting,
            Phase.PARKED: self.parked,
            Phase.PREFILLING: self.prefilling,
            Phase.DECODING: self.decoding,
            Phase.IDLE: self.idle,
        }
        #: the last is given first
        self.free_slots = list(range(slots - 1, -1, -1))
        #: slots that the device has to close with the next plan; they may be opened again in that very plan
        self.closing: list[int] = []
        #: a plan failed: which slots the device has open is not known, so the next plan makes it forget them all
        self.slots_unknown = False
        #: outputs to emit at the end of this ``handle``
        self.outputs: list[TokenOutput] = []

    # -- tenants

    def open_group(self, group: Group) -> None:
        """Register a new request."""
        self.groups[group.request.request_id] = group
        self._interactive_requests += not group.request.is_deferrable
        self.tenants[group.tenant] = self.tenants.get(group.tenant, 0) + 1
        self.turns.add_tenant(group.tenant, group.request.weight)
        self.grammars.on_request_opened(group.wanted_grammar, self.now)

    def first_urgency(self, tenant: str) -> int:
        """The lowest urgency of the tenant's sequences that have prompts to compute."""
        line = self.waiting.line_of(tenant)
        first = next((sequence for sequence in self.prefilling.items if sequence.group.tenant == tenant), None)
        return min([sequence.rank[0] for sequence in (first, *line[:1]) if sequence is not None], default=0)

    @property
    def expects_interactive_requests(self) -> bool:
        """Whether there is a request that is not deferrable, or was one lately, so that the next may come any time."""
        ended_ns = self._interactive_ended_ns
        return bool(self._interactive_requests) or (ended_ns is not None and self.now - ended_ns < INTERACTIVE_NS)

    def serve_decodes(self, steps: int) -> None:
        """Count a token for each decoding sequence in each of ``steps`` steps in the turns of its tenant."""
        if len(self.turns) > 1:  # a single tenant has no turns
            for tenant, count in self.decoding.tenants.items():
                self.turns.serve_tenant(tenant, count, steps)

    # -- slots

    def take_slot(self, sequence: Sequence) -> None:
        """Bind a free slot."""
        reserved = sequence.group.reserved_slots
        slot = reserved.pop(0) if reserved else self.free_slots.pop()
        sequence.slot = slot
        sequence.draw = (slot,)

    def reserve_slots(self, group: Group) -> None:
        """Keep slots for the sequences that will be forked from the first one."""
        for _ in range(group.forks_pending):
            group.reserved_slots.append(self.free_slots.pop())

    def return_reserved(self, group: Group) -> None:
        """Give up reserved slots that are not needed (now)."""
        self.free_slots.extend(reversed(group.reserved_slots))
        group.reserved_slots.clear()

    def close_slot(self, sequence: Sequence) -> None:
        """Have the device forget what it knows of the slot; the sequence keeps it."""
        if sequence.opened:
            check(sequence.slot is not None, f"{sequence.request_id} is open without a slot")
            self.closing.append(sequence.slot)  # type: ignore[arg-type]  # checked in the line before
            sequence.opened = False

    def _release_slot(self, sequence: Sequence) -> None:
        self.close_slot(sequence)
        if sequence.slot is not None:
            self.free_slots.append(sequence.slot)
            sequence.slot = None
        self.return_reserved(sequence.group)

    # -- moves

    def move(self, sequence: Sequence, cause: Cause) -> None:
        """Change the phase, and the container that goes with it. Raises :class:`InvariantError` for an illegal move."""
        before, after = sequence.phase, SEQUENCE.next_phase(sequence.phase, cause)
        if after is Phase.WAITING and self.grammars.is_awaited(sequence.wanted_grammar):
            after = SEQUENCE.next_phase(after, Cause.GRAMMAR_EXPECTED)
        container = self._containers.get(before)
        if container is not None:
            container.remove(sequence)
        self.sequences += (before is Phase.NEW) - (after is Phase.FINISHED)
        sequence.phase = after
        container = self._containers.get(after)
        if container is not None:
            container.add(sequence)

    def hold_for_tokens(self, sequence: Sequence) -> None:
        """It decodes on when its tokens under way are known."""
        sequence.awaits_tokens = True
        self.move(sequence, Cause.AWAITS_TOKENS)

    def skip_draw(self, sequence: Sequence) -> None:
        """A draw of ``sequence`` was late, and so are those of plans under way: it waits for its mask in its slot."""
        sequence.inflight -= 1
        sequence.left += 1
        if sequence.slot is None:  # it was preempted meanwhile: what it had computed for that token has no meaning
            sequence.computed = min(sequence.computed, sequence.known_length - 1 + sequence.inflight)
            self.resume_sequence(sequence)
        elif sequence.late is not None:
            sequence.computed -= 1
        else:
            self.late_masks.add_sequence(sequence, self.now)
            if sequence.phase is Phase.DECODING:
                self.move(sequence, Cause.AWAITS_TOKENS)

    def resume_sequence(self, sequence: Sequence) -> None:
        """A token came. One that was held decodes on; a preempted one waits for admission again, unless tokens or
        candidates of it are still under way."""
        if sequence.awaits_tokens and not sequence.inflight:
            sequence.awaits_tokens = False
            self.move(sequence, Cause.TOKENS_KNOWN)
        elif sequence.phase is Phase.PREEMPTED and not sequence.inflight and sequence.candidates is None:
            if self.memory.layers.is_by_layer and sequence.out and sequence.dram_blocks:
                self.park_sequence(sequence)
            else:
                self.move(sequence, Cause.RESUMED)

    def park_sequence(self, sequence: Sequence) -> None:
        """Its client has tokens, and its KV is in DRAM: it waits for room without holding up prompts."""
        self.move(sequence, Cause.PARKED)
        sequence.parked_since_ns = self.now
        sequence.group.facts.append(("parked", f"{len(sequence.dram_blocks)} blocks"))

    def compute_again(self, sequence: Sequence) -> None:
        """Take the KV of ``sequence`` away on both tiers: it waits, and is computed again."""
        if sequence.phase not in (Phase.PARKED, Phase.WAITING):
            self.preempt_sequence(sequence, may_swap=False)
            return
        self.memory.detach(sequence)
        self.counters.preempted_by_recompute += 1
        sequence.group.preemptions += 1
        if sequence.phase is Phase.PARKED:
            self.move(sequence, Cause.PREEMPTED)
            self.resume_sequence(sequence)

    def preempt_sequence(self, sequence: Sequence, *, may_swap: bool = True) -> None:
        """Take slot and blocks away; the sequence continues with the tokens that it has."""
        memory, counters = self.memory, self.counters
        self._stop_waiting(sequence)
        tokens, blocks = sequence.computed, memory.blocks_held(sequence) + memory.states.blocks_each
        finished_by_count = sequence.phase is Phase.IDLE and sequence.left == 0
        swap = memory.is_swapped_at_no_cost(sequence) or self.costs.prefers_swap(self.preemption, tokens, blocks)
        if may_swap and swap and not finished_by_count and memory.swap_out(sequence):
            counters.preempted_by_swap += 1
        else:
            memory.detach(sequence)
            counters.preempted_by_recompute += 0 if finished_by_count else 1
        sequence.group.preemptions += 0 if finished_by_count else 1
        sequence.awaits_tokens = False
        self._release_slot(sequence)
        self.move(sequence, Cause.PREEMPTED)
        self.resume_sequence(sequence)
        group = sequence.group
        if (group.tokens_here is not None or sequence.striped is not None) and self.transfers is not None:
            self.transfers.request_preempted(group)

    def _stop_waiting(self, sequence: Sequence) -> None:
        """It loses its slot, and with it the logits that it would have drawn from."""
        if sequence.late is not None:
            self.late_masks.drop_sequence(sequence, self.now)
            sequence.computed = min(sequence.computed, sequence.known_length - 1)

    def preempt_all(self) -> None:
        """Preempt every sequence that holds blocks, but for segments that are kept for others: the way out of a
        standstill (see ``Planner``)."""
        for container in (self.idle, self.decoding, self.prefilling, self.remote_kv_ready):
            for sequence in list(container):
                # not in it any more: the request has started over, because a handoff came to nothing
                if sequence in container and not is_held_segment(sequence):
                    self.preempt_sequence(sequence)

    def reset_sequence(self, sequence: Sequence) -> None:
        """The device failed: drop all KV of the sequence, which starts over from its known tokens."""
        self._stop_waiting(sequence)
        self.memory.abandon_blocks(sequence)
        self._release_slot(sequence)
        sequence.inflight, sequence.awaits_tokens = 0, False
        sequence.left = sequence.draws_left
        if SEQUENCE.allows_move(sequence.phase, Cause.PREEMPTED):
            self.move(sequence, Cause.PREEMPTED)
        self.resume_sequence(sequence)

    # -- views

    def prefill_tokens_queued(self) -> int:
        """Known tokens of all sequences, running ones included, that are not computed yet."""
        _, prefilling = _core.count_tokens(self.prefilling.items)
        return prefilling + sum([_core.count_tokens(line)[1] for line in self.waiting.lines])

    def waiting_and_running(self) -> tuple[int, int]:
        """How many sequences have no slot, for whatever reason, and how many have one."""
        running = len(self.prefilling.items) + len(self.decoding.items) + len(self.idle.items)
        return self.sequences - running, running

    def current_load(self, transfers_open: int, dispatches_heard: int, answers_told: int) -> Load:
        """For a heartbeat."""
        running = [*self.prefilling.items, *self.decoding.items, *self.idle.items]
        requests_waiting, sequences_running = self.waiting_and_running()
        return Load(
            requests_waiting=requests_waiting,
            sequences_running=sequences_running,
            prefill_tokens_queued=self.prefill_tokens_queued(),
            context_tokens_running=_core.count_tokens(running)[0],
            hbm_blocks_available=self.memory.pool.available(),
            transfers_open=transfers_open,
            dispatches_heard=dispatches_heard,
            answers_told=answers_told,
        )

    @property
    def holds_blocks(self) -> bool:
        """Whether any sequence holds HBM blocks that it may lose."""
        idle = any(not is_held_segment(sequence) for sequence in self.idle.items)
        return bool(idle or self.decoding.items or self.prefilling.items or self.remote_kv_ready)

    # -- endings

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence: slot and blocks go back, results still under way will be dropped."""
        group = sequence.group
        wants_kv = group.remote is not None and group.remote.home is not None
        if wants_kv and reason in (FinishReason.STOP, FinishReason.LENGTH) and self.transfers is not None:
            self.transfers.sequence_completed(sequence)
        returns = self.returns if reason in (FinishReason.STOP, FinishReason.LENGTH) else None
        tokens = None if returns is None else sequence.known_tokens()
        self._retire_sequence(sequence)
        if returns is not None and tokens is not None:  # only now has it left its KV to the cache
            returns.on_answer_left(group, tokens, len(sequence.out))
        self.counters.count_finish(reason)
        if not group.sequences:
            self.forget_group(group)

    def forget_group(self, group: Group) -> None:
        """The request has ended, all its outputs are emitted."""
        self.counters.requests_finished += 1
        self._remove_group(group)

    def finish_silently(self, sequence: Sequence) -> None:
        """End one sequence without an output: the client has its ending already."""
        self._retire_sequence(sequence)
        if not sequence.group.sequences:
            self._remove_group(sequence.group)

    def drop_group(self, group: Group) -> None:
        """Remove the request without emitting output: another instance owns it, or has finished it."""
        for sequence in list(group.sequences.values()):
            self._retire_sequence(sequence)
        self._remove_group(group)

    def _remove_group(self, group: Group) -> None:
        del self.groups[group.request.request_id]
        if self.returns is not None:
            self.returns.on_request_ended(group.request.request_id)
        if not group.request.is_deferrable:
            self._interactive_requests, self._interactive_ended_ns = self._interactive_requests - 1, self.now
        self.grammars.on_request_ended(group.wanted_grammar, self.now)
        count_left = self.tenants[group.tenant] - 1
        if count_left:
            self.tenants[group.tenant] = count_left
        else:
            del self.tenants[group.tenant]
            self.turns.remove_tenant(group.tenant)
        if group.remote is not None and self.transfers is not None:
            self.transfers.request_ended(group)

    def drop_beam(self, sequence: Sequence) -> None:
        """End a beam that no hypothesis continues. Its KV behind the prompt is of no use to others, and not cached."""
        self.memory.abandon_blocks(sequence)
        self._retire_sequence(sequence)

    def _retire_sequence(self, sequence: Sequence) -> None:
        self._stop_waiting(sequence)
        self.memory.detach(sequence)
        self._release_slot(sequence)
        self.move(sequence, Cause.FINISHED)
        del sequence.group.sequences[sequence.index]

    def finish_group(self, group: Group, reason: FinishReason, error: str = "") -> None:
        """End every unfinished sequence of a request now, each with one final output."""
        request = group.request
        live = list(group.sequences.values())
        if group.beam is not None or group.muted:
            indices = list(range(request.n))
        else:
            forks = range(group.next_index, group.next_index + group.forks_pending)
            indices = [sequence.index for sequence in live] + list(forks)
        for sequence in live:
            self._retire_sequence(sequence)
        by_index = {s.index: s.final_output(reason, error) for s in live if group.beam is None and not group.muted}
        for index in indices:
            unforked = TokenOutput(request.request_id, index, (), finish_reason=reason, error=error)
            self.outputs.append(by_index.get(index, unforked))
            self.counters.count_finish(reason)
        self.forget_group(group)

    def __repr__(self) -> str:
        return (
            f"<SchedulerState waiting={len(self.waiting)} parked={len(self.parked)} prefilling={len(self.prefilling)}"
            f" decoding={len(self.decoding)} idle={len(self.idle)}"
            f" slots={self.slots - len(self.free_slots)}/{self.slots}>"
        )

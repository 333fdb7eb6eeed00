"""Who is where (level 2): all sequences by phase, the device slots, and the moves between phases.

::

    EXPECTED --fetched--> WAITING                   (KV from another instance)
        +----handed over--> LANDED --admit--> WORKING

    WAITING --admit--> WORKING --prompt done--> DECODING --all tokens under way--> IDLE
       ^                  |                        |                                |
       +---- preempt -----+------------------------+-------> PARKED <---------------+   (PARKED until what is under way
       +<--------------------------- wake -----------------------+                       is known)
    any --finish--> FINISHED
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memserve import _core
from memserve.errors import check
from memserve.instance.memory import SequenceMemory
from memserve.instance.orders import Homeward
from memserve.instance.report import Counters
from memserve.instance.sequence import Group, Phase, Sequence
from memserve.instance.waiting import RankedList, WaitingLine
from memserve.policy.fairness import Turns
from memserve.types import FinishReason, TokenOutput

if TYPE_CHECKING:
    from memserve.messages import Peer


class Roster:
    """Sequences by phase, slots, outputs to emit. Every move keeps slots and blocks accounted exactly once."""

    __slots__ = (
        "closing",
        "costs",
        "counters",
        "decoding",
        "ended_orders",
        "free_slots",
        "groups",
        "homeward",
        "idle",
        "interrupted",
        "landed",
        "memory",
        "outputs",
        "preemption",
        "sequences",
        "slots",
        "slots_unknown",
        "tenants",
        "turns",
        "waiting",
        "working",
    )

    def __init__(self, memory: SequenceMemory, slots: int, preemption: str) -> None:
        self.memory = memory
        self.slots = slots
        self.preemption = preemption
        self.costs = memory.costs
        self.counters = Counters()
        #: all and only unfinished requests, in order of arrival
        self.groups: dict[str, Group] = {}
        #: how many of them each tenant has, of those that have any
        self.tenants: dict[str, int] = {}
        #: whose turn it is, of all and only those tenants
        self.turns = Turns()
        #: how many unfinished sequences they have
        self.sequences = 0
        self.landed = WaitingLine()
        self.waiting = WaitingLine()
        self.working = RankedList()
        self.decoding = RankedList()
        self.idle = RankedList()
        #: the last is given first
        self.free_slots = list(range(slots - 1, -1, -1))
        #: slots that the device has to close with the next plan; they may be opened again in that very plan
        self.closing: list[int] = []
        #: a plan failed: which slots the device has open is not known, so the next plan makes it forget them all
        self.slots_unknown = False
        #: outputs to emit at the end of this ``handle``
        self.outputs: list[TokenOutput] = []
        #: requests of the cluster that ended, whose transfers have to end too
        self.ended_orders: list[Group] = []
        #: requests that were preempted while they were being handed over
        self.interrupted: list[Group] = []
        #: generated KV that has to go back to where the prompt was computed; one reference a block is held for it
        self.homeward: list[Homeward] = []

    # -- tenants

    def open(self, group: Group) -> None:
        """A new request."""
        self.groups[group.request.request_id] = group
        self.tenants[group.tenant] = self.tenants.get(group.tenant, 0) + 1
        self.turns.enter(group.tenant, group.request.weight)

    def first_urgency(self, tenant: str) -> int:
        """The lowest urgency of what the tenant has to be computed beside decodes."""
        line = self.waiting.line(tenant)
        first = next((sequence for sequence in self.working.items if sequence.group.tenant == tenant), None)
        return min([sequence.rank[0] for sequence in (first, *line[:1]) if sequence is not None], default=0)

    def serve_decodes(self, steps: int) -> None:
        """The sequences that decode get a token in each of ``steps`` steps: it counts in their tenants' turns."""
        if len(self.turns) > 1:  # a single tenant has no turns
            for tenant, count in self.decoding.tenants.items():
                self.turns.serve(tenant, count, steps)

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
            self.closing.append(sequence.slot)  # type: ignore[arg-type]  # who is closed has a slot
            sequence.opened = False

    def _leave_slot(self, sequence: Sequence) -> None:
        self.close_slot(sequence)
        if sequence.slot is not None:
            self.free_slots.append(sequence.slot)
            sequence.slot = None
        self.return_reserved(sequence.group)

    # -- moves

    def _container(self, phase: Phase) -> RankedList | WaitingLine | None:
        if phase is Phase.DECODING:
            return self.decoding
        if phase is Phase.WORKING:
            return self.working
        if phase is Phase.WAITING:
            return self.waiting
        if phase is Phase.IDLE:
            return self.idle
        return self.landed if phase is Phase.LANDED else None

    def move(self, sequence: Sequence, phase: Phase) -> None:
        """Change the phase and the container that goes with it."""
        old, new = self._container(sequence.phase), self._container(phase)
        if old is not None:
            old.remove(sequence)
        sequence.phase = phase
        if new is not None:
            new.add(sequence)

    def enter(self, sequence: Sequence, phase: Phase) -> None:
        """A new sequence appears."""
        self.sequences += 1
        sequence.phase = phase
        container = self._container(phase)
        if container is not None:
            container.add(sequence)

    def wake(self, sequence: Sequence) -> None:
        """A parked sequence whose tokens are all known, and wanted, waits to be resumed."""
        if sequence.phase is Phase.PARKED and not sequence.inflight and sequence.candidates is None:
            self.move(sequence, Phase.WAITING)

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks away; it will continue with the same tokens later."""
        memory, counters = self.memory, self.counters
        if sequence.holds_tokens:
            self.outputs.append(sequence.news())  # the next ones may be long in coming
        tokens, blocks = sequence.computed, len(sequence.blocks)
        finished_by_count = sequence.phase is Phase.IDLE and sequence.left == 0
        swap = not finished_by_count and self.costs.prefers_swap(self.preemption, tokens, blocks)
        if swap and memory.swap_out(sequence):
            counters.preempted_by_swap += 1
        else:
            memory.detach(sequence)
            counters.preempted_by_recompute += 0 if finished_by_count else 1
        sequence.group.preemptions += 0 if finished_by_count else 1
        self._leave_slot(sequence)
        self.move(sequence, Phase.PARKED)
        self.wake(sequence)
        if sequence.group.tokens_here is not None:
            self.interrupted.append(sequence.group)

    def prefill_tokens_queued(self) -> int:
        """Known tokens of sequences here, those of running ones included, that are not computed yet."""
        _, in_work = _core.count_tokens(self.working.items)
        return in_work + sum([_core.count_tokens(line)[1] for line in self.waiting.lines])

    def crowd(self) -> tuple[int, int]:
        """How many sequences wait, for whatever, and how many run."""
        running = len(self.working.items) + len(self.decoding.items) + len(self.idle.items)
        return self.sequences - running, running

    @property
    def holds_blocks(self) -> bool:
        """Whether any sequence holds HBM blocks."""
        return bool(self.idle.items or self.decoding.items or self.working.items or self.landed)

    def preempt_all(self) -> None:
        """Take everything from everybody: the way out when nothing moves (see ``Planner``)."""
        for container in (self.idle, self.decoding, self.working, self.landed):
            for sequence in list(container):
                self.preempt(sequence)

    def reset(self, sequence: Sequence) -> None:
        """The device failed: forget all KV, trust only known tokens, and start over from them."""
        self.memory.abandon(sequence)
        self._leave_slot(sequence)
        sequence.inflight = 0
        sequence.left = sequence.draws_left
        if sequence.phase not in (Phase.WAITING, Phase.EXPECTED):
            self.move(sequence, Phase.PARKED)
            self.wake(sequence)

    # -- endings

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sequence: slot and blocks go back, results still under way will be dropped."""
        orders = sequence.group.orders
        if orders is not None and orders.home is not None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._send_home(sequence, orders.home, orders.home_tokens)
        self._retire(sequence)
        group = sequence.group
        self.counters.count_finish(reason)
        if not group.sequences:
            self.forget_group(group)

    def forget_group(self, group: Group) -> None:
        """The request has ended."""
        self.counters.requests_finished += 1
        self._forget(group)

    def leave(self, sequence: Sequence) -> None:
        """End one sequence without a word: whoever waits for it knows."""
        self._retire(sequence)
        if not sequence.group.sequences:
            self._forget(sequence.group)

    def drop_group(self, group: Group) -> None:
        """The request goes on, or has ended, somewhere else: nothing more is said about it here."""
        for sequence in list(group.sequences.values()):
            self._retire(sequence)
        self._forget(group)

    def _forget(self, group: Group) -> None:
        del self.groups[group.request.request_id]
        left = self.tenants[group.tenant] - 1
        if left:
            self.tenants[group.tenant] = left
        else:
            del self.tenants[group.tenant]
            self.turns.leave(group.tenant)
        if group.orders is not None:
            self.ended_orders.append(group)

    def _send_home(self, sequence: Sequence, home: Peer, home_tokens: int) -> None:
        """Keep the whole blocks behind those that ``home`` has, until they are offered to it."""
        block_tokens = self.memory.block_tokens
        first, end = home_tokens // block_tokens, min(sequence.computed, sequence.known) // block_tokens
        if first < end <= len(sequence.blocks):
            blocks = sequence.blocks[first:end]
            self.memory.pool.retain(blocks)
            tokens = sequence.known_tokens()[: end * block_tokens]
            self.homeward.append(Homeward(home, sequence.group.isolation, tokens, first, blocks))

    def drop_beam(self, sequence: Sequence) -> None:
        """A beam that no hypothesis continues. Its KV beyond the prompt is of no use to others: it is not cached."""
        self.memory.abandon(sequence)
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self.memory.detach(sequence)
        self._leave_slot(sequence)
        self.move(sequence, Phase.FINISHED)
        del sequence.group.sequences[sequence.index]
        self.sequences -= 1

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
            self._retire(sequence)
        by_index = {s.index: s.ending(reason, error) for s in live if group.beam is None and not group.muted}
        for index in indices:
            unforked = TokenOutput(request.request_id, index, (), finish_reason=reason, error=error)
            self.outputs.append(by_index.get(index, unforked))
            self.counters.count_finish(reason)
        self.forget_group(group)

    def __repr__(self) -> str:
        return (
            f"<Roster waiting={len(self.waiting)} working={len(self.working)} decoding={len(self.decoding)}"
            f" idle={len(self.idle)} slots={self.slots - len(self.free_slots)}/{self.slots}>"
        )

"""Which sequences are admitted, and which give way when tenants want more than there is.

Memory: the sequences of a tenant hold it in rank order, and where the earlier ones already hold much, the later ones
give way first. So each tenant's first sequence stands as high as any other, and the oldest of those can take from all
others: that is why there is always progress.

::

    tenant a   [ 0: 40 blocks ][ 40: 30 ][ 70: 25 ]        number: what the earlier ones hold, by weight
    tenant b   [ 0: 10 blocks ][ 10: 10 ]                  the highest gives way first

Slots and memory for the head of the line: while its tenant, with what it wants, has at most its share of the slots and
half of its share of the memory, and another tenant more than its own, the last sequences of the latter give way. What
is taken cannot be taken back: it belonged to a tenant above its share, which keeps its share of the slots. Sequences
grow, so the limit for memory is half of the share; the rest comes by turns, as sequences end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memserve.base.fairness import SCALE
from memserve.base.units import NS_PER_MS, ceil_div
from memserve.instance.scheduler.capacity import headroom_blocks
from memserve.instance.scheduler.sequence import Cause, Phase, Sequence
from memserve.instance.scheduler.state import SchedulerState

_HOLDS_PER_PLAN = 64  # how far behind held-back sequences one plan looks
_HOLDS_PER_REQUEST = 256  # after N the request no longer steps aside
_OVERTAKES_MAX = 256  # after N prompts the next parked sequence goes on before any other begins

Standing = tuple[int, int, int, int, int]
"""(urgency, what earlier sequences of the tenant hold, arrival of the session, arrival, index): the highest gives way
first."""


class SequenceAdmission:
    """Admits by turns of tenants, in rank order within one. The caller stops at the first sequence that does not fit,
    so that it is not overtaken for ever."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        #: the head of the line that others have made way for: what is parked for it does not come before it
        self.due: Sequence | None = None
        self._overtakes = 0  # prompts that began since a parked sequence went on

    def remote_kv_ready(self) -> Iterator[Sequence]:
        """Sequences whose KV has come from another instance, by turns of their tenants. The caller admits each, or asks
        for no more."""
        ready, turns = self.state.remote_kv_ready, self.state.turns
        while ready:
            yield ready.line_of(turns.sort_by_turn(ready.tenants)[0])[0]

    def waiting_sequences(self, tenant: str, urgency: int, publishing: list[Sequence]) -> Iterator[Sequence]:
        """Waiting sequences of ``tenant`` and ``urgency`` in rank order, without those that better wait one step.

        The caller admits each, or asks for no more. ``publishing``: sequences of which full blocks the plan being
        made publishes; the caller adds to it.
        """
        waiting = self.state.waiting.line_of(tenant)
        holds = 0
        while holds < min(_HOLDS_PER_PLAN, len(waiting)):  # a line may be long: it is not copied for the few in front
            sequence = waiting[holds]
            # the line is in rank order, so all behind it are later, too
            if sequence.rank[0] > urgency:
                return
            if self.state.returns is not None and self.state.returns.should_wait(sequence):
                holds += 1
            elif publishing and self._should_hold(sequence, publishing):
                sequence.group.held_steps += 1
                self.state.counters.prefix_holds += 1
                holds += 1
            else:
                yield sequence

    def _should_hold(self, sequence: Sequence, publishing: list[Sequence]) -> bool:
        """Whether this plan computes the very next block of ``sequence`` for another one."""
        memory, group = self.state.memory, sequence.group
        # one that has its KV in DRAM gains nothing, and a bound keeps prompts that grow alike from waiting for ever
        if sequence.dram_blocks or group.held_steps >= _HOLDS_PER_REQUEST or not memory.reads_cache(sequence):
            return False
        if memory.states.has_states:  # nothing goes on from a block alone
            return False
        isolation, tokens = group.isolation, sequence.known_tokens()
        first_block = tokens[: memory.block_tokens]
        cached: int | None = None
        for leader in publishing:
            prompt = leader.group.request.prompt
            if leader.group.isolation != isolation or not np.array_equal(prompt[: len(first_block)], first_block):
                continue
            if cached is None:
                # only now: a walk through the index is dearer than comparing one block, which rules most out
                cached = memory.pool.match(isolation, tokens)
            end = cached + memory.block_tokens
            if end > len(tokens) or not cached < min(leader.computed, leader.prompt_tokens) >= end:
                continue
            if np.array_equal(prompt[:end], tokens[:end]):
                return True
        return False

    def admit(self, sequence: Sequence, now_ns: int) -> bool:
        """Give ``sequence`` its slots and blocks. False: there are not enough, and nothing has changed."""
        state, group = self.state, sequence.group
        if 1 + group.forks_pending > len(state.free_slots):
            return False
        # the counter before, taken from the counter behind: how much this one brought up
        from_dram = -state.memory.dram_tokens_reused
        has_blocks = sequence.phase is Phase.REMOTE_KV_READY
        headroom = state.memory.windows.blocks_for(headroom_blocks(len(state.decoding)))
        if not has_blocks and not self._attach_blocks(sequence, headroom):
            return False
        from_dram += state.memory.dram_tokens_reused
        state.take_slot(sequence)
        state.memory.states.begin(sequence)
        state.reserve_slots(group)
        sequence.left = sequence.draws_left
        if group.admitted_ns is None:
            self._count_admission(sequence, now_ns, from_dram)
        if sequence.phase is Phase.PARKED:
            parked_ns = now_ns - sequence.parked_since_ns
            sequence.parked_ns += parked_ns
            group.facts.append(("parked_ms", parked_ns // NS_PER_MS))
        state.move(sequence, Cause.ADMITTED)
        return True

    def _attach_blocks(self, sequence: Sequence, headroom: int) -> bool:
        """Whole, or by layer. Memory that comes free is first of all for those that are parked; prompts that may lie by
        layer take only what they need to be computed."""
        memory, layers = self.state.memory, self.state.memory.layers
        is_parked = sequence.phase is Phase.PARKED
        crowded = not is_parked and bool(self.state.parked) and layers.may_offload(sequence)
        crowded = crowded and sequence is not self.due
        if is_parked:
            headroom += layers.blocks_to_reserve(ceil_div(sequence.known_length, memory.block_tokens) + headroom)
        if not crowded or sequence.dram_blocks:
            fits = memory.attach(sequence, headroom)
            if fits or (memory.evict_layers_for(sequence, headroom) and memory.attach(sequence, headroom)):
                return True
        if is_parked or sequence.dram_blocks:
            return layers.resume_by_layer(sequence, headroom)
        if layers.overtaking.left_tokens == 0 or (crowded and self._overtakes > _OVERTAKES_MAX):
            return False
        begins = memory.attach_by_layer(sequence, headroom, crowded=crowded)
        self._overtakes += crowded and begins
        return begins

    def parked_sequences(self) -> Iterator[Sequence]:
        """Parked sequences by turns of their tenants, in rank order within one. The caller admits each, or asks for no
        more."""
        parked, turns, objectives = self.state.parked, self.state.turns, self.state.objectives
        while parked:
            line = parked.line_of(turns.sort_by_turn(parked.tenants)[0])
            yield line[0] if objectives is None else objectives.next_in_turn(line, self.state.now)
            self._overtakes = 0  # one has been admitted

    def _count_admission(self, sequence: Sequence, now_ns: int, from_dram: int) -> None:
        group, counters = sequence.group, self.state.counters
        group.admitted_ns = now_ns
        group.cached_tokens = min(sequence.computed, sequence.prompt_tokens - 1)  # a resumed one may have more
        counters.queued_ns += now_ns - group.arrived_ns
        counters.prompt_tokens += sequence.prompt_tokens
        counters.cached_tokens += group.cached_tokens
        if self.state.returns is not None:
            self.state.returns.on_admitted(group)
        group.inexact_tokens = 0 if sequence.inexact is None else sequence.inexact.tokens
        counters.inexact_tokens += group.inexact_tokens
        if group.remote is not None:
            from_hbm = max(0, sequence.computed - from_dram)
            group.facts += [("cached_tokens_hbm", from_hbm), ("cached_tokens_dram", from_dram)]


class PrefixSharing:
    """Chooses the sequences to preempt, and for which others."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def victim_for(self, needy: Sequence, step_id: int) -> Sequence | None:
        """The sequence to preempt so that ``needy`` gets a block in the plan ``step_id``.

        First one with its last token under way: it needs its blocks no more. Else the one that stands lowest, if that
        is below ``needy``; never one that is scheduled in this plan already, nor one that is being handed over: its
        blocks are held for the receiver as well, and it leaves soon.
        """
        for sequence in self._state.idle:
            leaves = sequence.group.tokens_here is not None
            if sequence.left == 0 and sequence.scheduled_step != step_id and sequence.blocks and not leaves:
                return sequence
        return (
            self._lowest_ranked(needy, step_id)
            if len(self._state.turns) == 1
            else self._lowest_standing(needy, step_id)
        )

    def lowest_in_dram(self) -> Sequence:
        """The last in rank order of those whose KV lies in DRAM, one of which streams, has no room for its next blocks
        there, and can wait for nothing else."""
        running = [sequence for sequences in self._lists_with_blocks() for sequence in sequences]
        parked = [sequence for line in self._state.parked.lines for sequence in line]
        by_layer = [sequence for sequence in running if sequence.layered is not None]
        return max((*parked, *by_layer), key=lambda sequence: sequence.rank)

    def _lowest_ranked(self, needy: Sequence, step_id: int) -> Sequence | None:
        """The last one in rank order, where a single tenant has sequences."""
        lowest = needy
        for sequences in self._lists_with_blocks():
            for sequence in reversed(sequences):
                if sequence.rank <= lowest.rank:
                    break
                if sequence.scheduled_step != step_id and sequence.group.tokens_here is None:
                    lowest = sequence
                    break
        return None if lowest is needy else lowest

    def _lowest_standing(self, needy: Sequence, step_id: int) -> Sequence | None:
        standings = self._compute_standings()
        lowest, lowest_standing = None, standings[needy]
        for sequence, standing in standings.items():
            stays = sequence.scheduled_step == step_id or sequence.group.tokens_here is not None
            if standing > lowest_standing and not stays:
                lowest, lowest_standing = sequence, standing
        return lowest

    def _compute_standings(self) -> dict[Sequence, Standing]:
        """The standings of all sequences that hold blocks."""
        blocks_by_tenant: dict[str, int] = {}
        standings: dict[Sequence, Standing] = {}
        turns = self._state.turns
        holders = [sequence for sequences in self._lists_with_blocks() for sequence in sequences]
        for sequence in sorted(holders, key=lambda sequence: sequence.rank):
            group = sequence.group
            before = blocks_by_tenant.get(group.tenant, 0)
            urgency, _, session_arrival, arrival, index = sequence.rank
            standings[sequence] = (
                urgency,
                before * SCALE // turns.weight_of(group.tenant),
                session_arrival,
                arrival,
                index,
            )
            blocks_by_tenant[group.tenant] = before + self._state.memory.blocks_held(sequence)
        return standings

    def _lists_with_blocks(self) -> Iterator[list[Sequence]]:
        """All sequences that hold blocks, in lists in rank order."""
        state = self._state
        yield from (state.decoding.items, state.prefilling.items, state.idle.items)
        yield from state.remote_kv_ready.lines

    # -- the head of the line

    def preempt_for_head(self, head: Sequence) -> bool:
        """Preempt for ``head``, which did not fit, as far as that is its tenant's due; before a plan is begun.

        For those behind it in its tenant's line there are slots as well, as far as they are due: a burst within the
        share waits for one plan, not for one plan each. Deferrable sequences make room for all others, whosever they
        are. Returns whether ``head`` has room now; ``False`` where a single tenant has nothing to share.
        """
        state, tenant = self._state, head.group.tenant
        if head.phase is Phase.WAITING and not head.is_deferrable and self._preempt_deferrable(head):
            return True
        if len(state.turns) == 1 or head.phase not in (Phase.WAITING, Phase.REMOTE_KV_READY):
            return False
        slots = 1 + head.group.forks_pending
        if not self._make_slots(head, slots):
            return False
        for sequence in state.waiting.line_of(tenant)[: state.slots]:
            slots += 0 if sequence is head else 1 + sequence.group.forks_pending
            if not self._make_slots(head, slots):
                break
        if head.phase is Phase.REMOTE_KV_READY:
            return True
        windows, total = state.memory.windows, state.memory.pool.config.hbm_blocks
        blocks = windows.blocks_for(ceil_div(head.known_length, state.memory.block_tokens))
        while not self._has_blocks_for(head):
            blocks_by_tenant = self._blocks_held()
            if 2 * (blocks_by_tenant.get(tenant, 0) + blocks) > state.turns.share_of(tenant, total):
                return False
            if not self._preempt_above_share(head, blocks, blocks_by_tenant, total):
                return False
        return True

    def _has_blocks_for(self, head: Sequence) -> bool:
        memory = self._state.memory
        return memory.has_blocks_for(head, memory.windows.blocks_for(headroom_blocks(len(self._state.decoding))))

    def _preempt_deferrable(self, head: Sequence) -> bool:
        """Preempt deferrable sequences until ``head`` has room. False: there are too few of them, or it needs none."""
        state, has_made_room = self._state, False
        while len(state.free_slots) < 1 + head.group.forks_pending or not self._has_blocks_for(head):
            lists = (state.decoding.items, state.prefilling.items, state.idle.items)
            lasts = [items[-1] for items in lists if items and items[-1].is_deferrable]
            victims = [sequence for sequence in lasts if sequence.group.tokens_here is None]
            if not victims:
                return False
            state.preempt_sequence(max(victims, key=lambda sequence: sequence.rank))
            has_made_room = True
        return has_made_room

    def slots_due(self, tenant: str) -> int:
        """Slots that ``tenant`` may have besides its own, before others that wait have had theirs.

        A tenant without any may have what the head of its line needs, even above its share: else a request with more
        sequences than that would be overtaken for ever.
        """
        state = self._state
        if len(state.turns) == 1:
            return state.slots
        share, slots_held = state.turns.share_of(tenant, state.slots), self._slots_held().get(tenant, 0)
        line = state.waiting.line_of(tenant)
        return share - slots_held if slots_held or not line else max(share, 1 + line[0].group.forks_pending)

    def _make_slots(self, head: Sequence, count: int) -> bool:
        """Preempt until ``count`` slots are free. False: the tenant of ``head`` is not due as many."""
        state = self._state
        while count > len(state.free_slots):
            if not self._preempt_above_share(head, count, self._slots_held(), state.slots):
                return False
            state.counters.preempted_for_slots += 1
        return True

    def _preempt_above_share(self, head: Sequence, count: int, held_by_tenant: dict[str, int], total: int) -> bool:
        """Preempt the last sequence of the tenant that is furthest above its share. False: none is."""
        turns, tenant = self._state.turns, head.group.tenant
        if held_by_tenant.get(tenant, 0) + count > turns.share_of(tenant, total):
            return False
        most = max(held_by_tenant, key=lambda name: held_by_tenant[name] / turns.share_of(name, total), default=tenant)
        # nothing is taken for a tenant from itself: its own line keeps its order
        is_above = most != tenant and held_by_tenant[most] > turns.share_of(most, total)
        victim = self._last_of(most) if is_above else None
        if victim is None or victim.rank[0] < head.rank[0]:
            return False
        self._state.preempt_sequence(victim)
        return True

    def _last_of(self, tenant: str) -> Sequence | None:
        state = self._state
        lists = (state.decoding.items, state.prefilling.items, state.idle.items)
        lasts = [next((s for s in reversed(items) if _may_be_preempted(s, tenant)), None) for items in lists]
        return max((s for s in lasts if s is not None), key=lambda sequence: sequence.rank, default=None)

    def _slots_held(self) -> dict[str, int]:
        slots_by_tenant: dict[str, int] = {}
        for ranked in (self._state.decoding, self._state.prefilling, self._state.idle):
            for tenant, count in ranked.tenants.items():
                slots_by_tenant[tenant] = slots_by_tenant.get(tenant, 0) + count
        return slots_by_tenant

    def _blocks_held(self) -> dict[str, int]:
        blocks_by_tenant: dict[str, int] = {}
        for sequences in self._lists_with_blocks():
            for sequence in sequences:
                tenant = sequence.group.tenant
                blocks_held = self._state.memory.blocks_held(sequence)
                blocks_by_tenant[tenant] = blocks_by_tenant.get(tenant, 0) + blocks_held
        return blocks_by_tenant


def _may_be_preempted(sequence: Sequence, tenant: str) -> bool:
    return sequence.group.tenant == tenant and sequence.group.tokens_here is None

"""Who leaves the waiting line (level 2)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memserve.instance.roster import Roster
from memserve.instance.sequence import Phase, Sequence
from memserve.policy.capacity import headroom_blocks

_HOLDS_PER_PLAN = 64  # how far behind held-back sequences one plan looks
_HOLDS_PER_REQUEST = 256  # after so many the request no longer steps aside


class Admission:
    """Admits by turns of tenants, in rank order within one; the caller stops at the first that does not fit, so that
    it is not overtaken for ever."""

    __slots__ = ("roster",)

    def __init__(self, roster: Roster) -> None:
        self.roster = roster

    def landed(self) -> Iterator[Sequence]:
        """Landed sequences, by turns of their tenants. The caller admits each, or asks for no more."""
        landed, turns = self.roster.landed, self.roster.turns
        while landed:
            yield landed.line(turns.in_turn(landed.tenants)[0])[0]

    def waiting(self, tenant: str, urgency: int, publishing: list[Sequence]) -> Iterator[Sequence]:
        """Waiting sequences of ``tenant`` and ``urgency`` in rank order, but for those that better wait one step.

        The caller admits each, or asks for no more. ``publishing`` are the sequences whose full blocks the plan being
        made publishes; the caller adds to it.
        """
        waiting = self.roster.waiting.line(tenant)
        holds = 0
        while holds < min(_HOLDS_PER_PLAN, len(waiting)):  # a line may be long: it is not copied for the few in front
            sequence = waiting[holds]
            if sequence.rank[0] > urgency:
                return
            if publishing and self._should_hold(sequence, publishing):
                sequence.group.held_steps += 1
                self.roster.counters.prefix_holds += 1
                holds += 1
            else:
                yield sequence

    def _should_hold(self, sequence: Sequence, publishing: list[Sequence]) -> bool:
        """Whether the very next block of this sequence is being computed for another one in this plan."""
        memory, group = self.roster.memory, sequence.group
        if sequence.dram_blocks or group.held_steps >= _HOLDS_PER_REQUEST or not memory.reads_cache(sequence):
            return False
        isolation, tokens = group.isolation, sequence.known_tokens()
        first_block = tokens[: memory.block_tokens]
        cached: int | None = None
        for leader in publishing:
            prompt = leader.group.request.prompt
            if leader.group.isolation != isolation or not np.array_equal(prompt[: len(first_block)], first_block):
                continue
            if cached is None:
                cached = memory.pool.match(isolation, tokens)
            end = cached + memory.block_tokens
            if end > len(tokens) or not cached < min(leader.computed, leader.prompt_tokens) >= end:
                continue
            if np.array_equal(prompt[:end], tokens[:end]):
                return True
        return False

    def admit(self, sequence: Sequence, now: int) -> bool:
        """Give ``sequence`` its slots and blocks; ``False``, and nothing changed, when there are not enough."""
        roster, group = self.roster, sequence.group
        if 1 + group.forks_pending > len(roster.free_slots):
            return False
        from_dram = -roster.memory.dram_tokens_reused
        landed = sequence.phase is Phase.LANDED
        if not landed and not roster.memory.attach(sequence, headroom_blocks(len(roster.decoding))):
            return False
        from_dram += roster.memory.dram_tokens_reused
        roster.take_slot(sequence)
        roster.reserve_slots(group)
        sequence.left = sequence.draws_left
        if group.admitted_ns is None:
            self._first_time(sequence, now, from_dram)
        roster.move(sequence, Phase.WORKING)
        return True

    def _first_time(self, sequence: Sequence, now: int, from_dram: int) -> None:
        group, counters = sequence.group, self.roster.counters
        group.admitted_ns = now
        group.cached_tokens = min(sequence.computed, sequence.prompt_tokens - 1)  # a resumed one may have more
        counters.queued_ns += now - group.arrived_ns
        counters.prompt_tokens += sequence.prompt_tokens
        counters.cached_tokens += group.cached_tokens
        if group.orders is not None:
            from_hbm = max(0, sequence.computed - from_dram)
            group.facts += [("cached_tokens_hbm", from_hbm), ("cached_tokens_dram", from_dram)]

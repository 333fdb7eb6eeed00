"""Which sequences give way when tenants want more than there is (level 2).

Memory: the sequences of a tenant hold it in rank order, and where the earlier ones already hold much, the later ones
give way first. So each tenant's first sequence stands as high as any other, and the oldest of those can take from all
others: that is why there is always progress.

::

    tenant a   [ 0: 40 blocks ][ 40: 30 ][ 70: 25 ]        number: what the earlier ones hold, by weight
    tenant b   [ 0: 10 blocks ][ 10: 10 ]                  the highest gives way first

Slots and memory for the head of the line: while its tenant, with what it wants, has at most its share of the slots and
half of its share of the memory, and another more than its own, the latter's last sequences give way. So what is taken
cannot be taken back: it belonged to a tenant above its share, and that one still has its share of the slots behind
it. Sequences grow, so of memory it is half; up to the whole share turns do it, as sequences end.
"""

from __future__ import annotations

from collections.abc import Iterator

from memserve.instance.roster import Roster
from memserve.instance.sequence import Phase, Sequence
from memserve.policy.capacity import headroom_blocks
from memserve.policy.fairness import SCALE
from memserve.units import ceil_div

Standing = tuple[int, int, int, int]
"""(urgency, what earlier sequences of the tenant hold, arrival, index): the highest gives way first."""


class Sharing:
    """Chooses the sequences to preempt, and for which others."""

    __slots__ = ("_roster",)

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def victim_for(self, needy: Sequence, step_id: int) -> Sequence | None:
        """The sequence to preempt so that ``needy`` gets a block in the plan ``step_id``.

        First one whose last token is under way: it needs its blocks no more. Else the one that stands lowest, if that
        is below ``needy``; never one that is scheduled in this plan already, nor one that is being handed over: its
        blocks are held for the taker as well, and it leaves soon.
        """
        for sequence in self._roster.idle:
            leaves = sequence.group.tokens_here is not None
            if sequence.left == 0 and sequence.scheduled_step != step_id and sequence.blocks and not leaves:
                return sequence
        return self._lowest_ranked(needy, step_id) if len(self._roster.turns) == 1 else self._lowest(needy, step_id)

    def _lowest_ranked(self, needy: Sequence, step_id: int) -> Sequence | None:
        """Of one tenant's sequences: the last one in rank order."""
        lowest = needy
        for sequences in self._holding():
            for sequence in reversed(sequences):
                if sequence.rank <= lowest.rank:
                    break
                if sequence.scheduled_step != step_id and sequence.group.tokens_here is None:
                    lowest = sequence
                    break
        return None if lowest is needy else lowest

    def _lowest(self, needy: Sequence, step_id: int) -> Sequence | None:
        standings = self._standings()
        lowest, at = None, standings[needy]
        for sequence, standing in standings.items():
            stays = sequence.scheduled_step == step_id or sequence.group.tokens_here is not None
            if standing > at and not stays:
                lowest, at = sequence, standing
        return lowest

    def _standings(self) -> dict[Sequence, Standing]:
        """Of all sequences that hold blocks."""
        held: dict[str, int] = {}
        standings: dict[Sequence, Standing] = {}
        turns = self._roster.turns
        holders = [sequence for sequences in self._holding() for sequence in sequences]
        for sequence in sorted(holders, key=lambda sequence: sequence.rank):
            group = sequence.group
            before = held.get(group.tenant, 0)
            urgency, _, arrival, index = sequence.rank
            standings[sequence] = urgency, before * SCALE // turns.weight(group.tenant), arrival, index
            held[group.tenant] = before + len(sequence.blocks)
        return standings

    def _holding(self) -> Iterator[list[Sequence]]:
        """All sequences that hold blocks, in lists in rank order."""
        roster = self._roster
        yield from (roster.decoding.items, roster.working.items, roster.idle.items)
        yield from roster.landed.lines

    # -- the head of the line

    def make_way(self, head: Sequence) -> bool:
        """Preempt for ``head``, for which there was no room, as far as that is its tenant's due. No plan is begun.

        For those behind it in its tenant's line there are slots as well, as far as they are due: a burst within the
        share waits for one plan, not for one plan each. Returns whether ``head`` has room now; ``False`` where a single
        tenant has nothing to share.
        """
        roster, tenant = self._roster, head.group.tenant
        if len(roster.turns) == 1 or head.phase not in (Phase.WAITING, Phase.LANDED):
            return False
        slots = 1 + head.group.forks_pending
        if not self._make_slots(head, slots):
            return False
        for sequence in roster.waiting.line(tenant)[: roster.slots]:
            slots += 0 if sequence is head else 1 + sequence.group.forks_pending
            if not self._make_slots(head, slots):
                break
        if head.phase is Phase.LANDED:
            return True
        blocks, total = ceil_div(head.known, roster.memory.block_tokens), roster.memory.pool.config.hbm_blocks
        while not roster.memory.has_blocks_for(head, headroom_blocks(len(roster.decoding))):
            held = self._blocks_held()
            if 2 * (held.get(tenant, 0) + blocks) > roster.turns.share(tenant, total):
                return False
            if not self._give_way(head, blocks, held, total):
                return False
        return True

    def slots_due(self, tenant: str) -> int:
        """Slots that ``tenant`` may have besides its own, before others that wait have had theirs.

        A tenant without any may have what the head of its line needs, even above its share: else a request with more
        sequences than that would be overtaken for ever.
        """
        roster = self._roster
        if len(roster.turns) == 1:
            return roster.slots
        share, held = roster.turns.share(tenant, roster.slots), self._slots_held().get(tenant, 0)
        line = roster.waiting.line(tenant)
        return share - held if held or not line else max(share, 1 + line[0].group.forks_pending)

    def _make_slots(self, head: Sequence, count: int) -> bool:
        """So many free slots, if the tenant of ``head`` is due as many."""
        roster = self._roster
        while count > len(roster.free_slots):
            if not self._give_way(head, count, self._slots_held(), roster.slots):
                return False
            roster.counters.preempted_for_slots += 1
        return True

    def _give_way(self, head: Sequence, wanted: int, held: dict[str, int], total: int) -> bool:
        """Preempt the last sequence of the tenant that is furthest above its share. ``False`` = none should."""
        turns, tenant = self._roster.turns, head.group.tenant
        if held.get(tenant, 0) + wanted > turns.share(tenant, total):
            return False
        most = max(held, key=lambda name: held[name] / turns.share(name, total), default=tenant)
        is_above = most != tenant and held[most] > turns.share(most, total)
        victim = self._last_of(most) if is_above else None
        if victim is None or victim.rank[0] < head.rank[0]:
            return False
        self._roster.preempt(victim)
        return True

    def _last_of(self, tenant: str) -> Sequence | None:
        roster = self._roster
        lists = (roster.decoding.items, roster.working.items, roster.idle.items)
        lasts = [next((s for s in reversed(items) if _may_go(s, tenant)), None) for items in lists]
        return max((s for s in lasts if s is not None), key=lambda sequence: sequence.rank, default=None)

    def _slots_held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for ranked in (self._roster.decoding, self._roster.working, self._roster.idle):
            for tenant, count in ranked.tenants.items():
                held[tenant] = held.get(tenant, 0) + count
        return held

    def _blocks_held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for sequences in self._holding():
            for sequence in sequences:
                tenant = sequence.group.tenant
                held[tenant] = held.get(tenant, 0) + len(sequence.blocks)
        return held


def _may_go(sequence: Sequence, tenant: str) -> bool:
    return sequence.group.tenant == tenant and sequence.group.tokens_here is None

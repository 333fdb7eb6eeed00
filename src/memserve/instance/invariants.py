"""What must hold between any two events (level 2). Only looks; never helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memserve.errors import check
from memserve.instance.outstanding import Outstanding
from memserve.instance.roster import Roster
from memserve.instance.sequence import Phase, Sequence
from memserve.instance.waiting import RankedList, WaitingLine
from memserve.units import ceil_div

if TYPE_CHECKING:
    from memserve.instance.cluster_link import ClusterLink

_RUNNING = (Phase.WORKING, Phase.DECODING, Phase.IDLE)
_HOLDING = (*_RUNNING, Phase.LANDED)


def check_instance(roster: Roster, outstanding: Iterable[Outstanding], link: ClusterLink | None) -> None:
    """Raise :class:`InvariantError` if anything contradicts."""
    sequences = [s for group in roster.groups.values() for s in group.sequences.values()]
    _check_containers(roster, sequences)
    _check_slots(roster, sequences)
    _check_inflight(sequences, outstanding)
    for sequence in sequences:
        _check_sequence(roster, sequence)
    check(not roster.outputs, "outputs left over from an earlier event")
    roster.memory.pool.check_invariants()
    if link is not None:
        link.exchange.check_invariants()
        _check_link(roster, link)


def _check_link(roster: Roster, link: ClusterLink) -> None:
    """Every transfer of a request is known from both ends, and nothing waits to be said."""
    live = {id(group): group for group in roster.groups.values() if group.orders is not None}
    orders = [group.orders for group in live.values() if group.orders is not None]
    check(not (roster.ended_orders or roster.interrupted or roster.homeward), "left over from an earlier event")
    coming = {key: group.orders.import_id for key, group in live.items() if group.orders and group.orders.import_id}
    check(coming == {id(g): key for key, g in link.takeovers.coming.items()}, "imports and requests disagree")
    asked = {key: group.orders.fetch_id for key, group in live.items() if group.orders and group.orders.fetch_id}
    check(asked == {id(g): key for key, (g, _) in link.fetches.asked.items()}, "fetches and requests disagree")
    leaving = {name: group for name, group in roster.groups.items() if group.tokens_here is not None}
    check(leaving == link.handoffs.leaving, "who leaves is not who should")
    check(all((o.offer_id, o.import_id, o.fetch_id).count(None) >= 2 for o in orders), "a request moves two ways")
    for group in roster.groups.values():
        expected = [s for s in group.sequences.values() if s.phase is Phase.EXPECTED]
        waits = id(group) in coming or id(group) in asked or group in link.fetches.undecided
        check(bool(expected) == waits, f"{group} is expected, but nothing comes, or the reverse")


def _check_containers(roster: Roster, sequences: list[Sequence]) -> None:
    containers: dict[Phase, RankedList | WaitingLine] = {
        Phase.LANDED: roster.landed,
        Phase.WAITING: roster.waiting,
        Phase.WORKING: roster.working,
        Phase.DECODING: roster.decoding,
        Phase.IDLE: roster.idle,
    }
    for phase, container in containers.items():
        expected = sorted((s.rank, id(s)) for s in sequences if s.phase is phase)
        check([(s.rank, id(s)) for s in container] == expected, f"the container of {phase} is not what it should be")
    tenants = Counter(group.tenant for group in roster.groups.values())
    check(tenants == roster.tenants and sorted(roster.turns) == sorted(tenants), f"tenants are not {roster.tenants}")
    roster.turns.check_invariants()
    for ranked in (roster.working, roster.decoding, roster.idle):
        check(
            Counter(s.group.tenant for s in ranked.items) == ranked.tenants, f"tenants of {ranked} are {ranked.tenants}"
        )
    for group in roster.groups.values():
        check(group.sequences, f"{group} is unfinished but has no sequence")
    check(roster.sequences == len(sequences), f"{roster.sequences} sequences were counted, there are {len(sequences)}")
    check(all(s.phase is not Phase.FINISHED for s in sequences), "a finished sequence is still listed")


def _check_slots(roster: Roster, sequences: list[Sequence]) -> None:
    slots = [s.slot for s in sequences if s.slot is not None] + roster.free_slots
    for group in roster.groups.values():
        slots += group.reserved_slots
    check(sorted(slots) == list(range(roster.slots)), f"slots are lost or given twice: {sorted(slots)}")
    check(len(set(roster.closing)) == len(roster.closing), f"a slot is to be closed twice: {roster.closing}")


def _check_inflight(sequences: list[Sequence], outstanding: Iterable[Outstanding]) -> None:
    draws = Counter(id(target) for plan in outstanding if not plan.void for target in plan.targets)
    for sequence in sequences:
        check(sequence.inflight == draws[id(sequence)], f"{sequence} waits for {draws[id(sequence)]} tokens")


def _check_sequence(roster: Roster, sequence: Sequence) -> None:
    block_tokens = roster.memory.block_tokens
    holds = sequence.phase in _HOLDING
    runs = sequence.phase in _RUNNING
    check((sequence.slot is not None) == runs, f"{sequence} has a slot and should not, or the reverse")
    check(bool(sequence.blocks) == holds, f"{sequence} has HBM blocks and should not, or the reverse")
    check(not (sequence.dram_blocks and sequence.blocks), f"{sequence} is on two tiers")
    check(runs or not sequence.opened, f"{sequence} is open on the device")
    complete = bool(sequence.inflight) or sequence.candidates is not None  # else its last token is to be computed
    check(sequence.computed <= sequence.length - (not complete), f"{sequence} computed what it does not have")
    again = sequence.computed == sequence.known - 1  # the last token is computed even if its block is there
    check(sequence.published <= sequence.computed + again, f"{sequence} published what is not computed")
    if holds:
        capacity = len(sequence.blocks) * block_tokens
        check(sequence.computed <= capacity, f"{sequence} has computed beyond its blocks")
        check(sequence.writable_until <= capacity, f"{sequence} may write beyond its blocks")
        tokens = max(sequence.computed + 1, sequence.known)
        check(len(sequence.blocks) <= ceil_div(tokens, block_tokens), f"{sequence} has blocks for tokens that it lacks")
    elif not sequence.dram_blocks:
        check(sequence.computed == 0 and sequence.lease is None, f"{sequence} has no blocks, but KV or a lease")
    if sequence.phase is Phase.DECODING:
        check(sequence.computed == sequence.length - 1, f"{sequence} decodes, but is not at its end")
        check(sequence.left > 0 and sequence.opened, f"{sequence} decodes, but has nothing to decode")
    check(0 <= sequence.told <= len(sequence.out), f"{sequence} has told {sequence.told} tokens")
    if sequence.group.beam is None:
        check(not runs or sequence.left == sequence.draws_left, f"{sequence} has {sequence.left} left")

"""What must hold between any two events. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.base.units import ceil_div
from memserve.instance.cluster.link import ClusterLink
from memserve.instance.scheduler.batch import InflightPlan
from memserve.instance.scheduler.sequence import Phase, Sequence
from memserve.instance.scheduler.state import RankedList, SchedulerState, WaitingQueue

_RUNNING = (Phase.PREFILLING, Phase.DECODING, Phase.IDLE)
_HOLDING = (*_RUNNING, Phase.REMOTE_KV_READY)
_GOING_ON = (*_HOLDING, Phase.WAITING)
_Item = TypeVar("_Item")
_AHEAD_MAX = 4  # plans that may be under way behind one with a late draw


def check_instance(state: SchedulerState, inflight: Iterable[InflightPlan], link: ClusterLink | None) -> None:
    """Raise :class:`InvariantError` if anything contradicts."""
    sequences = [s for group in state.groups.values() for s in group.sequences.values()]
    _check_containers(state, sequences)
    _check_slots(state, sequences)
    _check_inflight(sequences, inflight)
    for sequence in sequences:
        _check_sequence(state, sequence)
    state.memory.layers.check_invariants(sequences)
    state.memory.states.check_invariants(sequences)
    state.memory.windows.check_invariants(sequences)
    if state.memory.contents is not None:
        state.memory.contents.check_invariants({sequence.key for sequence in sequences if sequence.inexact})
    check(not state.outputs, "outputs left over from an earlier event")
    state.memory.pool.check_invariants()
    if state.objectives is not None:
        state.objectives.check_invariants()
    if state.returns is not None:
        state.returns.check_invariants()
    if link is not None:
        link.exchange.check_invariants()
        link.writer.check_invariants()
        link.replay_buffer.check_invariants(state.groups)
        link.segments.check_invariants()
        link.striped.check_invariants()
        link.migrations.check_invariants()
        link.routers.check_invariants(state.groups)
        link.router_updates.check_invariants()
        _check_link(state, link)


def _count_each(items: Iterable[_Item]) -> dict[_Item, int]:
    """How often each occurs. A ``Counter``, of nothing as mostly, takes longer than most checks."""
    counts: dict[_Item, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts


def _check_link(state: SchedulerState, link: ClusterLink) -> None:
    """Every transfer of a request is known from both ends."""
    live = {id(group): group for group in state.groups.values() if group.remote is not None}
    remote = [group.remote for group in live.values() if group.remote is not None]
    coming = {key: group.remote.import_id for key, group in live.items() if group.remote and group.remote.import_id}
    check(coming == {id(g): key for key, g in link.receiver.pending_imports.items()}, "imports and requests disagree")
    fetching = {key: group.remote.fetch_id for key, group in live.items() if group.remote and group.remote.fetch_id}
    check(fetching == {id(g): key for key, (g, _) in link.fetches.pending.items()}, "fetches and requests disagree")
    leaving = {name: group for name, group in state.groups.items() if group.tokens_here is not None}
    leaving = {name: group for name, group in leaving.items() if name not in link.segments.groups}
    check(leaving == link.sender.leaving, "requests with tokens_here and requests that leave disagree")
    check(all((o.offer_id, o.import_id, o.fetch_id).count(None) >= 2 for o in remote), "a request moves two ways")
    for group in state.groups.values():
        expected = [s for s in group.sequences.values() if s.phase is Phase.WAITING_FOR_REMOTE_KV]
        waits = id(group) in coming or id(group) in fetching or group in link.fetches.undecided
        check(bool(expected) == waits, "{} waits for remote KV that does not come, or the reverse", group)


def _check_containers(state: SchedulerState, sequences: list[Sequence]) -> None:
    containers: tuple[tuple[Phase, RankedList | WaitingQueue], ...] = (
        (Phase.REMOTE_KV_READY, state.remote_kv_ready),
        (Phase.WAITING, state.waiting),
        (Phase.PARKED, state.parked),
        (Phase.PREFILLING, state.prefilling),
        (Phase.DECODING, state.decoding),
        (Phase.IDLE, state.idle),
    )
    for phase, container in containers:
        expected = sorted([(s.rank, id(s)) for s in sequences if s.phase is phase])
        check([(s.rank, id(s)) for s in container] == expected, "the container of {} is not what it should be", phase)
    tenants = _count_each([group.tenant for group in state.groups.values()])
    check(tenants == state.tenants and sorted(state.turns) == sorted(tenants), "tenants are not {}", state.tenants)
    state.turns.check_invariants()
    for ranked in (state.prefilling, state.decoding, state.idle):
        counts = _count_each([s.group.tenant for s in ranked.items])
        check(counts == ranked.tenants, "tenants of {} are {}", ranked, ranked.tenants)
    for group in state.groups.values():
        check(group.sequences, "{} is unfinished but has no sequence", group)
    check(state.sequences == len(sequences), "{} sequences were counted, there are {}", state.sequences, len(sequences))
    users = _count_each([group.wanted_grammar for group in state.groups.values() if group.request.sampling.grammar])
    state.grammars.check_invariants()
    late = [id(sequence) for sequence in sequences if sequence.late is not None]
    check(sorted(late) == sorted(map(id, state.late_masks.sequences())), "masks are late for other sequences")
    check(users == state.grammars.requests_by_grammar(), "grammars have other users than {}", users)
    for sequence in sequences:
        awaits = state.grammars.is_awaited(sequence.wanted_grammar)
        check(
            awaits or sequence.phase is not Phase.WAITING_FOR_GRAMMAR, "{} waits for a grammar that is built", sequence
        )
        check(not awaits or sequence.phase not in _GOING_ON, "{} goes on without its grammar", sequence)
    unlisted = [sequence for sequence in sequences if sequence.phase in (Phase.NEW, Phase.FINISHED)]
    check(not unlisted, "a new or finished sequence is listed: {}", unlisted)


def _check_slots(state: SchedulerState, sequences: list[Sequence]) -> None:
    slots = [s.slot for s in sequences if s.slot is not None] + state.free_slots
    for group in state.groups.values():
        slots += group.reserved_slots
    check(sorted(slots) == list(range(state.slots)), "slots are lost or given twice: {}", sorted(slots))
    check(len(set(state.closing)) == len(state.closing), "a slot is to be closed twice: {}", state.closing)


def _check_inflight(sequences: list[Sequence], inflight: Iterable[InflightPlan]) -> None:
    draws = _count_each([id(target) for plan in inflight if not plan.void for target in plan.targets])
    for sequence in sequences:
        count = draws.get(id(sequence), 0)
        check(sequence.inflight == count, "{} waits for {} tokens", sequence, count)


def _check_sequence(state: SchedulerState, sequence: Sequence) -> None:
    block_tokens = state.memory.block_tokens
    holds = sequence.phase in _HOLDING
    runs = sequence.phase in _RUNNING
    check((sequence.slot is not None) == runs, "{} has a slot and should not, or the reverse", sequence)
    check(sequence.layered is None or runs, "{} lies by layer, and does not run", sequence)
    check(
        bool(sequence.blocks_held) == holds or sequence.layered is not None,
        "{} has HBM blocks and should not, or the reverse",
        sequence,
    )
    check(not (sequence.dram_blocks and sequence.blocks), "{} is on two tiers", sequence)
    check(sequence.phase is not Phase.PARKED or sequence.dram_blocks, "{} is parked without KV", sequence)
    check(runs or not sequence.opened, "{} is open on the device", sequence)
    waits = sequence.candidates is not None or sequence.late is not None
    complete = bool(sequence.inflight) or waits  # else its last token is to be computed
    check(sequence.late is None or sequence.phase is Phase.IDLE, "{} waits for a mask, and is not idle", sequence)
    check(sequence.computed <= sequence.length - (not complete), "{} computed what it does not have", sequence)
    again = sequence.computed == sequence.known_length - 1  # the last token is computed even if its block is there
    check(sequence.published <= sequence.computed + again, "{} published what is not computed", sequence)
    if holds:
        capacity = sequence.table_entries * block_tokens
        check(sequence.computed <= capacity, "{} has computed beyond its blocks", sequence)
        check(sequence.writable_until <= capacity, "{} may write beyond its blocks", sequence)
        ahead = _AHEAD_MAX if sequence.group.request.sampling.grammar else 0  # for tokens that were late
        tokens = max(sequence.computed + 1, sequence.known_length) + ahead
        check(
            sequence.table_entries <= ceil_div(tokens, block_tokens), "{} has blocks for tokens that it lacks", sequence
        )
    elif not sequence.dram_blocks:
        check(sequence.computed == 0 and sequence.lease is None, "{} has no blocks, but KV or a lease", sequence)
    if sequence.inexact is not None:
        exact_tokens = sequence.inexact.exact_tokens
        check(sequence.published <= exact_tokens, "{} has published inexact KV", sequence)
        holders = len(sequence.group.sequences)
        for block in sequence.blocks[exact_tokens // block_tokens :]:
            references = state.memory.pool.ref_count(Tier.HBM, block)
            check(references <= holders, "inexact KV of {} is cached or lent", sequence)
    if sequence.phase is Phase.DECODING:
        check(sequence.computed == sequence.length - 1, "{} decodes, but is not at its end", sequence)
        check(sequence.left > 0 and sequence.opened, "{} decodes, but has nothing to decode", sequence)
    if sequence.group.beam is None:
        check(not runs or sequence.left == sequence.draws_left, "{} has {} left", sequence, sequence.left)

"""Recurrent states of sequences, as the scheduler sees them: which slot goes on from what, where snapshots are taken.

A running sequence owns one state, in its slot, which each of its rows changes: it cannot be rolled back. Of a row with
drafts the device keeps the state behind each token until it is known which are right. A snapshot is an immutable copy
behind whole blocks of tokens. Which ones there are:

* each sequence has one of its own that moves along with it: behind the last whole block that a row has computed. So a
  prompt's end has one, an answer's end, and where a sequence is preempted;
* where the pool's policy says, a prompt leaves others: where it parts from cached KV, at its end, some blocks before
  (:mod:`memserve.kv.snapshot_policy`). They are cached as soon as the plan is made that takes them, like blocks; the
  one that moves along when the sequence goes.

:class:`NoStates` is the other kind of model: everything is called alike, and does nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol, cast

from memserve.base.errors import check
from memserve.base.types import Tier, TokenArray
from memserve.instance.events import LoadState, SaveState, StepPlan, TakeSnapshot
from memserve.kv.state_snapshot import PlannedPrompt, SnapshotKind

if TYPE_CHECKING:
    from memserve.instance.scheduler.sequence import Sequence
    from memserve.kv.costs import PreemptionModel
    from memserve.kv.pool import BlockPool
    from memserve.kv.snapshots import SnapshotCache
    from memserve.kv.state_snapshot import Lease, StateSnapshot


class SnapshotListener(Protocol):
    """Hears which snapshots the prefix cache has got."""

    def on_snapshot_kept(self, isolation: str, tokens: TokenArray) -> None:
        """There is one behind ``tokens``, whole blocks, once the plan has finished that takes it."""


class NoStates:
    """Of a model whose layers keep KV alone."""

    has_states = False
    #: None: no store keeps snapshots
    listener: SnapshotListener | None = None

    @property
    def blocks_each(self) -> int:
        """Blocks that a state takes where it is swapped out."""
        return 0

    def choose_source(self, sequence: Sequence, lease: Lease) -> None:
        """``sequence`` has got ``lease``, and perhaps goes on behind it."""

    def adopt_state(self, sequence: Sequence, tokens: int, blocks: Items[int]) -> None:
        """The KV of ``tokens`` tokens of ``sequence`` has come, and in ``blocks``, with their references, the state
        behind them."""
        check(not blocks, "a state has come, and layers have none")

    def begin(self, sequence: Sequence) -> None:
        """``sequence`` has got a slot, and goes on behind ``computed`` tokens."""

    def reserve_below(self, sequence: Sequence) -> list[int] | None:
        """DRAM blocks for the state of a sequence that is to be swapped out, with their references. None: there are too
        few, or it is not known which state its slot will have."""
        return []

    def swap_out(self, sequence: Sequence, dram_blocks: list[int]) -> None:
        """``sequence`` loses its slot: the state of all that it has computed goes to these blocks."""

    def swap_in(self, sequence: Sequence) -> None:
        """``sequence`` is about to get a slot, and goes on from what was swapped out."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` has a slot, and goes on where ``parent`` is when the plans made so far are over."""

    def note_chunk(self, sequence: Sequence, start: int, end: int) -> None:
        """The plan that is being made computes known tokens ``[start, end)`` of ``sequence``."""

    def note_decodes(self, sequences: Iterable[Sequence]) -> None:
        """The plan that is being made computes a token of each of ``sequences``; ``computed`` counts it already."""

    def draft_room(self, sequence: Sequence, states_taken: int) -> int:
        """How many drafts may stand behind the last token of ``sequence``, in a plan whose rows with drafts compute
        ``states_taken`` tokens so far."""
        return sys.maxsize

    def on_published(self, sequence: Sequence) -> None:
        """The index has the blocks of ``published`` tokens of a sequence that goes on."""

    def leave_snapshot(self, sequence: Sequence) -> None:
        """``sequence`` goes, and the index has what it will ever have of it."""

    def take_for_peer(self, sequence: Sequence) -> StateSnapshot | None:
        """A snapshot of the state behind all that ``sequence``, which leaves, has computed with the last plan; the
        caller gives it up (:meth:`forget`). None: there is no room."""
        return None

    def forget(self, snapshot: StateSnapshot) -> None:
        """The snapshot is of no use here any more."""

    def lend_last(self, sequence: Sequence, least_tokens: int) -> Lease | None:
        """The last snapshot of a sequence that has ended, for a peer. None: it has none behind so many tokens."""
        return None

    def drop_sequence(self, sequence: Sequence) -> None:
        """Forget what is left of it."""

    def discard(self, sequence: Sequence, tokens: TokenArray) -> None:
        """What was computed behind ``tokens``, or some of them, is not to be trusted."""

    def finish_plan(self, plan: StepPlan) -> None:
        """``plan`` has all its rows: it carries what was decided since the last one."""

    def forget_orders(self) -> None:
        """A step has failed: no slot has anything, and no snapshot is to be trusted."""

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise :class:`InvariantError` where its books and ``sequences``, all there are, contradict. For tests."""


class RecurrentStates(NoStates):
    """Of a model with a recurrent state."""

    has_states = True

    def __init__(self, pool: BlockPool) -> None:
        check(pool.snapshots is not None, "a pool without snapshots")
        self._pool, self._snapshots, self._block_tokens = pool, cast("SnapshotCache", pool.snapshots), pool.block_tokens
        self._draft_states = pool.config.states.draft_states if pool.config.states is not None else 0
        #: since the last plan: before its rows, in order
        self._orders: list[LoadState | SaveState] = []
        #: of the plan that is being made: slot, tokens, snapshot
        self._taking: list[tuple[int, int, StateSnapshot]] = []
        #: of sequences that are being admitted: behind how many tokens they go on, and where that snapshot lies
        self._sources: dict[Sequence, tuple[int, Tier, list[int]]] = {}
        #: of sequences that have come from a peer and have no slot yet: what they go on from; forks share it
        self._adopted: dict[Sequence, StateSnapshot] = {}
        #: DRAM blocks with the states of sequences that are swapped out
        self._swapped: dict[Sequence, list[int]] = {}
        #: of sequences that leave: behind the last row that they have here
        self._for_peers: dict[Sequence, StateSnapshot] = {}
        #: the last snapshot of each sequence that has one
        self._last: dict[Sequence, StateSnapshot] = {}
        #: snapshots that go into the cache as soon as the index has the blocks before them
        self._due: dict[Sequence, list[StateSnapshot]] = {}
        #: where sequences that compute known tokens leave snapshots, in order, and where they part from cached KV
        self._positions: dict[Sequence, deque[int]] = {}
        self._partings: dict[Sequence, int] = {}

    @property
    def blocks_each(self) -> int:
        return self._pool.state_blocks

    def choose_source(self, sequence: Sequence, lease: Lease) -> None:
        if lease.snapshot is not None:
            self._read_snapshot(sequence, lease.snapshot)
            # from now on it may go, even for blocks of this sequence: these are written when it has been read
            self._snapshots.use_lease(lease)

    def adopt_state(self, sequence: Sequence, tokens: int, blocks: Items[int]) -> None:
        check(blocks, "KV came without the state behind it")
        self._share_adopted(sequence, self._pool.adopt_snapshot(tokens, blocks))

    def begin(self, sequence: Sequence) -> None:
        adopted = self._adopted.get(sequence)
        if adopted is not None:
            self._read_snapshot(sequence, adopted)
            self._end_adopted(sequence)  # as in choose_source: it may go now
        tokens, tier, pages = self._sources.pop(sequence, (0, Tier.HBM, []))
        check(tokens == sequence.computed, "{} begins where it has no state", sequence)
        self._order(LoadState(_slot_of(sequence), tokens, pages, tier=tier))
        if sequence.lease is None:
            return
        if self._pool.config.caching:
            prompt = describe_prompt(self._pool, sequence.group.isolation, sequence.known_tokens(), tokens)
            self._positions[sequence] = deque(self._snapshots.policy.choose_positions(prompt))
            self._partings[sequence] = prompt.parting_tokens

    def reserve_below(self, sequence: Sequence) -> list[int] | None:
        # what has come from a peer lies in a snapshot still; where a mask is late, a row has had no meaning, or is
        # computed again for its logits: then the slot has another state; and with drafts under way it is not known
        # behind how many tokens it is
        if sequence.slot is None or sequence.wanted_grammar[1] or sequence.awaits_tokens:
            return None
        blocks = self._pool.allocate_dram_ids(self._pool.state_blocks)
        return None if blocks is None else blocks.tolist()

    def swap_out(self, sequence: Sequence, dram_blocks: list[int]) -> None:
        self._order(SaveState(_slot_of(sequence), sequence.computed, dram_blocks))
        self.leave_snapshot(sequence)
        self.drop_sequence(sequence)
        self._swapped[sequence] = dram_blocks

    def swap_in(self, sequence: Sequence) -> None:
        blocks = self._swapped.pop(sequence)
        self._sources[sequence] = sequence.computed, Tier.DRAM, blocks
        self._pool.release_dram(blocks)  # whatever is written there comes behind the load

    def fork(self, parent: Sequence, child: Sequence) -> None:
        if child.lease is not None:
            self._snapshots.end_lease(child.lease)
        adopted = self._adopted.get(parent)
        if adopted is not None:
            self._share_adopted(child, adopted)
            return
        self._order(LoadState(_slot_of(child), child.computed, from_slot=_slot_of(parent)))

    def note_chunk(self, sequence: Sequence, start: int, end: int) -> None:
        if end == sequence.known_length and sequence.group.tokens_here is not None:
            self._take_end(sequence)
        if sequence.lease is None:
            return
        last = min(end, sequence.known_length - 1) // self._block_tokens * self._block_tokens
        positions = self._positions.get(sequence, deque())
        while positions and positions[0] <= start:  # there was no room for it
            positions.popleft()
        while positions and positions[0] < min(end, last):
            self._take_inside(sequence, positions.popleft())
        if last > start:
            self._move_on(sequence, last)
            snapshot = self._last.get(sequence)
            if positions and positions[0] == last and snapshot is not None:
                snapshot.kind = self._kind_of(sequence, positions.popleft())
                self._due.setdefault(sequence, []).append(snapshot)
        if end >= sequence.known_length - 1:
            self._positions.pop(sequence, None)
            self._partings.pop(sequence, None)

    def draft_room(self, sequence: Sequence, states_taken: int) -> int:
        room = self._draft_states - states_taken - 1
        if sequence.lease is None:
            return room
        # not to the end of a block: a snapshot is taken there, and of drafts it would be of tokens that may be wrong
        return min(room, self._block_tokens - sequence.computed % self._block_tokens - 2)

    def note_decodes(self, sequences: Iterable[Sequence]) -> None:
        size = self._block_tokens
        for sequence in sequences:
            if sequence.group.tokens_here is not None and not sequence.left:
                self._take_end(sequence)
            if sequence.computed % size == 0 and sequence.lease is not None:
                self._move_on(sequence, sequence.computed)
                snapshot = self._last.get(sequence)
                if self._answer_interval and sequence.computed % self._answer_interval == 0 and snapshot is not None:
                    self._due.setdefault(sequence, []).append(snapshot)

    def on_published(self, sequence: Sequence) -> None:
        for snapshot in self._due.pop(sequence, ()):
            self._keep(sequence, snapshot)

    def leave_snapshot(self, sequence: Sequence) -> None:
        self.on_published(sequence)
        snapshot = self._last.pop(sequence, None)
        if snapshot is not None:
            self._keep(sequence, snapshot)

    def take_for_peer(self, sequence: Sequence) -> StateSnapshot | None:
        snapshot = self._for_peers.pop(sequence, None)
        if snapshot is not None:
            self._snapshots.unpin(snapshot)
        return snapshot

    def forget(self, snapshot: StateSnapshot) -> None:
        self._snapshots.forget(snapshot)

    def lend_last(self, sequence: Sequence, least_tokens: int) -> Lease | None:
        snapshot = self._last.get(sequence)
        if snapshot is None or not snapshot.pages or not self._pool.state_blocks:
            return None
        is_whole = least_tokens <= snapshot.tokens <= _counted(sequence)
        return self._pool.lend_snapshot(sequence.group.isolation, snapshot) if is_whole else None

    def drop_sequence(self, sequence: Sequence) -> None:
        self._end_adopted(sequence)
        self._drop_end(sequence)
        self._positions.pop(sequence, None)
        self._partings.pop(sequence, None)
        self._sources.pop(sequence, None)
        self._pool.release_dram(self._swapped.pop(sequence, []))
        snapshots = self._due.pop(sequence, [])
        snapshot = self._last.pop(sequence, None)
        for uncached in (*snapshots, snapshot):
            if uncached is not None and not uncached.is_cached:
                self._snapshots.forget(uncached)

    def discard(self, sequence: Sequence, tokens: TokenArray) -> None:
        self._pool.forget_snapshots(sequence.group.isolation, tokens)

    def finish_plan(self, plan: StepPlan) -> None:
        for sequence in [s for s in self._for_peers if s.scheduled_step != plan.step_id]:
            if sequence.group.tokens_here is None or sequence.left:
                self._drop_end(sequence)  # it stays, after all
        plan.states, self._orders = self._orders, []
        # not those that were given up meanwhile: rows of this very plan may write to their pages
        plan.snapshots = [TakeSnapshot(slot, tokens, list(s.pages)) for slot, tokens, s in self._taking if s.pages]
        self._taking = []

    def forget_orders(self) -> None:
        self._orders, self._taking = [], []
        self._snapshots.forget_all(with_pinned=True)

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        holders = {sequence for sequence in sequences if sequence.slot is not None}
        for books in (self._last, self._due, self._positions, self._partings, self._for_peers):
            check(books.keys() <= holders, "a sequence without a slot has a state")
        waiting = {sequence for sequence in sequences if sequence.slot is None}
        check(self._adopted.keys() <= waiting, "a sequence with a slot has not taken over its state")
        swapped = {sequence for sequence in waiting if sequence.dram_blocks}
        check(self._swapped.keys() == swapped, "a state is not where its sequence's KV is")
        check(not self._taking, "snapshots are to be taken, and no plan does")
        check(not self._sources, "a sequence goes on from a snapshot, and no plan says so")

    # -- inside

    def _share_adopted(self, sequence: Sequence, snapshot: StateSnapshot) -> None:
        self._snapshots.pin(snapshot)
        self._adopted[sequence] = snapshot

    def _end_adopted(self, sequence: Sequence) -> None:
        """``sequence`` does not need what it came with; the last of its request gives it up."""
        snapshot = self._adopted.pop(sequence, None)
        if snapshot is not None:
            self._snapshots.unpin(snapshot)
            if not snapshot.pins:
                self._snapshots.forget(snapshot)

    def _read_snapshot(self, sequence: Sequence, snapshot: StateSnapshot) -> None:
        tier, pages = snapshot.source
        self._sources[sequence] = snapshot.tokens, tier, list(pages)
        self._pool.note_state_access(snapshot, writes=False)

    def _order(self, order: LoadState | SaveState) -> None:
        self._orders.append(order)

    def _take_end(self, sequence: Sequence) -> None:
        """A snapshot for a peer, behind the last row of a sequence that leaves. Now, not when the plan is made: what
        must make room for it is copied by this very plan, before its rows."""
        snapshot = self._pool.allocate_snapshot(sequence.computed)
        if snapshot is not None:
            self._snapshots.pin(snapshot)
            self._take(sequence, snapshot)
            self._for_peers[sequence] = snapshot

    def _drop_end(self, sequence: Sequence) -> None:
        snapshot = self.take_for_peer(sequence)
        if snapshot is not None:
            self._snapshots.forget(snapshot)

    def _take_inside(self, sequence: Sequence, tokens: int) -> None:
        """A snapshot of its own, in the middle of a row or not, that stays in the cache."""
        snapshot = self._pool.allocate_snapshot(tokens)
        if snapshot is not None:
            snapshot.kind = self._kind_of(sequence, tokens)
            self._take(sequence, snapshot)
            self._due.setdefault(sequence, []).append(snapshot)

    def _kind_of(self, sequence: Sequence, tokens: int) -> SnapshotKind:
        if tokens == self._partings.get(sequence):
            return SnapshotKind.BRANCH
        return SnapshotKind.PROMPT if tokens + self._block_tokens > sequence.prompt_tokens - 1 else SnapshotKind.BEHIND

    @property
    def _answer_interval(self) -> int:
        return self._snapshots.policy.answer_interval

    def _take(self, sequence: Sequence, snapshot: StateSnapshot) -> None:
        self._taking.append((_slot_of(sequence), snapshot.tokens, snapshot))
        self._pool.note_state_access(snapshot, writes=True)

    def _move_on(self, sequence: Sequence, tokens: int) -> None:
        """The last snapshot of ``sequence`` is one behind ``tokens`` from now on: in the pages of the one before,
        unless the cache has that or will have it."""
        snapshot = self._last.get(sequence)
        if snapshot is None or not snapshot.pages or snapshot.is_cached or snapshot in self._due.get(sequence, ()):
            snapshot = self._pool.allocate_snapshot(tokens)
            if snapshot is None:
                self._last.pop(sequence, None)
                return
            self._last[sequence] = snapshot
        snapshot.tokens = tokens
        self._take(sequence, snapshot)

    def _keep(self, sequence: Sequence, snapshot: StateSnapshot) -> None:
        """Cache it if the index has the blocks before it; else it is of no use, unless it moves along."""
        if not snapshot.pages or snapshot.is_cached:
            return
        isolation, tokens = sequence.group.isolation, sequence.known_tokens()[: snapshot.tokens]
        is_whole = len(tokens) == snapshot.tokens <= _counted(sequence)
        is_kept = is_whole and self._pool.keep_snapshot(isolation, tokens, snapshot)
        if is_kept and self.listener is not None:
            self.listener.on_snapshot_kept(isolation, tokens)
        if not is_kept and self._last.get(sequence) is not snapshot:
            self._snapshots.forget(snapshot)


def _counted(sequence: Sequence) -> int:
    """How many tokens of ``sequence`` have a state that counts: a row that ran ahead of a late draw has none."""
    return min(sequence.computed, sequence.known_length)


def _slot_of(sequence: Sequence) -> int:
    check(sequence.slot is not None, "{} has no slot", sequence)
    return sequence.slot if sequence.slot is not None else -1


def describe_prompt(pool: BlockPool, isolation: str, tokens: TokenArray, start_tokens: int) -> PlannedPrompt:
    """What a policy of snapshots must know of a prompt that goes on behind ``start_tokens``."""
    reusable_tokens = tokens[: max(0, len(tokens) - 1)]
    identities = pool.identities(isolation, reusable_tokens)
    cached_tokens = pool.match_kv(isolation, reusable_tokens)
    return PlannedPrompt(start_tokens, cached_tokens, len(tokens), pool.block_tokens, identities)


def states_of(pool: BlockPool, costs: PreemptionModel) -> NoStates:
    """What the scheduler does about recurrent states, for a pool that has snapshots or none. ``costs`` say what
    snapshots are worth."""
    if pool.config.states is None or pool.snapshots is None:
        return NoStates()
    pool.snapshots.compute_ns = costs.saved_ns
    return RecurrentStates(pool)

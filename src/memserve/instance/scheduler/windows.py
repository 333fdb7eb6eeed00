"""KV of layers that read a window, as the scheduler sees it, where it lies apart (:mod:`memserve.kv.windows`).

::

    entries       | 0  1  2  3  4 | 5  6  7  8  9 | 10 11 |
    blocks        | all of a sequence, from its admission on|
    parts         | passed: gone  | its window    | row   |      spare: for the rows to come

A sequence that is admitted has spare parts for its window and a step's rows. Before each row it lets go of those that
are behind the window, and places others where the row writes.

:class:`NoWindows` is the other kind of model: everything is called alike, and does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memserve.base.errors import check
from memserve.base.types import Tier
from memserve.base.units import ceil_div
from memserve.instance.events import PlaceWindow, StepPlan
from memserve.kv.windows import WindowCache, WindowPart

if TYPE_CHECKING:
    from memserve.base.types import TokenArray
    from memserve.instance.scheduler.sequence import Sequence
    from memserve.kv.pool import BlockPool
    from memserve.kv.state_snapshot import Lease


@dataclass(slots=True)
class WindowTail:
    """The parts of a sequence."""

    first: int
    """The entry of the first one that is placed."""
    placed: list[WindowPart]
    """Of the entries from there on, without a gap."""
    spare: list[WindowPart] = field(default_factory=list)
    told: int = 0
    """Entries before this one are as the device has them."""
    may_be_shared: bool = False
    """A fork may share the block of the next token. Else a row waits for parts alone."""

    @property
    def end(self) -> int:
        """The entry behind the last one that is placed."""
        return self.first + len(self.placed)

    @property
    def parts(self) -> int:
        """All of them."""
        return len(self.placed) + len(self.spare)


class NoWindows:
    """Of a model whose layers' KV lies together."""

    has_windows = False

    def blocks_for(self, entries: int, behind_tokens: int = 0) -> int:
        """Blocks that so many new entries take, of a sequence that begins behind cached tokens."""
        return entries

    def blocks_to_extend(self, sequence: Sequence, entries: int) -> int:
        """Blocks that so many entries more of ``sequence`` take."""
        return entries

    def blocks_held(self, sequence: Sequence) -> int:
        """Blocks of its parts."""
        return 0

    def take_lease(self, sequence: Sequence, lease: Lease) -> None:
        """``sequence`` begins behind the tokens of ``lease``, and needs its last window."""

    def adopt_state(self, sequence: Sequence, tokens: int, blocks: Items[int]) -> None:
        """The KV of ``tokens`` tokens of ``sequence`` has come, and in ``blocks``, with their references, the parts
        that it needs."""

    def lend(self, sequence: Sequence, tokens: int) -> Lease | None:
        """The parts that another instance needs to go on behind ``tokens`` tokens of ``sequence``, for a peer. None: it
        has not all of them."""
        return None

    def take_blocks(self, sequence: Sequence, blocks: list[int], entries: int) -> list[int]:
        """``blocks`` were allocated for ``entries`` new entries: returns those of the entries themselves."""
        return blocks

    def writable_end(self, sequence: Sequence, tokens: int) -> int:
        """Up to where of ``tokens`` ``sequence`` may write, by its parts."""
        return tokens

    def may_share_next(self, sequence: Sequence) -> bool:
        """Whether the block of the next token, which has one, may be a fork's as well."""
        return True

    def pass_parts(self, sequence: Sequence) -> None:
        """Let go of what is behind the window of the next row."""

    def place_parts(self, sequence: Sequence, end: int) -> bool:
        """Parts for a row that computes the tokens ``[computed, end)``. False: the pool has no room."""
        return True

    def make_private(self, sequence: Sequence, entry: int, *, copies: bool) -> bool:
        """The block of ``entry`` is private from now on; ``copies``: because it was copied, as its part must be. False:
        no room for that."""
        return True

    def on_published(self, sequence: Sequence, tokens: TokenArray) -> None:
        """The index has the blocks of ``tokens``, the first of ``sequence``."""

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` shares all KV of ``parent``."""

    def drop_sequence(self, sequence: Sequence) -> None:
        """Its parts go: it ends, or begins again later."""

    def finish_plan(self, plan: StepPlan) -> None:
        """``plan`` has all its rows: it carries what was placed since the last one."""

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise :class:`InvariantError` where its books and ``sequences``, all there are, contradict. For tests."""


class WindowsApart(NoWindows):
    """Of a model with windows whose KV lies apart."""

    has_windows = True

    def __init__(self, pool: BlockPool, cache: WindowCache) -> None:
        self._pool, self._cache, self._pages = pool, cache, cache.pages
        #: of each sequence that holds blocks
        self._tails: dict[Sequence, WindowTail] = {}
        #: those with parts that the device does not know yet
        self._changed: dict[Sequence, None] = {}

    def blocks_for(self, entries: int, behind_tokens: int = 0) -> int:
        return self._pages.blocks_for(entries, len(self._pages.entries_behind(behind_tokens)))

    def blocks_to_extend(self, sequence: Sequence, entries: int) -> int:
        tail = self._tails.get(sequence)
        return self._pages.blocks_for(entries, tail.parts if tail is not None else 0)

    def blocks_held(self, sequence: Sequence) -> int:
        tail = self._tails.get(sequence)
        return tail.parts * self._pages.part_blocks if tail is not None else 0

    def take_lease(self, sequence: Sequence, lease: Lease) -> None:
        parts, lease.tail = lease.tail, []
        first = len(lease.blocks) - len(parts)
        self._tails[sequence] = WindowTail(first, parts, told=first)
        self._changed[sequence] = None

    def adopt_state(self, sequence: Sequence, tokens: int, blocks: Items[int]) -> None:
        parts, entries = self._cache.build_parts(blocks), self._pages.entries_behind(tokens)
        check(len(parts) == len(entries), "{} gets {} parts, not {}", sequence, len(parts), len(entries))
        self._tails[sequence] = WindowTail(entries.start, parts, told=entries.start, may_be_shared=True)
        self._changed[sequence] = None

    def lend(self, sequence: Sequence, tokens: int) -> Lease | None:
        tail, entries = self._tails[sequence], self._pages.entries_behind(tokens)
        if not tail.first <= entries.start <= entries.stop <= tail.end:
            return None
        return self._pool.lend_parts(tail.placed[entries.start - tail.first : entries.stop - tail.first], tokens)

    def take_blocks(self, sequence: Sequence, blocks: list[int], entries: int) -> list[int]:
        tail = self._tails.setdefault(sequence, WindowTail(0, []))
        tail.spare += self._cache.build_parts(blocks[entries:])
        return blocks[:entries]

    def writable_end(self, sequence: Sequence, tokens: int) -> int:
        return min(tokens, self._tails[sequence].end * self._pages.block_tokens)

    def may_share_next(self, sequence: Sequence) -> bool:
        return self._tails[sequence].may_be_shared

    def pass_parts(self, sequence: Sequence) -> None:
        tail = self._tails[sequence]
        count = min(max(0, self._pages.kept_from(sequence.computed) - tail.first), len(tail.placed))
        self._cache.release_parts(tail.placed[:count], is_end=False)
        del tail.placed[:count]
        tail.first += count

    def place_parts(self, sequence: Sequence, end: int) -> bool:
        tail, entries = self._tails[sequence], ceil_div(end, self._pages.block_tokens)
        while tail.end < entries:
            if not tail.spare:
                blocks = self._pool.allocate(self._pages.part_blocks)
                if blocks is None:
                    return False
                tail.spare += self._cache.build_parts(blocks)
            tail.placed.append(tail.spare.pop())
            self._changed[sequence] = None
        if end >= sequence.known_length:  # from here on it gets a part with each block
            self._release_spare(tail)
        return True

    def make_private(self, sequence: Sequence, entry: int, *, copies: bool) -> bool:
        tail = self._tails[sequence]
        copies &= tail.first <= entry < tail.end
        blocks = self._pool.allocate(self._pages.part_blocks) if copies else ()
        if blocks is None:
            return False
        tail.may_be_shared = False
        for part in self._cache.build_parts(blocks):
            shared = tail.placed[entry - tail.first]
            self._pool.record_copies(Tier.HBM, shared.blocks, Tier.HBM, part.blocks)
            tail.placed[entry - tail.first] = part
            self._cache.release_parts((shared,), is_end=False)
            tail.told = min(tail.told, entry)
            self._changed[sequence] = None
        return True

    def on_published(self, sequence: Sequence, tokens: TokenArray) -> None:
        tail = self._tails[sequence]
        entries = len(tokens) // self._pages.block_tokens
        fresh = next((n for n, part in enumerate(tail.placed) if not part.is_cached), len(tail.placed))
        parts = tail.placed[fresh : max(fresh, entries - tail.first)]
        first, plan = tail.first + fresh, sequence.scheduled_step
        self._pool.anchor_parts(sequence.group.isolation, tokens, first, parts, written_by=plan)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        tail = self._tails[parent]
        self._cache.use_parts(tail.placed)
        tail.may_be_shared = True
        self._tails[child] = WindowTail(tail.first, list(tail.placed), told=tail.first, may_be_shared=True)
        self._changed[child] = None

    def drop_sequence(self, sequence: Sequence) -> None:
        self._changed.pop(sequence, None)
        tail = self._tails.pop(sequence, None)
        if tail is None:
            return
        passed = max(0, self._pages.first_entry(sequence.published) - tail.first)
        self._cache.release_parts(tail.placed[:passed], is_end=False)
        self._cache.release_parts(tail.placed[passed:], is_end=True)
        self._release_spare(tail)

    def finish_plan(self, plan: StepPlan) -> None:
        opened = {sequence.slot for sequence in plan.open}
        for sequence, tail in self._tails.items() if opened else ():
            if sequence.slot in opened:  # the device knows nothing of a slot that is opened
                tail.told = tail.first
                self._changed[sequence] = None
        for sequence in [sequence for sequence in self._changed if sequence.opened]:
            tail = self._tails[sequence]
            first = max(tail.first, tail.told)
            blocks = [block for part in tail.placed[first - tail.first :] for block in part.blocks]
            if blocks and sequence.slot is not None:
                plan.windows.append(PlaceWindow(sequence.slot, first, blocks))
            tail.told = tail.end
            del self._changed[sequence]

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        users: dict[WindowPart, int] = {}
        for sequence in sequences:
            tail = self._tails.get(sequence)
            check((tail is not None) == bool(sequence.blocks), "{} has parts and no blocks, or the reverse", sequence)
            if tail is None:
                continue
            for part in (*tail.placed, *tail.spare):
                users[part] = users.get(part, 0) + 1
            size = self._pages.block_tokens
            check(tail.end <= len(sequence.blocks), "{} has parts beyond its blocks", sequence)
            check(sequence.writable_until <= tail.end * size, "{} may write beyond its parts", sequence)
            check(sequence.computed <= tail.end * size, "{} has computed beyond its parts", sequence)
            first = self._pages.first_entry(sequence.computed)
            check(tail.first <= first or not sequence.computed, "{} lacks a part of its window", sequence)
        check(all(part.users >= count for part, count in users.items()), "a part has more users than it knows of")

    def _release_spare(self, tail: WindowTail) -> None:
        self._cache.release_parts(tail.spare, is_end=True)
        tail.spare = []


def windows_of(pool: BlockPool) -> NoWindows:
    """What the scheduler does about windows, for a pool whose parts lie apart or not."""
    if pool.config.windows is None or pool.windows is None:
        return NoWindows()
    return WindowsApart(pool, pool.windows)

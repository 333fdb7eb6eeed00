"""The scheduler's side of the store: which blocks of a prompt are there, as they were stored, and stay there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from memserve.integrations.block_cache import BlockCache, CacheJobs, drop_views
from memserve.integrations.store_cache import Piece, Value, name_in
from memserve.integrations.vllm.memory import BlockLayout
from memserve.store.client.memory import View

_THREADS = 2
_WAITING_MAX = 256
"""Look-ups under way; further requests compute."""


@dataclass(frozen=True, slots=True)
class RankNames:
    """How the values of one worker are named, and what they look like."""

    prefix: bytes
    layout: BlockLayout

    def name_of(self, block_hash: bytes) -> bytes:
        """Of a block. vLLM's hash has all tokens up to the block's end, salt, LoRA and images in it."""
        return name_in(self.prefix, block_hash)

    def value_of(self, block_hash: bytes, pieces: Sequence[Piece] | None = None) -> Value:
        """In these pieces of memory. None: to compare with, its pieces have lengths and no addresses."""
        if pieces is None:
            pieces = [(0, nbytes) for nbytes in self.layout.piece_bytes]
        return Value(self.name_of(block_hash), pieces, self.layout.digest)


@dataclass(frozen=True, slots=True)
class GroupOfKv:
    """Layers with one block table."""

    tail_blocks: int | None = None
    """A prefix that is loaded needs this group's last blocks alone, as many as its window reaches; None: all."""

    def needed_blocks(self, end: int) -> range:
        """Of the first ``end`` blocks."""
        return range(0 if self.tail_blocks is None else max(0, end - self.tail_blocks), end)


@dataclass(slots=True, eq=False)
class _LookUp:
    blocks: int
    """That are to be held."""
    views: list[View] = field(default_factory=list)
    count: int | None = None
    """None: it is under way."""
    is_forgotten: bool = False


class Lookups:
    """Look-ups by request. A block of a group is there when the values of all workers are; a prefix when all blocks are
    that it needs."""

    def __init__(self, pool: BlockCache, groups: Sequence[GroupOfKv] = (GroupOfKv(),)) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self._ranks: list[tuple[RankNames, ...]] = []
        self._jobs = CacheJobs(_THREADS, _WAITING_MAX)
        self._changed = threading.Lock()
        self._open: dict[str, _LookUp] = {}

    def set_ranks(self, ranks: Sequence[tuple[RankNames, ...]]) -> None:
        """What the workers have said, each of its groups. None are known: nothing is found."""
        self._ranks = list(ranks)

    @property
    def is_known(self) -> bool:
        """Whether the workers have said how they name values."""
        return bool(self._ranks)

    def _ranks_of(self, group: int) -> list[RankNames]:
        return [names[group] for names in self._ranks]

    def prefix_at_once(self, hashes: Sequence[bytes]) -> int | None:
        """How many blocks seem to be there, from the first on; None: the store has to be asked."""
        end = len(hashes)
        for number, group in enumerate(self.groups):
            if group.tail_blocks is None:
                counts = [
                    self.pool.prefix_at_once([rank.name_of(block_hash) for block_hash in hashes])
                    for rank in self._ranks_of(number)
                ]
                known_counts = [count for count in counts if count is not None]
                if len(known_counts) < len(counts):
                    return None
                end = min(end, min(known_counts, default=0))
        tails = [
            (g, self._present_flags(n, hashes[:end])) for n, g in enumerate(self.groups) if g.tail_blocks is not None
        ]
        while end and (
            absent := [index for g, presence in tails for index in g.needed_blocks(end) if not presence[index]]
        ):
            end = max(absent)  # no longer prefix can do without it
        return end

    def _present_flags(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        return [not lacks for lacks in self._missing_flags(group, hashes)]

    def _missing_flags(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        flags = [False] * len(hashes)
        for rank in self._ranks_of(group):
            for index, is_present in enumerate(
                self.pool.exists_at_once([rank.name_of(block_hash) for block_hash in hashes])
            ):
                flags[index] = flags[index] or not is_present
        return flags

    def missing_at_once(self, hashes: Sequence[bytes]) -> list[list[bool]]:
        """For each group: whether the store lacks a value of a block, as far as is known without asking it."""
        return [self._missing_flags(group, hashes) for group in range(len(self.groups))]

    def has_room(self, blocks: int) -> bool:
        """Whether so many can be held beside those of other requests. A request alone always may: it gets what fits."""
        if not self._open:
            return True
        count, nbytes = 0, 0
        for prefix in [blocks, *(lookup.blocks for lookup in self._open.values())]:
            for number, group in enumerate(self.groups):
                needed = len(group.needed_blocks(prefix))
                count += needed * len(self._ranks)
                nbytes += needed * sum(rank.value_of(b"").stored_bytes for rank in self._ranks_of(number))
        return self.pool.may_hold(count, nbytes)

    def start_lookup(self, request_id: str, hashes: Sequence[bytes]) -> bool:
        """Have these blocks held and compared, or as many as are needed. False: too much is under way."""
        lookup = _LookUp(len(hashes))

        def look() -> None:
            count, views = 0, list[View]()
            try:
                count, views = self._hold_prefix(hashes)
            finally:
                with self._changed:
                    lookup.count = count
                    if not lookup.is_forgotten:
                        lookup.views, views = views, []
                drop_views(views)

        self.forget_request(request_id)
        if not self._jobs.start(look):
            return False
        self._open[request_id] = lookup
        return True

    def _hold_prefix(self, hashes: Sequence[bytes]) -> tuple[int, list[View]]:
        """How many blocks are held, and what holds them. Groups that need all blocks come first: a tail ends with
        them. Where a tail has a hole, the prefix ends there, and the tails are looked for anew."""
        end, whole = len(hashes), list[View]()
        windowed = [number for number, group in enumerate(self.groups) if group.tail_blocks is not None]
        for number in range(len(self.groups)):
            if number not in windowed:
                end = min([end, *(self._hold_blocks(rank, hashes[:end], whole) for rank in self._ranks_of(number))])
        tails, is_whole = list[View](), False
        while end and not is_whole:
            drop_views(tails)
            tails, is_whole = [], True
            for number in windowed:
                needed = self.groups[number].needed_blocks(end)
                needed_hashes = [hashes[index] for index in needed]
                count = min(self._hold_blocks(rank, needed_hashes, tails) for rank in self._ranks_of(number))
                if count < len(needed_hashes):
                    end, is_whole = needed[count], False
                    break
        if not end:
            drop_views(tails)
            tails = []
        return end, whole + tails

    def _hold_blocks(self, rank: RankNames, hashes: Sequence[bytes], views: list[View]) -> int:
        count, held_views = self.pool.hold_values([rank.value_of(block_hash) for block_hash in hashes])
        views += held_views
        return count

    def lookup_result(self, request_id: str) -> int | None:
        """How many blocks are held, from the first on; None: it is not known yet."""
        return self._open[request_id].count

    def forget_request(self, request_id: str) -> None:
        """Hold the request's blocks no longer."""
        lookup = self._open.pop(request_id, None)
        if lookup is not None:
            with self._changed:
                lookup.is_forgotten = True
                views, lookup.views = lookup.views, []
            drop_views(views)

    @property
    def open_count(self) -> int:
        """Requests with look-ups or blocks."""
        return len(self._open)

    def forget_everything(self) -> bool:
        """Forget all values of these workers in the store, too. False: the store was away."""
        return self.pool.clear(*[rank.prefix for names in self._ranks for rank in names]) if self._ranks else True

    def close(self) -> None:
        """Give everything back."""
        for request_id in list(self._open):
            self.forget_request(request_id)
        self._jobs.close()
        self.pool.close()

"""KV events of other engines, applied to the router's prefix directory.

Blocks are named by the engine's own hashes, and their tokens come along (``fleet/kv_formats.py``). The directory names
blocks by memserve's identities, so each hash is kept with the identity that follows from its parent's and its tokens:
engines with other hash functions, or with random seeds, share one directory.

An engine stores a block once a copy and removes it once a copy; the directory counts references. Batches are numbered,
and applied in order. A gap is filled by a replay, else all blocks of the engine are forgotten: an entry too few costs
time, one too many sends requests to an empty cache::

    live 7          expected 7: applied
    live 12         expected 8: kept aside, ask for a replay from 8
    replay 8        applied, ... 11, then 12 from aside
    replay 10       its first, expected 8: 8 and 9 are gone for good: forget, go on with 10
    replay 8, 10    9 was lost on its way: 10 is kept aside, ask for another replay from 9
    live 3          after live 12: the engine has restarted: forget, expect 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from memserve import _core
from memserve.fleet.kv_formats import (
    AllBlocksRemoved,
    BlocksRemoved,
    BlocksStored,
    EngineKvEvent,
    Hash,
    KvBatch,
    guarded_format,
)

ASIDE_MAX = 4096
"""Batches that are kept behind a gap."""


@dataclass(slots=True)
class _Block:
    identity: bytes
    references: list[int] = field(default_factory=lambda: [0, 0])
    """Upper and lower tier."""


@dataclass(slots=True)
class _Rank:
    """One publisher."""

    expected: int = 0
    live: int | None = None
    """The last batch that was not a replay."""
    aside: dict[int, Sequence[EngineKvEvent]] = field(default_factory=dict)
    is_repeating: bool = False
    """A replay has brought a batch, and has not ended."""


class EngineKvFeed:
    """The events of one engine, and what the directory has of it."""

    def __init__(
        self,
        number: int,
        directory: _core.PrefixDirectory,
        key: bytes,
        root: Callable[[int], bytes],
        replays: bool,
        format_name: str = "vllm",
    ) -> None:
        """``root``: the namespace of blocks of so many tokens. ``replays``: the engine can repeat its events.
        ``format_name``: how it writes them. Raises :class:`UserError` where that is not known."""
        self._read_batch: Callable[[bytes], KvBatch] = guarded_format(format_name)
        self._number, self._directory, self._key, self._root = number, directory, key, root
        self._replays = replays
        self._ranks: dict[int, _Rank] = {}
        self._blocks: dict[Hash, _Block] = {}
        #: of the blocks that are stored; 0: none was yet
        self.block_tokens = 0
        self.batches = self.gaps = self.forgotten = 0

    def on_live_batch(self, sequence: int, payload: bytes) -> int | None:
        """A new batch. Returns the number to ask a replay from, if a gap begins with it. Raises ``ValueError`` for a
        malformed one: the caller forgets the engine's blocks."""
        number, events = self._read_batch(payload)
        rank = self._ranks.setdefault(number, _Rank())
        if rank.live is not None and sequence <= rank.live:
            self.on_engine_restarted()
            rank = self._ranks.setdefault(number, _Rank())
        rank.live = sequence
        if sequence < rank.expected:
            return None  # a replay has brought it already
        is_known_gap = bool(rank.aside)
        rank.aside[sequence] = events
        self._catch_up(rank)
        if not rank.aside:
            return None
        self.gaps += not is_known_gap
        if not self._replays or len(rank.aside) > ASIDE_MAX:
            self._skip_gap(rank)
            return None
        return None if is_known_gap else rank.expected

    def on_replayed_batch(self, sequence: int, payload: bytes) -> None:
        """A batch of a replay. Raises ``ValueError`` as :meth:`on_live_batch` does."""
        number, events = self._read_batch(payload)
        rank = self._ranks.setdefault(number, _Rank())
        if sequence < rank.expected:
            return
        if sequence == rank.expected or len(rank.aside) < ASIDE_MAX:
            rank.aside[sequence] = events
        if sequence > rank.expected and not rank.is_repeating:
            self._skip_gap(rank)  # replays are in order: what is before the first is gone for good
        self._catch_up(rank)
        rank.is_repeating = True

    def on_replay_ended(self, *, is_old: bool = False) -> int | None:
        """What it did not bring will not come. Returns the number to ask another replay from, if batches of this one
        were lost on the way: vLLM's socket drops what it cannot send at once. ``is_old``: a gap has begun since it was
        asked for."""
        is_short = False
        for rank in self._ranks.values():
            while rank.aside and not rank.is_repeating and not is_old:
                self._skip_gap(rank)
            is_short = is_short or bool(rank.aside)
            rank.is_repeating = False
        return self.next_batch if is_short else None

    @property
    def next_batch(self) -> int:
        """The first batch that was not heard."""
        return min((rank.expected for rank in self._ranks.values()), default=0)

    def on_engine_restarted(self) -> None:
        """The engine has nothing any more, and numbers its batches from 0 again."""
        self.forget_blocks()
        self._ranks.clear()
        self.block_tokens = 0

    def forget_blocks(self) -> None:
        """Its blocks are unknown from now on."""
        self.forgotten += bool(self._blocks)
        self._blocks.clear()
        self._directory.clear(self._number)

    def _skip_gap(self, rank: _Rank) -> None:
        if rank.expected or self._blocks:
            self.forget_blocks()
        rank.expected = min(rank.aside)
        self._catch_up(rank)

    def _catch_up(self, rank: _Rank) -> None:
        while (events := rank.aside.pop(rank.expected, None)) is not None:
            rank.expected += 1
            self.batches += 1
            for event in events:
                self._apply_event(event)
        for old in [sequence for sequence in rank.aside if sequence < rank.expected]:
            del rank.aside[old]

    def _apply_event(self, event: EngineKvEvent) -> None:
        match event:
            case AllBlocksRemoved():
                self._blocks.clear()
                self._directory.clear(self._number)
            case BlocksStored():
                self._store_blocks(event)
            case BlocksRemoved():
                self._remove_blocks(event)

    def _store_blocks(self, event: BlocksStored) -> None:
        size, parent = event.block_tokens, event.parent
        if size < self.block_tokens:
            return  # the rest of a prompt that fills no block
        if size > self.block_tokens:
            self.forget_blocks()
            self.block_tokens = size
        if parent is None:
            above = self._root(size)
        elif parent in self._blocks:
            above = self._blocks[parent].identity
        else:
            return  # heard too late: where it lies in a prompt is unknown
        packed = _core.block_identities(self._key, above, np.array(event.tokens, np.int32), size)
        tier = int(event.is_lower)
        for index, block_hash in enumerate(event.hashes):
            block = self._blocks.setdefault(block_hash, _Block(packed[16 * index : 16 * index + 16]))
            block.references[tier] += 1
            self._directory.store(self._number, tier, block.identity)

    def _remove_blocks(self, event: BlocksRemoved) -> None:
        tier = int(event.is_lower)
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is None or not block.references[tier]:
                continue
            block.references[tier] -= 1
            self._directory.evict(self._number, block.identity, tier)
            if not any(block.references):
                del self._blocks[block_hash]

    def block_counts(self) -> dict[Hash, tuple[int, int]]:
        """References of each known block, upper and lower tier; to look at."""
        return {block_hash: (block.references[0], block.references[1]) for block_hash, block in self._blocks.items()}

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
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memserve import _core
from memserve.base.units import NS_PER_S
from memserve.fleet.kv_formats import (
    AllBlocksRemoved,
    BlocksRemoved,
    BlocksStored,
    EngineKvEvent,
    Hash,
    KvBatch,
    guarded_format,
)
from memserve.fleet.messages import KvReceived

LISTEN_AGAIN_NS = 5 * NS_PER_S
"""An engine that publishes nothing for this long after a prompt, or after its last batch, is asked what it published:
a batch that was lost with none behind it shows no gap."""
_NO_TOKENS: NDArray[np.int32] = np.zeros(0, np.int32)
ASIDE_MAX = 4096
"""Batches that are kept behind a gap."""


@dataclass(slots=True)
class _Block:
    identities: bytes
    """Of the blocks of the directory's size that end in it, 16 bytes each."""
    last_identity: bytes
    """The last of them, or of those before."""
    rest: NDArray[np.int32]
    """Tokens behind that: they begin a block that ends further on."""
    references: list[int] = field(default_factory=lambda: [0, 0])
    """Upper and lower tier."""


class KvDirectory(Protocol):
    """Where the blocks of an engine are entered: a router's directory, or the list of one that is a member."""

    def store(self, holder: int, tier: int, identities: bytes) -> None:
        """One copy more of each, on this tier (0 upper, 1 lower)."""

    def evict(self, holder: int, identities: bytes, tier: int) -> object:
        """One copy less of each."""

    def clear(self, holder: int) -> None:
        """It has none."""


@dataclass(slots=True)
class _Rank:
    """One publisher."""

    expected: int = 0
    live: int | None = None
    """The last batch that was not a replay."""
    aside: dict[int, Sequence[EngineKvEvent]] = field(default_factory=dict)
    is_repeating: bool = False
    """A replay has brought a batch, and has not ended."""


@dataclass(frozen=True, slots=True)
class KvEntries:
    """Where the blocks of one engine are entered, and what they are called there."""

    holder: int
    """The engine."""
    directory: KvDirectory
    key: bytes
    root: Callable[[int], bytes]
    """The namespace of blocks of so many tokens."""
    block_tokens: int = 0
    """Of a block in the directory. 0: as the engine's are."""


class EngineKvFeed:
    """The events of one engine, and what the directory has of it."""

    def __init__(self, entries: KvEntries, replays: bool, format_name: str = "vllm") -> None:
        """``entries``: where blocks are entered. ``replays``: the engine can repeat its events. ``format_name``: how it
        writes them. Raises :class:`UserError` where that is not known."""
        self._read_batch: Callable[[bytes], KvBatch] = guarded_format(format_name)
        self._entries, self._directory, self._replays = entries, entries.directory, replays
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
        # its numbers begin anew: it was started again, and its cache is empty
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
        # what is missing will not come, or what waits behind it takes too much: go on without, and know less
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
        self._directory.clear(self._entries.holder)

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
                self._directory.clear(self._entries.holder)
            case BlocksStored():
                self._store_blocks(event)
            case BlocksRemoved():
                self._remove_blocks(event)

    def _store_blocks(self, event: BlocksStored) -> None:
        size, parent = event.block_tokens, event.parent
        if size < self.block_tokens:
            return  # the rest of a prompt that fills no block
        # smaller ones until now were ends of prompts, whose identities nothing else shares
        if size > self.block_tokens:
            self.forget_blocks()
            self.block_tokens = size
        entry_tokens = self._entries.block_tokens or size
        if parent is None:
            last_identity, rest = self._entries.root(entry_tokens), _NO_TOKENS
        elif parent in self._blocks:
            last_identity, rest = self._blocks[parent].last_identity, self._blocks[parent].rest
        else:
            return  # heard too late: where it lies in a prompt is unknown
        tokens = np.concatenate((rest, np.array(event.tokens, np.int32)))
        packed = _core.block_identities(self._entries.key, last_identity, tokens, entry_tokens)
        tier, entries = int(event.is_lower), 0
        for end, block_hash in enumerate(event.hashes, 1):
            first, entries = entries, (len(rest) + end * size) // entry_tokens
            block = self._blocks.get(block_hash)
            if block is None:
                identities = packed[16 * first : 16 * entries]
                last_identity = identities[-16:] or last_identity
                end_tokens = tokens[entries * entry_tokens : len(rest) + end * size]
                block = self._blocks[block_hash] = _Block(identities, last_identity, end_tokens)
            last_identity = block.last_identity
            block.references[tier] += 1
            if block.identities:
                self._directory.store(self._entries.holder, tier, block.identities)

    def _remove_blocks(self, event: BlocksRemoved) -> None:
        tier = int(event.is_lower)
        for block_hash in event.hashes:
            block = self._blocks.get(block_hash)
            if block is None or not block.references[tier]:
                continue
            block.references[tier] -= 1
            if block.identities:
                self._directory.evict(self._entries.holder, block.identities, tier)
            if not any(block.references):
                del self._blocks[block_hash]

    def block_counts(self) -> dict[Hash, tuple[int, int]]:
        """References of each known block, upper and lower tier; to look at."""
        return {block_hash: (block.references[0], block.references[1]) for block_hash, block in self._blocks.items()}


class KvListener:
    """The feed of one engine, and when to ask the engine to repeat what was missed: one replay at a time.

    Each method says from which batch on the engine is to be asked now; None: it is not."""

    def __init__(self, feed: EngineKvFeed, replays: bool) -> None:
        """``replays``: the engine can repeat its events."""
        self.feed, self._replays = feed, replays
        self._silent_since_ns: int | None = None  # when it had a prompt, or was heard, without being heard since
        self._is_repeating = False  # it was asked for a replay, which has not ended
        self._replays_again = False  # another gap has begun meanwhile, perhaps behind what that replay brings

    def on_prompt_sent(self, now_ns: int) -> None:
        """The engine has something to say of its cache soon."""
        if self._silent_since_ns is None:
            self._silent_since_ns = now_ns

    def on_received(self, event: KvReceived, now_ns: int) -> int | None:
        """A batch of its KV events."""
        self._silent_since_ns = now_ns
        try:
            if event.replayed:
                self.feed.on_replayed_batch(event.sequence, event.payload)
                return None
            first = self.feed.on_live_batch(event.sequence, event.payload)
        except ValueError:  # what such an engine says about its cache is worth nothing
            self.feed.on_engine_restarted()
            return None
        return None if first is None else self.request_replay(first)

    def on_replay_ended(self) -> int | None:
        """No more of what it was asked for will come."""
        is_old, self._is_repeating, self._replays_again = self._replays_again, False, False
        first = self.feed.on_replay_ended(is_old=is_old)
        return self.request_replay(self.feed.next_batch) if first is not None or is_old else None

    def on_answered(self, *, is_new: bool, is_busy: bool, now_ns: int) -> int | None:
        """The engine is well. ``is_new``: it was not before; ``is_busy``: it has requests. An engine that falls quiet
        is asked once more: a lost last batch shows no gap."""
        since_ns = self._silent_since_ns
        if not is_new and (since_ns is None or now_ns - since_ns < LISTEN_AGAIN_NS):
            return None
        # without requests nothing more will be published: asking again and again would be in vain
        self._silent_since_ns = now_ns if is_busy else None
        return self.request_replay(self.feed.next_batch) if self._replays else None

    def request_replay(self, first: int) -> int | None:
        """What is missing begins with batch ``first``."""
        if self._is_repeating:
            self._replays_again = True
            return None
        self._is_repeating = True
        return first

"""What callers of the pool hold: a cached path, or a snapshot of a recurrent state; why that was taken, and the prompt
that may leave some."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from memserve.base.types import Tier, TokenArray
from memserve.kv.windows import WindowPart


class SnapshotKind(enum.Enum):
    """Why a snapshot was taken."""

    ANSWER = "answer"  # where a sequence ended, or was preempted
    PROMPT = "prompt"  # behind a prompt
    BRANCH = "branch"  # where a prompt left cached KV
    BEHIND = "behind"  # some blocks before a prompt's end


@dataclass(slots=True, eq=False)
class StateSnapshot:
    """A recurrent state as it was behind ``tokens`` tokens of a sequence."""

    tokens: int
    """Whole blocks of them."""
    pages: list[int]
    """Where it lies. Empty: it was given up."""
    tier: Tier = Tier.HBM
    """Of its pages; in DRAM they are blocks."""
    is_planned: bool = False
    """The plan that is being made writes it behind its rows."""
    before_copies: tuple[Tier, list[int]] | None = None
    """Where it lay before the plan that is being made copies it: there its loads find it. None: where it lies."""
    identity: bytes = b""
    """Of the last block before it. Empty: it is not cached."""
    prefix: TokenArray = field(default_factory=lambda: np.empty(0, np.int32), repr=False)
    """Cached: its tokens, which a match compares."""
    pins: int = 0
    """Holders that keep it from being given up."""
    retained: tuple[float, int] | None = None
    """Cached: the priority of the retained prefix behind which it stands, and when that lapses. It goes when all others
    have gone, the one with the lowest first. None: it is not retained."""
    kind: SnapshotKind = SnapshotKind.ANSWER
    uses: int = 0
    """Cached: sequences that went on from it."""
    owner: bytes = b""
    """Cached: whose it is, as the index counts owners."""
    hold: int = 0
    """Cached: the index's handle of the KV before it, which stays as long as it does."""
    identities: bytes = field(default=b"", repr=False)
    """Cached: of the blocks of ``prefix``."""
    parent: StateSnapshot | None = field(default=None, repr=False)
    """Cached: the longest cached one of a shorter prefix of its tokens."""
    children: dict[StateSnapshot, None] = field(default_factory=dict, repr=False)
    """Cached: those that it is the parent of."""

    @property
    def gap_tokens(self) -> int:
        """How many tokens it saves beside the snapshot before it on its path."""
        return self.tokens - (self.parent.tokens if self.parent is not None else 0)

    @property
    def source(self) -> tuple[Tier, list[int]]:
        """Where loads of the plan that is being made find it."""
        return self.before_copies or (self.tier, self.pages)

    @property
    def is_ordinary(self) -> bool:
        """Neither pinned nor retained: a policy says when it goes."""
        return not self.pins and self.retained is None

    @property
    def is_cached(self) -> bool:
        return bool(self.identity)


@dataclass(slots=True)
class Lease:
    """A pinned path of the index."""

    blocks: list[int] = field(default_factory=list)
    """HBM blocks of the matched prefix, in order, each with one reference for the caller."""
    tokens: int = 0
    """``len(blocks) * block_tokens``."""
    dram_tokens: int = 0
    """How many of these tokens had to be copied up from DRAM (copies recorded)."""
    pin: int = 0
    """The index's handle of the path's end; 0: nothing is pinned."""
    snapshot: StateSnapshot | None = None
    """Of the recurrent state behind these tokens, pinned. None: there are none, or the model has no such state."""
    tail: list[WindowPart] = field(default_factory=list)
    """Parts of the last window before the end of these tokens, in use. Empty: no layers' KV lies apart."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt that is about to be computed."""

    start_tokens: int
    """It goes on behind so many."""
    cached_tokens: int
    """KV of so many is cached: beyond ``start_tokens``, it parts there from what others have computed."""
    tokens: int
    """Of all of it."""
    block_tokens: int
    identities: bytes
    """Of its whole blocks, 16 bytes each."""

    @property
    def last_tokens(self) -> int:
        """Behind the last whole block that a snapshot can stand behind: the last token is always computed."""
        return (self.tokens - 1) // self.block_tokens * self.block_tokens

    def identity_at(self, tokens: int) -> bytes:
        """Of the block that ends behind ``tokens``."""
        end = tokens // self.block_tokens * 16
        return self.identities[end - 16 : end]

    @property
    def parting_tokens(self) -> int:
        """Where it leaves cached KV. 0: it does not, or goes on just there."""
        return self.cached_tokens if self.start_tokens < self.cached_tokens <= self.last_tokens else 0

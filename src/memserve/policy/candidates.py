"""What a routing decision is made of (level 1): candidates in numbers, what a request needs, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from memserve.types import Role


class RoutingCosts(Protocol):
    """Expected times in nanoseconds; :class:`memserve.policy.costs.CostModel` has them."""

    def prefill_ns(self, new_tokens: int, context_tokens: int) -> int:
        """Computing ``new_tokens`` behind ``context_tokens`` whose KV is there."""

    def decode_step_ns(self, batch: int, context_tokens: int) -> int:
        """One step of ``batch`` sequences that attend to ``context_tokens`` tokens altogether."""

    def swap_in_ns(self, copy_bytes: int) -> int:
        """DRAM to HBM."""

    def transfer_ns(self, copy_bytes: int, same_host: bool) -> int:
        """From one instance to another."""


class Candidate(msgspec.Struct, frozen=True):
    """An instance that could take a request, in the numbers that decisions are made of."""

    number: int
    name: str
    role: Role
    host_id: str = ""
    takes_requests: bool = True
    """False: it drains, or is gone."""
    prefill_tokens: int = 0
    """Uncomputed prompt tokens before this request."""
    sequences: int = 0
    """That decode there."""
    context_tokens: int = 0
    """In their contexts: what each decode step reads."""
    room_tokens: int = 1 << 40
    """KV that it has memory for, its evictable cache included."""
    matched_tokens: int = 0
    """The prompt's prefix in its cache, HBM and DRAM."""
    dram_tokens: int = 0
    """Of them: in DRAM."""

    @property
    def work_tokens(self) -> int:
        """Outstanding work: tokens to be computed, and tokens to be read in each step."""
        return self.prefill_tokens + self.context_tokens


class Holding(msgspec.Struct, frozen=True):
    """A long prefix of the prompt in somebody's cache, that whoever computes the prompt may fetch."""

    number: int
    tokens: int
    host_id: str = ""


class Ask(msgspec.Struct, frozen=True):
    """What a request needs."""

    prompt_tokens: int
    """To be computed or reused: a resumed request's generated tokens included."""
    max_tokens: int = 16
    sequences: int = 1
    token_bytes: int = 0
    """Of KV."""
    favourites: tuple[int, ...] = ()
    """Instances that know the session, or have its prefix pinned."""
    holdings: tuple[Holding, ...] = ()
    """Longest first."""
    block_tokens: int = 1
    """Prefixes are cached in whole blocks of so many."""


class Route(NamedTuple):
    """A decision."""

    first: Candidate
    """Computes the prompt."""
    decode_at: Candidate | None
    """Decodes; ``None`` = the first one does."""
    reason: str


Policy = Callable[[Ask, Sequence[Candidate], Sequence[Candidate], RoutingCosts], Route]

"""How many different blocks prompts have had: what an unlimited cache would have reached, the ceiling of the hit rate.

A set of all identities would grow for ever. A HyperLogLog keeps a byte for each of ``m`` registers: the largest rank
(leading zeros, plus one) among the hashes that fell to it. The estimate here is the "historic inverse probability"
(Cohen 2014; Ting 2014): each time a register changes, the sketch was changed by a new hash with a probability that it
knows, and one over that probability is added. Such an estimate has a relative standard error of 0.83 / sqrt(m), less
than HyperLogLog's own 1.04 / sqrt(m), needs no correction for small counts, and can be divided: what one batch added is
what that batch brought that was new.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from memserve._core import raise_registers
from memserve.base.errors import check
from memserve.base.metrics import counter

REGISTERS = 1 << 16
"""A standard error of 0.33 %, in 64 KiB."""
IDENTITY_BYTES = 16
TENANTS_MAX = 64
"""Tenants with a sketch of their own; all further ones share one."""


class DistinctBlocks:
    """Counts different identities in constant memory."""

    __slots__ = ("_chance", "_checked", "_registers", "total")

    def __init__(self) -> None:
        self._registers = np.zeros(REGISTERS, np.uint8)
        self._chance = 1.0
        """Probability that a new identity changes a register: a sum of powers of two, without rounding."""
        self.total = 0.0
        """Estimate of the different identities so far."""
        self._checked: tuple[float, float, bytes] | None = None

    def add_identities(self, identities: bytes, counted: int = sys.maxsize) -> float:
        """Add ``identities``, 16 uniformly distributed bytes each. Returns the estimate of how many of the first
        ``counted`` are new."""
        if not identities:
            return 0.0
        raised = raise_registers(self._registers, identities, counted, self.total, self._chance)
        self.total, self._chance, new = raised
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of the registers."""
        return self._registers.nbytes

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` unless the probability is that of the registers."""
        state = self.total, self._chance, self._registers.tobytes()
        if state == self._checked:  # a simulator asks after every event, of which few add an identity
            return
        # eights that are not all zero: few at first
        used = self._registers.reshape(-1, 8)[self._registers.view(np.uint64) != 0]
        chance = (REGISTERS - used.size + float(np.exp2(-used.astype(np.float64)).sum())) / REGISTERS
        check(self._chance == chance, f"a new identity changes a register with {chance}, not {self._chance}")
        check(self.total >= np.count_nonzero(used), "more registers are in use than identities were counted")
        self._checked = state


@dataclass(slots=True)
class PromptTokens:
    """Prompt tokens, and how many of them a cache could have had."""

    total: int = counter("router_seen_prompt_tokens", "Prompt tokens of placed requests, each request once")
    new: float = counter(
        "router_new_prompt_tokens", "Prompt tokens, estimated, whose KV not even an unlimited cache would have had"
    )
    """Those in no whole block of an earlier prompt or answer of the tenant."""

    @property
    def attainable(self) -> float:
        """Share (0 to 1) that an unlimited cache would have had: the ceiling of the hit rate."""
        return max(0.0, 1.0 - self.new / self.total) if self.total else 0.0


class ReuseCeiling:
    """What an unlimited cache would have had, by tenant; bounded: :data:`TENANTS_MAX` sketches, and one for all further
    tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, tuple[DistinctBlocks, PromptTokens]] = {}
        self._rest: tuple[DistinctBlocks, PromptTokens] | None = None

    def count_prompt(self, tenant: str, identities: bytes, tokens: int, block_tokens: int) -> None:
        """A prompt of ``tokens``, with the ``identities`` of its whole blocks. At least one token is always computed: a
        block that ends with the prompt is not reused."""
        sketch, count = self._sketch_of(tenant)
        blocks = (tokens - 1) // block_tokens
        count.total += tokens
        count.new += tokens - blocks * block_tokens + sketch.add_identities(identities, blocks) * block_tokens

    def count_answer(self, tenant: str, identities: bytes) -> None:
        """Whole blocks that an answer has filled: later prompts may begin with them."""
        self._sketch_of(tenant)[0].add_identities(identities)

    def counts_by_tenant(self) -> dict[str, PromptTokens]:
        """By tenant, without those that share a sketch."""
        return {tenant: PromptTokens(count.total, count.new) for tenant, (_, count) in self._tenants.items()}

    def total_counts(self) -> PromptTokens:
        """Of all tenants. They never share KV, so the sum is that of different blocks, too."""
        counts = [count for _, count in self._tenants.values()]
        counts += [self._rest[1]] if self._rest is not None else []
        return PromptTokens(sum(count.total for count in counts), sum(count.new for count in counts))

    def _sketch_of(self, tenant: str) -> tuple[DistinctBlocks, PromptTokens]:
        entry = self._tenants.get(tenant)
        if entry is not None:
            return entry
        if len(self._tenants) < TENANTS_MAX:
            self._tenants[tenant] = DistinctBlocks(), PromptTokens()
            return self._tenants[tenant]
        if self._rest is None:
            self._rest = DistinctBlocks(), PromptTokens()
        return self._rest

    def check_invariants(self) -> None:
        """Raise :class:`InvariantError` if a sketch contradicts itself, or there are too many."""
        check(len(self._tenants) <= TENANTS_MAX, "{} tenants have a sketch of their own", len(self._tenants))
        for sketch, count in [*self._tenants.values(), *([self._rest] if self._rest is not None else [])]:
            sketch.check_invariants()
            check(count.new >= 0, "fewer than no tokens were new: {}", count)

"""Who computes a prompt, and who decodes it (level 1)."""

from __future__ import annotations

from typing import Protocol


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

"""Swap or recompute: what taking a sequence's blocks away costs (level 1).

The two ways of MemServe 4 and vLLM: *swap* copies the blocks to host memory and back; *recompute* drops them and runs
the tokens through the model again. Which is cheaper depends on the link, the model and the length.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.units import NS_PER_S

_SMOOTHING = 8  # a new measurement weighs 1/8


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What is known before anything is measured."""

    block_bytes: int = 1 << 20
    """Bytes of one block over all layers (``KVGeometry.block_bytes``)."""
    link_bytes_per_s: int = 5_000_000_000
    """Copy rate between the arena and host memory, one way."""
    prefill_ns_per_token: int = 500_000
    """First guess; replaced by measurements as steps finish."""


class PreemptionModel:
    """Costs in nanoseconds; learns the prefill rate from finished steps, in integers, hence deterministically."""

    __slots__ = ("_costs", "prefill_ns_per_token", "samples")

    def __init__(self, costs: PreemptionCosts) -> None:
        self._costs = costs
        self.prefill_ns_per_token = max(1, costs.prefill_ns_per_token)
        self.samples = 0

    def learn(self, prefill_tokens: int, decode_rows: int, device_ns: int) -> None:
        """Take a finished step into account when it was mostly prefill, so that its time says something about it."""
        if device_ns <= 0 or prefill_tokens < 8 * (decode_rows + 1):
            return
        measured = max(1, device_ns // (prefill_tokens + decode_rows))
        self.samples += 1
        if self.samples == 1:
            self.prefill_ns_per_token = measured
            return
        self.prefill_ns_per_token += (measured - self.prefill_ns_per_token) // _SMOOTHING
        self.prefill_ns_per_token = max(1, self.prefill_ns_per_token)

    def recompute_ns(self, tokens: int) -> int:
        """Time to run ``tokens`` through the model again."""
        return tokens * self.prefill_ns_per_token

    def swap_ns(self, blocks: int) -> int:
        """Time to copy ``blocks`` out and in again."""
        return 2 * blocks * self._costs.block_bytes * NS_PER_S // self._costs.link_bytes_per_s

    def prefers_swap(self, mode: str, tokens: int, blocks: int) -> bool:
        """Whether to swap: as ``mode`` says, or by cost when it is ``auto``."""
        if mode == "auto":
            return self.swap_ns(blocks) < self.recompute_ns(tokens)
        return mode == "swap"

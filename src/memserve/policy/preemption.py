"""Swap or recompute: what taking a sequence's blocks away costs (level 1).

The two ways of MemServe 4 and vLLM: *swap* copies the blocks to host memory and back; *recompute* drops them and runs
the tokens through the model again. Which is cheaper depends on the link, the model and the length.
"""

from __future__ import annotations

from dataclasses import dataclass

from memserve.policy.costs import CostModel
from memserve.policy.curves import CopyCurve, PrefillCurve
from memserve.units import NS_PER_S

_SMOOTHING = 8  # a new measurement weighs 1/8
_TYPICAL_TOKENS = 256
_STEP_SHARE_MIN = 8  # prefill tokens a decode row: with fewer a step says little about prefill


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """What is known before anything is measured."""

    block_bytes: int = 1 << 20
    """Bytes of one block over all layers (``KVGeometry.block_bytes``)."""
    link_bytes_per_s: int = 5_000_000_000
    """Copy rate between the arena and host memory, one way."""
    prefill_ns_per_token: int = 500_000
    """First guess; replaced by measurements as steps finish."""
    profile: CostModel | None = None
    """Measured on this machine: replaces the two rates above."""

    @property
    def model(self) -> CostModel:
        """The profile, or one of these rates."""
        if self.profile is not None:
            return self.profile
        copy = CopyCurve(0.0, 0.0, NS_PER_S / self.link_bytes_per_s)
        return CostModel(prefill=PrefillCurve(0.0, self.prefill_ns_per_token, 0.0), swap_in=copy, swap_out=copy)


class PreemptionModel:
    """Costs in nanoseconds; learns from finished steps how quickly prompts are computed right now."""

    __slots__ = ("_block_bytes", "_is_measured", "_known", "_scale", "model", "samples")

    def __init__(self, costs: PreemptionCosts) -> None:
        self._block_bytes = costs.block_bytes
        self._known = costs.model
        #: all costs, prompts at the speed that was learnt
        self.model = costs.model
        self._scale = 1.0
        self._is_measured = costs.profile is not None
        self.samples = int(self._is_measured)

    def learn(self, prefill_tokens: int, decode_rows: int, device_ns: int, prefill_pairs: int = 0) -> None:
        """Take a finished step into account when it was mostly prefill, so that its time says something about it.

        ``prefill_pairs``: see :func:`memserve.policy.curves.attended_pairs`, over all pieces of prompts. The first step
        replaces a guess; after that, and to a profile, each adds an eighth of what it says.
        """
        if device_ns <= 0 or prefill_tokens < _STEP_SHARE_MIN * (decode_rows + 1):
            return
        scale = device_ns / max(1, self._known.prefill.step(prefill_tokens + decode_rows, prefill_pairs))
        self._scale = scale if self.samples == 0 else self._scale + (scale - self._scale) / _SMOOTHING
        self.samples += 1
        self.model = self._known.scaled(self._scale)

    def step_ns(self, prefill_tokens: int, decode_rows: int, prefill_pairs: int) -> int:
        """How long a step with so much prefill will take; 0: it has none, or no such step was measured yet."""
        if not (prefill_tokens and self.samples):
            return 0
        return self.model.prefill.step(prefill_tokens + decode_rows, prefill_pairs)

    @property
    def prefill_ns_per_token(self) -> int:
        """Of a prompt of typical length."""
        return max(1, round(self.recompute_ns(_TYPICAL_TOKENS) / _TYPICAL_TOKENS))

    def recompute_ns(self, tokens: int) -> int:
        """Time to run ``tokens`` through the model again."""
        return self.model.prefill_ns(tokens)

    def queue_ns(self, tokens: int) -> int:
        """Time to compute the ``tokens`` of several waiting prompts of typical length."""
        return tokens * self.prefill_ns_per_token

    def swap_ns(self, blocks: int) -> int:
        """Time to copy ``blocks`` out and in again."""
        copy_bytes = blocks * self._block_bytes
        return self._known.swap_out_ns(copy_bytes, blocks) + self._known.swap_in_ns(copy_bytes, blocks)

    def reusable_blocks(self, tokens: int, block_tokens: int, hbm_blocks: int, dram_blocks: int) -> int:
        """Blocks of a cached prefix to reuse for ``tokens`` tokens: those in HBM, and behind them those in DRAM if
        bringing them up is quicker than computing them again.

        Only a profile says that it may not be: without one, what was kept is used.
        """
        if not (self._is_measured and dram_blocks):
            return hbm_blocks + dram_blocks
        own = min(hbm_blocks * block_tokens, tokens - 1)
        all_of_it = min((hbm_blocks + dram_blocks) * block_tokens, tokens - 1)
        copy_ns = self._known.swap_in_ns(dram_blocks * self._block_bytes, dram_blocks)
        saved_ns = self.model.prefill_ns(tokens - own, own) - self.model.prefill_ns(tokens - all_of_it, all_of_it)
        return hbm_blocks + (dram_blocks if copy_ns <= saved_ns else 0)

    def prefers_swap(self, mode: str, tokens: int, blocks: int) -> bool:
        """Whether to swap: as ``mode`` says, or by cost when it is ``auto``."""
        if mode == "auto":
            return self.swap_ns(blocks) < self.recompute_ns(tokens)
        return mode == "swap"

"""What an instance machine can say about itself (level 2)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TierReport:
    """Blocks of one tier: ``total = free + used``; ``cached`` of the used ones only the index holds."""

    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    """Held by the index alone: evictable, reusable."""
    pages_free: int = 0
    """Pages not handed out."""
    pages_stranded: int = 0
    """Of them: in blocks that are broken up, so that no request for a block can have them (external fragmentation)."""


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """Gauges of the moment and totals since the start (additive: consumers ignore what they do not know)."""

    requests_waiting: int = 0
    sequences_running: int = 0
    sequences_swapped: int = 0
    requests_arrived: int = 0
    requests_finished: int = 0
    requests_rejected: int = 0
    requests_cancelled: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of admitted requests."""
    cached_tokens: int = 0
    """Of them: KV came from the cache."""
    computed_tokens: int = 0
    """Tokens given to the device, prefill and decode."""
    generated_tokens: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    steps_failed: int = 0
    rows_failed: int = 0
    """Sequences that ended because their own row failed, alone."""
    hbm: TierReport = field(default_factory=TierReport)
    dram: TierReport = field(default_factory=TierReport)
    running_slots_tokens: int = 0
    """Token positions in the blocks that running sequences hold."""
    running_tokens: int = 0
    """Of them: positions that hold a token's state (row P4)."""
    plans_in_flight: int = 0
    steps: int = 0
    """Plans made."""
    dropped_tokens: int = 0
    """Sampled after the sequence had ended: stop tokens are seen one step late."""
    copied_on_write: int = 0
    """Blocks copied because a fork or the cache shared them."""
    dram_tokens_reused: int = 0
    """Cached tokens whose KV a match brought up from DRAM (row M3)."""
    prefill_ns_per_token: int = 0
    """What recomputing is taken to cost, learnt from finished steps."""
    finished: dict[str, int] = field(default_factory=dict)
    """Sequences by finish reason."""
    handed_over: int = 0
    """Requests that left after their first token (M8)."""
    taken_over: int = 0
    """Requests whose prompt was computed elsewhere and that were decoded here."""
    takeovers_failed: int = 0
    """Requests that were to come here and did not."""
    fetched_tokens: int = 0
    """Tokens of prefixes that came from other instances before admission (M10)."""
    blocks_sent_home: int = 0
    """Blocks of generated KV offered to where their prompts were computed (PD-Caching-3)."""
    blocks_come_home: int = 0
    """Blocks that came here that way."""
    blocks_received: int = 0
    """Blocks pulled from other instances, for whatever reason."""
    blocks_reused: int = 0
    """Blocks that others offered and that were here already (PD-Caching-2)."""
    bytes_received: int = 0
    dram_bytes_received: int = 0
    """Of them: out of the owner's DRAM."""
    transfers_open: int = 0
    transfers_failed: int = 0
    """Imports that came to nothing through no doing of this instance."""
    checksum_mismatches: int = 0
    pins: int = 0
    """Named prefixes (M14)."""
    messages_ignored: int = 0
    """Orders of somebody who is not the router."""

    @property
    def external_fragmentation(self) -> float:
        """Free pages that no request for a block can have, as a share of all free pages of both tiers, 0 to 1."""
        free = self.hbm.pages_free + self.dram.pages_free
        return (self.hbm.pages_stranded + self.dram.pages_stranded) / free if free else 0.0

    @property
    def internal_fragmentation_tokens(self) -> int:
        """Positions allocated to running sequences that hold no token yet: below one block a sequence."""
        return self.running_slots_tokens - self.running_tokens

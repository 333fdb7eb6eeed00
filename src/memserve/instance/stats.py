"""What an instance says about itself: statistics, and the use of its memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memserve.base.metrics import counter, gauge
from memserve.base.types import Tier
from memserve.instance.cluster.link import ClusterLink
from memserve.instance.layerwise.state import LayerReport
from memserve.instance.scheduler.slo import ObjectiveReport
from memserve.instance.scheduler.state import SchedulerState
from memserve.kv.events import PoolReport


@dataclass(frozen=True, slots=True)
class TierStats:
    """Blocks of one tier: ``total = free + used``; ``cached`` ones are used by the index alone."""

    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    """Of the used ones: held by the index alone, evictable, reusable."""
    pages_free: int = 0
    """Pages not handed out."""
    pages_stranded: int = 0
    """Of them: in blocks that are broken up, so that they serve no request for a block (external fragmentation)."""
    block_bytes: int = 0
    """Of one block; 0: not known."""


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """Gauges of the moment and totals since the start. Consumers ignore fields that they do not know."""

    requests_waiting: int = gauge("", "Requests in the queues of {whose}", engine="requests_waiting")
    sequences_running: int = gauge("", "Sequences that are computed together now", engine="sequences_running")
    sequences_swapped: int = gauge("", "Sequences whose KV is swapped out to DRAM now", engine="sequences_swapped")
    requests_arrived: int = counter("", "Requests that reached {whose}", engine="engine_requests")
    requests_finished: int = counter("", "Requests that {whose} finished", engine="engine_requests_finished")
    requests_rejected: int = counter("", "Requests that {whose} refused", engine="engine_requests_rejected")
    """HTTP and the router refuse most of them before an instance sees them."""
    requests_cancelled: int = counter("", "Requests that were cancelled in {whose}", engine="engine_requests_cancelled")
    prompt_tokens: int = counter(
        "instance_prompt_tokens", "Prompt tokens of requests that {whose} admitted", engine="engine_prompt_tokens"
    )
    cached_tokens: int = counter(
        "instance_cached_tokens",
        "Prompt tokens of requests admitted with KV that {whose} had or fetched",
        engine="engine_cached_tokens",
    )
    inexact_tokens: int = counter(
        "instance_inexact_tokens",
        "Prompt tokens of requests admitted with KV that {whose} had computed behind other tokens",
        engine="engine_inexact_tokens",
    )
    computed_tokens: int = counter(
        "instance_computed_tokens",
        "Tokens that the device of {whose} computed, in prefill and decode",
        engine="engine_computed_tokens",
    )
    generated_tokens: int = counter(
        "instance_generated_tokens", "Tokens that {whose} generated", engine="engine_generated_tokens"
    )
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    steps_failed: int = counter(
        "instance_steps_failed", "Steps that failed on the device of {whose}", engine="steps_failed"
    )
    rows_failed: int = counter(
        "instance_rows_failed",
        "Sequences of {whose} that ended because their own row of a step failed",
        engine="rows_failed",
    )
    hbm: TierStats = field(default_factory=TierStats)
    dram: TierStats = field(default_factory=TierStats)
    running_slots_tokens: int = gauge("", "Token positions held by running sequences", engine="pool_slot_tokens")
    """Positions in the blocks of their tables."""
    running_tokens: int = gauge(
        "", "Token positions held by running sequences that hold the state of a token", engine="pool_state_tokens"
    )
    plans_in_flight: int = 0
    steps: int = 0
    """Plans made."""
    dropped_tokens: int = 0
    """Sampled after the sequence had ended: stop tokens are seen one step late."""
    prefixes_kept: int = gauge(
        "instance_prefixes_kept", "Sessions of {whose} whose KV is kept until they come back", engine="prefixes_kept"
    )
    turns_returned: int = counter(
        "instance_turns_returned", "Requests that went on from an answer of {whose}", engine="engine_turns_returned"
    )
    turns_kept: int = counter(
        "instance_turns_kept", "Of those, requests whose KV was all there still in {whose}", engine="engine_turns_kept"
    )
    turns_delayed: int = counter(
        "instance_turns_delayed",
        "Requests that waited in {whose} for room which was kept for earlier sessions",
        engine="engine_turns_delayed",
    )
    retention_off: int = counter(
        "instance_retention_off",
        "Times that the order of last use did better in {whose}, so that nothing was kept for a while",
        engine="engine_retention_off",
    )
    drafts_computed: int = counter(
        "instance_drafts_computed", "Tokens that {whose} computed as drafts", engine="engine_drafts_computed"
    )
    drafts_kept: int = counter(
        "instance_drafts_kept", "Drafts of {whose} that were drawn as well", engine="engine_drafts_kept"
    )
    copied_on_write: int = 0
    """Blocks copied because a fork or the cache shared them."""
    dram_tokens_reused: int = 0
    """Cached tokens whose KV a match brought up from DRAM."""
    prefill_ns_per_token: int = 0
    """The estimated cost of recomputing a token, learnt from finished steps."""
    finished: dict[str, int] = field(default_factory=dict)
    """Sequences by finish reason."""
    handed_over: int = counter(
        "instance_handed_over", "Requests handed over to another instance after their first token"
    )
    migrated: int = counter("instance_migrated", "Requests handed over to another instance while they decoded")
    taken_over: int = counter(
        "instance_taken_over", "Requests decoded by {whose} after another one computed the prompt"
    )
    takeovers_failed: int = 0
    """Requests that were to be taken over, and were not."""
    fetched_tokens: int = counter(
        "instance_fetched_tokens", "Prompt tokens with KV from other instances before admission"
    )
    blocks_sent_home: int = 0
    """Blocks of generated KV offered to where their prompts were computed (PD-Caching-3)."""
    blocks_come_home: int = counter(
        "instance_returned_blocks", "KV blocks of answers that came back to the prefill instance (PD-Caching-3)"
    )
    blocks_received: int = counter("instance_received_blocks", "KV blocks pulled from other instances")
    """For any reason."""
    blocks_reused: int = counter(
        "instance_reused_blocks", "KV blocks that other instances offered and {whose} had already"
    )
    """As in PD-Caching-2."""
    bytes_received: int = counter("instance_received_bytes", "Bytes of KV pulled from other instances")
    dram_bytes_received: int = counter(
        "instance_received_dram_bytes", "Bytes of KV pulled out of the DRAM tier of other instances"
    )
    bytes_saved: int = counter(
        "instance_received_saved_bytes",
        "Bytes of KV pulled from other instances that did not travel, since KV was encoded",
    )
    codec_ns: int = counter(
        "instance_codec_seconds", "Seconds in which KV for {whose} was encoded and decoded, at both ends"
    )
    transfers_open: int = 0
    transfers_failed: int = counter(
        "instance_transfers_failed", "KV transfers to {whose} that failed; their tokens are computed instead"
    )
    """Withdrawn, out of time, peer gone, or damaged."""
    checksum_mismatches: int = counter(
        "instance_checksum_mismatches", "Pieces of KV with another checksum than the sender's; they are not used"
    )
    pulls_failed: int = counter("instance_pulls_failed", "Reads of peers' KV that failed or stalled; its log says why")
    """Peer or link gone or stalled, or a checksum that differed."""
    pins: int = 0
    """Named prefixes."""
    retained_tokens: int = gauge(
        "instance_retained_tokens",
        "Tokens of cached prefixes of {whose} that are evicted last",
        engine="retained_tokens",
    )
    store_tokens: int = counter("instance_store_tokens", "Prompt tokens with KV out of a store")
    """Part of ``fetched_tokens``."""
    store_ssd_tokens: int = counter(
        "instance_store_ssd_tokens",
        "Prompt tokens with KV out of a store that had some of the prefix on its disks alone",
    )
    store_fetches_failed: int = counter(
        "instance_store_fetches_failed",
        "Fetches from a store that brought nothing in time; their tokens are computed instead",
    )
    store_blocks_offered: int = counter("instance_store_blocks_offered", "KV blocks that {whose} offered to a store")
    store_blocks_taken: int = counter("instance_store_blocks_taken", "KV blocks of {whose} that a store has got")
    store_blocks_failed: int = counter(
        "instance_store_blocks_failed",
        "KV blocks offered to a store that were refused, too late, or taken back for a request",
    )
    store_blocks_dropped: int = counter(
        "instance_store_blocks_dropped", "KV blocks that were not offered, since the store was slower than {whose}"
    )
    snapshots_cached: int = gauge("instance_snapshots", "Snapshots of recurrent states that {whose} has cached")
    snapshots_used: int = counter("instance_snapshots_used", "Sequences of {whose} that went on from a snapshot")
    snapshots_given_up: int = counter("instance_snapshots_given_up", "Cached snapshots that {whose} has given up")
    window_parts: int = gauge("instance_window_parts", "Parts of windows' KV that {whose} has cached")
    window_parts_passed: int = counter(
        "instance_window_parts_passed", "Parts of windows' KV that sequences of {whose} let go of behind their window"
    )
    window_parts_given_up: int = counter(
        "instance_window_parts_given_up", "Cached parts of windows' KV that {whose} gave up before their blocks"
    )
    objectives: ObjectiveReport = field(default_factory=ObjectiveReport)
    """All zero: requests have no objectives (``--scheduling fcfs``)."""
    layers: LayerReport = field(default_factory=LayerReport)
    """All zero: no KV lies by layer (``--layerwise off``)."""
    messages_ignored: int = 0
    """Messages that only the router may send, from another process or an earlier router."""

    @property
    def external_fragmentation(self) -> float:
        """Free pages that serve no request for a block, as a share of all free pages of both tiers, 0 to 1."""
        free = self.hbm.pages_free + self.dram.pages_free
        return (self.hbm.pages_stranded + self.dram.pages_stranded) / free if free else 0.0

    @property
    def internal_fragmentation_tokens(self) -> int:
        """Positions allocated to running sequences that hold no token yet: below one block a sequence."""
        return self.running_slots_tokens - self.running_tokens


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """How the HBM blocks of running sequences are used.

    A sequence's *internal fragmentation* is the part of its blocks that no token of it will fill: less than one block.
    """

    pool: PoolReport
    sequences: int  # with HBM blocks
    block_tokens: int
    blocks_held: int  # distinct
    tokens_held: int  # token states in them
    fragmentation_tokens_total: int
    fragmentation_tokens_max: int  # of one sequence: below block_tokens


# -- read from the machine


def instance_stats(state: SchedulerState, plans_in_flight: int, link: ClusterLink | None) -> InstanceStats:
    """State now, and totals since the start."""
    stats = _local_stats(state, plans_in_flight)
    return stats if link is None else _with_cluster(stats, link)


def _with_cluster(stats: InstanceStats, link: ClusterLink) -> InstanceStats:
    counters = link.exchange.counters
    return replace(
        stats,
        layers=replace(stats.layers, handed_over=link.sender.by_layer, taken_over=link.receiver.parked),
        handed_over=link.sender.handed_over,
        migrated=link.sender.migrated,
        taken_over=link.receiver.taken_over,
        takeovers_failed=link.receiver.failed,
        fetched_tokens=link.fetches.fetched_tokens,
        blocks_sent_home=link.receiver.blocks_sent_back,
        blocks_come_home=link.blocks_come_home,
        blocks_received=counters.pulled_blocks,
        blocks_reused=counters.reused_blocks,
        bytes_received=counters.pulled_bytes,
        dram_bytes_received=counters.pulled_dram_bytes,
        bytes_saved=counters.pulled_saved_bytes,
        codec_ns=counters.pulled_codec_ns,
        transfers_open=link.exchange.transfers_open,
        transfers_failed=counters.imports_failed,
        checksum_mismatches=counters.mismatches,
        pulls_failed=counters.pulls_failed,
        pins=link.pins_held,
        store_tokens=link.fetches.fetched_store_tokens,
        store_ssd_tokens=link.fetches.fetched_ssd_tokens,
        store_fetches_failed=link.fetches.store_failures,
        store_blocks_offered=link.writer.offers.counters.offered,
        store_blocks_taken=link.writer.offers.counters.accepted,
        store_blocks_failed=link.writer.offers.counters.failed,
        store_blocks_dropped=link.writer.offers.counters.dropped,
        messages_ignored=link.messages_ignored,
    )


def _local_stats(state: SchedulerState, plans_in_flight: int) -> InstanceStats:
    counters, pool = state.counters, state.memory.pool.report()
    sequences = [s for group in state.groups.values() for s in group.sequences.values()]
    memory = memory_report(state)
    hbm_bytes, dram_bytes = state.memory.pool.config.block_bytes_by_tier
    return InstanceStats(
        retained_tokens=state.memory.pool.retained.tokens,
        requests_waiting=sum(s.slot is None for s in sequences),
        sequences_running=sum(s.slot is not None for s in sequences),
        sequences_swapped=sum(bool(s.dram_blocks) for s in sequences),
        requests_arrived=counters.requests,
        requests_finished=counters.requests_finished,
        requests_rejected=counters.requests_rejected,
        requests_cancelled=counters.requests_cancelled,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        inexact_tokens=counters.inexact_tokens,
        computed_tokens=counters.prefill_tokens + counters.decode_tokens,
        generated_tokens=counters.generated_tokens,
        preemptions_swap=counters.preempted_by_swap,
        preemptions_recompute=counters.preempted_by_recompute,
        steps_failed=counters.steps_failed,
        rows_failed=counters.rows_failed,
        hbm=_tier(pool, Tier.HBM, hbm_bytes),
        dram=_tier(pool, Tier.DRAM, dram_bytes),
        running_slots_tokens=memory.blocks_held * memory.block_tokens,
        running_tokens=memory.tokens_held,
        plans_in_flight=plans_in_flight,
        steps=counters.steps,
        dropped_tokens=counters.dropped_tokens,
        prefixes_kept=state.returns.kept_prefixes if state.returns is not None else 0,
        turns_returned=counters.returned_turns,
        turns_kept=counters.kept_turns,
        turns_delayed=counters.delayed_turns,
        retention_off=counters.retention_off,
        drafts_computed=counters.drafted_tokens,
        drafts_kept=counters.kept_tokens,
        copied_on_write=state.memory.copied_on_write,
        dram_tokens_reused=state.memory.dram_tokens_reused,
        snapshots_cached=pool.snapshots.cached,
        snapshots_used=pool.snapshots.used,
        snapshots_given_up=pool.snapshots.given_up,
        window_parts=pool.windows.cached,
        window_parts_passed=pool.windows.passed,
        window_parts_given_up=pool.windows.given_up,
        prefill_ns_per_token=state.costs.prefill_ns_per_token,
        finished=dict(counters.finished),
        objectives=state.objectives.report() if state.objectives is not None else ObjectiveReport(),
        layers=state.memory.layers.report(len(state.parked)),
    )


def _tier(pool: PoolReport, tier: Tier, block_bytes: int) -> TierStats:
    report = pool.by_tier[tier]
    return TierStats(
        blocks_total=report.blocks_total,
        blocks_free=report.blocks_free,
        blocks_cached=report.blocks_evictable,
        pages_free=report.pages_free,
        pages_stranded=report.pages_stranded,
        block_bytes=block_bytes,
    )


def memory_report(state: SchedulerState) -> MemoryReport:
    """How sequences use the HBM blocks. A block that several of them share counts once, by its fullest holder."""
    block_tokens = state.memory.block_tokens
    filled: dict[int, int] = {}
    fragments: list[int] = []
    for group in state.groups.values():
        for sequence in group.sequences.values():
            if not sequence.blocks:
                continue
            tokens = max(sequence.known_length, sequence.computed)
            capacity = sequence.table_entries * block_tokens
            stored_tokens = min(tokens, capacity)
            fragments.append(capacity - stored_tokens)
            by_layer = sequence.layered
            for place, block in enumerate(sequence.blocks):
                if by_layer is not None and place >= by_layer.first:
                    place += len(by_layer.dram_blocks)
                inside = min(block_tokens, max(0, stored_tokens - place * block_tokens))
                filled[block] = max(inside, filled.get(block, 0))
    return MemoryReport(
        pool=state.memory.pool.report(),
        sequences=len(fragments),
        block_tokens=block_tokens,
        blocks_held=len(filled),
        tokens_held=sum(filled.values()),
        fragmentation_tokens_total=sum(fragments),
        fragmentation_tokens_max=max(fragments, default=0),
    )
